"""Closes database connections that are in use for too long: their server is frozen, or gone behind a pooler."""

from datetime import datetime
from time import monotonic

import structlog

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

EVERY_S = 10.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Close them, and log how many there were. The step itself asks the database nothing."""
    closed = runtime.database.lent.close_overdue(monotonic())
    if closed:
        log.warning("connections_overdue", closed=closed)
    return StepResult(done=closed)
