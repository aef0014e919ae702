"""PURE: track what a stream has read of the log, what is unsettled, and where its checkpoint may move."""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from app.store.relay.log import Outgoing

CHECKPOINT_EVERY = timedelta(seconds=1)


class Progress:
    """`position`: the offset up to which the log was read. `checkpoint`: the stored offset; all up to it is settled."""

    def __init__(self, offset: int) -> None:
        self.position = self.checkpoint = offset
        # Offsets that are not settled, in order. Messages from delivery_retry do not hold the checkpoint back.
        self._outstanding: dict[int, tuple[datetime, int]] = {}
        # Bytes of their bodies.
        self.bytes = 0
        self._moved_at: datetime | None = None

    def __len__(self) -> int:
        return len(self._outstanding)

    def read(self, messages: Iterable[Outgoing], reached: int | None) -> None:
        """Note a window and the offset that it reached (None: there was nothing)."""
        for message in messages:
            self._outstanding[message.offset] = message.committed_at, len(message.body)
            self.bytes += len(message.body)
        self.position = self.position if reached is None else max(self.position, reached)

    def unread(self, message: Outgoing) -> None:
        """Forget a message that was read and not sent; the next holder reads it again."""
        self.settled(message.offset)
        self.position = min(self.position, message.offset - 1)

    def settled(self, offset: int) -> None:
        """Note that an offset is settled."""
        found = self._outstanding.pop(offset, None)
        if found is not None:
            self.bytes -= found[1]

    def target(self, over: Collection[int] = ()) -> int:
        """Return where the checkpoint may move once the offsets `over` are settled: before the first that is not.

        Never beyond `position`: a message that was read and not sent may be before one that is still in flight.
        """
        unsettled = next((offset for offset in self._outstanding if offset not in over), None)
        return self.position if unsettled is None else min(self.position, unsettled - 1)

    def may_move(self, now: datetime) -> bool:
        """Return whether the stored checkpoint was last moved long enough ago."""
        return self._moved_at is None or abs(now - self._moved_at) >= CHECKPOINT_EVERY

    def moved(self, offset: int, now: datetime) -> None:
        """Note that the checkpoint was stored."""
        self.checkpoint, self._moved_at = offset, now

    def oldest_at(self) -> datetime | None:
        """Return when the oldest message that is not settled was committed."""
        return next((at for at, _ in self._outstanding.values()), None)
