"""Processes that die: a coroutine that is killed at any of its awaits, and a network that loses what it brings."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx


class Crash(BaseException):
    """The process died."""


class Killed:
    """Awaits a coroutine until its await number `at` (from 0), and kills it there; None: never.

    What it would do on its way out does not happen: whatever it awaits then is killed as well.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int | None) -> None:
        self._coroutine, self._at = coroutine, at

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        for turn in itertools.count():
            dying = self._at is not None and turn >= self._at
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
            if dying:
                continue
            try:
                yield waited
            except BaseException as error:
                thrown = error


async def killed(coroutine: Coroutine[Any, Any, Any], at: int | None) -> bool:
    """Run a coroutine with a death; tell whether it came to its end before."""
    try:
        await Killed(coroutine, at)
    except Crash:
        return False
    return True


class Network(httpx.AsyncBaseTransport):
    """Brings requests to `inner`. `faults`, one a request: a `lost` one never arrives, of an `unheard` one the answer.

    There is an await before and after, at which a process may die.
    """

    def __init__(self, inner: httpx.MockTransport, faults: Iterator[str]) -> None:
        self._inner, self._faults = inner, faults

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fault = next(self._faults, "")
        await asyncio.sleep(0)
        if fault == "lost":
            raise httpx.ConnectError("connection refused")
        came = await self._inner.handle_async_request(request)
        await asyncio.sleep(0)
        if fault == "unheard":
            raise httpx.ReadError("reset by peer")
        return came


class Connections:
    """A pool without a memory: each connection is new, and cut in the end, so that a death leaves none behind."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connecting: set[asyncio.Task[asyncpg.Connection]] = set()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[asyncpg.Connection]:
        """Yield a new connection."""
        # A task of its own: a socket that was about to connect when its process died must be closed by somebody.
        connecting = asyncio.create_task(asyncpg.connect(self._url))
        self._connecting.add(connecting)
        connection = await asyncio.shield(connecting)
        try:
            yield connection
        finally:
            connection.terminate()
            self._connecting.discard(connecting)

    async def close(self) -> None:
        """Cut what the dead have left."""
        for connecting in self._connecting:
            (await connecting).terminate()
        self._connecting.clear()
        # Sockets are closed at the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
