"""Look for a promoted server among the hosts of the database URL; connections to its predecessor are then closed."""

from datetime import datetime

import structlog

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Look at all hosts, and log a timeline that is new."""
    guard = runtime.database.guard
    before = guard.highest
    await guard.look()
    if before is not None and guard.highest is not None and guard.highest.number > before.number:
        log.warning("timeline_raised", timeline=guard.highest.number, before=before.number)
    return StepResult(done=1)
