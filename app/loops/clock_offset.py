"""Measures the offset between this machine's clock and the database's clock, which all times use."""

from datetime import datetime

import structlog

from app.clock import SKEW_SAID_S
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

EVERY_S = 60.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Measure the offset, publish it, and log a warning if it is over a second."""
    async with runtime.database.connection() as connection:
        offset_s = await runtime.clock.measure(connection)
    runtime.metrics.process.clock_skew_s.set(offset_s)
    if abs(offset_s) > SKEW_SAID_S:
        log.warning("clock_skew", offset_s=round(offset_s, 3))
    return StepResult(done=1)
