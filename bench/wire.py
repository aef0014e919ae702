"""An HTTP client with very low cost on a keep-alive connection, which returns only the status; and open-loop pacing."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import cast

from bench.receiver import END_OF_HEAD, length_of


class Wire(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None

    @classmethod
    async def to(cls, port: int) -> "Wire":
        """Connect to a port of 127.0.0.1."""
        _, wire = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return wire

    async def status(self, request: bytes) -> int:
        """Send a request, await the whole answer, and return its status."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    async def ask(self, request: bytes) -> None:
        """Send a request and await the whole answer. Raises RuntimeError unless the status is 2xx."""
        status = await self.status(request)
        if status // 100 != 2:
            raise RuntimeError(f"answered {status}")

    @property
    def closed(self) -> bool:
        """Whether the service has closed the connection, as it closes any idle connection."""
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed before the answer"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(END_OF_HEAD)
        if end < 0 or len(self._buffer) < end + len(END_OF_HEAD) + length_of(self._buffer[:end]):
            return
        status, self._buffer = int(self._buffer[9:12]), b""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)


async def paced(rate: float, seconds: float, act: Callable[[int], Awaitable[None]]) -> list[float]:
    """Call `act(n)` `rate` times per second, whether or not earlier calls are answered; return the seconds of each.

    The time of a call starts when it is sent. So a late answer does not delay other calls, and every call counts.
    """
    loop = asyncio.get_running_loop()

    async def timed(n: int) -> float:
        started = perf_counter()
        await act(n)
        return perf_counter() - started

    calls = []
    first = loop.time()
    for n in range(int(rate * seconds)):
        wait_s = first + n / rate - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        calls.append(asyncio.ensure_future(timed(n)))
    return await asyncio.gather(*calls)
