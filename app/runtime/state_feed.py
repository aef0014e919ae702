"""The state of the service for all open event streams of one process: one look at the database serves all of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from app.errors import Overloaded

# The pause between two looks is this many times as long as a look took, so that looking takes at most a hundredth of
# the time; within these bounds.
PAUSE_FACTOR = 100
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class StateEvent:
    """A state to send. Equal states have equal ids in all processes. `data`: JSON, one line. `state` None: unknown."""

    name: str
    id: str
    data: str
    state: Any = None


Look = Callable[[], Awaitable[StateEvent]]


class StateFeed:
    """Looks at the state while a stream is open. A stream that waits costs no database turn."""

    def __init__(self, most: int) -> None:
        self.streams = 0
        self._most = most
        self._found: StateEvent | None = None
        # Replaced at each change, so that each waiting stream is woken once.
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        # The numbers of the last look that began and of the last one that ended.
        self._begun = self._ended = 0
        self._looking: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def state(self) -> Any:
        """The state that was found last; None while no stream is open, or if the last look failed."""
        return None if self._found is None else self._found.state

    @property
    def id(self) -> str:
        """The id of `state`; empty where that is None."""
        return "" if self._found is None or self._found.state is None else self._found.id

    def refuse_past_limit(self) -> None:
        """Raise Overloaded if as many streams are open as may be."""
        if self.streams >= self._most:
            raise Overloaded(f"{self.streams} event streams are open here; repeat later.", retry_after_s=10)

    @contextmanager
    def stream(self, look: Look) -> Iterator[None]:
        """Count a stream as open. `look` must not raise."""
        self.streams += 1
        if self._looking is None and not self.closed:
            self._looking = asyncio.create_task(self._look(look))
        try:
            yield
        finally:
            self.streams -= 1
            if not self.streams:
                self._hurry.set()

    def look_for(self, seen: str | None) -> int:
        """Return the number of the first look that is not older than the state `seen`, and let it begin soon.

        Another process may have sent that state, and this one's last look be older. 0: any look will do.
        """
        if seen is None or (self._found is not None and self._found.id == seen):
            return 0
        self._hurry.set()
        return self._begun + 1

    async def newer(
        self, seen: str | None, within_s: float, first_within_s: float, first_look: int = 0
    ) -> StateEvent | None:
        """Wait for a state with another id than `seen`; None if the time is over or the process stops.

        `first_within_s`: the time for the first look, if there was none, or none since the look `first_look`.
        """
        if self._found is None or self._ended < first_look:
            await self._wait(first_within_s)
        if self._is_news(seen, first_look):
            return self._found
        await self._wait(within_s)
        return self._found if self._is_news(seen, first_look) else None

    def _is_news(self, seen: str | None, first_look: int) -> bool:
        if self.closed or self._found is None or self._ended < first_look:
            return False
        return self._found.id != seen

    async def _wait(self, within_s: float) -> None:
        if self.closed:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """End all streams, before the process stops."""
        self.closed = True
        self._hurry.set()
        self._changed.set()

    async def end(self) -> None:
        """End all streams, and wait for the look that runs."""
        self.close()
        if self._looking is not None:
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, look: Look) -> None:
        try:
            while self.streams and not self.closed:
                is_awaited = self._hurry.is_set()
                self._hurry.clear()
                self._begun += 1
                began = monotonic()
                found = await look()
                pause_s = PAUSE_FACTOR * (monotonic() - began)
                is_new = self._found is None or self._found.id != found.id
                # Also if the id is the same: what changes without being announced is fresh for `state`.
                self._found, self._ended = found, self._begun
                if is_new or is_awaited:
                    self._changed.set()
                    self._changed = asyncio.Event()
                try:
                    async with asyncio.timeout(min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, pause_s))):
                        await self._hurry.wait()
                except TimeoutError:
                    pass
        finally:
            self._looking, self._found = None, None
