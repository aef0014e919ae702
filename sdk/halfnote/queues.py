"""The messages of a consumer's `run` that are claimed and not begun, by their keys."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from halfnote.consuming import HeldMessage

# How many messages may wait for earlier ones of their keys in a `run` as it claims, if `at_most` is not given: as many
# as a claim has then, as a rule. Each failure gives those of its key back.
WAITING_MOST = 10


@dataclass(eq=False)
class Queue:
    """The claimed messages of one key in their order, or one message without a key. One handler works on them."""

    key: str | None
    messages: deque[HeldMessage]
    is_begun: bool = False

    def waiting(self) -> int:
        """Return how many messages wait for an earlier one."""
        return len(self.messages) if self.is_begun else len(self.messages) - 1


class Queues:
    """The messages of a `run` that are claimed and not begun. Safe to share among threads.

    A claim is made while fewer queues than `at_once` are under way, so one handler that hangs keeps no other key back,
    unless a claim's worth of messages (`at_most`) waits for earlier ones of their keys: a failure of one that many wait
    for would give all of them back. Messages of a later claim whose key is under way go to the end of its queue.
    """

    def __init__(self, at_once: int, at_most: int | None) -> None:
        if at_once < 1:
            raise ValueError(f"at_once is at least 1, not {at_once}")
        self._at_once, self._waiting_most = at_once, WAITING_MOST if at_most is None else at_most
        self._lock = threading.Lock()
        self._under_way: set[Queue] = set()
        self._of_keys: dict[str, Queue] = {}

    def have_room(self) -> bool:
        """Return whether a handler has nothing to work on, and not too many messages wait for others of their keys."""
        with self._lock:
            waiting = sum(queue.waiting() for queue in self._under_way)
            return len(self._under_way) < self._at_once and waiting < self._waiting_most

    def add(self, held: Sequence[HeldMessage]) -> list[Queue]:
        """Queue messages; return the queues that are new, each of which a handler must take from until it ends."""
        new: list[Queue] = []
        with self._lock:
            for one in held:
                key = one.message.key
                if key is not None and (queue := self._of_keys.get(key)) is not None:
                    queue.messages.append(one)
                    continue
                queue = Queue(key, deque([one]))
                self._under_way.add(queue)
                if key is not None:
                    self._of_keys[key] = queue
                new.append(queue)
        return new

    def next(self, queue: Queue) -> HeldMessage | None:
        """Return the next message; None ends the queue."""
        with self._lock:
            queue.is_begun = True
            if queue.messages:
                return queue.messages.popleft()
            self._end(queue)
            return None

    def end(self, queue: Queue) -> list[HeldMessage]:
        """End a queue; return what is left of it."""
        with self._lock:
            self._end(queue)
            return list(queue.messages)

    def _end(self, queue: Queue) -> None:
        self._under_way.discard(queue)
        if queue.key is not None and self._of_keys.get(queue.key) is queue:
            del self._of_keys[queue.key]
