"""Handles Ctrl-C and SIGTERM, so that an interrupted run leaves no files behind."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


# The time limit of the cleanup; after it the program ends.
PATIENCE_S = 30.0


def apart(act: Callable[[], object]) -> None:
    """Run a function in a separate thread and wait for it.

    If the main thread was interrupted during a call to Java, its connection to Java is unusable; that of a new thread
    works.
    """
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)


class InterruptedRunError(KeyboardInterrupt):
    """A signal ended the run. A KeyboardInterrupt, so that its cleanup code also runs after SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that shells report for a program that a signal ended."""
        return 128 + self.number


class Interrupts:
    """Turns the first signal into InterruptedRunError in the main thread; later ones are ignored."""

    def __init__(self) -> None:
        self._came = False
        self._closed = False

    def listen(self) -> None:
        """Install the handlers. Call it again after a new SparkContext, which takes SIGINT."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Finish the block despite signals. It is the last step of a run, so a signal comes too late then."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._came and not self._closed:
            self._came = True
            # Py4J would log the interrupted call with its whole stack, and the program ends in any case.
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
