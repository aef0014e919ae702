"""PURE: decide which messages have waited too long for a subscription, by age or by the number that wait."""

from dataclasses import dataclass
from datetime import datetime, timedelta

# The share of a limit from which its approach is announced.
ANNOUNCED_FROM = 0.5
# How often what waits is counted. Of a backlog that is too long, as many messages go as two counts in a row find too
# many: a burst that is delivered meanwhile expires nothing.
COUNT_EVERY = timedelta(seconds=5)
# How many messages one turn expires, and how many beyond `max_backlog` one count finds.
AT_ONCE = 500
EXCESS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """The limits of a subscription's waiting messages: their age and their number. None: no limit."""

    expire_after: timedelta | None = None
    max_backlog: int | None = None

    def __bool__(self) -> bool:
        return self.expire_after is not None or self.max_backlog is not None

    def too_old(self, waiting_since: datetime, now: datetime) -> bool:
        """Return whether a message has waited longer than it may."""
        return self.expire_after is not None and now - waiting_since > self.expire_after

    def excess(self, backlog: int) -> int:
        """Return how many of the waiting messages are more than may wait."""
        return 0 if self.max_backlog is None else max(0, backlog - self.max_backlog)

    def used(self, oldest_at: datetime | None, backlog: int, now: datetime) -> float:
        """Return the share of a limit that the waiting messages use, of both limits the larger share.

        At 1 the oldest messages become dead letters.
        """
        waited = max(timedelta(), now - oldest_at) if oldest_at is not None else timedelta()
        by_age = 0.0 if self.expire_after is None else waited / self.expire_after
        return max(by_age, 0.0 if self.max_backlog is None else backlog / self.max_backlog)
