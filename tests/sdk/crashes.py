"""Processes that die: a coroutine that is killed at any of its awaits, and a network that loses answers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import httpx


class Crash(BaseException):
    """The process died."""


@dataclass(frozen=True)
class Death:
    """When a process dies: at its await number `at`, from 0; after that, or `during` it: what it asked for is done."""

    at: int
    during: bool = False


class Killed:
    """Awaits a coroutine until its death; None: never.

    What it would do on its way out does not happen: whatever it awaits then is killed as well.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], death: Death | None) -> None:
        self._coroutine, self._death = coroutine, death

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        for turn in itertools.count():
            dying = self._death is not None and turn >= self._death.at
            try:
                if dying:
                    waited = self._coroutine.throw(Crash())
                elif thrown is not None:
                    waited = self._coroutine.throw(thrown)
                else:
                    waited = self._coroutine.send(None)
            except StopIteration as stop:
                return stop.value
            thrown = None
            if dying or self._dies_during(turn):
                continue
            try:
                yield waited
            except BaseException as error:
                thrown = error

    def _dies_during(self, turn: int) -> bool:
        return self._death is not None and self._death.during and turn + 1 >= self._death.at


async def killed(coroutine: Coroutine[Any, Any, Any], death: Death | None) -> bool:
    """Run a coroutine with a death; tell whether it ended before that."""
    try:
        await Killed(coroutine, death)
    except Crash:
        return False
    return True


class Network:
    """Passes requests to `inner`. A request arrives even if its sender dies while waiting for the answer."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner
        self.sending: set[asyncio.Task[httpx.Response]] = set()

    def line(self, faults: Iterable[str] = ()) -> "Line":
        """Return one process's part of it."""
        return Line(self, iter(faults))

    async def rested(self) -> None:
        """Wait until nothing is on its way."""
        while self.sending:
            await asyncio.wait(self.sending)

    async def close(self) -> None:
        """Wait until nothing is on its way, and close the connections."""
        await self.rested()
        await self.inner.aclose()


class Line(httpx.AsyncBaseTransport):
    """`faults`, one a request: a `lost` one never arrives, of an `unheard` one the answer.

    There is an await before and after, at which a process may die.
    """

    def __init__(self, network: Network, faults: Iterator[str]) -> None:
        self._network, self._faults = network, faults

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fault = next(self._faults, "")
        await asyncio.sleep(0)
        if fault == "lost":
            raise httpx.ConnectError("connection refused")
        sending = asyncio.create_task(self._sent(request))
        self._network.sending.add(sending)
        sending.add_done_callback(self._over)
        answer = await asyncio.shield(sending)
        await asyncio.sleep(0)
        if fault == "unheard":
            raise httpx.ReadError("reset by peer")
        return answer

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        answer = await self._network.inner.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

    def _over(self, sending: "asyncio.Task[httpx.Response]") -> None:
        self._network.sending.discard(sending)
        # No receiver may be left for the error.
        sending.cancelled() or sending.exception()


class Connections:
    """A pool that keeps no connections: each is new and closed at the end, so that a death leaves none open."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connecting: set[asyncio.Task[asyncpg.Connection]] = set()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[asyncpg.Connection]:
        """Yield a new connection."""
        # A separate task, because a socket that was connecting when its process died must still be closed.
        connecting = asyncio.create_task(asyncpg.connect(self._url))
        self._connecting.add(connecting)
        connection = await asyncio.shield(connecting)
        try:
            yield connection
        finally:
            connection.terminate()
            self._connecting.discard(connecting)

    async def close(self) -> None:
        """Close the connections that dead processes left open."""
        # Those that live connect meanwhile, or are done.
        while self._connecting:
            (await self._connecting.pop()).terminate()
        # Sockets are closed at the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
