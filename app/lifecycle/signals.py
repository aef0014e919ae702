"""Start the shutdown at SIGTERM or SIGINT, before the web server passes it on."""

import asyncio
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
    time limit. Outside the main thread, which cannot handle signals, it does nothing.
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
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
