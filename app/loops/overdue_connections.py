"""Closes database connections that are in use for too long: their server is frozen, or gone behind a pooler."""

from datetime import datetime

import structlog

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

# With LENT_FOR_LOOKS of app/database/lent_connections.py: 5 minutes.
EVERY_S = 10.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Close them, and log how many there were. The database is asked only if there are any."""
    closed = await runtime.database.close_overdue()
    if closed:
        log.warning("connections_overdue", closed=closed)
    return StepResult(done=closed)
