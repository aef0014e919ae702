"""Shows Prometheus what `/readyz` finds: a replica that is not ready is sent nothing, and so refuses nobody who could
be counted."""

from datetime import datetime

from app.loops.runner import Turned
from app.readiness import readiness
from app.runtime import Runtime

EVERY_S = 10.0


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Look, and set the gauge; a database that does not answer is a finding, not a failure."""
    found = await readiness(runtime)
    runtime.metrics.ready.set(found.ready)
    return Turned(done=1)
