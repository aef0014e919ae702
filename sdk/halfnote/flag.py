"""An event that a handler of a signal may set and wait for, whatever line of its own thread the signal interrupts."""

import math
import queue
import time

# A thread that is not woken, because an exception of a handler came between, looks after so long.
LOOK_S = 0.5


class Flag:
    """Is set or not, and threads wait until it is set.

    `threading.Event` has a lock. The interrupted thread may hold this lock, and its handler would wait for it for ever.
    The queue of CPython has none that Python code holds.
    """

    def __init__(self) -> None:
        self._is_set = False
        # An item wakes one thread, which puts it back for the next one. It may be left after `clear`.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake the threads that wait."""
        self._is_set = True
        # An item that is there wakes a thread too, which sees that the flag is set.
        if self._wakes.empty():
            self._wakes.put(None)

    def clear(self) -> None:
        """Let threads wait again."""
        self._is_set = False

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until it is set, or for so long; return whether it is set."""
        until, has_taken = time.monotonic() + seconds, False
        while not self._is_set and (left_s := until - time.monotonic()) > 0:
            try:
                self._wakes.get(timeout=min(left_s, LOOK_S))
            except queue.Empty:
                continue
            has_taken = True
        if has_taken and self._is_set and self._wakes.empty():
            self._wakes.put(None)
        return self._is_set
