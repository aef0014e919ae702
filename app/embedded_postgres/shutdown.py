"""Stop a Postgres server: fast, then immediate, then SIGKILL. A later step costs a crash recovery, never data."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterable

import psutil

# A fast shutdown ends with a checkpoint, which may have gigabytes to write.
_FAST_WITHIN_S = 60.0
_IMMEDIATE_WITHIN_S = 10.0
_POLL_S = 0.02


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process has ended. This reaps a child; another process's child may stay a zombie for long."""
    try:
        over = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        over = True
    try:
        process.wait(timeout=0)
    except psutil.TimeoutExpired:
        return over
    return True


def await_end(processes: Iterable[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Wait at most `within_s` for all to end; return the processes that still run."""
    deadline = time.monotonic() + within_s
    while (running := [process for process in processes if not has_ended(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return running


def stop_server(postmaster: psutil.Process) -> None:
    """Shut down: end sessions, write a checkpoint; return when the postmaster has ended.

    psutil signals by pid and start time, so never a later process with the same pid.
    """
    if sys.platform != "win32":
        for how, within_s in ((signal.SIGINT, _FAST_WITHIN_S), (signal.SIGQUIT, _IMMEDIATE_WITHIN_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                postmaster.send_signal(how)
            if not await_end([postmaster], within_s):
                return
    kill_server(postmaster)


def kill_server(postmaster: psutil.Process) -> None:
    """Send SIGKILL to the postmaster and every backend; return when all have ended."""
    backends: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        # A suspended postmaster starts no backend between the listing and the kill.
        postmaster.suspend()
        backends = postmaster.children(recursive=True)
    kill_all([postmaster, *backends])


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process and wait for its end."""
    doomed = list(processes)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await_end(doomed, math.inf)
