"""NATS JetStream: one message each, delivered once a stream acknowledged that it has stored it.

`Nats-Msg-Id`, by which a stream knows duplicates, is `<message id>:<subscription>`, and a replay adds `:<replay id>`:
what Halfnote sends again is stored once within the stream's window, while a replay, and another subscription that
leads to the same stream, are not swallowed. Headers follow CloudEvents' NATS binding (binary mode, `ce-<attribute>`,
`datacontenttype` among them), with `halfnote-…` and the message's own as `halfnote-h-<name>` beside them; values are
percent-encoded as in HTTP.

In a subject, what stands for `{key}` or `{tag}` is one token: all but ASCII letters, digits, `_` and `-` is
percent-encoded as UTF-8, also `.`, `*`, `>` and spaces; without a key or tag it is `_`. For `{topic}` and `{group}` it
is the same, but `.` stays and parts tokens.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from time import perf_counter
from typing import Any
from urllib.parse import quote, urlsplit

from nats.errors import Error

from app.destinations.base import Delivery, Destination, Outcome
from app.destinations.cloudevents import attributes, own_headers
from app.destinations.lines import BAD_MESSAGE, TOO_LARGE, Lines, Sending
from app.destinations.nats_line import NatsLine, NoStream, NotPermitted, NotStored, Place, connected
from app.destinations.placeholders import filled
from app.destinations.webhook import encoded
from app.dialling import Dialling
from app.trace_context import trace_headers

# How many messages one call takes; they go out one behind the other.
BATCH_MAX = 100
# NATS takes lines of 4,096 bytes by default, the inbox for the answer and two sizes included.
SUBJECT_BYTES = 3_900
# JetStream's numbers (nats-server, errors.json): larger than the stream's `max_msg_size`.
EXCEEDS_STREAM = 10054


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, dialling: Dialling
) -> Destination:
    """Return the destination of a stored `{type: "nats", url, subject?, username?}`."""
    account: dict[str, str] = {}
    if destination.get("username"):
        account = {"user": destination["username"], "password": credentials.get("password", "")}
    elif credentials.get("token"):
        account = {"token": credentials["token"]}
    place = Place(urlsplit(destination["url"]), account, dialling)
    return Nats(destination["url"], place, destination.get("subject") or "{topic}", timeout_s)


class Nats:
    """A subject, or several by placeholders, on one connection for all calls."""

    batch_max = BATCH_MAX

    def __init__(self, address: str, place: Place, subject: str, timeout_s: float) -> None:
        self.address = address
        self._subject = subject
        self._lines = Lines(partial(connected, place, timeout_s), self._publish, (Error,), timeout_s)

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Publish and wait until each is acknowledged or refused, or the time is over."""
        started = perf_counter()
        return await self._lines.send([self._sending(delivery, started) for delivery in deliveries])

    async def close(self) -> None:
        """Close the connection."""
        await self._lines.close()

    def _sending(self, delivery: Delivery, started: float) -> Sending:
        sending = Sending(delivery, filled(self._subject, delivery, token_of), started)
        subject = sending.name
        if len(subject) > SUBJECT_BYTES:
            sending.refuse(BAD_MESSAGE, f"a subject of {len(subject):,} bytes; NATS takes about {SUBJECT_BYTES:,}")
        elif subject.startswith(".") or subject.endswith(".") or ".." in subject:
            sending.refuse(BAD_MESSAGE, f"{subject!r} is no subject: a token is empty")
        return sending

    async def _publish(self, line: NatsLine, waiting: Sequence[Sending]) -> None:
        """Publish all once; those without an outcome then are to be sent again."""
        with line.answers() as asked:
            sent: list[Sending] = []
            for sending in waiting:
                headers = headers_of(sending.delivery)
                if _fits(sending, headers, line.largest):
                    asked.append(await line.publish(sending.name, sending.delivery.body, headers))
                    sent.append(sending)
            for sending, answer in zip(sent, asked, strict=True):
                try:
                    await answer
                    sending.done()
                except OSError as broken:
                    self._lines.drop(line)
                    sending.broken(str(broken))
                except (NoStream, NotPermitted, NotStored) as failure:
                    _judge(sending, failure)


def _fits(sending: Sending, headers: Mapping[str, str], largest: int) -> bool:
    """Tell whether NATS takes so much; if not, the outcome is set: NATS would close the connection under all others."""
    size = len(sending.delivery.body) + 12 + sum(len(name) + len(value) + 4 for name, value in headers.items())
    if size > largest:
        error = f"{size:,} bytes with headers; this NATS takes at most {largest:,} (max_payload)"
        sending.refuse(TOO_LARGE, error)
    return size <= largest


def _judge(sending: Sending, failure: NoStream | NotPermitted | NotStored) -> None:
    if isinstance(failure, NoStream):
        sending.fail(
            f"no JetStream stream has the subject {sending.name}: create one, or add the subject to one "
            "(nats stream add, nats stream edit)"
        )
    elif isinstance(failure, NotPermitted):
        sending.fail(f"NATS does not permit this account to publish to {sending.name}")
    elif failure.number == EXCEEDS_STREAM:
        size = len(sending.delivery.body)
        sending.refuse(TOO_LARGE, f"a body of {size:,} bytes; the stream takes less (max_msg_size): {failure}")
    else:
        sending.fail(f"JetStream did not store it: {failure} (error {failure.number})")


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
    """Return what stands for a placeholder in a subject: one token, or of a topic or group as many as it has parts."""
    escaped = quote(value, safe="").replace("~", "%7E")
    return escaped if name in ("topic", "group") else escaped.replace(".", "%2E") or "_"
