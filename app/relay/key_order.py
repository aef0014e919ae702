"""PURE: decide for each message of an ordered subscription: send it, keep it behind its key, or store it as a retry.

A key is *busy* while one of its messages is in flight; later ones of the same window wait behind it in memory. A key is
*held* while delivery_retry has a message of it that was sent and failed, or that waits for such a message. New messages
of a held key go to delivery_retry as well, so that the window can move on. The claim from delivery_retry checks the
table itself, so this state only decides what may pass.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from enum import Enum

from app.store.relay.log import Outgoing

# The most rows that may wait in delivery_retry for others of their key; beyond it the window stops.
HELD_MOST = 10_000


class Admission(Enum):
    """The decision on a message: send it now, let it wait in memory, or hold it in delivery_retry."""

    GO = 1
    WAIT = 2
    HOLD = 3


class KeyOrder:
    """The keys of one stream. `stored`: key → offsets of its rows in delivery_retry that keep later ones back.

    With `hold_dead`, `dead` are the keys that a dead letter stops until a person acts.

    Invariant: at most one message of a key is in flight.
    """

    def __init__(
        self, stored: Mapping[str, Iterable[int]], *, hold_dead: bool = False, dead: Iterable[str] = ()
    ) -> None:
        self._stored = {key: set(offsets) for key, offsets in stored.items()}
        self._held = sum(map(len, self._stored.values()))
        self._waiting: dict[str, deque[Outgoing]] = {}
        self._hold_dead = hold_dead
        self.dead = set(dead)

    @property
    def full(self) -> bool:
        """Whether the number of held messages is at the limit, so that the window must stop."""
        return self._held >= HELD_MOST

    def admit(self, message: Outgoing) -> Admission:
        """Decide on a message that was read or claimed; GO makes its key busy."""
        key = message.key
        if key is None:
            return Admission.GO
        queue = self._waiting.get(key)
        if message.claim is None:
            if key in self._stored or key in self.dead:
                self._store(key, message.offset)
                return Admission.HOLD
            if queue is None:
                self._waiting[key] = deque()
                return Admission.GO
            queue.append(message)
            return Admission.WAIT
        self._store(key, message.offset)
        if queue is None:
            self._waiting[key] = deque()
            return Admission.GO
        # A delayed message that is due goes before messages with higher offsets.
        later = next((i for i, other in enumerate(queue) if other.offset > message.offset), len(queue))
        queue.insert(later, message)
        return Admission.WAIT

    def settled(self, message: Outgoing, *, dead: bool = False) -> tuple[Outgoing | None, list[Outgoing]]:
        """Note that a message is delivered or dead.

        Return the next of its key to send, and those of its key that go to delivery_retry instead.
        """
        key = message.key
        if key is None:
            return None, []
        self._unstore(key, message.offset)
        if dead and self._hold_dead:
            self.dead.add(key)
            return None, self._remove_waiting(key)
        queue = self._waiting.get(key)
        if not queue:
            self._waiting.pop(key, None)
            return None, []
        return queue.popleft(), []

    def expired(self, message: Outgoing) -> list[Outgoing]:
        """Note that a message which no other one waited for is dead; return those of its key that go to delivery_retry.

        It was not busy, so the next of its key does not follow it. If another one of its key is in flight, the key
        stays busy.
        """
        key = message.key
        if key is None:
            return []
        self._unstore(key, message.offset)
        if not self._hold_dead:
            return []
        self.dead.add(key)
        return self._store_waiting(key)

    def waiting(self) -> list[Outgoing]:
        """Return the messages that wait in memory behind another of their key."""
        return [message for queue in self._waiting.values() for message in queue]

    def remove(self, offsets: Collection[int]) -> None:
        """Remove messages that wait in memory."""
        for queue in self._waiting.values():
            kept = [message for message in queue if message.offset not in offsets]
            if len(kept) < len(queue):
                queue.clear()
                queue.extend(kept)

    def postponed(self, message: Outgoing) -> list[Outgoing]:
        """Note that a message is tried again later; return the others of its key, which are stored too."""
        if message.key is None:
            return []
        self._store(message.key, message.offset)
        return self._remove_waiting(message.key)

    def freed(self, keys: Iterable[str], stored: Mapping[str, Iterable[int]]) -> None:
        """Note that a person acted on the dead letters that stopped these keys.

        `stored` is as for a new KeyOrder, read after the dead letters: a redelivered message keeps later ones back.
        """
        for key in keys:
            self.dead.discard(key)
            for offset in stored.get(key, ()):
                self._store(key, offset)

    def stored_offsets(self) -> set[int]:
        """Return the offsets that have a row in delivery_retry, or will have one after the next settle."""
        return {offset for offsets in self._stored.values() for offset in offsets}

    def removed(self, offsets: Collection[int]) -> None:
        """Note that upkeep removed these rows of delivery_retry, and made dead letters of them.

        With `hold_dead` their keys are dead until `freed`, because dead letters stop them now.
        """
        for key in [key for key, stored in self._stored.items() if not stored.isdisjoint(offsets)]:
            for offset in self._stored[key].intersection(offsets):
                self._unstore(key, offset)
            if self._hold_dead:
                self.dead.add(key)

    def has_stored(self, key: str | None) -> bool:
        """Return whether delivery_retry has more of a key."""
        return key in self._stored

    def clear(self) -> list[Outgoing]:
        """Remove the messages that wait in memory, and return them."""
        waiting = self.waiting()
        self._waiting.clear()
        return waiting

    def _remove_waiting(self, key: str) -> list[Outgoing]:
        waiting = self._store_waiting(key)
        self._waiting.pop(key, None)
        return waiting

    def _store_waiting(self, key: str) -> list[Outgoing]:
        queue = self._waiting.get(key, deque())
        waiting = list(queue)
        queue.clear()
        for message in waiting:
            self._store(key, message.offset)
        return waiting

    def _store(self, key: str, offset: int) -> None:
        offsets = self._stored.setdefault(key, set())
        self._held += offset not in offsets
        offsets.add(offset)

    def _unstore(self, key: str, offset: int) -> None:
        offsets = self._stored.get(key)
        if offsets is not None and offset in offsets:
            offsets.remove(offset)
            self._held -= 1
            if not offsets:
                del self._stored[key]
