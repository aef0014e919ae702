"""Sweeps find the transactions in doubt. The main sweep follows the times of first checks; two passes find the others.

While nothing is due, the main sweep asks once a second for the next time of a first check, and waits for that time. So
a half is found within 0.25 s of its time, or within 1 s if it became visible in the last second before its time.

A commit may hang without a limit (a synchronous standby is missing) and is invisible meanwhile, so a half may appear
behind the main sweep's cursor. Each minute the trailing pass sweeps the last ten minutes again; each hour another pass
sweeps all days that may hold undecided transactions. All work in bounded batches; two replicas may run them at once.

The hourly pass begins with the newest days, where such a half nearly always is. A pass may take longer than an hour:
then the next run sweeps the newest days again, and goes on with those that are left. A process that stops returns its
run, so that another one begins at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import structlog

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.checkback import sweeps
from app.store.checkback.sweeps import Range, Swept
from app.store.proof.shared_settings import longest_id_skew_s

log = structlog.get_logger(__name__)

EVERY_S = 1.0
# While there is work, and between two looks at the next time of a first check.
BUSY_EVERY_S = 0.25
# An idle sweep moves its cursor this often.
MOVES_EVERY = timedelta(seconds=10)
BATCH = 5000
# The other passes take one batch a step: some 40,000 halves a second, a tenth of one core.
PASS_BATCH = 10_000
TRAILING_EVERY_S = 60.0
TRAILING_BACK = timedelta(minutes=10)
HOURLY_EVERY_S = 3600.0
# The days that each run of the hourly pass sweeps first.
NEWEST_DAYS = 2
# How often a process asks the database whether a run of another pass is due.
ASK_EVERY = timedelta(seconds=5)
LOWEST = UUID(int=0)


@dataclass(slots=True)
class _Trailing:
    """A running trailing pass: the rest of its time range, and the last id that was removed from check_back."""

    since: datetime
    until: datetime
    cleaned_to: UUID = LOWEST


class Sweeps:
    """The sweeps of one process. `found` is called when a transaction is newly in doubt."""

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._trailing: _Trailing | None = None
        # The main sweep's cursor as this process last knew it; it is never ahead of the stored one. None while halves
        # come.
        self._reached: datetime | None = None
        # The skew of ids that any process permits, as the last turn of the main sweep read it. A larger one counts from
        # the next turn on; until then the trailing pass finds what the main sweep misses.
        self._skew_s = 0
        # The id ranges that the running hourly pass has left, in their order, and when its run was taken.
        self._days: list[tuple[UUID, UUID]] = []
        self._hourly_at: datetime | None = None
        # When this process last asked for a run of each pass.
        self._asked_at: dict[str, datetime] = {}

    def forget(self) -> None:
        """Forget the main sweep's cursor: after a promotion, the stored one may be behind it."""
        self._reached = None

    async def drain(self, runtime: Runtime) -> None:
        """Return the run of an hourly pass that is not complete."""
        if self._days and self._hourly_at is not None:
            async with runtime.database.connection() as connection:
                await sweeps.return_run(connection, "hourly", HOURLY_EVERY_S, self._hourly_at)

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Sweep what is newly due, then one batch of each other pass."""
        within_s = await self._next_within_s(runtime, now)
        main = Swept(0, 0, None) if within_s else await self._main(runtime, now)
        swept = main.swept
        more = main.scanned >= BATCH
        if not more:
            swept += await self._sweep_trailing(runtime, now) + await self._sweep_days(runtime, now)
        if swept:
            self._found()
            log.info("swept", in_doubt=swept)
        working = within_s is None or self._trailing is not None or bool(self._days)
        return StepResult(swept, more, BUSY_EVERY_S if working else within_s)

    async def _next_within_s(self, runtime: Runtime, now: datetime) -> float | None:
        """Return within how many seconds to look again; None if the main sweep is due."""
        since = self._reached
        if since is None or not timedelta() <= now - since < MOVES_EVERY:
            return None
        async with runtime.database.keyed() as connection:
            due = await sweeps.next_due(connection, Range(since, now, self._skew_s))
        if due is None:
            return EVERY_S
        return max(BUSY_EVERY_S, min(EVERY_S, (due - now).total_seconds())) if due > now else None

    async def _main(self, runtime: Runtime, now: datetime) -> Swept:
        self._reached = None
        async with runtime.database.transaction() as connection:
            self._skew_s = await longest_id_skew_s(connection, runtime.settings.id_skew_s)
            if not await sweeps.take_turn(connection):
                return Swept(0, 0, None)
            since = await sweeps.reached_main(connection, now)
            times = Range(since, now, self._skew_s)
            swept = await sweeps.sweep_main(connection, times, BATCH, now)
        if not swept.scanned:
            self._reached = now if since < now - MOVES_EVERY else since
        return swept

    async def _sweep_trailing(self, runtime: Runtime, now: datetime) -> int:
        """Continue the trailing pass, and at its end remove decided rows of check_back; return how many were swept."""
        if self._trailing is None and not self._asks("trailing", now):
            return 0
        async with runtime.database.connection() as connection:
            if self._trailing is None:
                if not await sweeps.take_run(connection, "trailing", TRAILING_EVERY_S, now):
                    return 0
                self._trailing = _Trailing(now - TRAILING_BACK, now)
            left = self._trailing
            if left.since < left.until:
                times = Range(left.since, left.until, self._skew_s)
                batch = await sweeps.sweep_again(connection, times, PASS_BATCH, now)
                whole = batch.scanned < PASS_BATCH or batch.reached is None
                left.since = left.until if whole or batch.reached is None else batch.reached
                return batch.swept
            removed = await sweeps.remove_decided(connection, left.cleaned_to, PASS_BATCH)
            if removed.scanned < PASS_BATCH or removed.reached is None:
                self._trailing = None
            else:
                left.cleaned_to = removed.reached
            return 0

    async def _sweep_days(self, runtime: Runtime, now: datetime) -> int:
        """Continue the hourly pass; return how many were swept."""
        asks = self._asks("hourly", now)
        if not self._days and not asks:
            return 0
        async with runtime.database.connection() as connection:
            if asks and await sweeps.take_run(connection, "hourly", HOURLY_EVERY_S, now):
                self._hourly_at = now
                self._days = _in_order(await sweeps.undecided_days(connection, now, self._skew_s), self._days)
            if not self._days:
                return 0
            after, high = self._days[0]
            batch = await sweeps.sweep_ids(connection, after, high, PASS_BATCH, now)
        if batch.scanned < PASS_BATCH or batch.reached is None:
            del self._days[0]
        else:
            self._days[0] = (batch.reached, high)
        return batch.swept

    def _asks(self, name: str, now: datetime) -> bool:
        """Return whether to ask for a run of a pass now; a clock that stepped back does not delay it."""
        at = self._asked_at.get(name)
        if at is not None and abs(now - at) < ASK_EVERY:
            return False
        self._asked_at[name] = now
        return True


def _in_order(days: list[tuple[UUID, UUID]], left: list[tuple[UUID, UUID]]) -> list[tuple[UUID, UUID]]:
    """Return the days of a new run, newest first; but after NEWEST_DAYS come those that the last run has left."""
    ends = {high for _, high in days[NEWEST_DAYS:]}
    kept = [(after, high) for after, high in left if high in ends]
    known = {high for _, high in kept}
    return [*days[:NEWEST_DAYS], *kept, *(one for one in days[NEWEST_DAYS:] if one[1] not in known)]
