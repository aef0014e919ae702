"""PURE: the messages of one stream that may be sent now, in order; an ordered subscription sends one of each key."""

from collections import deque
from collections.abc import Collection, Sequence

from app.relay.key_order import Admission, KeyOrder
from app.store.relay.log import Outgoing


class SendQueue:
    """`ready` is what the sender takes from; `keys` is the order by key, None for an unordered subscription.

    Invariants: with `keys`, at most one message of a key is ready or in flight, and it is the oldest that is not
    settled. A message that a method returns is not in the queue any more and belongs in delivery_retry. `ready` stays
    the same object, because the sender holds it.
    """

    def __init__(self, keys: KeyOrder | None) -> None:
        self.ready: deque[Outgoing] = deque()
        self.keys = keys

    @property
    def ordered(self) -> bool:
        """Whether the subscription is ordered by key."""
        return self.keys is not None

    @property
    def full(self) -> bool:
        """Whether the number of messages held for their keys is at the limit, so that no more may be read."""
        return self.keys is not None and self.keys.full

    @property
    def deferred(self) -> int:
        """How many messages wait for their keys without their bodies in memory."""
        return 0 if self.keys is None else self.keys.deferred

    @property
    def deferred_bytes(self) -> int:
        """How many bytes these bodies have."""
        return 0 if self.keys is None else self.keys.deferred_bytes

    def admit(self, message: Outgoing) -> bool:
        """Queue a message, or keep it behind others of its key; False if it belongs in delivery_retry instead."""
        admission = Admission.GO if self.keys is None else self.keys.admit(message)
        if admission is Admission.GO:
            self.ready.append(message)
        return admission is not Admission.HOLD

    def reach(self, offset: int) -> None:
        """Note that the log was read up to an offset."""
        if self.keys is not None:
            self.keys.reach(offset)

    def admit_retries(self, messages: Sequence[Outgoing]) -> None:
        """Queue messages that were claimed from delivery_retry, before all that is ready."""
        waiting = list(self.ready)
        self.ready.clear()
        for message in messages:
            # A claimed message is never held: its row is in delivery_retry already.
            self.admit(message)
        self.ready.extend(waiting)

    def settled(self, message: Outgoing, *, dead: bool) -> tuple[list[Outgoing], bool]:
        """Note that a message is recorded as delivered or dead, and queue the next of its key.

        Return those of its key that go back to delivery_retry, and whether the next one is to be claimed from there.
        """
        if self.keys is None:
            return [], False
        following, back = self.keys.settled(message, dead=dead)
        if following is not None:
            self.ready.append(following)
            return back, False
        return back, self.keys.has_stored(message.key)

    def postponed(self, message: Outgoing) -> list[Outgoing]:
        """Note that a message is tried again later; return the others of its key, which go back with it."""
        return [] if self.keys is None else self.keys.postponed(message)

    def returned(self, claimed: Outgoing) -> None:
        """Note that a claimed message goes back to delivery_retry without having been queued."""
        if self.keys is not None:
            self.keys.returned(claimed)

    def expired(self, message: Outgoing) -> tuple[list[Outgoing], bool]:
        """Note that a message that was not ready or in flight is recorded as dead; return what `settled` does."""
        if self.keys is None:
            return [], False
        back = self.keys.expired(message)
        return back, message.claim is not None and self.keys.has_stored(message.key)

    def unsent(self, *, waiting: bool) -> list[Outgoing]:
        """Return the messages that are ready or, with `waiting`, behind another of their key, in order of offsets."""
        queued = [*self.ready, *(self.keys.waiting() if waiting and self.keys is not None else [])]
        return sorted(queued, key=lambda message: message.offset)

    def remove(self, offsets: Collection[int]) -> set[int]:
        """Remove messages by their offsets; return the offsets of those that were next of their key, or ready."""
        ready = list(self.ready)
        self.ready.clear()
        self.ready.extend(message for message in ready if message.offset not in offsets)
        removed = {message.offset for message in ready if message.offset in offsets}
        if self.keys is not None:
            waited_for, following = self.keys.remove(offsets)
            removed |= waited_for
            self.ready.extend(following)
        return removed

    def defer(self, messages: int, body_bytes: int) -> None:
        """Keep so many bodies, and so many bytes, of the messages that wait for their keys."""
        if self.keys is not None:
            self.keys.defer(messages, body_bytes)

    def bodies_to_read(self, messages: int, body_bytes: int, *, ahead: bool) -> list[Outgoing]:
        """Return the messages whose bodies are to be read now; so many messages and bytes may be in memory.

        Without `ahead` only those that a key waits for.
        """
        return [] if self.keys is None else self.keys.bodies_to_read(messages, body_bytes, ahead=ahead)

    def bodies_read(self, messages: Sequence[Outgoing]) -> None:
        """Take messages with the bodies that were read, and queue those that their keys waited for."""
        if self.keys is not None:
            self.ready.extend(self.keys.bodies_read(messages))

    def remove_claimed(self) -> list[Outgoing]:
        """Remove the ready messages that were claimed from delivery_retry, and return them."""
        ready = list(self.ready)
        self.ready.clear()
        self.ready.extend(message for message in ready if message.claim is None)
        return [message for message in ready if message.claim is not None]

    def remove_first(self, most: int) -> list[Outgoing]:
        """Remove up to `most` ready messages of the log, the first ones, and return them."""
        removed: list[Outgoing] = []
        for _ in range(len(self.ready)):
            message = self.ready.popleft()
            if message.claim is None and len(removed) < most:
                removed.append(message)
            else:
                self.ready.append(message)
        return removed

    def remove_all(self) -> list[Outgoing]:
        """Remove all messages, those that wait for their key among them; return them, highest offset first."""
        unsent = [*self.ready, *(self.keys.clear() if self.keys is not None else [])]
        self.ready.clear()
        return sorted(unsent, key=lambda message: message.offset, reverse=True)
