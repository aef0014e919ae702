"""Exports the result of `/readyz` as a gauge. A replica that is not ready gets no requests, so no error shows it."""

from datetime import datetime

from app.runtime.loop_runner import StepResult
from app.runtime.readiness import readiness
from app.runtime.state import Runtime

EVERY_S = 10.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Run the checks and set the gauge. A database that does not answer is a result, not an error."""
    found = await readiness(runtime)
    runtime.metrics.process.ready.set(found.ready)
    return StepResult(done=1)
