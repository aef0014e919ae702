"""Start the shutdown at SIGTERM or SIGINT, before the web server passes it on; treat a closed terminal as SIGTERM."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_shutdown_signal(begin: Callable[[], None]) -> Iterator[None]:
    """Call `begin` in the running event loop as soon as SIGTERM or SIGINT comes, and pass the signal on.

    The web server notifies the app only after the last answer. Background work ends meanwhile, so that both keep one
    time limit. SIGHUP counts as SIGTERM: plain uvicorn would end at it. Outside the main thread, which cannot handle
    signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def both(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(begin)
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    handled = [number for number, handler in before.items() if callable(handler)]
    for number in handled:
        signal.signal(number, both)
    try:
        with hangup_as_sigterm():
            yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


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
