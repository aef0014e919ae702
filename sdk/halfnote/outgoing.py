"""The messages of a producer, and their JSON for Halfnote."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID


@dataclass(frozen=True)
class Outgoing:
    """A message to send.

    `body`: any value that the producer's `serialize` can write as JSON, or `bytes`, which are sent unchanged with
    `content_type` (by default `application/octet-stream`). `key`: the id of the subject of the message, such as an
    order; `tag`: subscriptions can filter by it. `deliver_after_s`: seconds from the commit to the delivery, at most 40
    days.
    """

    topic: str
    body: Any
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None
    deliver_after_s: float | None = None

    def __post_init__(self) -> None:
        """Raises TypeError for a field of another type."""
        for name in ("topic", "key", "tag", "content_type"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "topic"):
                raise TypeError(f"`{name}` of a message must be text, not {type(value).__name__}")
        if not isinstance(self.headers, Mapping):
            raise TypeError(f"`headers` of a message must be a mapping, not {type(self.headers).__name__}")

    def as_json(self) -> dict[str, Any]:
        """Return the message in the JSON of `POST /half`."""
        shown: dict[str, Any] = {"topic": self.topic}
        if isinstance(self.body, (bytes, bytearray, memoryview)):
            shown["body_base64"] = base64.b64encode(self.body).decode()
        else:
            shown["body"] = self.body
        optional = {
            "key": self.key,
            "tag": self.tag,
            "headers": dict(self.headers) or None,
            "content_type": self.content_type,
            "deliver_after_s": self.deliver_after_s,
        }
        return shown | {name: value for name, value in optional.items() if value is not None}


def as_list(messages: Outgoing | Sequence[Outgoing]) -> list[Outgoing]:
    """Return one message or several as a list. Raises ValueError if there is none, TypeError if one is none."""
    if not isinstance(messages, (Outgoing, list, tuple)):
        raise TypeError(f"an Outgoing, or a list of them, is expected, not {type(messages).__name__}")
    found = [messages] if isinstance(messages, Outgoing) else list(messages)
    for message in found:
        if not isinstance(message, Outgoing):
            raise TypeError(f"a message must be an Outgoing, not {type(message).__name__}")
    if not found:
        raise ValueError("a transaction needs at least one message")
    return found


def serializable(value: Any) -> Any:
    """Return a value that JSON has in place of one that it does not have. Raises TypeError for an unknown type.

    Times and dates in ISO 8601; `Decimal` and `UUID` as text, so that no digit is lost.
    """
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    raise TypeError(
        f"{type(value).__name__} cannot be written as JSON: give the producer a `serialize` function for it"
    )


def encoded(content: Any, serialize: Callable[[Any], Any] = serializable) -> bytes:
    """Return the JSON of a request or body. Raises ValueError or TypeError, naming what cannot be written as JSON.

    `serialize` is called with each value that JSON does not have, and returns one that it has.
    """
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=serialize).encode()
