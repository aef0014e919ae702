"""Runs exchanges on asyncio, with an httpx transport, or with aiohttp (`halfnote[fast]`) if it is installed."""

import asyncio
import inspect
import logging
import os
import time
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import httpx

from halfnote.async_batching import BatchingWire
from halfnote.errors import ProducerClosed
from halfnote.exchange import (
    LEFT_AS_CLOSED,
    LEFT_AT_CLOSE,
    LEFT_TOO_MANY,
    Call,
    Dropped,
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
from halfnote.http import CONNECTED_WITHIN, FAILURES, LIMITS, answered, base_of, unanswered
from halfnote.time_limits import within
from halfnote.tls import trusted

T = TypeVar("T")
log = logging.getLogger("halfnote")

# The most ends that wait in the background; check-back decides the others.
BACKGROUND_MAX = 10_000
_parents: list["dict[asyncio.AbstractEventLoop, _Running]"] = []


class Wire(Protocol):
    """The transport of requests."""

    async def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, and read its answer."""

    async def aclose(self) -> None:
        """Close the connections."""


@dataclass
class _Running:
    """What belongs to one event loop: its connections, and the exchanges in its background.

    `background`: of how many transactions each is. `closes`: how many closes wait for it. `asking`: how many requests
    use the connections. `is_closing`: the last of them closes the connections.
    """

    loop: asyncio.AbstractEventLoop
    wire: Wire
    background: dict["asyncio.Task[Any]", int] = field(default_factory=dict)
    closes: int = 0
    asking: int = 0
    is_closing: bool = False


class AsyncDriver:
    """Separate connections for each event loop and process: they survive neither a new loop nor a fork.

    Loops of several threads may use it at the same time.
    """

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
        self._pid = os.getpid()
        self._running: dict[asyncio.AbstractEventLoop, _Running] = {}
        # The last one used: mostly there is one loop.
        self._last: _Running | None = None
        # The loops for which `end_background` was called. A request that follows has connections of its own.
        self._closed: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        # Ends of bound sessions after a close. A loop itself does not keep its tasks.
        self._following: dict[asyncio.Task[Any], int] = {}
        # What closes connections.
        self._closing: set[asyncio.Task[None]] = set()

    def require_open(self) -> None:
        """Raise ProducerClosed after `end_background` or `close` on the running loop."""
        if self._is_closed():
            raise ProducerClosed

    async def run(self, exchange: Exchange[T]) -> T:
        """Run an exchange to its end; return its result or raise its error.

        If this is canceled, the exchange hands over what is left to do to the background.
        """
        try:
            return await self._run(exchange)
        except asyncio.CancelledError:
            self._drop(exchange)
            raise

    async def _run(self, exchange: Exchange[T]) -> T:
        try:
            effect = next(exchange)
            while True:
                effect = exchange.send(await self._do(effect))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _drop(self, exchange: Exchange[Any]) -> None:
        try:
            effect = exchange.throw(Dropped())
            while isinstance(effect, Later):
                effect = exchange.send(self._later(effect))
            exchange.close()
        except (Dropped, StopIteration):
            pass
        except Exception as error:
            # The caller gets the cancellation.
            log.error("what was canceled left nothing in the background", exc_info=error)

    def later(self, exchange: Exchange[Any], transactions: int = 1, *, has_fallback: bool = False) -> bool:
        """Run an exchange in the background; False, with a line in the log, if too many are under way or it is closed.

        While a close still waits for ends, it waits for this one too, unless that has a fallback. `transactions` and
        `has_fallback`: as of `Later`.
        """
        is_closed = self._is_closed() and (has_fallback or not self._waits())
        # Without connections that nothing would close.
        background = {} if is_closed else self._current().background
        if is_closed or len(background) >= BACKGROUND_MAX:
            if not has_fallback:
                log.warning(LEFT_AS_CLOSED if is_closed else LEFT_TOO_MANY, transactions)
            return False
        task = asyncio.get_running_loop().create_task(self._run(exchange))
        background[task] = transactions
        task.add_done_callback(partial(_over, background))
        return True

    def _waits(self) -> bool:
        running = self._running.get(asyncio.get_running_loop())
        return running is not None and running.closes > 0

    def _later(self, effect: Later) -> bool:
        return self.later(effect.exchange, effect.transactions, has_fallback=effect.has_fallback)

    def follow(self, exchange: Exchange[Any]) -> "asyncio.Task[Any] | None":
        """Run the end of a bound session in the background; after a close, return its task, to be awaited."""
        if self.later(exchange, has_fallback=True):
            return None
        if not self._is_closed():
            log.warning(LEFT_TOO_MANY, 1)
            return None
        task = asyncio.get_running_loop().create_task(self._run(exchange))
        self._following[task] = 1
        task.add_done_callback(partial(_over, self._following))
        return task

    def open(self) -> None:
        """Begin exchanges again on this loop after a close."""
        loop = asyncio.get_running_loop()
        self._closed.discard(loop)
        if (running := self._running.get(loop)) is not None:
            running.is_closing = False
            if running.closes:
                # A close that still waits leaves what begins from now on.
                running.background = {}

    async def close(self, grace_s: float) -> None:
        """End what is in the background within `grace_s` seconds, and close the connections: of this loop."""
        await self.end_background(grace_s)
        await self.disconnect()

    def end_background(self, grace_s: float) -> Coroutine[Any, Any, None]:
        """Give background exchanges of this loop `grace_s` seconds, then cancel them, and say so in the log.

        From now on, also if what is returned is never run, none begins, but an end that was tried may be repeated.
        """
        running = self._current()
        self._closed.add(running.loop)
        return self._end_background(running, grace_s)

    async def _end_background(self, running: _Running, grace_s: float) -> None:
        until, background = time.monotonic() + grace_s, running.background
        running.closes += 1
        try:
            while (under_way := _unfinished(background)) and (left_s := until - time.monotonic()) > 0:
                await asyncio.wait(under_way, timeout=left_s)
        finally:
            running.closes -= 1
            late, left = _unfinished(background), 0
            for task in late:
                task.cancel()
                # The first of several closes logs it.
                left += background[task]
                background[task] = 0
            if left:
                log.warning(LEFT_AT_CLOSE, left)
        await asyncio.gather(*late, return_exceptions=True)

    async def disconnect(self) -> None:
        """Close the connections of this loop; the last request that is under way on them closes them otherwise.

        If it was opened again, they are left to the next close, which then knows what began meanwhile.
        """
        running = self._current()
        if running.loop in self._closed:
            running.is_closing = True
            self._forget(running)
            if not running.asking:
                self._end_connections(running)
        await self._connections_ended(running.loop)

    def _end_connections(self, running: _Running) -> None:
        """Close them in a task of its own, because who closes them may be canceled, and again in the midst of it."""
        self._forget(running)
        closing = running.loop.create_task(running.wire.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _connections_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        closing = [task for task in list(self._closing) if task.get_loop() is loop]
        await asyncio.shield(asyncio.gather(*closing))

    def _forget(self, running: _Running) -> None:
        # After `open` the loop may have others already.
        if self._running.get(running.loop) is running:
            del self._running[running.loop]
        if self._last is running:
            self._last = None

    def _is_closed(self) -> bool:
        return self._pid == os.getpid() and asyncio.get_running_loop() in self._closed

    async def _asked(self, request: Request) -> Response | NoAnswer:
        running = self._current()
        running.asking += 1
        try:
            return await running.wire.ask(request)
        finally:
            running.asking -= 1
            if running.is_closing and not running.asking:
                self._end_connections(running)
                await self._connections_ended(running.loop)

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Request):
            return await self._asked(effect)
        if isinstance(effect, Wait):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, Later):
            return self._later(effect)
        if effect.waits:
            return await called_async(effect, calls_async=is_async(effect.function))
        return await _called(effect)

    def _current(self) -> _Running:
        loop, last = asyncio.get_running_loop(), self._last
        if last is not None and last.loop is loop and self._pid == os.getpid():
            return last
        if self._pid != os.getpid():
            # Closing what a fork shares would disturb the parent, so it is never collected.
            _parents.append(self._running)
            self._pid, self._running, self._closed = os.getpid(), {}, weakref.WeakSet()
        found = self._running.get(loop)
        if found is None:
            # Their connections ended with them.
            for ended in [other for other in list(self._running) if other.is_closed()]:
                self._running.pop(ended, None)
            wire = _wire(self._url, self._headers, self._transport)
            wire = BatchingWire(wire) if self._batching else wire
            found = self._running[loop] = _Running(loop, wire, is_closing=loop in self._closed)
        self._last = found
        return found


def _unfinished(background: dict["asyncio.Task[Any]", int]) -> list["asyncio.Task[Any]"]:
    return [task for task in background if not task.done()]


def _over(background: dict["asyncio.Task[Any]", int], task: "asyncio.Task[Any]") -> None:
    background.pop(task, None)
    if not task.cancelled() and task.exception() is not None:
        log.error("an end in the background failed", exc_info=task.exception())


class HttpxWire:
    """Requests over an httpx transport without its client, whose other features, such as redirects, are not needed."""

    def __init__(self, url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport) -> None:
        self._url, self._headers, self._transport = url, headers, transport

    async def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, and read its answer."""
        try:
            # The limits of httpx are for each read and write, so an answer in small parts would have none.
            return await within(request.timeout_s, self._answer(request))
        except FAILURES as error:
            return unanswered(error, request.timeout_s)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def _answer(self, request: Request) -> Response:
        answer = await self._transport.handle_async_request(self._made(request))
        try:
            await answer.aread()
        finally:
            await answer.aclose()
        return answered(answer)

    def _made(self, request: Request) -> httpx.Request:
        connect_s = request.timeout_s * CONNECTED_WITHIN
        timeouts = {"connect": connect_s, "read": request.timeout_s, "write": request.timeout_s, "pool": connect_s}
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
