"""Ctrl-C and SIGTERM: a run that is ended leaves nothing behind."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


# How long is waited for what cleans up; then the program ends without.
PATIENCE_S = 30.0


def apart(act: Callable[[], object]) -> None:
    """Do something in a thread of its own, and wait for it.

    Where the main thread was interrupted within a call to Java, its line to Java is out of step; another's is not.
    """
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)


class InterruptedRunError(KeyboardInterrupt):
    """Somebody ended the run. A KeyboardInterrupt, so that whatever cleans up after one does so after SIGTERM too."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that shells know of a program which a signal ended."""
        return 128 + self.number


class Interrupts:
    """Turns the first signal into InterruptedRunError in the main thread; later ones are not heeded."""

    def __init__(self) -> None:
        self._came = False
        self._closed = False

    def listen(self) -> None:
        """Take the signals. Again after whatever else takes them: a new SparkContext takes SIGINT."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Finish the block whatever comes. It is the last thing that a run does, so a signal comes too late then."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._came and not self._closed:
            self._came = True
            # Py4J logs the call that is broken off here with its whole stack, and the program ends anyway.
            logging.disable()
            raise InterruptedRunError(number)


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Listen until the end of the block, then leave the signals as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    interrupts = Interrupts()
    interrupts.listen()
    try:
        yield interrupts
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, how in before.items():
                signal.signal(number, how)
