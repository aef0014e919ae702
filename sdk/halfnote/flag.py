"""An event that a handler of a signal may set and wait for, whatever line of its own thread the signal interrupts."""

import queue
import time


class Flag:
    """Is set or not, and threads wait until it is set.

    `threading.Event` has a lock. The interrupted thread may hold this lock, and its handler would wait for it for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        # An item while it is set and a thread may wait. A thread that takes it puts one back, for the next thread.
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

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, or for so long; return whether it is set."""
        until = None if seconds is None else time.monotonic() + seconds
        has_taken = False
        while not self._is_set:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                return self._is_set
            try:
                self._wakes.get(timeout=left_s)
                has_taken = True
            except queue.Empty:
                return self._is_set
        if has_taken and self._wakes.empty():
            self._wakes.put(None)
        return True
