"""Messages as a producer gives them, and the JSON that Halfnote takes."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outgoing:
    """A message to be sent.

    `body`: anything that `json` writes, or `bytes`, which go out as they are with `content_type` (by default
    `application/octet-stream`). `key`: what it is about; `tag`: what subscriptions filter by. `deliver_after_s`:
    seconds from the commit to the delivery, at most 40 days.
    """

    topic: str
    body: Any
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None
    deliver_after_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the message as `POST /half` takes it."""
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
    """Return one message or several as a list. Raises ValueError if there is none."""
    found = [messages] if isinstance(messages, Outgoing) else list(messages)
    if not found:
        raise ValueError("a transaction needs at least one message")
    return found


def encoded(content: Any) -> bytes:
    """Return the JSON of a request or body. Raises ValueError or TypeError, naming what cannot be written as JSON."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
