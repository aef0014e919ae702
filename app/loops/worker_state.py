"""Shows the API processes beside this worker that its loops turn: `/readyz` of theirs reads it."""

from datetime import datetime
from pathlib import Path

from app.runtime import worker_state
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

EVERY_S = 2.0


class WorkerStateWriter:
    """Writes the last turns of this process's loops to the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Write the file."""
        worker_state.write(self._file, runtime.heartbeats, runtime.every_s)
        return StepResult(done=1)
