"""The messages of a producer, and their JSON for Halfnote."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outgoing:
    """A message to send.

    `body`: any value that `json` can write, or `bytes`, which are sent unchanged with `content_type` (by default
    `application/octet-stream`). `key`: the id of the subject of the message, such as an order; `tag`: subscriptions can
    filter by it. `deliver_after_s`: seconds from the commit to the delivery, at most 40 days.
    """

    topic: str
    body: Any
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None
    deliver_after_s: float | None = None

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
    """Return one message or several as a list. Raises ValueError if there is none."""
    found = [messages] if isinstance(messages, Outgoing) else list(messages)
    if not found:
        raise ValueError("a transaction needs at least one message")
    return found


def encoded(content: Any) -> bytes:
    """Return the JSON of a request or body. Raises ValueError or TypeError, naming what cannot be written as JSON."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
