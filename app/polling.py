"""Keeps the event loop awake through the short waits of a caller who is alone.

Of what one caller alone waits for, the greater part is not work: the process goes to sleep until Postgres answers, and
again until the caller asks once more, and each time wakes up on a processor that slept as well, its caches cold. So
through a wait that will be short the loop looks again and again instead, as the kernel does for a socket with
`SO_BUSY_POLL`. Which will be is told by the last one; who has company, or a database far away, costs nothing.
"""

import asyncio
import os
from collections.abc import Callable
from time import perf_counter

# Where it exists: whoever else wants this processor gets it.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Polling:
    """One event loop's. `most_s`: the longest wait that is polled through, 0: none is; `clock` counts seconds."""

    def __init__(self, most_s: float, clock: Callable[[], float] = perf_counter) -> None:
        self._most_s = most_s
        self._clock = clock
        self._until = 0.0
        self._turning = False
        self._asked_at = self._answered_at = 0.0
        # How long the last waits were: for the database, and for the caller's next request.
        self._flush_s = self._gap_s = most_s

    @property
    def awake(self) -> bool:
        """Whether the loop is polling."""
        return self._turning

    def asked(self) -> None:
        """Note that a single request goes to the database."""
        now = self._asked_at = self._clock()
        self._gap_s = now - self._answered_at
        self._poll(now, self._flush_s)

    def answered(self) -> None:
        """Note that its answer is here."""
        now = self._answered_at = self._clock()
        self._flush_s = now - self._asked_at
        self._poll(now, self._gap_s)

    def _poll(self, now: float, expected_s: float) -> None:
        if expected_s >= self._most_s:
            self._until = now
            return
        self._until = now + self._most_s
        if not self._turning:
            self._turning = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        # A loop that has something to call looks for what came without waiting for it.
        self._turning = self._clock() < self._until
        if self._turning:
            _give_way()
            loop.call_soon(self._turn, loop)
