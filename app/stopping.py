"""Hears the signals that end a process, before the web server does."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def heard(begin: Callable[[], None]) -> Iterator[None]:
    """Call `begin` in the running event loop as soon as SIGTERM or SIGINT comes, and pass the signal on.

    A web server tells the app only after the last request was answered; background work should end meanwhile, so that
    both together keep to one time limit. Outside the main thread, where signals can't be heard, it does nothing.
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

    heard_now = [number for number, handler in before.items() if callable(handler)]
    for number in heard_now:
        signal.signal(number, both)
    try:
        yield
    finally:
        for number in heard_now:
            signal.signal(number, before[number])
