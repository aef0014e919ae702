"""Measures the offset between this machine's clock and the database's clock, which all times use."""

from datetime import datetime

import structlog

from app.clock import SKEW_SAID_S
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

# After a step of the database's own clock, processes disagree for at most as long.
EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Measure, and publish the skew of this machine's clock; log a warning if it is over a second."""
    async with runtime.database.connection() as connection:
        skew_s = await runtime.clock.measure(connection)
    runtime.metrics.process.clock_skew_s.set(skew_s)
    if abs(skew_s) > SKEW_SAID_S:
        log.warning("clock_skew", offset_s=round(skew_s, 3))
    return StepResult(done=1)
