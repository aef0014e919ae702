"""Measures the offset between this machine's clock and the database's clock, which all times use."""

from datetime import datetime, timedelta

import structlog

from app.clock import SKEW_SAID_S
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

# After a step of the database's own clock, processes disagree for at most as long.
EVERY_S = 5.0
# A skew is logged when it begins, and at most this often while it lasts.
LOGGED_EVERY = timedelta(minutes=1)


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Measure, and publish the skew of this machine's clock; log a warning if it is over a second, and its end."""
    async with runtime.database.connection() as connection:
        skew_s = await runtime.clock.measure(connection)
    runtime.metrics.process.clock_skew_s.set(skew_s)
    _log_skew(runtime, skew_s, now)
    return StepResult(done=1)


def _log_skew(runtime: Runtime, skew_s: float, now: datetime) -> None:
    logged_at = runtime.skew_logged_at
    if logged_at is not None and abs(now - logged_at) < LOGGED_EVERY:
        return
    if abs(skew_s) > SKEW_SAID_S:
        log.warning("clock_skew", offset_s=round(skew_s, 3))
        runtime.skew_logged_at = now
    elif logged_at is not None:
        log.info("clock_skew_ended", offset_s=round(skew_s, 3))
        runtime.skew_logged_at = None
