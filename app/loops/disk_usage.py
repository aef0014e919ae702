"""Measures the size of the database and of its days, when its disk is full, and how many days have partitions."""

import asyncio
from datetime import datetime

from app.policy.disk_growth import DiskGrowth
from app.runtime.disk_space import free_bytes
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.admin.gauges import sizes
from app.store.retention import days
from app.verdicts import DayState

EVERY_S = 60.0


class DiskUsage:
    """The growth of the database as this process has measured it."""

    def __init__(self) -> None:
        self._growth = DiskGrowth()

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Set the gauges."""
        async with runtime.database.connection() as connection:
            found = await sizes(connection)
            known = await days.days(connection)
        metrics = runtime.metrics.retention
        metrics.show_bytes(found.database, found.days)
        metrics.days_ahead.set(sum(day.state is DayState.OPEN and day.day > now.date() for day in known))
        disk_bytes = runtime.settings.database_disk_bytes
        free = await asyncio.to_thread(free_bytes, disk_bytes, runtime.embedded_home, found.database)
        hours = None if free is None else self._growth.hours_to_full(found.database, free, now)
        metrics.show_disk("setting" if disk_bytes is not None else "data_dir", free, hours)
        return StepResult(done=1)
