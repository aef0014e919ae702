"""The stored transaction of the coordinator in memory."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from halfnote.message import Message
from halfnote.outgoing import encoded

Source = Literal["producer", "check"]


@dataclass
class Stored:
    """A stored transaction; `verdict` None: it is undecided."""

    transaction_id: UUID
    group: str
    request: Mapping[str, Any]
    plain: bool
    born_at: datetime
    traceparent: str | None = None
    checks: int = 0
    verdict: Literal["commit", "rollback"] | None = None
    source: Source | None = None
    reason: str | None = None
    decided_at: datetime | None = None
    offsets: list[int] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The state's name in the service."""
        return {None: "half", "commit": "committed", "rollback": "rolled_back"}[self.verdict]

    def message_id(self, position: int) -> str:
        """Return the id of a message."""
        return f"{self.transaction_id}-{position}"

    def recorded(self) -> dict[str, Any]:
        """Return its verdict."""
        assert self.decided_at is not None
        return {"verdict": self.verdict, "source": self.source, "decided_at": self.decided_at.isoformat()}

    def placed(self) -> list[dict[str, Any]]:
        """Return its messages with their offsets."""
        return [
            {"message_id": self.message_id(position), "topic": message["topic"], "offset": self.offsets[position]}
            for position, message in enumerate(self.request["messages"])
        ]

    def shown(self) -> dict[str, Any]:
        """Return the JSON of `GET /transactions/{id}`, without the timeline."""
        content: dict[str, Any] = {
            "transaction_id": str(self.transaction_id),
            "producer_group": self.group,
            "state": self.state,
            "born_at": self.born_at.isoformat(),
            "messages": [
                {
                    "message_id": self.message_id(position),
                    "topic": message["topic"],
                    "key": message.get("key"),
                    "tag": message.get("tag"),
                    "headers": message.get("headers") or {},
                    **({"offset": self.offsets[position]} if self.offsets else {}),
                }
                for position, message in enumerate(self.request["messages"])
            ],
        }
        if "context" in self.request:
            content["context"] = self.request["context"]
        if self.verdict is not None:
            reason = {"reason": self.reason} if self.reason is not None else {}
            content["verdict"] = {**self.recorded(), **reason}
        return content

    def published(self, position: int) -> Message:
        """Return a message in the form that a consumer gets."""
        message = self.request["messages"][position]
        if message.get("body_base64") is not None:
            body, kind = base64.b64decode(message["body_base64"]), "application/octet-stream"
        else:
            body, kind = encoded(message["body"]), "application/json"
        return Message(
            message_id=self.message_id(position),
            topic=message["topic"],
            body=body,
            content_type=message.get("content_type") or kind,
            key=message.get("key"),
            tag=message.get("tag"),
            headers=message.get("headers") or {},
            group=self.group,
            transaction_id=str(self.transaction_id),
            offset=self.offsets[position],
            subscription="tests",
            committed_at=self.decided_at,
            traceparent=self.traceparent,
        )


def without_defaults(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a request for comparisons: a null field equals a missing field, except in JSON values."""
    found = {name: value for name, value in request.items() if name == "context" or value is not None}
    found.pop("transaction_id", None)
    found["messages"] = [
        {name: value for name, value in message.items() if name == "body" or value is not None}
        for message in request["messages"]
    ]
    return found


def difference(stored: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Name the first field that differs, as the service does."""
    if stored["producer_group"] != given["producer_group"]:
        return "producer_group"
    if len(stored["messages"]) != len(given["messages"]):
        return "messages"
    for index, (old, new) in enumerate(zip(stored["messages"], given["messages"], strict=True)):
        for name in ("topic", "key", "tag", "content_type", "body", "body_base64", "deliver_after_s", "headers"):
            if old.get(name) != new.get(name):
                return f"messages[{index}].{'body' if name == 'body_base64' else name}"
    return next((name for name in ("context", "check") if stored.get(name) != given.get(name)), None)
