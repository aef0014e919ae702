"""PURE: what one stream has read of the log and not settled, and where its checkpoint may move."""

from collections.abc import Collection, Sequence
from datetime import datetime

from app.relay.progress import Progress
from app.relay.stream_source import StreamSource
from app.store.relay.log import WINDOW_BYTES, Outgoing, Reader, wants

# How many messages one read returns: enough to keep every slot busy until the next.
WINDOW_LEAST, WINDOW_MOST = 64, 2000
# How many messages may be in memory, in multiples of one read.
MEMORY_TIMES = 8
# Bytes of bodies that are read and not settled, past which no more is read. One more read may come on top.
UNSETTLED_BYTES = 4 * WINDOW_BYTES


class Window:
    """The part of the log between the stored checkpoint and `position`, as one stream sees it.

    Invariants: the checkpoint never passes an unsettled offset. Every message of the stream up to `position` is in the
    window, settled, or in delivery_retry.
    """

    def __init__(self, source: StreamSource, offset: int, settled_to: int, messages_at_once: int) -> None:
        # How many messages a read should return.
        self.capacity = max(WINDOW_LEAST, min(WINDOW_MOST, 4 * messages_at_once))
        self._source = source
        # Made once: each message is compared with it.
        self.route = source.subscription.route
        self._progress = Progress(offset)
        # Up to this offset the former holder may have settled messages.
        self._former_settled_to = settled_to

    @property
    def position(self) -> int:
        """The offset up to which the log was read."""
        return self._progress.position

    @property
    def settled_to(self) -> int:
        """The offset up to which everything is settled or in retry; the stored checkpoint follows it."""
        return self._progress.target()

    @property
    def reader(self) -> Reader:
        """The stream as a reader of the log."""
        shard = self._source.shard
        return Reader(
            subscription_id=shard.subscription_id,
            replay=shard.replay,
            route=self.route,
            shards=shard.divided_by,
            shard=shard.remainder,
            settled_to=self._former_settled_to,
            until=self._source.until,
        )

    @property
    def shares_reads(self) -> bool:
        """Whether a window that is read for other streams at the same position serves this one as well."""
        shard = self._source.shard
        plain = shard.shards == 1 and not shard.replay and self.route.headers is None
        return plain and self.position >= self._former_settled_to

    def has_room(self, deferred: int, deferred_bytes: int) -> bool:
        """Return whether memory has room for one more read, if so many messages are unsettled without their bodies."""
        messages, body_bytes = len(self._progress) - deferred, self._progress.bytes - deferred_bytes
        return messages < MEMORY_TIMES * self.capacity and body_bytes < UNSETTLED_BYTES

    @property
    def unsettled(self) -> int:
        """How many messages that were read are not settled."""
        return len(self._progress)

    @property
    def oldest_at(self) -> datetime | None:
        """When the oldest message that was read and is not settled was committed."""
        return self._progress.oldest_at()

    def is_behind(self, head: int) -> bool:
        """Return whether the log, whose last offset is `head`, has something to read."""
        return min(head, self._source.until) > self.position

    def accept(self, messages: Sequence[Outgoing], reached: int | None) -> Sequence[Outgoing]:
        """Take the messages of a read, up to the capacity; return those that the stream delivers.

        `reached` is the offset up to which the log was read; None if nothing was there.
        """
        if len(messages) > self.capacity:
            messages = messages[: self.capacity]
            reached = messages[-1].offset
        wanted = self._source.wanted
        if wanted is not None:
            messages = [message for message in messages if wants(wanted, message)]
        self._progress.read(messages, reached)
        return messages

    def unread(self, message: Outgoing) -> None:
        """Forget a message that was not sent, so that the next holder reads it again. Highest offsets come first."""
        self._progress.unread(message)

    def settled(self, offset: int) -> None:
        """Note that the message at an offset is settled."""
        self._progress.settled(offset)

    def checkpoint_lags(self) -> bool:
        """Return whether the stored checkpoint is behind what is settled."""
        return self.settled_to > self._progress.checkpoint

    def checkpoint_may_move(self, now: datetime) -> bool:
        """Return whether the last move of the stored checkpoint was long enough ago."""
        return self._progress.may_move(now)

    def checkpoint_after(self, offsets: Collection[int]) -> int | None:
        """Return the checkpoint to store once `offsets` are settled; None if it stays."""
        target = self._progress.target(offsets)
        return target if target > self._progress.checkpoint else None

    def checkpoint_moved(self, offset: int, now: datetime) -> None:
        """Note that the checkpoint is stored at `offset`."""
        self._progress.moved(offset, now)

    def lag(self, head: int, now: datetime) -> tuple[float, int]:
        """Return the lag behind the log's head: the age of the oldest unsettled message in seconds, and a count.

        The count is of log entries (of any topic) that are not read, and of messages that are not settled.
        """
        oldest = self._progress.oldest_at() or now
        return max(0.0, (now - oldest).total_seconds()), max(0, head - self.position) + len(self._progress)
