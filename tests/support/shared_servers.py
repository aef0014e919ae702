"""Servers that a pytest run shares: they outlive the worker that started them, and the run's keeper ends them."""

import contextlib
from pathlib import Path

import psutil

# They are killed, not stopped: their contents are worthless.
_END_WITHIN_S = 10.0


def keep(run: Path, pid: int) -> None:
    """Register a process to be ended with the run, with all that it starts."""
    place = run / "processes"
    place.mkdir(exist_ok=True)
    (place / str(pid)).write_text(repr(psutil.Process(pid).create_time()))


def end_all(run: Path) -> None:
    """End every registered process, and wait until it has ended."""
    for note in (run / "processes").glob("*"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            process = psutil.Process(int(note.name))
            # Another process may have the id by now.
            if repr(process.create_time()) == note.read_text():
                end(process)


def end(process: psutil.Process) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [*process.children(recursive=True), process]
        for member in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(processes, timeout=_END_WITHIN_S)
