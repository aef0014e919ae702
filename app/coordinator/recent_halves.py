"""PURE: the halves that this process stored last, so that a commit can pass its messages on without reading them."""

from collections import OrderedDict
from uuid import UUID

from app.store.coordinator.halves import Half

# About what a half and a message take in memory beside the body.
HALF_BYTES, MESSAGE_BYTES = 400, 600


class RecentHalves:
    """Keeps halves until their end, up to `limit_bytes`; the oldest are forgotten first.

    Only halves that are stored belong here. A half is never updated, so what is kept is what the table has.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        # By the number of the transaction's id: a UUID is hashed in Python. An ordinary dict looks for its oldest entry
        # past the places of all that were removed before it.
        self._halves: OrderedDict[int, tuple[Half, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._halves)

    def keep(self, half: Half) -> None:
        """Keep a half that is stored now."""
        size = HALF_BYTES
        for message in half.messages:
            size += MESSAGE_BYTES + len(message.body) + len(message.headers or "")
        if size > self._limit:
            return
        number = half.transaction_id.int
        if number in self._halves:
            self._take(number)
        self._halves[number] = half, size
        self._bytes += size
        while self._bytes > self._limit:
            _, (_, freed) = self._halves.popitem(last=False)
            self._bytes -= freed

    def take(self, transaction_id: UUID) -> Half | None:
        """Forget a half and return it; None if it is not here."""
        return self._take(transaction_id.int)

    def _take(self, number: int) -> Half | None:
        found = self._halves.pop(number, None)
        if found is None:
            return None
        half, size = found
        self._bytes -= size
        return half

    def clear(self) -> None:
        """Forget all halves."""
        self._halves.clear()
        self._bytes = 0
