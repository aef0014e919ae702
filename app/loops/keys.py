"""PURE: which messages of an ordered subscription may be sent, which wait for others of their key, which are put by.

A key is *busy* while one of its messages is under way here; the others of that window wait behind it in memory. It is
*held* while delivery_retry has a message of it that was sent and failed, or waits for such a one: then what the log
brings is put there too, so that the window can slide on. The claim from delivery_retry looks at the table itself, so
what is known here only decides what may pass.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum

from app.store.relay import Outgoing

# So many rows may wait in delivery_retry for others of their key; past it the window stops instead.
HELD_MOST = 10_000


class Admission(Enum):
    """What becomes of a message: sent now, kept behind another one, or put to delivery_retry."""

    GO = 1
    WAIT = 2
    HOLD = 3


class Keys:
    """The keys of one stream. `stored`: key → offsets of its rows in delivery_retry that keep later ones back.

    With `hold_dead`, `dead` are the keys that a dead letter stops until a person acts.
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
        """Whether so many are held that the window must stop."""
        return self._held >= HELD_MOST

    def admit(self, message: Outgoing) -> Admission:
        """Say what becomes of a message that was read or claimed; GO makes its key busy."""
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
        # A delayed message that fell due takes its place before what came after it.
        later = next((i for i, other in enumerate(queue) if other.offset > message.offset), len(queue))
        queue.insert(later, message)
        return Admission.WAIT

    def over(self, message: Outgoing, *, dead: bool = False) -> tuple[Outgoing | None, list[Outgoing]]:
        """Note that a message that went is delivered or dead: return the next of its key that goes, and those that go
        back to delivery_retry instead."""
        key = message.key
        if key is None:
            return None, []
        self._unstore(key, message.offset)
        if dead and self._hold_dead:
            self.dead.add(key)
            return None, self._put_by(key)
        queue = self._waiting.get(key)
        if not queue:
            self._waiting.pop(key, None)
            return None, []
        return queue.popleft(), []

    def put_off(self, message: Outgoing) -> list[Outgoing]:
        """Note that a message that went is to be tried again later: return those of its key that go back as well."""
        if message.key is None:
            return []
        self._store(message.key, message.offset)
        return self._put_by(message.key)

    def freed(self, keys: Iterable[str]) -> None:
        """Note that a person acted on the dead letters that stopped these keys."""
        self.dead.difference_update(keys)

    def has_stored(self, key: str | None) -> bool:
        """Tell whether delivery_retry has more of a key."""
        return key in self._stored

    def clear(self) -> list[Outgoing]:
        """Let go of what waits in memory and return it."""
        waiting = [message for queue in self._waiting.values() for message in queue]
        self._waiting.clear()
        return waiting

    def _put_by(self, key: str) -> list[Outgoing]:
        queue = self._waiting.pop(key, deque())
        for message in queue:
            self._store(key, message.offset)
        return list(queue)

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
