"""Read a consumer's message from any kind of destination, in CloudEvents 1.0.

HTTP: binary mode, structured mode and batches. RabbitMQ, NATS, Kafka, Redis: from the object of the client, without an
import of the client.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from halfnote.errors import HalfnoteError
from halfnote.json_text import JsonText, with_exact
from halfnote.times import instant

STRUCTURED, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
# How the `webhook-id` of a batch of several messages begins.
BATCH_ID = "bat_"
_OWN = "halfnote-h-"
# Reserved: no producer can send on it.
TEST_TOPIC = "halfnote.test"


class NotAMessage(HalfnoteError):
    """The input is not a message of Halfnote; the text says what is missing."""


@dataclass(frozen=True)
class Message:
    """One message. `message_id` is the same in each delivery; `replay` names the replay that sends it again.

    `body` has exactly the producer's bytes; within an event or a claim, without white space around its JSON.
    """

    message_id: str
    topic: str
    body: bytes
    content_type: str = "application/json"
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    transaction_id: str | None = None
    offset: int | None = None
    attempt: int = 1
    subscription: str | None = None
    replay: str | None = None
    committed_at: datetime | None = None
    # The W3C trace context of this delivery, a descendant of the producer's.
    traceparent: str | None = None
    tracestate: str | None = None

    @property
    def is_test(self) -> bool:
        """Whether it was sent to test a subscription (`POST /subscriptions/{name}/test`)."""
        return self.topic == TEST_TOPIC

    def json(self) -> Any:
        """Return the body's JSON. Raises ValueError."""
        return json.loads(self.body)


def is_signed_as(signed_id: str, headers: Mapping[str, str], messages: Sequence[Message]) -> bool:
    """Return whether the messages of a delivery belong to its signed `webhook-id`.

    The signature covers that id and the body, but no other header: neither the mode nor, in binary mode, the message's
    id. A batch has an id of its own, unless it has one message.
    """
    ids = [message.message_id for message in messages]
    if signed_id.startswith(BATCH_ID):
        return _kind(headers) == BATCH
    return ids == [signed_id]


def _kind(headers: Mapping[str, str]) -> str:
    """Return the content type that shows the mode, or nothing in binary mode.

    Only binary mode has attributes in headers, and the type of a message's own body may be any.
    """
    if "ce-id" in headers or "ce-specversion" in headers:
        return ""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def from_http(headers: Mapping[str, str], body: bytes) -> list[Message]:
    """Return the messages of a delivery: one, or those of a batch. Header names are in lower case.

    Raises NotAMessage. It does not verify the signature: see Verifier and DeliveryEndpoint.
    """
    kind = _kind(headers)
    if kind == BATCH:
        return [_from_event(event) for event in _events(body)]
    if kind == STRUCTURED:
        return [_from_event(_event(body))]
    plain = {name: unquote(value) for name, value in headers.items() if name.startswith(("ce-", "halfnote-"))}
    attributes = {name[3:]: value for name, value in plain.items() if name.startswith("ce-")}
    return [_message(attributes, plain, body, headers.get("content-type"), headers)]


def from_aio_pika(incoming: Any) -> Message:
    """Return the message of an `aio_pika.IncomingMessage`."""
    found = {str(name): _text(value) for name, value in incoming.headers.items()}
    return _message(_with_prefix(found, "cloudEvents_"), found, incoming.body, incoming.content_type, found)


def from_nats(incoming: Any) -> Message:
    """Return the message of a `nats.aio.msg.Msg`."""
    plain = incoming.headers or {}
    found = {name: unquote(value) for name, value in plain.items()}
    attributes = _with_prefix(found, "ce-")
    return _message(attributes, found, incoming.data, attributes.get("datacontenttype"), plain)


def from_aiokafka(record: Any) -> Message:
    """Return the message of an `aiokafka.ConsumerRecord`."""
    found = {name: _text(value) for name, value in record.headers}
    return _message(_with_prefix(found, "ce_"), found, record.value, found.get("content-type"), found)


