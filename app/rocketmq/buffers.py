"""How many bytes of requests and of claimed messages the process holds at the same time."""

import asyncio
from bisect import insort
from dataclasses import dataclass
from itertools import count

# A request up to this size is small, as heartbeats and acknowledgements are.
SMALL_BYTES = 64 * 1024
# How long a request that has arrived, and an answer of Halfnote, wait for room. Their time passes meanwhile: a client
# waits for the one, and Halfnote holds the messages of the other.
ROOM_WITHIN_S = 5.0


@dataclass(eq=False, slots=True)
class _Waiting:
    """A caller that waits for bytes. `request`: that of which they are a part; None: they are all that it asks for."""

    rank: int
    size: int
    turn: "asyncio.Future[None]"
    request: object | None


class Budget:
    """Bytes for which callers wait in the order in which they ask. `held`: what they hold now.

    A request that arrives part by part asks for each part, with the rank of its first part. Those that hold a part and
    wait for the next could wait for each other forever. So one of them at a time goes beyond what there is, until all
    that it holds is given back.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._ranks = count()
        # Sorted by rank.
        self._waiting: list[_Waiting] = []
        self._beyond: object | None = None

    def rank(self) -> int:
        """Return the rank of a request whose first part has arrived."""
        return next(self._ranks)

    async def take(self, size: int) -> int:
        """Hold bytes as soon as they are free; return how many to give back. More than there are count as all."""
        size = min(size, self.most)
        await self._take(size, self.rank(), None)
        return size

    async def take_part(self, size: int, rank: int, request: object) -> None:
        """Hold bytes of a request that arrives as soon as they are free, or it may go beyond what there is.

        `give` with the request says that it holds nothing any more.
        """
        await self._take(size, rank, request)

    def overbook(self, size: int) -> int:
        """Hold bytes that may not be free; return how many to give back."""
        size = min(size, self.most)
        self.held += size
        return size

    def give(self, size: int, request: object | None = None) -> None:
        """Give bytes back. `request`: it holds nothing any more, so another one may go beyond what there is."""
        self.held -= size
        if request is not None and self._beyond is request:
            self._beyond = None
        self._grant()

    async def _take(self, size: int, rank: int, request: object | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        insort(self._waiting, _Waiting(rank, size, turn, request), key=lambda one: one.rank)
        self._grant()
        if turn.done():
            return
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give(size)
            else:
                self._grant()
            raise

    def _grant(self) -> None:
        self._waiting = [one for one in self._waiting if not one.turn.cancelled()]
        while self._waiting and self.held + self._waiting[0].size <= self.most:
            self._let(self._waiting[0])
        for one in self._waiting:
            if one.request is not None and self._beyond in (None, one.request):
                self._beyond = one.request
                self._let(one)
                return

    def _let(self, one: _Waiting) -> None:
        self._waiting.remove(one)
        self.held += one.size
        one.turn.set_result(None)


class Buffers:
    """The budgets of the process. Half is for claimed messages, and a quarter each for large and small requests.

    So heartbeats and acknowledgements go on while large messages wait, and producers while consumers read slowly.
    Only a request that arrives waits for more of a budget of which it holds a part, and one of those always goes on.
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
        self._taken: dict[Budget, int] = {}
        self._rank: int | None = None
        # Whether Halfnote has answered, so that messages may be held for the caller.
        self.is_answered = False

    async def arrived(self, size: int, whole: int) -> None:
        """Wait until a part of a request that has arrived may be held. `whole`: bytes of the request, as announced."""
        budget = self._budget_of(whole)
        if self._rank is None:
            self._rank = budget.rank()
        size = min(size, budget.most - self._taken.setdefault(budget, 0))
        await budget.take_part(size, self._rank, self)
        self._taken[budget] += size

    async def arrived_request(self, size: int) -> bool:
        """Hold a request that has arrived; return False if there is no room for it within ROOM_WITHIN_S."""
        budget = self._budget_of(size)
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                self._hold(budget, await budget.take(size))
        except TimeoutError:
            return False
        return True

    async def answer(self, size: int) -> None:
        """Wait until an answer of Halfnote may be read, for at most ROOM_WITHIN_S. A small one does not wait."""
        self.is_answered, budget = True, self._buffers.answers
        if size <= SMALL_BYTES:
            self._hold(budget, budget.overbook(size))
            return
        try:
            async with asyncio.timeout(ROOM_WITHIN_S):
                taken = await budget.take(size)
        except TimeoutError:
            taken = budget.overbook(size)
        self._hold(budget, taken)

    def release(self) -> None:
        """Give back what is held."""
        taken, self._taken = self._taken, {}
        for budget, size in taken.items():
            budget.give(size, self)

    def _hold(self, budget: Budget, size: int) -> None:
        self._taken[budget] = self._taken.get(budget, 0) + size

    def _budget_of(self, size: int) -> Budget:
        return self._buffers.small if size <= SMALL_BYTES else self._buffers.large
