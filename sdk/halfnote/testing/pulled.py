"""Claims of consumers in memory: what a subscription has handed out, what failed, and what is dead."""

import base64
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx

from halfnote.message import Message
from halfnote.testing.problems import invalid

TRIES = 17


@dataclass
class Pulled:
    """A subscription whose consumers claim. `topics`: patterns, as in its PUT.

    Time does not matter here: what was given back can be claimed at once, and `lapse` ends all leases.
    """

    topics: Sequence[str]
    ordered: bool = False
    acknowledged: list[Message] = field(default_factory=list)
    dead: list[Message] = field(default_factory=list)
    _position: int = 0
    _waiting: list[Message] = field(default_factory=list)
    _held: dict[str, Message] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def claim(self, log: Sequence[Message], request: Mapping[str, Any]) -> httpx.Response:
        """Hand out messages that wait, or else new ones of the log."""
        self._waiting += [one for one in log[self._position :] if self._takes(one)]
        self._position = len(log)
        self._waiting.sort(key=lambda one: one.offset or 0)
        out = {one.key for one in self._held.values()} if self.ordered else set()
        ready = [one for one in self._waiting if one.key is None or one.key not in out][: request.get("max", 10)]
        taken = {one.message_id: f"{one.message_id}-{uuid.uuid4()}" for one in ready}
        self._held |= {taken[one.message_id]: one for one in ready}
        self._waiting = [one for one in self._waiting if one.message_id not in taken]
        until = datetime.now(timezone.utc) + timedelta(seconds=request.get("invisible_s", 30))
        messages = [{"handle": taken[one.message_id], **_shown(one)} for one in ready]
        content = {"messages": messages, "held_until": until.isoformat(), "more": bool(self._waiting)}
        return httpx.Response(200, json=content)

    def settle(self, act: str, request: Mapping[str, Any]) -> httpx.Response:
        """Acknowledge, give back, reject or extend."""
        if not request.get("handles"):
            raise invalid("handles", "at least one handle is expected")
        outcomes = [self._settled(act, handle, request.get("begun", True)) for handle in request["handles"]]
        return httpx.Response(200, json={"outcomes": outcomes})

    def lapse(self) -> None:
        """Let the time of all that is held be over."""
        for handle in list(self._held):
            self._again(self._held.pop(handle))

    def _settled(self, act: str, handle: str, begun: bool) -> dict[str, Any]:
        if act == "ack" and handle in self._done:
            return {"status": 200, "replayed": True}
        message = self._held.get(handle)
        if message is None:
            detail = "Its time is over, or it was settled before. Nothing was changed."
            return {"type": "/problems/not-held", "title": "Not held", "status": 409, "detail": detail}
        shown: dict[str, Any] = {"status": 200, "message_id": message.message_id}
        if act == "extend":
            return shown
        del self._held[handle]
        if act == "ack":
            self._done.add(handle)
            self.acknowledged.append(message)
            return {**shown, "replayed": False}
        if act == "nack":
            return {**shown, "result": self._again(message, begun=begun)}
        self.dead.append(message)
        return {**shown, "result": "dead"}

    def _again(self, message: Message, *, begun: bool = True) -> str:
        if not begun:
            self._waiting.append(message)
            return "retry"
        if message.attempt >= TRIES:
            self.dead.append(message)
            return "dead"
        self._waiting.append(replace(message, attempt=message.attempt + 1))
        return "retry"

    def _takes(self, message: Message) -> bool:
        return any(
            message.topic.startswith(pattern[:-1]) if pattern.endswith("*") else message.topic == pattern
            for pattern in self.topics
        )


def _shown(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "message_id": message.message_id,
        "offset": message.offset,
        "producer_group": message.group,
        "topic": message.topic,
        "key": message.key,
        "tag": message.tag,
        "headers": dict(message.headers),
        "content_type": message.content_type,
        "committed_at": (message.committed_at or datetime.now(timezone.utc)).isoformat(),
        "attempt": message.attempt,
        "replay": None,
        "traceparent": message.traceparent,
    }
    if message.content_type == "application/json":
        return {**shown, "body": json.loads(message.body)}
    return {**shown, "body_base64": base64.b64encode(message.body).decode()}
