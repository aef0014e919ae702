"""Single flight: concurrent callers share one lookup, so that many callers cost no more than one."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")

SHARED_FOR_S = 1.0


class SingleFlight(Generic[T]):
    """Shares the result of a lookup for `for_s` seconds. At most one lookup runs at a time."""

    def __init__(self, for_s: float = SHARED_FOR_S) -> None:
        self.for_s = for_s
        self.found: T | None = None
        self._fresh_until = 0.0
        self._running: asyncio.Task[T] | None = None

    async def get(self, look_up: Callable[[], Awaitable[T]]) -> T:
        """Return a fresh result, or that of the lookup that runs, or start one.

        Raises what the lookup raises. An error is not shared with later callers.
        """
        if self.found is not None and monotonic() < self._fresh_until:
            return self.found
        if self._running is None:
            self._running = asyncio.create_task(self._look_up(look_up))
        # A canceled caller does not cancel the lookup of the others.
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """Cancel the lookup that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _look_up(self, look_up: Callable[[], Awaitable[T]]) -> T:
        try:
            self.found = await look_up()
            self._fresh_until = monotonic() + self.for_s
            return self.found
        finally:
            self._running = None
