"""The state of the service for all open event streams of one process: one look at the database serves all of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from app.errors import Overloaded

# The pause between two looks is this many times as long as a look took, so that looking takes at most a hundredth of
# the time; within these bounds.
PAUSE_FACTOR = 100
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
# The same bounds while a client waits that may have a newer state. The longer one and a look are to end within the time
# that a stream waits for its first look (`events.HEARTBEAT_S`), because a stream may end after that.
SHORTEST_HURRIED_PAUSE_S, LONGEST_HURRIED_PAUSE_S = 0.5, 10.0


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
        # Set when the pause between two looks may have another end.
        self._pause_changed = asyncio.Event()
        # The numbers of the last look that began, of the last one that ended, and of the last one that a client needs.
        self._begun = self._ended = self._needed = 0
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
                self._pause_changed.set()

    def look_for(self, seen: str | None) -> int:
        """Return the number of the first look that is not older than the state `seen`, and shorten the pause before it.

        Another process may have sent that state, and this one's last look be older. 0: any look will do.
        """
        if seen is None or (self._found is not None and self._found.id == seen):
            return 0
        self._needed = self._begun + 1
        self._pause_changed.set()
        return self._needed

    async def newer(
        self, seen: str | None, within_s: float, first_within_s: float, first_look: int = 0
    ) -> StateEvent | None:
        """Wait for a state with another id than `seen`; None if the time is over or the process stops.

        `first_within_s`: the time for the first look, if there was none, or none since the look `first_look`. Both
        times are in seconds and begin now.
        """
        began = asyncio.get_running_loop().time()
        await self._wait(lambda: self._has_looked(first_look), began + first_within_s)
        await self._wait(lambda: self._is_news(seen, first_look), began + within_s)
        return self._found if self._is_news(seen, first_look) else None

    def _has_looked(self, first_look: int) -> bool:
        return self._found is not None and self._ended >= first_look

    def _is_news(self, seen: str | None, first_look: int) -> bool:
        if self.closed or self._found is None or not self._has_looked(first_look):
            return False
        return self._found.id != seen

    async def _wait(self, is_over: Callable[[], bool], until: float) -> None:
        """Wait until `is_over`, the time `until` of the loop's clock, or the close."""
        if self.closed or is_over():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not (self.closed or is_over()):
                    await self._changed.wait()

    def close(self) -> None:
        """End all streams, before the process stops."""
        self.closed = True
        self._pause_changed.set()
        self._changed.set()

    async def end(self) -> None:
        """End all streams, and wait for the look that runs."""
        self.close()
        if self._looking is not None:
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, look: Look) -> None:
        try:
            while self.streams and not self.closed:
                self._begun += 1
                is_needed = self._needed >= self._begun
                began = monotonic()
                found = await look()
                pause_s = PAUSE_FACTOR * (monotonic() - began)
                is_new = self._found is None or self._found.id != found.id
                # Also if the id is the same: what changes without being announced is fresh for `state`.
                self._found, self._ended = found, self._begun
                if is_new or is_needed:
                    self._changed.set()
                    self._changed = asyncio.Event()
                await self._pause(pause_s)
        finally:
            self._looking, self._found = None, None

    async def _pause(self, pause_s: float) -> None:
        """Wait `pause_s` within its bounds, and not longer than a stream is open."""
        ended = monotonic()
        while self.streams and not self.closed:
            shortest_s, longest_s = SHORTEST_PAUSE_S, LONGEST_PAUSE_S
            if self._needed > self._begun:
                shortest_s, longest_s = SHORTEST_HURRIED_PAUSE_S, LONGEST_HURRIED_PAUSE_S
            left_s = ended + min(longest_s, max(shortest_s, pause_s)) - monotonic()
            if left_s <= 0:
                return
            self._pause_changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._pause_changed.wait()
