"""Writes the figures by the minute: every process what it did, and one worker at a time what stands open."""

from datetime import datetime, timedelta

from app.observability.activity import totals
from app.observability.metrics import Metrics
from app.runtime.loop_runner import StepResult
from app.runtime.single_lease import SingleLease
from app.runtime.standing import open_now
from app.runtime.state import Runtime
from app.store.admin.minutes import Activity, add_activity, forget_before, set_standing
from app.store.relay.leases import LeaseKind

# The last 15 minutes that `GET /stats` shows are this old at most.
COUNT_EVERY_S = 10.0
LOOK_EVERY_S = 15.0
NAME: str = LeaseKind.FIGURES
LEASE = timedelta(seconds=45)
KEPT_DAYS = 30


class ActivityCounter:
    """Adds what this process did since the last step. What a killed process did since then is not counted."""

    def __init__(self, metrics: Metrics) -> None:
        # Not from 0: the file of an earlier process with the same id may have counted before.
        self._counted = totals(metrics)

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Add what is new to the row of this minute."""
        counted = totals(runtime.metrics)
        new = {name: count - self._counted[name] for name, count in counted.items()}
        if not any(new.values()):
            return StepResult()
        async with runtime.database.connection() as connection:
            await add_activity(connection, Activity(**new), now)
        self._counted = counted
        return StepResult(done=1)

    async def drain(self, runtime: Runtime) -> None:
        """Add what the process did last."""
        await self.step(runtime, runtime.clock.now())


class StandingSampler:
    """Writes once a minute while this process holds the lease, and removes what is older than KEPT."""

    def __init__(self) -> None:
        self._lease = SingleLease(NAME, LEASE)
        self._written: datetime | None = None

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Measure and write, unless this minute has its figures."""
        minute = now.replace(second=0, microsecond=0)
        async with runtime.database.connection() as connection:
            if not await self._lease.held(connection, runtime.owner, now) or minute == self._written:
                return StepResult()
            await set_standing(connection, (await open_now(connection, now)).figures(), now)
            await forget_before(connection, minute - timedelta(days=KEPT_DAYS))
        self._written = minute
        return StepResult(done=1)

    async def drain(self, runtime: Runtime) -> None:
        """Release the lease."""
        await self._lease.release(runtime)
