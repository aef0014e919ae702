"""PURE: the halves that this process stored last, so that a commit can pass its messages on without reading them."""

from collections.abc import Sequence
from uuid import UUID

from app.store.coordinator.halves import Half, HalfMessage

# About what a half and a message take in memory beside the body.
HALF_BYTES, MESSAGE_BYTES = 400, 600


class RecentHalves:
    """Keeps halves until their end, up to `limit_bytes`; the oldest are forgotten first.

    Only halves that are stored belong here. A half is never updated, so what is kept is what the table has.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._halves: dict[UUID, tuple[Half, int]] = {}

    def __len__(self) -> int:
        return len(self._halves)

    def keep(self, half: Half) -> None:
        """Keep a half that is stored now."""
        size = HALF_BYTES + _bytes_of(half.messages)
        if size > self._limit:
            return
        self.take(half.transaction_id)
        self._halves[half.transaction_id] = half, size
        self._bytes += size
        while self._bytes > self._limit:
            self.take(next(iter(self._halves)))

    def take(self, transaction_id: UUID) -> Half | None:
        """Forget a half and return it; None if it is not here."""
        found = self._halves.pop(transaction_id, None)
        if found is None:
            return None
        half, size = found
        self._bytes -= size
        return half

    def clear(self) -> None:
        """Forget all halves."""
        self._halves.clear()
        self._bytes = 0


def _bytes_of(messages: Sequence[HalfMessage]) -> int:
    return sum(MESSAGE_BYTES + len(message.body) + len(message.headers or "") for message in messages)
