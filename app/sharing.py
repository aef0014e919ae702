"""One look for all who ask at about the same time, so that many who ask cost no more than one."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")

SHARED_FOR_S = 1.0


class Shared(Generic[T]):
    """What the last look found, given to whoever asks within `for_s` of it; at most one look is under way."""

    def __init__(self, for_s: float = SHARED_FOR_S) -> None:
        self.for_s = for_s
        self.found: T | None = None
        self._fresh_until = 0.0
        self._looking: asyncio.Task[T] | None = None

    async def ask(self, look: Callable[[], Awaitable[T]]) -> T:
        """Return what was found a moment ago, or what the look that is under way finds, or look.

        Raises what the look raises; that is not kept.
        """
        if self.found is not None and monotonic() < self._fresh_until:
            return self.found
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(look))
        # Who goes away does not take the others' look along.
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """End the look that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, look: Callable[[], Awaitable[T]]) -> T:
        try:
            self.found = await look()
            self._fresh_until = monotonic() + self.for_s
            return self.found
        finally:
            self._looking = None
