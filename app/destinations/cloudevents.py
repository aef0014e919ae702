"""A message as a CloudEvent 1.0.2: its attributes, Halfnote's own headers beside them, and the event as JSON.

The one place that names any of them: HTTP and each broker put their binding's prefix before a name. All values are
text, plain: a binding that needs it encodes them. `halfnoteoffset` is text because the integers of CloudEvents end at
2,147,483,647.

In JSON there are no headers, so a message's own ones are together in one extension, `halfnoteheaders`: the text of a
JSON object with names and values as the producer gave them. Not an extension for each: names of extensions know neither
case nor `.`, `_` and `-`, and a header called `id` or `data` would be taken for something else.
"""

from base64 import b64encode
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec

from app.destinations.base import Delivery
from app.trace_context import trace_headers

EVENT = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"

_encode = msgspec.json.Encoder().encode
_raw = msgspec.json.Decoder(msgspec.Raw).decode


def attributes(delivery: Delivery) -> dict[str, str]:
    """Return the attributes and extensions; `subject`, `halfnotetag` and `halfnotereplay` only if there are any."""
    found = context(delivery)
    found["datacontenttype"] = delivery.content_type
    found["halfnotetransaction"] = str(delivery.transaction_id)
    found["halfnoteoffset"] = str(delivery.offset)
    found["halfnoteattempt"] = str(delivery.attempt)
    found["halfnotesubscription"] = delivery.subscription
    if delivery.tag is not None:
        found["halfnotetag"] = delivery.tag
    if delivery.replay is not None:
        found["halfnotereplay"] = delivery.replay
    return found


def context(delivery: Delivery) -> dict[str, str]:
    """Return the attributes that CloudEvents itself defines, but for `datacontenttype`."""
    found = {
        "specversion": "1.0",
        "id": delivery.message_id,
        "source": source_of(delivery.producer_group),
        "type": delivery.topic,
        "time": _time_of(delivery.committed_at),
    }
    if delivery.key is not None:
        found["subject"] = delivery.key
    return found


def own_headers(delivery: Delivery) -> dict[str, str]:
    """Return `halfnote-…` headers: of the delivery, and as `halfnote-h-<name>` the message's own."""
    found = {
        "halfnote-transaction": str(delivery.transaction_id),
        "halfnote-offset": str(delivery.offset),
        "halfnote-attempt": str(delivery.attempt),
        "halfnote-subscription": delivery.subscription,
    }
    if delivery.tag is not None:
        found["halfnote-tag"] = delivery.tag
    if delivery.replay is not None:
        found["halfnote-replay"] = delivery.replay
    for name, value in delivery.headers.items():
        found[f"halfnote-h-{name}"] = value
    return found


@lru_cache(maxsize=1024)
def _time_of(committed_at: datetime) -> str:
    """Return `time`; the messages of one flush share theirs."""
    return committed_at.isoformat().replace("+00:00", "Z")


@lru_cache(maxsize=1024)
def source_of(producer_group: str) -> str:
    """Return a group's `source`: a URI reference, so the name is percent-encoded as a path segment."""
    return "/producer-groups/" + quote(producer_group, safe="")


def event(delivery: Delivery) -> bytes:
    """Return the event as JSON (`application/cloudevents+json`).

    A JSON body is `data`, byte for byte; any other, and one that is JSON by its content type alone, `data_base64`.
    """
    members: dict[str, Any] = {**attributes(delivery)}
    # CloudEvents' Distributed Tracing extension names them as the headers are.
    members.update(trace_headers(delivery.trace))
    if delivery.headers:
        members["halfnoteheaders"] = _encode(delivery.headers).decode()
    if is_json(delivery.content_type) and _parses(delivery.body):
        members["data"] = msgspec.Raw(delivery.body)
    else:
        members["data_base64"] = b64encode(delivery.body).decode()
    return _encode(members)


def joined(events: Iterable[bytes]) -> bytes:
    """Return events as one JSON array (`application/cloudevents-batch+json`)."""
    return b"[" + b",".join(events) + b"]"


@lru_cache(maxsize=1024)
def is_json(content_type: str) -> bool:
    """Tell whether a content type declares JSON: `*/json` or `*/*+json` (JSON event format 1.0.2 §3.1.1)."""
    subtype = content_type.partition(";")[0].rpartition("/")[2].strip().lower()
    return subtype == "json" or subtype.endswith("+json")


def _parses(body: bytes) -> bool:
    """Tell whether bytes are one JSON value that may stand inside another: what came as base64 was never looked at."""
    try:
        _raw(body)
        body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
