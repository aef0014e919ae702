"""Claims that wait for a due check, or for a message, in one process.

A waiting claim costs no database turn: one look serves all.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass(slots=True, eq=False)
class _Waiting:
    most: int
    woken: asyncio.Event


class WaitingClaims:
    """The claims that wait, by producer group or by the id of a subscription, in the order in which they came.

    `look` is set when checks, or messages, may be due.
    """

    def __init__(self) -> None:
        self.look = asyncio.Event()
        self._by_group: dict[str, deque[_Waiting]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closed = False

    @property
    def any_waiting(self) -> bool:
        """Whether any claim waits."""
        return bool(self._by_group)

    def may_be_due(self) -> None:
        """Ask for a look, if any claim waits."""
        if self._by_group:
            self.look.set()

    @property
    def limits(self) -> dict[str, int]:
        """How many checks the claims of each group would take together."""
        return {group: sum(one.most for one in waiting) for group, waiting in self._by_group.items()}

    async def wait(self, group: str, most: int, within_s: float) -> bool:
        """Wait until checks of a group are due for this claim; False if the time is over or the process stops."""
        if self._closed:
            return False
        mine = _Waiting(most, asyncio.Event())
        waiting = self._by_group.setdefault(group, deque())
        waiting.append(mine)
        try:
            async with asyncio.timeout(within_s):
                await mine.woken.wait()
        except TimeoutError:
            return False
        finally:
            if mine in waiting:
                waiting.remove(mine)
            if not waiting and self._by_group.get(group) is waiting:
                del self._by_group[group]
        return not self._closed

    @asynccontextmanager
    async def turn(self, group: str, within_s: float) -> AsyncIterator[bool]:
        """Let one claim of a group at a time go on; False if the time is over or the process stops."""
        lock = self._turns.setdefault(group, asyncio.Lock())
        try:
            async with asyncio.timeout(within_s):
                await lock.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield not self._closed
        finally:
            lock.release()

    def wake(self, group: str, due: int) -> None:
        """Wake the first claims of a group, as many as take this many checks together."""
        waiting = self._by_group.get(group)
        while waiting and due > 0:
            first = waiting.popleft()
            due -= first.most
            first.woken.set()

    def close(self) -> None:
        """Wake all claims, so that they are answered before the process stops."""
        self._closed = True
        for waiting in self._by_group.values():
            for one in waiting:
                one.woken.set()
