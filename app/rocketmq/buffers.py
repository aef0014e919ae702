"""How many bytes of requests and of claimed messages the process holds at the same time."""

import asyncio
from collections import deque

# A request up to this size is small, as heartbeats and acknowledgements are.
SMALL_BYTES = 64 * 1024
# How long a request that has arrived, and an answer of Halfnote, wait for room. Their time passes meanwhile: a client
# waits for the one, and Halfnote holds the messages of the other.
ROOM_WITHIN_S = 5.0


class Budget:
    """Bytes for which callers wait in the order in which they ask. `held`: what they hold now."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Hold bytes as soon as they are free; return how many to give back. More than there are count as all."""
        if (taken := self.take_now(size)) is not None:
            return taken
        size = min(size, self.most)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give(size)
            else:
                self._grant()
            raise
        return size

    def take_now(self, size: int) -> int | None:
        """Hold bytes; return how many to give back, or None if they are not free, or others wait."""
        size = min(size, self.most)
        if self._waiting or self.held + size > self.most:
            return None
        self.held += size
        return size

    def overbook(self, size: int) -> int:
        """Hold bytes that may not be free; return how many to give back."""
        size = min(size, self.most)
        self.held += size
        return size

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.held -= size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if self.held + size > self.most:
                    return
                self.held += size
                turn.set_result(None)
            self._waiting.popleft()


class Buffers:
    """The budgets of the process. Half is for claimed messages, and a quarter each for large and small requests.

    So heartbeats and acknowledgements go on while large messages wait, and producers while consumers read slowly.
    A caller that holds a part of one budget waits for no other part of it, so none waits forever.
    """

    def __init__(self, most: int) -> None:
        self.small, self.large = Budget(most // 4), Budget(most // 4)
        self.answers = Budget(most // 2)

    @property
    def held(self) -> int:
        """The bytes that are held now."""
        return self.small.held + self.large.held + self.answers.held

    def part(self) -> "BufferedBytes":
        """Return what one request holds, nothing yet."""
        return BufferedBytes(self)


class BufferedBytes:
    """What one request and its answer hold until they are released."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._taken: list[tuple[Budget, int]] = []
        # Whether Halfnote has answered, so that messages may be held for the caller.
        self.is_answered = False

    async def request(self, size: int) -> None:
        """Wait until the request may be read."""
        budget = self._budget_of(size)
        self._taken.append((budget, await budget.take(size)))

    async def arrived_request(self, size: int) -> bool:
        """Hold a request that has arrived; return False if there is no room for it within ROOM_WITHIN_S."""
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                await self.request(size)
        except TimeoutError:
            return False
        return True

    async def answer(self, size: int) -> None:
        """Wait until an answer of Halfnote may be read, for at most ROOM_WITHIN_S. A small one does not wait."""
        self.is_answered, budget = True, self._buffers.answers
        if size <= SMALL_BYTES:
            self._taken.append((budget, budget.overbook(size)))
            return
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                taken = await budget.take(size)
        except TimeoutError:
            taken = budget.overbook(size)
        self._taken.append((budget, taken))

    def release(self) -> None:
        """Give back what is held."""
        taken, self._taken = self._taken, []
        for budget, size in taken:
            budget.give(size)

    def _budget_of(self, size: int) -> Budget:
        return self._buffers.small if size <= SMALL_BYTES else self._buffers.large