def from_redis(fields: Mapping[Any, Any]) -> Message:
    """Return the message of a stream's entry, as `xreadgroup` gives its fields, with `decode_responses` or without."""
    found = {_text(name): value for name, value in fields.items()}
    body = found.pop("body", b"")
    texts = {name: _text(value) for name, value in found.items()}
    content = body if isinstance(body, bytes) else str(body).encode()
    return _message(_with_prefix(texts, "ce_"), texts, content, texts.get("content-type"), texts)


def _event(content: bytes) -> Mapping[str, Any]:
    """Return an event; its `data` is JSON in bytes, as it was sent."""
    try:
        text = JsonText(content)
        if not text.is_object:
            raise NotAMessage("an event is a JSON object")
        event = with_exact(text, "data")
        text.end()
    except (ValueError, RecursionError):
        raise NotAMessage("the event is not JSON") from None
    return event


def _events(content: bytes) -> list[Mapping[str, Any]]:
    """Return the events of a batch, as `_event` does."""
    try:
        text = JsonText(content)
        if not text.is_array:
            raise NotAMessage("a batch is a JSON array")
        events = []
        for _ in text.items():
            if not text.is_object:
                raise NotAMessage("an event is a JSON object")
            events.append(with_exact(text, "data"))
        text.end()
    except (ValueError, RecursionError):
        raise NotAMessage("the batch is not JSON") from None
    return events


def _from_event(event: Mapping[str, Any]) -> Message:
    """Return the message of an event in JSON; its extensions are Halfnote's headers without hyphens."""
    texts = {name: value for name, value in event.items() if isinstance(value, str)}
    own = {f"halfnote-{name[8:]}": value for name, value in texts.items() if name.startswith("halfnote")}
    headers = _json(own.pop("halfnote-headers", "{}").encode())
    if not isinstance(headers, dict):
        raise NotAMessage("halfnoteheaders is not the text of a JSON object")
    own.update({_OWN + name: str(value) for name, value in headers.items()})
    body: bytes = _base64(event["data_base64"]) if "data_base64" in event else event.get("data", b"null")
    return _message(texts, own, body, texts.get("datacontenttype"), texts)


def _message(
    attributes: Mapping[str, str],
    halfnote: Mapping[str, str],
    body: bytes,
    content_type: str | None,
    trace: Mapping[str, str],
) -> Message:
    """Return a message from CloudEvents' attributes, Halfnote's headers and the trace's, all plain text."""
    for needed in ("id", "type"):
        if not attributes.get(needed):
            raise NotAMessage(f"the CloudEvents attribute `{needed}` is missing")
    source = attributes.get("source", "")
    return Message(
        message_id=attributes["id"],
        topic=attributes["type"],
        body=body,
        content_type=content_type or "application/octet-stream",
        key=attributes.get("subject"),
        tag=halfnote.get("halfnote-tag"),
        headers={name[len(_OWN) :]: value for name, value in halfnote.items() if name.startswith(_OWN)},
        group=unquote(source.rpartition("/")[2]) or None,
        transaction_id=halfnote.get("halfnote-transaction"),
        offset=_number(halfnote, "halfnote-offset"),
        attempt=_number(halfnote, "halfnote-attempt") or 1,
        subscription=halfnote.get("halfnote-subscription"),
        replay=halfnote.get("halfnote-replay"),
        committed_at=_time(attributes.get("time")),
        traceparent=trace.get("traceparent"),
        tracestate=trace.get("tracestate"),
    )


def _with_prefix(found: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name[len(prefix) :]: value for name, value in found.items() if name.startswith(prefix)}


def _number(found: Mapping[str, str], name: str) -> int | None:
    value = found.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()):
        raise NotAMessage(f"`{name}` is not a number")
    return int(value[:18])


def _time(value: str | None) -> datetime | None:
    try:
        return None if value is None else instant(value)
    except ValueError:
        raise NotAMessage("the CloudEvents attribute `time` is not a time") from None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise NotAMessage("halfnoteheaders is not JSON") from None


def _base64(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        raise NotAMessage("`data_base64` is not base64") from None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def ids_of(messages: Iterable[Message]) -> str:
    """Return the ids of messages for a log line."""
    return ", ".join(message.message_id for message in messages)
