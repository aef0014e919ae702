"""The source of "now": the database's clock, estimated by this process.

A process counts the time on a clock that no one sets, so a step of its machine's clock changes nothing. How far the
database's clock is from it is measured.
"""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import asyncpg

SKEW_SAID_S = 1.0
# At the start of a process.
FIRST_MEASURES = 3

# Of Linux: it goes on while the machine is suspended. Elsewhere a suspension is seen by the next measurement.
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def steady_time() -> float:
    """Return seconds of a clock that no one sets."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


def _steady_epoch() -> float:
    """Return the Unix time at which the steady clock was 0, by the machine's clock as it is now."""
    return time.time() - steady_time()


@dataclass(slots=True)
class Clock:
    """The database's time: a steady clock of this machine plus a measured offset; tests set `offset_s` or `fixed`.

    `skew_s`: the database's clock minus this machine's, when it was last measured.
    """

    offset_s: float = 0.0
    fixed: datetime | None = None
    skew_s: float = 0.0
    _epoch_s: float = field(default_factory=_steady_epoch)
    _measured: bool = False

    def now(self) -> datetime:
        """Return the database's time, timezone-aware UTC, to the microsecond."""
        if self.fixed is not None:
            return self.fixed
        return datetime.fromtimestamp(self._epoch_s + steady_time() + self.offset_s, UTC)

    def time(self) -> float:
        """Return the database's time as a Unix time in seconds."""
        return self._epoch_s + steady_time() + self.offset_s if self.fixed is None else self.fixed.timestamp()

    async def measure(self, connection: asyncpg.Connection) -> float:
        """Measure the offset, and the skew (seconds, database minus this machine); return the skew.

        The database read its clock after it was asked and before it had answered. These two bound the offset, which
        changes only as far as they demand: so an answer that took long, which shows little, does no harm.
        """
        asked = steady_time()
        # clock_timestamp(), because this measures the database's clock itself.
        theirs: datetime = await connection.fetchval("select clock_timestamp()")
        answered = steady_time()
        least, most = (theirs.timestamp() - self._epoch_s - at for at in (answered, asked))
        self.offset_s = min(max(self.offset_s, least), most) if self._measured else (least + most) / 2
        self._measured = True
        self.skew_s = self._epoch_s + steady_time() + self.offset_s - time.time()
        return self.skew_s


def from_ms(milliseconds: int) -> datetime:
    """Return the UTC time of a Unix time in milliseconds (exact, no floats)."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
