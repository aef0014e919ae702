"""Servers that a pytest run shares: they outlive the worker that started them, and the run's keeper ends them."""

import contextlib
from pathlib import Path

import psutil

# Killed and waited for; their contents are worthless.
_END_WITHIN_S = 10.0


def keep(run: Path, pid: int) -> None:
    """Have a process, with all that it starts, ended with the run."""
    place = run / "kept"
    place.mkdir(exist_ok=True)
    (place / str(pid)).write_text(repr(psutil.Process(pid).create_time()))


def end_all(run: Path) -> None:
    """End every process that was kept, and wait until they are gone."""
    for note in (run / "kept").glob("*"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            process = psutil.Process(int(note.name))
            # The number may be another's by now.
            if repr(process.create_time()) == note.read_text():
                end(process)


def end(process: psutil.Process) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=_END_WITHIN_S)
