"""The messages that one client holds in one queue, under the offsets by which the client knows them.

Each queue has offsets of its own, which no other one gives, in this process or another: a client that goes on here with
an offset of another process gets higher ones. So an offset that was given here is never above a message that the client
has not got. One that was not says nothing of the messages that were.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.rocketmq.answer_sizes import AnswerSize

# How far a queue begins above the time and the client's offset, at random. A process may have given a few offsets above
# the client's that it did not get, and several may begin at the same time, or by clocks that differ.
_AHEAD = range(1 << 20, 1 << 30)


@dataclass(frozen=True, slots=True)
class HeldDelivery:
    """A message that a client holds. `position`: its place in the commit log, as the client was told."""

    offset: int
    position: int
    message_id: str
    handle: str
    attempt: int


class QueueName(NamedTuple):
    """A queue as its client names it."""

    group: str
    topic: str
    queue_id: int


class ClaimQueue:
    """One queue of one client: its messages, and where it goes on. `pulling` is held by the pull that is under way.

    `after`: the offset with which a client goes on that another process, or a former queue, gave it.
    """

    def __init__(self, name: QueueName, subscription: str, after: int | None = None) -> None:
        self.name, self.subscription = name, subscription
        # A client may go to another process, begin or go on there, and come back.
        self._after, self._lowest = after, _first_offset(after or 0)
        self.next_offset = self._lowest
        self.pulling = asyncio.Lock()
        self._size, self._is_answered = AnswerSize(), False
        self._held: dict[int, HeldDelivery] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def most(self) -> int:
        """How many messages the next answer has at most."""
        return self._size.most

    def gave(self, offset: int) -> bool:
        """Return whether an offset is of this queue, or the one after which it began."""
        return offset == self._after or self._lowest <= offset <= self.next_offset

    def answer(self, deliveries: Sequence[HeldDelivery], body_bytes: int) -> None:
        """Note what the client holds once it has the next answer. `body_bytes`: of all bodies in it."""
        self.hold(deliveries)
        self.next_offset += len(deliveries)
        self._size.sent(len(deliveries), body_bytes)
        self._is_answered = True

    def go_on(self, offset: int) -> list[HeldDelivery]:
        """Note for which offset of this queue the client asks. Forget and return what it did not get."""
        lost = self.take_from(offset)
        if lost:
            self._size.lost()
        elif self._is_answered:
            self._size.arrived()
        self.next_offset, self._is_answered = max(offset, self._lowest), False
        return lost

    @property
    def handles(self) -> list[str]:
        """The handles of the messages that the client holds."""
        return [one.handle for one in self._held.values()]

    @property
    def first_offset(self) -> int:
        """The lowest offset that the client holds, else the next one."""
        return min(self._held, default=self.next_offset)

    def hold(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Note what the client holds."""
        self._held.update((one.offset, one) for one in deliveries)

    def take_below(self, offset: int) -> list[HeldDelivery]:
        """Forget and return what is below an offset."""
        return self._take([one for one in self._held.values() if one.offset < offset])

    def take_from(self, offset: int) -> list[HeldDelivery]:
        """Forget and return what is at an offset and above."""
        return self._take([one for one in self._held.values() if one.offset >= offset])

    def take_at(self, position: int, message_id: str) -> HeldDelivery | None:
        """Forget and return the message at a place in the commit log, if it has this id."""
        return self._first(
            one for one in self._held.values() if (one.position, one.message_id) == (position, message_id)
        )

    def take_handle(self, handle: str) -> HeldDelivery | None:
        """Forget and return the message with a handle."""
        return self._first(one for one in self._held.values() if one.handle == handle)

    def _first(self, found: Iterable[HeldDelivery]) -> HeldDelivery | None:
        taken = next(iter(found), None)
        if taken is not None:
            del self._held[taken.offset]
        return taken

    def _take(self, taken: list[HeldDelivery]) -> list[HeldDelivery]:
        for one in taken:
            del self._held[one.offset]
        return taken


def _first_offset(after: int) -> int:
    return max(after, int(time.time() * 1000) << 20) + secrets.choice(_AHEAD)
