"""What API processes know of the worker process of the same `halfnote serve`: a file with its loops' last turns.

The worker writes the file, the parent removes it when the worker's process ended, and API processes read it for
`/readyz`. Times are monotonic seconds, which all processes of a machine share.
"""

import json
import os
from pathlib import Path
from time import monotonic
from typing import NamedTuple

# The parent sets it for its children if one of them is the worker.
VARIABLE = "HALFNOTE_WORKER_STATE_FILE"
# A worker process that wrote longer ago does not run, or does not get to its loops.
SILENT_AFTER_S = 15.0


class WorkerState(NamedTuple):
    """When the worker wrote its state, and for each of its loops the last turn and the interval."""

    written_at: float
    heartbeats: dict[str, float]
    every_s: dict[str, float]


def worker_state_file() -> Path | None:
    """Return the file; None if no worker process runs beside this process."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def write(file: Path, heartbeats: dict[str, float], every_s: dict[str, float]) -> None:
    """Write the state of this process, the worker."""
    # A reader sees the former or the new state, never a part of one.
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps([monotonic(), heartbeats, every_s]))
    new.replace(file)


def clear(file: Path) -> None:
    """Say that no worker process runs: remove the file, which needs no room on the disk."""
    file.unlink(missing_ok=True)


def read(file: Path) -> WorkerState | None:
    """Return the worker's last state; None if its process ended, or has written nothing yet."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    return WorkerState(*json.loads(text))
