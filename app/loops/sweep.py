"""Sweeps: who is in doubt. The main one follows the time of first checks; two more find what it could not see.

A commit may hang for as long as it likes (a synchronous standby is missing) and is invisible meanwhile, so a half may
appear behind the main sweep's cursor. The trailing pass looks back ten minutes each minute, the hourly one at every day
that may hold undecided transactions. All are bounded batches, and harmless if two replicas do them at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import structlog

from app.loops.runner import Turned
from app.runtime import Runtime
from app.store import sweeps
from app.store.sweeps import Range, Swept

log = structlog.get_logger(__name__)

EVERY_S = 0.25
BATCH = 5000
# The other passes go one batch a step and rest between: some 40,000 halves a second, a tenth of one core.
PASS_BATCH = 10_000
TRAILING_EVERY_S = 60.0
TRAILING_BACK = timedelta(minutes=10)
HOURLY_EVERY_S = 3600.0
LOWEST = UUID(int=0)


@dataclass(slots=True)
class _Trailing:
    """A trailing pass under way: what is left of its time, and how far the tidying of check_back came."""

    since: datetime
    until: datetime
    tidied: UUID = LOWEST


class Sweeps:
    """The sweeps of one process. `found` is called when somebody is newly in doubt."""

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._trailing: _Trailing | None = None
        # The hourly pass under way: the id ranges that are left, oldest first.
        self._days: list[tuple[UUID, UUID]] = []

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Sweep what is newly due, and go one batch on with each of the other passes."""
        main = await self._main(runtime, now)
        swept = main.swept
        more = main.scanned >= BATCH
        if not more:
            swept += await self._trail(runtime, now) + await self._look_at_days(runtime, now)
        if swept:
            self._found()
            log.info("swept", in_doubt=swept)
        return Turned(swept, more)

    async def _main(self, runtime: Runtime, now: datetime) -> Swept:
        async with runtime.database.transaction() as connection:
            if not await sweeps.take_turn(connection):
                return Swept(0, 0, None)
            since = await sweeps.reached_main(connection, now)
            times = Range(since, now, runtime.settings.id_skew_s)
            return await sweeps.sweep_main(connection, times, BATCH, now)

    async def _trail(self, runtime: Runtime, now: datetime) -> int:
        """Go on with the trailing pass, and at its end tidy check_back; return how many were swept."""
        async with runtime.database.connection() as connection:
            if self._trailing is None:
                if not await sweeps.take_run(connection, "trailing", TRAILING_EVERY_S, now):
                    return 0
                self._trailing = _Trailing(now - TRAILING_BACK, now)
            left = self._trailing
            if left.since < left.until:
                times = Range(left.since, left.until, runtime.settings.id_skew_s)
                batch = await sweeps.sweep_again(connection, times, PASS_BATCH, now)
                whole = batch.scanned < PASS_BATCH or batch.reached is None
                left.since = left.until if whole or batch.reached is None else batch.reached
                return batch.swept
            tidied = await sweeps.tidy(connection, left.tidied, PASS_BATCH)
            if tidied.scanned < PASS_BATCH or tidied.reached is None:
                self._trailing = None
            else:
                left.tidied = tidied.reached
            return 0

    async def _look_at_days(self, runtime: Runtime, now: datetime) -> int:
        """Go on with the hourly pass; return how many were swept."""
        async with runtime.database.connection() as connection:
            if not self._days:
                if not await sweeps.take_run(connection, "hourly", HOURLY_EVERY_S, now):
                    return 0
                self._days = await sweeps.undecided_days(connection, now, runtime.settings.id_skew_s)
                return 0
            after, high = self._days[0]
            batch = await sweeps.sweep_ids(connection, after, high, PASS_BATCH, now)
        if batch.scanned < PASS_BATCH or batch.reached is None:
            del self._days[0]
        else:
            self._days[0] = (batch.reached, high)
        return batch.swept
