"""The source of "now": the database's clock, estimated by this process."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg

SKEW_SAID_S = 1.0


@dataclass(slots=True)
class Clock:
    """The database's time: this machine's clock plus a measured offset; tests set `offset_s` or `fixed`."""

    offset_s: float = 0.0
    fixed: datetime | None = None

    def now(self) -> datetime:
        """Return the database's time, timezone-aware UTC, to the microsecond."""
        if self.fixed is not None:
            return self.fixed
        return datetime.fromtimestamp(time.time() + self.offset_s, UTC)

    def time(self) -> float:
        """Return the database's time as a Unix time in seconds."""
        return time.time() + self.offset_s if self.fixed is None else self.fixed.timestamp()

    async def measure(self, connection: asyncpg.Connection) -> float:
        """Measure the offset (seconds, database minus this machine) against half the round trip; return it."""
        asked = time.time()
        # clock_timestamp(), because this measures the database's clock itself.
        theirs: datetime = await connection.fetchval("select clock_timestamp()")
        answered = time.time()
        self.offset_s = theirs.timestamp() - (asked + answered) / 2
        return self.offset_s


def from_ms(milliseconds: int) -> datetime:
    """Return the UTC time of a Unix time in milliseconds (exact, no floats)."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
