"""Bounds the memory for bodies that checks send: they are read just before a call, within a limit of bytes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.store.relay.log import WINDOW_BYTES

# As a shard of the relay holds of bodies that are not settled. A larger body goes alone.
IN_FLIGHT_BYTES = 4 * WINDOW_BYTES
# The longest wait for memory. It is well below the margin of a check's lease (claims.LEASE_MARGIN_S).
WAITS_S = 15.0


class BodyMemory:
    """The bytes of bodies in calls of one process.

    A group of which no call with bodies is under way does not wait, so that groups whose URLs hang delay no other one.
    Apart from that the first who waits is the first to go on.
    """

    def __init__(self, most: int = IN_FLIGHT_BYTES, waits_s: float = WAITS_S) -> None:
        self._free = most
        self._waits_s = waits_s
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @asynccontextmanager
    async def held(self, group: str, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes for a call of a group. Raises TimeoutError after `waits_s`."""
        if size == 0:
            yield
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = group, size
        self._let_go_on()
        try:
            async with asyncio.timeout(self._waits_s):
                await turn
            yield
        finally:
            if self._waiting.pop(turn, None) is None:
                self._free += size
                self._under_way[group] -= 1
            self._let_go_on()

    def _let_go_on(self) -> None:
        in_turn = True
        for turn, (group, size) in list(self._waiting.items()):
            in_turn = in_turn and size <= self._free
            if turn.done() or not (in_turn or self._under_way[group] == 0):
                continue
            del self._waiting[turn]
            self._free -= size
            self._under_way[group] += 1
            turn.set_result(None)
