"""PURE: decide for each message of an ordered subscription: send it, keep it behind its key, or store it as a retry.

A key is *busy* while one of its messages is in flight; later ones of the same window wait behind it in memory. If they
fill the memory that the window has, most of them wait without their bodies, so that messages of other keys are read. A
key whose next message has no body in memory stays busy until the body is read. A key is *held* while delivery_retry has
a message of it that was sent and failed, or that waits for such a message. Later messages of a held key go to
delivery_retry as well, so that the window can move on. The claim from delivery_retry checks the table itself, so this
state only decides what may pass.

A new holder of a shard reads on from the checkpoint, and delivery_retry may have rows after the offset that it has
reached. They hold nothing before them, and are not claimed before they are reached.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from heapq import heappop, heappush

from app.relay.key_queue import KeyQueue
from app.store.relay.log import NEWEST, WINDOW_BYTES, Outgoing

# The most messages that may wait for others of their key in delivery_retry, and in memory without their bodies; beyond
# either the window stops.
HELD_MOST = DEFERRED_MOST = 10_000
# The most messages of a key that wait with their bodies once some wait without; bodies are read again when a quarter of
# them is left.
BODIES_OF_KEY = 64


class Admission(Enum):
    """The decision on a message: send it now, let it wait in memory, or hold it in delivery_retry."""

    GO = 1
    WAIT = 2
    HOLD = 3


class KeyOrder:
    """The keys of one stream. `stored`: key → offsets of its rows in delivery_retry that keep later ones back.

    The log was read up to the offset `reached`. With `hold_dead`, `dead` are the keys that a dead letter stops until a
    person acts.

    Invariant: at most one message of a key is in flight.
    """

    def __init__(
        self,
        stored: Mapping[str, Iterable[int]],
        *,
        reached: int = NEWEST,
        hold_dead: bool = False,
        dead: Iterable[str] = (),
    ) -> None:
        self._reached = reached
        # Those of the rows that the log has reached, and how many they are.
        self._stored: dict[str, set[int]] = {}
        self._held = 0
        # The others, offset → key, and a heap of their offsets. The heap may have some that are not ahead any more.
        self._ahead: dict[int, str] = {}
        self._ahead_offsets: list[int] = []
        for key, offsets in stored.items():
            self._note(key, offsets)
        self._waiting: dict[str, KeyQueue] = {}
        # Those of them that have messages without their bodies, and the keys whose next message is one.
        self._deferring: dict[str, KeyQueue] = {}
        self._stopped: dict[str, None] = {}
        self._hold_dead = hold_dead
        self.dead = set(dead)

    @property
    def full(self) -> bool:
        """Whether the number of held or deferred messages is at its limit, so that the window must stop."""
        return self.held_full or self.deferred >= DEFERRED_MOST

    @property
    def held_full(self) -> bool:
        """Whether the number of held messages is at the limit.

        Not while due rows are ahead: they can be claimed only once the log has reached them. What is left before them
        is what the former holder had in memory, or after a change of `shards` what the slowest shard had still to read.
        """
        return self._held >= HELD_MOST and not self._ahead

    @property
    def deferred(self) -> int:
        """How many messages wait without their bodies."""
        return sum(queue.without_body for queue in self._deferring.values())

    @property
    def deferred_bytes(self) -> int:
        """How many bytes these bodies have."""
        return sum(queue.deferred_bytes for queue in self._deferring.values())

    def admit(self, message: Outgoing) -> Admission:
        """Decide on a message that was read or claimed; GO makes its key busy."""
        key = message.key
        if key is None:
            return Admission.GO
        queue = self._waiting.get(key)
        if message.claim is None:
            self.reach(message.offset - 1)
            if key in self._stored or key in self.dead:
                self._store(key, message.offset)
                return Admission.HOLD
            if queue is None:
                self._waiting[key] = KeyQueue()
                return Admission.GO
            queue.append(message)
            return Admission.WAIT
        self._store(key, message.offset)
        if queue is None:
            self._waiting[key] = KeyQueue()
            return Admission.GO
        # A delayed message that is due goes before messages with higher offsets.
        queue.insert(message)
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
        return self._next(key), []

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
        """Return the messages that wait in memory behind another of their key; some have no body."""
        return [message for queue in self._waiting.values() for message in queue.messages()]

    def remove(self, offsets: Collection[int]) -> tuple[set[int], list[Outgoing]]:
        """Remove messages that wait in memory.

        Return the offsets of those whose bodies keys waited for: such a key stays busy until its message is `settled`.
        And return messages that are to be sent now.
        """
        first = {key: self._waiting[key].first.offset for key in self._stopped}
        self._stopped = {key: None for key, offset in first.items() if offset not in offsets}
        for queue in self._waiting.values():
            queue.remove(offsets)
        return {offset for offset in first.values() if offset in offsets}, self._continued()

    def defer(self, messages: int, body_bytes: int) -> None:
        """Keep so many bodies of messages that wait, and so many bytes of them, divided among the keys."""
        most, most_bytes = self._share(messages, body_bytes)
        for key, queue in self._waiting.items():
            if queue.complete:
                queue.defer(most, most_bytes)
                if queue.deferred:
                    self._deferring[key] = queue

    def bodies_to_read(self, messages: int, body_bytes: int, *, ahead: bool) -> list[Outgoing]:
        """Return the messages whose bodies are to be read now: first those that a key waits for.

        `messages` and `body_bytes` are what may be in memory, as for `defer`. Without `ahead` nothing else is read. One
        read has at most WINDOW_BYTES, or one body.
        """
        if not self._deferring:
            return []
        most, most_bytes = self._share(messages, min(body_bytes, WINDOW_BYTES))
        found: list[Outgoing] = []
        left = WINDOW_BYTES
        low = [key for key in self._deferring if ahead and key not in self._stopped]
        for key in [*self._stopped, *low]:
            queue, stopped = self._deferring[key], key in self._stopped
            if left <= 0 or (not stopped and len(queue.complete) > most // 4):
                continue
            wanted = queue.first_deferred(
                most - len(queue.complete) if ahead else 1,
                min(left, most_bytes - queue.body_bytes),
                least=int(stopped),
            )
            size = sum(queue.length(message) for message in wanted)
            if found and size > left:
                # The key stays stopped, and the next read begins with it.
                break
            left -= size
            found += wanted
        return found

    def bodies_read(self, messages: Sequence[Outgoing]) -> list[Outgoing]:
        """Take messages with the bodies that were read; return those that keys waited for, to be sent.

        Meanwhile some of them may have gone to delivery_retry: those are not needed any more.
        """
        read = {message.offset: message for message in messages}
        for key in {message.key for message in messages}:
            queue = self._deferring.get(key or "")
            if queue is not None:
                queue.complete_with(read)
        self._forget_complete()
        return self._continued()

    def postponed(self, message: Outgoing) -> list[Outgoing]:
        """Note that a message is tried again later; return the others of its key, which are stored too."""
        if message.key is None:
            return []
        self._store(message.key, message.offset)
        return self._remove_waiting(message.key)

    def returned(self, claimed: Outgoing) -> None:
        """Note that a claimed message was not admitted: its row keeps later ones back."""
        if claimed.key is not None:
            self._store(claimed.key, claimed.offset)

    def freed(self, keys: Iterable[str], stored: Mapping[str, Iterable[int]]) -> None:
        """Note that a person acted on the dead letters that stopped these keys.

        `stored` is as for a new KeyOrder, read after the dead letters: a redelivered message keeps later ones back.
        """
        for key in keys:
            self.dead.discard(key)
            self._note(key, stored.get(key, ()))

    def stored_ahead(self, stored: Mapping[str, Iterable[int]]) -> None:
        """Note rows that are ahead of what the log has reached, so that the log is read up to them.

        `stored` is as for a new KeyOrder. It has rows of delayed messages that were not due then, and of redelivered
        ones.
        """
        for key, offsets in stored.items():
            self._note(key, [offset for offset in offsets if offset > self._reached])

    def reach(self, offset: int) -> None:
        """Note that the log was read up to an offset: the rows up to there hold later messages of their keys."""
        self._reached = max(self._reached, offset)
        while self._ahead_offsets and self._ahead_offsets[0] <= self._reached:
            passed = heappop(self._ahead_offsets)
            key = self._ahead.get(passed)
            if key is not None:
                self._store(key, passed)

    def stored_offsets(self) -> set[int]:
        """Return the offsets that have a row in delivery_retry, or will have one after the next settle."""
        return self._ahead.keys() | {offset for offsets in self._stored.values() for offset in offsets}

    def removed(self, offsets: Collection[int]) -> None:
        """Note that upkeep removed these rows of delivery_retry, and made dead letters of them.

        With `hold_dead` their keys are dead until `freed`, because dead letters stop them now.
        """
        keys = {self._ahead.pop(offset) for offset in self._ahead.keys() & offsets}
        for key in [key for key, stored in self._stored.items() if not stored.isdisjoint(offsets)]:
            for offset in self._stored[key].intersection(offsets):
                self._unstore(key, offset)
            keys.add(key)
        if self._hold_dead:
            self.dead |= keys

    def has_stored(self, key: str | None) -> bool:
        """Return whether delivery_retry has more of a key, up to the offset that the log has reached."""
        return key in self._stored

    def clear(self) -> list[Outgoing]:
        """Remove the messages that wait in memory, and return them."""
        waiting = self.waiting()
        self._waiting.clear()
        self._deferring.clear()
        self._stopped.clear()
        return waiting

    def _next(self, key: str) -> Outgoing | None:
        """Return the next message of a busy key, to be sent. The key is free if none waits."""
        queue = self._waiting.get(key)
        if not queue:
            self._waiting.pop(key, None)
            self._deferring.pop(key, None)
            return None
        following = queue.pop()
        if following is None:
            self._stopped[key] = None
        return following

    def _continued(self) -> list[Outgoing]:
        """Return the next messages of keys that waited for a body, as far as they have it now."""
        stopped, self._stopped = self._stopped, {}
        return [following for key in stopped if (following := self._next(key)) is not None]

    def _share(self, messages: int, body_bytes: int) -> tuple[int, int]:
        keys = max(1, sum(bool(queue) for queue in self._waiting.values()))
        return max(1, min(BODIES_OF_KEY, messages // keys)), body_bytes // keys

    def _forget_complete(self) -> None:
        for key in [key for key, queue in self._deferring.items() if not queue.deferred]:
            del self._deferring[key]

    def _remove_waiting(self, key: str) -> list[Outgoing]:
        waiting = self._store_waiting(key)
        self._waiting.pop(key, None)
        return waiting

    def _store_waiting(self, key: str) -> list[Outgoing]:
        queue = self._waiting.get(key)
        waiting = [] if queue is None else queue.clear()
        self._deferring.pop(key, None)
        if key in self._stopped:
            # None of it is in flight.
            del self._stopped[key], self._waiting[key]
        for message in waiting:
            self._store(key, message.offset)
        return waiting

    def _note(self, key: str, offsets: Iterable[int]) -> None:
        for offset in offsets:
            if offset <= self._reached:
                self._store(key, offset)
            elif offset not in self._ahead:
                self._ahead[offset] = key
                heappush(self._ahead_offsets, offset)

    def _store(self, key: str, offset: int) -> None:
        self._ahead.pop(offset, None)
        offsets = self._stored.setdefault(key, set())
        self._held += offset not in offsets
        offsets.add(offset)

    def _unstore(self, key: str, offset: int) -> None:
        self._ahead.pop(offset, None)
        offsets = self._stored.get(key)
        if offsets is not None and offset in offsets:
            offsets.remove(offset)
            self._held -= 1
            if not offsets:
                del self._stored[key]
