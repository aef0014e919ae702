"""End a command by an exception, so that what it began is ended in order; treat a closed terminal as SIGTERM."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leaving() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, Ctrl-C and a hang-up, so that a server that was started here is stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with hangup_as_sigterm():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hangup_as_sigterm() -> Iterator[None]:
    """Treat SIGHUP, which a closed terminal sends, as SIGTERM. Where it is ignored, as below `nohup`, it stays so."""
    if os.name != "posix" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGHUP, _hung_up)
    try:
        yield
    finally:
        # After a hang-up it stays ignored, until the process ends.
        if signal.getsignal(signal.SIGHUP) is _hung_up:
            signal.signal(signal.SIGHUP, before)


def _hung_up(number: int, frame: FrameType | None) -> None:
    # The shell and the kernel may each send one. A second one must not interrupt the orderly end.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)
