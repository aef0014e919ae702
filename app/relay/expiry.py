"""Make dead letters of messages that have waited too long for a subscription, or that are too many.

The holder of a shard does it, so it knows what is being sent: that is never expired. Streams of paused and disabled
subscriptions send nothing and exist only for this.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from app import announcements
from app.database.connection import Connection
from app.policy.expiry import ANNOUNCED_FROM, AT_ONCE, COUNT_EVERY, EXCESS_AT_ONCE, WaitingLimits
from app.relay.stream_source import StreamSource
from app.relay.window import Window
from app.store.relay.announcements import Announcement
from app.store.relay.expiry import claim_waiting, matching_ahead, waiting_retries
from app.store.relay.log import Outgoing
from app.verdicts import DeadLetterReason

# How many parts of the log one turn reads.
SPANS_AT_ONCE = 5
# A claimed retry that is not settled may be claimed again after this: the stream that still has it goes on with the new
# claim. A new holder of the shard frees it at once.
CLAIM_FOR = timedelta(minutes=15)


class Expiry:
    """What waits for one stream that has limits: messages of its window, of the log after it, and retries.

    Invariant: a message that is on its way out of the window (`leaving`) does not count as waiting.
    """

    def __init__(self, source: StreamSource, window: Window) -> None:
        subscription, self._since = source.subscription, source.since
        self._subscription = subscription
        after_s = subscription.expire_after_s
        self.limits = WaitingLimits(
            None if after_s is None else timedelta(seconds=after_s),
            None if source.shard.replay else subscription.max_backlog,
        )
        # Offsets of the window whose outcome is known and not recorded.
        self.leaving: set[int] = set()
        # Whether a turn was not enough.
        self.more = False
        # The share of a limit that is used, of both limits the larger share, and when the oldest message was committed.
        self.used = 0.0
        self.oldest_at: datetime | None = None
        self._shard, self._lease, self._window = source.shard, source.lease, window
        self._announced = False
        # How many messages the last count found too many, and the last two counts both; less those that went since.
        self._found = self._excess = 0
        self._counted_at: datetime | None = None
        # The log was counted up to this offset; after the window's position it has `_ahead` messages.
        self._counted_to, self._ahead = window.position, 0
        self._retries = 0
        self._oldest_retry_at: datetime | None = None

    @property
    def backlog(self) -> int:
        """How many messages wait, as far as they are counted."""
        return self._retries + self._window.unsettled - len(self.leaving) + self._ahead

    def read(self, messages: int) -> None:
        """Note how many messages were read from the log."""
        self._ahead = max(0, self._ahead - messages)
        if self._window.position >= self._counted_to:
            self._counted_to, self._ahead = self._window.position, 0

    def may_expire(self, now: datetime) -> bool:
        """Return whether any message in memory can be one that must not wait any longer."""
        # Retries that are claimed and not sent are among those that the last count found.
        times = self._window.oldest_at, self._oldest_retry_at
        return self._excess > 0 or any(at is not None and self._too_old(at, now) for at in times)

    def expired(self, unsent: Sequence[Outgoing], now: datetime) -> dict[int, DeadLetterReason]:
        """Return why these messages in memory must not wait any longer, by offset; those that may are left out.

        `unsent` is in the order of offsets. The messages that are returned do not count as waiting any more.
        """
        # Retries that are not in memory are older, so they come first.
        surplus = 0 if self.more else self._surplus
        found = {}
        for message in unsent:
            if self._too_old(message.waits_from, now):
                found[message.offset] = DeadLetterReason.EXPIRED
            elif len(found) < surplus:
                found[message.offset] = DeadLetterReason.BACKLOG
        if found:
            retries = {message.offset for message in unsent if message.claim is not None}.intersection(found)
            self.leaving.update(found.keys() - retries)
            self._retries = max(0, self._retries - len(retries))
        self._gone(len(found))
        return found

    def due(self, now: datetime) -> bool:
        """Return whether to count or to claim in this turn."""
        return self.more or self._counted_at is None or abs(now - self._counted_at) >= COUNT_EVERY

    async def count(self, connection: Connection, now: datetime) -> None:
        """Count what waits. While there are more than one turn takes, the next turns claim without another count."""
        if not self.more:
            await self._count(connection, now)

    async def claim_old(
        self, connection: Connection, now: datetime
    ) -> list[tuple[Outgoing, DeadLetterReason, str | None]]:
        """Claim retries that have waited too long; each with the reason and its last error."""
        self.more = False
        after, oldest_at = self.limits.expire_after, self._oldest_retry_at
        if after is None or oldest_at is None or not self.limits.too_old(oldest_at, now):
            return []
        return await self._claim(connection, DeadLetterReason.EXPIRED, now - after, AT_ONCE, now)

    async def claim_surplus(
        self, connection: Connection, now: datetime
    ) -> list[tuple[Outgoing, DeadLetterReason, str | None]]:
        """Claim retries beyond the backlog that may wait, the oldest first, as `claim_old` does and after it."""
        at_most = 0 if self.more else min(self._surplus, self._retries, AT_ONCE)
        return await self._claim(connection, DeadLetterReason.BACKLOG, now, at_most, now) if at_most > 0 else []

    def approaching(self, now: datetime) -> Announcement | None:
        """Return the announcement that the messages approach a limit; None if it was made or they do not."""
        if self.used < ANNOUNCED_FROM:
            self._announced = False
        if self._announced or self.used < ANNOUNCED_FROM or self._shard.replay:
            return None
        oldest_s = 0.0 if self.oldest_at is None else (now - self.oldest_at).total_seconds()
        subscription = self._subscription
        return announcements.expiring(
            subscription.name,
            subscription.topics,
            state=subscription.state,
            oldest_s=oldest_s,
            backlog=self.backlog,
            expire_after_s=subscription.expire_after_s,
            max_backlog=subscription.max_backlog,
            at=now,
        )

    def announced(self) -> None:
        """Note that the approach is announced."""
        self._announced = True

    @property
    def has_surplus(self) -> bool:
        """Whether messages in memory are too many."""
        return not self.more and self._surplus > 0

    @property
    def _surplus(self) -> int:
        return min(self._excess, self.limits.excess(self.backlog))

    def _too_old(self, waiting_since: datetime, now: datetime) -> bool:
        return self.limits.too_old(waiting_since if self._since is None else max(waiting_since, self._since), now)

    def _gone(self, messages: int) -> None:
        self._found, self._excess = max(0, self._found - messages), max(0, self._excess - messages)

    async def _claim(
        self, connection: Connection, reason: DeadLetterReason, before: datetime, at_most: int, now: datetime
    ) -> list[tuple[Outgoing, DeadLetterReason, str | None]]:
        claimed = await claim_waiting(connection, self._lease, self._shard, before, at_most, now + CLAIM_FOR, now)
        self._retries = max(0, self._retries - len(claimed))
        self._gone(len(claimed))
        self.more = len(claimed) >= AT_ONCE
        return [(message, reason, error) for message, error in claimed]

    async def _count(self, connection: Connection, now: datetime) -> None:
        self._counted_at = now
        most = self.limits.max_backlog
        found = await waiting_retries(connection, self._shard, 1 if most is None else most + EXCESS_AT_ONCE, now)
        self._retries, self._oldest_retry_at = found.waiting, found.oldest_at
        if most is not None:
            await self._count_ahead(connection)
        excess = self.limits.excess(self.backlog)
        self._excess, self._found = min(self._found, excess), excess
        times = [at for at in (found.oldest_at, self._window.oldest_at) if at is not None]
        self.oldest_at = min(times, default=None)
        self.used = self.limits.used(self.oldest_at, self.backlog, now)

    async def _count_ahead(self, connection: Connection) -> None:
        for _ in range(SPANS_AT_ONCE):
            # Also delayed ones: a count goes on where the one before ended, so one that was left out would stay so.
            found = await matching_ahead(connection, self._window.reader, self._counted_to, None)
            if found.reached is not None:
                self._counted_to, self._ahead = found.reached, self._ahead + found.taken
            if not found.more:
                return


def expiry_of(source: StreamSource, window: Window) -> Expiry | None:
    """Return what makes messages of a stream expire; None if its subscription has no limits."""
    found = Expiry(source, window)
    return found if found.limits else None
