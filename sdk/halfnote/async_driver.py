"""Runs exchanges on asyncio, with an httpx transport, or with aiohttp (`halfnote[fast]`) if it is installed."""

import asyncio
import inspect
import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import httpx

from halfnote.async_batching import BatchingWire
from halfnote.exchange import (
    Call,
    Effect,
    Exchange,
    Later,
    NoAnswer,
    Raised,
    Request,
    Response,
    Returned,
    Wait,
)
from halfnote.hosting import called_async, is_async
from halfnote.http import FAILURES, LIMITS, answered, base_of, unanswered
from halfnote.tls import trusted

T = TypeVar("T")
log = logging.getLogger("halfnote")

# The most ends that wait in the background; check-back decides the others.
BACKGROUND_MAX = 10_000
_parents: list["Wire | None"] = []


class Wire(Protocol):
    """The transport of requests."""

    async def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, and read its answer."""

    async def aclose(self) -> None:
        """Close the connections."""


class AsyncDriver:
    """Separate connections for each event loop and process: they survive neither a new loop nor a fork."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        batching: bool = False,
    ) -> None:
        self._url, self._headers, self._transport = base_of(url), dict(headers), transport
        self._batching = batching
        self._connections: Wire | None = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def run(self, exchange: Exchange[T]) -> T:
        """Run an exchange to its end; return its result or raise its error."""
        try:
            effect = next(exchange)
            while True:
                effect = exchange.send(await self._do(effect))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def later(self, exchange: Exchange[Any]) -> bool:
        """Run an exchange in the background; False if too many are under way."""
        self._current()
        if len(self._background) >= BACKGROUND_MAX:
            return False
        task = asyncio.get_running_loop().create_task(self.run(exchange))
        self._background.add(task)
        task.add_done_callback(self._over)
        return True

    async def close(self, grace_s: float) -> None:
        """Give background exchanges `grace_s` seconds, then cancel them and close the connections."""
        self._current()
        background = list(self._background)
        if background:
            _, late = await asyncio.wait(background, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        connections, self._connections, self._owner = self._connections, None, None
        if connections is not None:
            await connections.aclose()

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Request):
            return await self._current().ask(effect)
        if isinstance(effect, Wait):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, Later):
            return self.later(effect.exchange)
        if effect.waits:
            return await called_async(effect, calls_async=is_async(effect.function))
        return await _called(effect)

    def _current(self) -> Wire:
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._connections is None or self._owner != owner:
            if self._owner is not None and self._owner[0] != owner[0]:
                # Closing what a fork shares would disturb the parent, so it is never collected.
                _parents.append(self._connections)
            wire = _wire(self._url, self._headers, self._transport)
            self._connections = BatchingWire(wire) if self._batching else wire
            self._owner = owner
            self._background = set()
        return self._connections

    def _over(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an end in the background failed", exc_info=task.exception())


class HttpxWire:
    """Requests over an httpx transport without its client, whose other features, such as redirects, are not needed."""

    def __init__(self, url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport) -> None:
        self._url, self._headers, self._transport = url, headers, transport

    async def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, and read its answer."""
        try:
            answer = await self._transport.handle_async_request(self._made(request))
            try:
                await answer.aread()
            finally:
                await answer.aclose()
        except FAILURES as error:
            return unanswered(error, request.timeout_s)
        return answered(answer)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    def _made(self, request: Request) -> httpx.Request:
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), request.timeout_s)
        return httpx.Request(
            request.method,
            self._url + request.path,
            headers={**self._headers, **request.headers},
            content=request.content or None,
            extensions={"timeout": timeouts},
        )


def _wire(url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport | None) -> Wire:
    if transport is None and find_spec("aiohttp") is not None:
        from halfnote.aiohttp_wire import AiohttpWire

        return AiohttpWire(url, headers)
    return HttpxWire(
        url, headers, transport or httpx.AsyncHTTPTransport(verify=trusted(url), limits=LIMITS, trust_env=False)
    )


async def _called(call: Call) -> Returned | Raised:
    try:
        value = call.function()
        return Returned(await value if inspect.isawaitable(value) else value)
    except Exception as error:
        return Raised(error)
