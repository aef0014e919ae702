"""A message as a CloudEvent 1.0.2: its attributes, Halfnote's own headers, and the event as JSON.

Only this module names them: HTTP and each broker prefix a name by their binding. All values are plain text; a binding
encodes them if it has to. `halfnoteoffset` is text because CloudEvents' integers end at 2,147,483,647.

JSON has no headers, so the message's own headers are in one extension, `halfnoteheaders`: the text of a JSON object
with the producer's names and values. There is no extension for each header: extension names have no case and no `.`,
`_` or `-`, and a header called `id` or `data` would clash with an attribute.
"""

from base64 import b64encode
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec

from app.delivery import Delivery
from app.field_rules import json_of
from app.observability.trace_context import trace_headers

EVENT = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
# Before the name of a header of the message's own.
OWN_HEADER = "halfnote-h-"

_encode = msgspec.json.Encoder().encode


def attributes(delivery: Delivery) -> dict[str, str]:
    """Return the attributes and extensions; `subject`, `halfnotetag` and `halfnotereplay` only if they have a value."""
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
    """Return the attributes that CloudEvents defines, without `datacontenttype`."""
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
    """Return the `halfnote-…` headers of the delivery, and the message's own as `halfnote-h-<name>`."""
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
        found[OWN_HEADER + name] = value
    return found


@lru_cache(maxsize=1024)
def _time_of(committed_at: datetime) -> str:
    """Return `time`. Cached: the messages of one flush share it."""
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
    # CloudEvents' Distributed Tracing extension uses the names of the headers.
    members.update(trace_headers(delivery.trace))
    if delivery.headers:
        members["halfnoteheaders"] = _encode(delivery.headers).decode()
    data = json_of(delivery.body, delivery.content_type)
    if data is None:
        members["data_base64"] = b64encode(delivery.body).decode()
    else:
        members["data"] = data
    return _encode(members)


def joined(events: Iterable[bytes]) -> bytes:
    """Return events as one JSON array (`application/cloudevents-batch+json`)."""
    return b"[" + b",".join(events) + b"]"
