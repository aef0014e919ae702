"""Ends a Postgres server: fast, then immediate, then by force. Each later step costs a crash recovery, never data."""

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
    """Whether the process is over. One that is our child is reaped by that; another's may stay a zombie for long."""
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
    """Waits at most so many seconds for all to end; returns those that have not."""
    deadline = time.monotonic() + within_s
    while (running := [process for process in processes if not has_ended(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return running


def stop_server(postmaster: psutil.Process) -> None:
    """Fast shutdown: sessions end, a checkpoint is written; returns when the postmaster is gone.

    psutil signals by pid and start time, so never whoever got the pid later.
    """
    if sys.platform != "win32":
        for how, within_s in ((signal.SIGINT, _FAST_WITHIN_S), (signal.SIGQUIT, _IMMEDIATE_WITHIN_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                postmaster.send_signal(how)
            if not await_end([postmaster], within_s):
                return
    kill_server(postmaster)


def kill_server(postmaster: psutil.Process) -> None:
    """SIGKILL for the postmaster and every backend; returns when all are gone."""
    backends: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        # Stopped first, it starts no further backend between the listing and the kill.
        postmaster.suspend()
        backends = postmaster.children(recursive=True)
    kill_all([postmaster, *backends])


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL for each, and waits for their end."""
    doomed = list(processes)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await_end(doomed, math.inf)
