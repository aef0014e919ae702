"""Deliver to NATS JetStream: a message is delivered when a stream acknowledges that it stored it.

`Nats-Msg-Id`, by which a stream detects duplicates, is `<message id>:<subscription>`, and a replay adds
`:<replay id>`. So a retry is stored once within the stream's window, and a replay, or another subscription with the
same stream, is no duplicate. Headers follow CloudEvents' NATS binding (binary mode, `ce-<attribute>`,
`datacontenttype` among them), with `halfnote-…` and the message's own as `halfnote-h-<name>` beside them; values are
percent-encoded as in HTTP.

In a subject, `{key}` and `{tag}` become one token: everything but ASCII letters, digits, `_` and `-` is percent-encoded
as UTF-8, also `.`, `*`, `>` and spaces; a missing key or tag becomes `_`. `{topic}` and `{group}` are encoded in the
same way, but `.` stays and separates tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from time import perf_counter
from typing import Any
from urllib.parse import quote, urlsplit

from nats.errors import Error

from app.delivery import Delivery, Outcome
from app.destinations.base import Destination
from app.destinations.broker_connection import BAD_MESSAGE, TOO_LARGE, BrokerConnections, PendingMessage
from app.destinations.cloudevents import attributes, own_headers
from app.destinations.name_templates import filled
from app.destinations.nats_connection import NatsAddress, NatsConnection, NoStream, NotPermitted, NotStored, connected
from app.destinations.webhook import encoded
from app.egress.network_policy import NetworkPolicy
from app.observability.trace_context import trace_headers

# The most messages of one call. They are sent without a wait in between.
BATCH_MAX = 100
# NATS takes protocol lines of 4,096 bytes by default, with the inbox for the answer and two sizes.
SUBJECT_BYTES = 3_900
# JetStream's error number (nats-server, errors.json): larger than the stream's `max_msg_size`.
EXCEEDS_STREAM = 10054


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, network_policy: NetworkPolicy
) -> Destination:
    """Return the destination of a stored `{type: "nats", url, subject?, username?}`."""
    account: dict[str, str] = {}
    if destination.get("username"):
        account = {"user": destination["username"], "password": credentials.get("password", "")}
    elif credentials.get("token"):
        account = {"token": credentials["token"]}
    broker_address = NatsAddress(urlsplit(destination["url"]), account, network_policy)
    return Nats(destination["url"], broker_address, destination.get("subject") or "{topic}", timeout_s)


class Nats:
    """One subject, or several by placeholders, on one connection for all calls."""

    batch_max = BATCH_MAX

    def __init__(self, address: str, broker_address: NatsAddress, subject: str, timeout_s: float) -> None:
        self.address = address
        self._subject = subject
        self._connections = BrokerConnections(
            partial(connected, broker_address, timeout_s), self._publish, (Error,), timeout_s
        )

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Publish and wait until each is acknowledged or refused, or the time is over."""
        started = perf_counter()
        return await self._connections.send([self._pending(delivery, started) for delivery in deliveries])

    async def close(self) -> None:
        """Close the connection."""
        await self._connections.close()

    def _pending(self, delivery: Delivery, started: float) -> PendingMessage:
        message = PendingMessage(delivery, filled(self._subject, delivery, token_of), started)
        subject = message.name
        if len(subject) > SUBJECT_BYTES:
            message.refuse(BAD_MESSAGE, f"a subject of {len(subject):,} bytes; NATS takes about {SUBJECT_BYTES:,}")
        elif subject.startswith(".") or subject.endswith(".") or ".." in subject:
            message.refuse(BAD_MESSAGE, f"{subject!r} is not a subject: a token is empty")
        return message

    async def _publish(self, connection: NatsConnection, waiting: Sequence[PendingMessage]) -> None:
        """Publish all once. Messages that have no outcome afterwards are sent again."""
        unjudged: dict[asyncio.Future[None], PendingMessage] = {}

        def judge(answer: asyncio.Future[None]) -> None:
            message = unjudged.pop(answer, None)
            if message is not None and not answer.cancelled():
                self._judge(connection, message, answer.exception())

        with connection.answers() as asked:
            try:
                for message in waiting:
                    headers = headers_of(message.delivery)
                    if _fits(message, headers, connection.largest):
                        answer = await connection.publish(message.name, message.delivery.body, headers)
                        asked.append(answer)
                        unjudged[answer] = message
                        # Each when it comes: one message without an answer must not fail those behind it.
                        answer.add_done_callback(judge)
                for answer in asked:
                    if not answer.done():
                        await asyncio.wait({answer})
            finally:
                # The loop may not have called back for the last answers yet, as when the time is over. A broken
                # connection is the answer of all others.
                while ended := [answer for answer in unjudged if answer.done()]:
                    for answer in ended:
                        judge(answer)

    def _judge(self, connection: NatsConnection, message: PendingMessage, error: BaseException | None) -> None:
        """Set the outcome from an answer. Without one afterwards the message is sent again."""
        if error is None:
            message.done()
        elif isinstance(error, NoStream | NotPermitted | NotStored):
            _fail(message, error)
        else:
            self._connections.drop(connection)
            message.broken(str(error))


def _fits(message: PendingMessage, headers: Mapping[str, str], largest: int) -> bool:
    """Return whether NATS takes a message of this size; refuse it if not, since NATS would close the connection."""
    size = len(message.delivery.body) + 12 + sum(len(name) + len(value) + 4 for name, value in headers.items())
    if size > largest:
        error = f"{size:,} bytes with headers; this NATS takes at most {largest:,} (max_payload)"
        message.refuse(TOO_LARGE, error)
    return size <= largest


def _fail(message: PendingMessage, failure: NoStream | NotPermitted | NotStored) -> None:
    if isinstance(failure, NoStream):
        message.fail(
            f"no JetStream stream has the subject {message.name}: create one, or add the subject to one "
            "(nats stream add, nats stream edit)"
        )
    elif isinstance(failure, NotPermitted):
        message.fail(f"NATS does not permit this account to publish to {message.name}")
    elif failure.number == EXCEEDS_STREAM:
        size = len(message.delivery.body)
        message.refuse(
            TOO_LARGE, f"a body of {size:,} bytes; the stream takes less (max_msg_size): {failure}", asked=True
        )
    else:
        message.fail(f"JetStream did not store it: {failure} (error {failure.number})")


def headers_of(delivery: Delivery) -> dict[str, str]:
    """Return the headers of a message."""
    parts = [delivery.message_id, delivery.subscription, *([delivery.replay] if delivery.replay is not None else [])]
    headers = {"Nats-Msg-Id": encoded(":".join(parts))}
    for name, value in attributes(delivery).items():
        headers["ce-" + name] = encoded(value)
    for name, value in own_headers(delivery).items():
        headers[name] = encoded(value)
    headers.update(trace_headers(delivery.trace))
    return headers


@lru_cache(maxsize=1024)
def token_of(name: str, value: str) -> str:
    """Return a placeholder's value for a subject: one token; for a topic or group as many as it has parts."""
    escaped = quote(value, safe="").replace("~", "%7E")
    return escaped if name in ("topic", "group") else escaped.replace(".", "%2E") or "_"
