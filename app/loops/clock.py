"""Measures how far this machine's clock is from the database's, by which everything is judged."""

from datetime import datetime

import structlog

from app.clock import SKEW_SAID_S
from app.loops.runner import Turned
from app.runtime import Runtime

log = structlog.get_logger(__name__)

EVERY_S = 60.0


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Measure the offset, publish it, and say so if it is over a second."""
    async with runtime.database.connection() as connection:
        offset_s = await runtime.clock.measure(connection)
    runtime.metrics.clock_skew_s.set(offset_s)
    if abs(offset_s) > SKEW_SAID_S:
        log.warning("clock_skew", offset_s=round(offset_s, 3))
    return Turned(done=1)
