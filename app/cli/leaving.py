"""End a command by an exception, so that what it began is ended in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from app.lifecycle.signals import hangup_as_sigterm


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
