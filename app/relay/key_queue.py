"""PURE: the messages of one key that wait behind the one in flight. Only the first of them need their bodies in memory.

A message without its body keeps its place; the relay reads the body again before its turn comes.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from app.store.relay.log import Outgoing


class KeyQueue:
    """`complete` are the first messages, with bodies; `deferred` those after them, without.

    Invariants: the offsets of both together rise. A message that was claimed from delivery_retry keeps its body in
    `deferred` too.
    """

    __slots__ = ("_lengths", "complete", "deferred", "deferred_bytes")

    def __init__(self) -> None:
        self.complete: deque[Outgoing] = deque()
        self.deferred: deque[Outgoing] = deque()
        # The length of each body that is not in memory, by offset, and of all of them.
        self._lengths: dict[int, int] = {}
        self.deferred_bytes = 0

    def __len__(self) -> int:
        return len(self.complete) + len(self.deferred)

    @property
    def without_body(self) -> int:
        """How many messages have no body in memory."""
        return len(self._lengths)

    def append(self, message: Outgoing) -> None:
        """Add a message of the log: without its body if the one before it is without."""
        if self.deferred:
            self.deferred.append(self._without_body(message))
        else:
            self.complete.append(message)

    def insert(self, claimed: Outgoing) -> None:
        """Add a claimed message before those with higher offsets."""
        part = self.complete
        if self.deferred and self.deferred[0].offset < claimed.offset:
            part = self.deferred
        part.insert(next((i for i, one in enumerate(part) if one.offset > claimed.offset), len(part)), claimed)

    def pop(self) -> Outgoing | None:
        """Remove and return the first message; None if none waits, or its body must be read first."""
        self.complete_with({})
        return self.complete.popleft() if self.complete else None

    @property
    def first(self) -> Outgoing:
        """The first message. Raises IndexError if none waits."""
        return self.complete[0] if self.complete else self.deferred[0]

    @property
    def body_bytes(self) -> int:
        """How many bytes the bodies of the first messages have."""
        return sum(len(message.body) for message in self.complete)

    def defer(self, messages: int, body_bytes: int) -> None:
        """Keep at most so many bodies, and so many bytes of them, from the first message on."""
        kept, used = 0, 0
        for message in self.complete:
            used += len(message.body)
            if kept >= messages or used > body_bytes:
                break
            kept += 1
        for _ in range(len(self.complete) - kept):
            message = self.complete.pop()
            self.deferred.appendleft(message if message.claim is not None else self._without_body(message))

    def first_deferred(self, messages: int, body_bytes: int, *, least: int = 0) -> list[Outgoing]:
        """Return the first messages without bodies: at most so many and so many bytes, but the first `least` always."""
        found: list[Outgoing] = []
        used = 0
        for message in self.deferred:
            if message.claim is not None:
                continue
            used += self._lengths[message.offset]
            if len(found) >= least and (len(found) >= messages or used > body_bytes):
                break
            found.append(message)
        return found

    def length(self, message: Outgoing) -> int:
        """Return the length of the body of a message that waits without it."""
        return self._lengths[message.offset]

    def complete_with(self, read: Mapping[int, Outgoing]) -> None:
        """Give the first messages their bodies, as far as they were read; `read` has them by their offsets."""
        deferred = self.deferred
        while deferred and (deferred[0].claim is not None or deferred[0].offset in read):
            message = deferred.popleft()
            self.complete.append(message if message.claim is not None else read[message.offset])
            self._forget(message.offset)

    def remove(self, offsets: Collection[int]) -> None:
        """Remove messages by their offsets."""
        for part in (self.complete, self.deferred):
            kept = [message for message in part if message.offset not in offsets]
            if len(kept) < len(part):
                part.clear()
                part.extend(kept)
        for offset in [offset for offset in self._lengths if offset in offsets]:
            self._forget(offset)

    def clear(self) -> list[Outgoing]:
        """Remove all messages, and return them in the order of their offsets; some have no body."""
        messages = self.messages()
        self.complete.clear()
        self.deferred.clear()
        self._lengths.clear()
        self.deferred_bytes = 0
        return messages

    def messages(self) -> list[Outgoing]:
        """Return all messages in the order of their offsets; some have no body."""
        return [*self.complete, *self.deferred]

    def _forget(self, offset: int) -> None:
        self.deferred_bytes -= self._lengths.pop(offset, 0)

    def _without_body(self, message: Outgoing) -> Outgoing:
        # A copy: streams that read together share their messages.
        self._lengths[message.offset] = len(message.body)
        self.deferred_bytes += len(message.body)
        return replace(message, headers=None, body=b"")
