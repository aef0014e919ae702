"""Measures the size of the database and of its days, and how many days ahead have partitions."""

from datetime import datetime

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.admin.gauges import sizes
from app.store.retention import days
from app.verdicts import DayState

EVERY_S = 60.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Set the gauges."""
    async with runtime.database.connection() as connection:
        found = await sizes(connection)
        known = await days.days(connection)
    metrics = runtime.metrics.retention
    metrics.show_bytes(found.database, found.days)
    metrics.days_ahead.set(sum(day.state is DayState.OPEN and day.day > now.date() for day in known))
    return StepResult(done=1)
