"""Deliver to webhooks: POSTs signed by Standard Webhooks 1.0, each a CloudEvent 1.0.2 in one of HTTP's three modes.

`binary`: the producer's body, everything else in headers. `structured`: the event as JSON, body included. `batch`: a
JSON array of events. `auto`: binary for one message, batch for more.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Literal
from urllib.parse import quote

from app.delivery import Delivered, Delivery, Failed, Gone, Outcome, Refused
from app.destinations.batching import Batches, CutShort
from app.destinations.cloudevents import BATCH, EVENT, context, event, joined, own_headers
from app.egress.http_client import EgressClient
from app.egress.reply import Reply
from app.egress.urls import without_query
from app.observability.trace_context import trace_headers
from app.secrets.signatures import Secret, Signer

Mode = Literal["binary", "structured", "batch", "auto"]
BATCHED: tuple[Mode, ...] = ("batch", "auto")

# CloudEvents HTTP binding 1.0.2 §3.1.3.2: space, ", % and everything but printable ASCII is percent-encoded as UTF-8.
_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_needs_none = re.compile(r"[!#$&-~]*").fullmatch


ABORT = "abort-message"
REASON_LIMIT = 500


class Webhook:
    """An HTTP endpoint that takes POSTs. `headers`: the subscription's own, sent with each request.

    `origin`: this service's name for a receiver that gave its consent (CloudEvents' HTTP webhooks 1.0.2 §2.1).
    """

    def __init__(
        self,
        client: EgressClient,
        url: str,
        headers: Mapping[str, str],
        secrets: Sequence[Secret],
        timeout_s: float,
        mode: Mode = "binary",
        batch_max: int = 1,
        origin: str | None = None,
    ) -> None:
        self._client, self._url, self._timeout_s, self._mode = client, url, timeout_s, mode
        self._batch_max = batch_max if mode in BATCHED else 1
        self._signer = Signer(secrets)
        self._cut_short = CutShort()
        self._always = {name.lower(): value for name, value in headers.items()}
        if origin is not None:
            self._always["webhook-request-origin"] = origin

    @property
    def address(self) -> str:
        """The URL without its query, which may hold a token."""
        return without_query(self._url)

    @property
    def batch_max(self) -> int:
        """One message a request except in modes `batch` and `auto`."""
        return self._batch_max

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """POST the message or the batch, signed as of `now`, and return what the answer means (design: Delivery)."""
        if self._mode in BATCHED:
            batches = Batches(self._post_batch, now, self._timeout_s, self._cut_short)
            return await batches.deliver(deliveries, self._batch_max)
        [delivery] = deliveries
        return [await self._post_single(delivery, now, self._timeout_s)]

    async def close(self) -> None:
        """Do nothing: the client is shared."""

    async def _post_single(self, delivery: Delivery, now: datetime, timeout_s: float) -> Outcome:
        if self._mode == "structured":
            body, described = event(delivery), structured_headers(delivery)
        else:
            body, described = delivery.body, message_headers(delivery)
        return await self._post(delivery.message_id, body, described, now, timeout_s)

    async def _post_batch(self, deliveries: Sequence[Delivery], now: datetime, timeout_s: float) -> Outcome:
        if self._mode == "auto" and len(deliveries) == 1:
            return await self._post_single(deliveries[0], now, timeout_s)
        body = joined(event(delivery) for delivery in deliveries)
        return await self._post(batch_id(deliveries), body, batch_headers(deliveries[0]), now, timeout_s)

    async def _post(
        self, webhook_id: str, body: bytes, described: Mapping[str, str], now: datetime, timeout_s: float
    ) -> Outcome:
        sent = {**self._always, **described, **self._signer.headers(webhook_id, body, now)}
        return outcome_of(await self._client.call(self._url, body, sent, timeout_s=timeout_s), now)


def outcome_of(reply: Reply, now: datetime) -> Outcome:
    """Return the outcome of an answer: 2xx delivers, 410 disables, `abort-message` refuses the message.

    Anything else is a failure. So is a redirect: only the subscription's URL is checked. Source: Standard Webhooks 1.0,
    "Consumer failure", and design, Delivery.
    """
    if reply.status is None:
        return Failed(reply.error or "no answer", None, None, None, reply.duration_ms, reply.unreachable)
    if 200 <= reply.status < 300:
        return Delivered(reply.status, reply.duration_ms)
    response, error = reply.text or None, f"answered {reply.status}"
    if reply.headers.get("webhook-delivery", "").strip().lower() == ABORT:
        reason = reply.headers.get("halfnote-reason", "").strip()[:REASON_LIMIT].replace("\x00", "")
        return Refused(reason or ABORT, error, reply.status, response, reply.duration_ms)
    if reply.status == 410:
        return Gone(error, reply.status, response, reply.duration_ms)
    if 300 <= reply.status < 400:
        error = f"redirected ({reply.status}); name the final URL in the subscription"
    wait_s = reply.retry_after_s(now) if reply.status in (429, 503) else None
    return Failed(error, reply.status, response, wait_s, reply.duration_ms)


def message_headers(delivery: Delivery) -> dict[str, str]:
    """Return the headers of a message in binary mode: CloudEvents', Halfnote's, the message's own."""
    headers = _encoded_values({f"ce-{name}": value for name, value in context(delivery).items()})
    headers["content-type"] = delivery.content_type
    headers |= _encoded_values(own_headers(delivery))
    headers |= trace_headers(delivery.trace)
    return headers


def structured_headers(delivery: Delivery) -> dict[str, str]:
    """Return the headers in structured mode: Halfnote's and the message's own; no `ce-`, which would mean binary."""
    return {"content-type": EVENT, **_encoded_values(own_headers(delivery)), **trace_headers(delivery.trace)}


def batch_headers(one: Delivery) -> dict[str, str]:
    """Return the headers of a batch, from any one of its messages: only what all of them share."""
    headers = {"content-type": BATCH, "halfnote-subscription": encoded(one.subscription)}
    if one.replay is not None:
        headers["halfnote-replay"] = encoded(one.replay)
    return headers


def batch_id(deliveries: Sequence[Delivery]) -> str:
    """Return the `webhook-id` of a batch: a single message's id, else a digest of all ids, independent of their order.

    So it is the same when the same messages are sent together again. A retry may group messages differently: receivers
    detect duplicates by the `id` of each event.
    """
    if len(deliveries) == 1:
        return deliveries[0].message_id
    ids = sorted(delivery.message_id for delivery in deliveries)
    return "bat_" + sha256("\n".join(ids).encode()).hexdigest()[:32]


def encoded(value: str) -> str:
    """Percent-encode a header value by the CloudEvents HTTP binding."""
    return value if _needs_none(value) else quote(value, safe=_PRINTABLE)


def _encoded_values(headers: dict[str, str]) -> dict[str, str]:
    """Return headers with encoded values. One look at all of them is enough for most messages."""
    if _needs_none("".join(headers.values())):
        return headers
    return {name: encoded(value) for name, value in headers.items()}
