"""A producer's check URL on a real socket: it records requests and answers as a test requires."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Call:
    """One received request."""

    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Call], Awaitable[web.StreamResponse]]


class Responder:
    """Answers every POST by `answer`, or with `status` and the JSON `content`; `calls` are the received requests."""

    def __init__(self, answer: Answer | None = None, *, status: int = 200, content: Any = None, **headers: str) -> None:
        self.calls: list[Call] = []
        self.answer = answer
        self.status, self.content, self.headers = status, content, headers
        self.open, self.most_open = 0, 0

    async def __aenter__(self) -> "Responder":
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_post("/check", self._on_post)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/check"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _on_post(self, request: web.Request) -> web.StreamResponse:
        call = Call(await request.read(), {name.lower(): value for name, value in request.headers.items()})
        self.calls.append(call)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            if self.answer is not None:
                return await self.answer(call)
            text = None if self.content is None else json.dumps(self.content)
            return web.Response(status=self.status, text=text, headers=self.headers)
        finally:
            self.open -= 1


class Silent:
    """A server that accepts connections and never answers; `connections` counts them."""

    async def __aenter__(self) -> "Silent":
        self.connections = 0
        self._closing = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            await self._closing.wait()
            writer.transport.abort()

        self._server = await asyncio.start_server(hang, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/check"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.close()
        await self._server.wait_closed()


@dataclass(frozen=True)
class RawRequest:
    """One request as it was received; the names of `headers` are in lower case. `head`: the bytes before the body."""

    method: str
    headers: dict[str, str]
    body: bytes
    head: bytes


class RawServer:
    """A server whose answers are raw bytes, for what no HTTP server would send.

    `write` gets the connection after each whole request. The connection stays open unless `write` closes it.
    `connections` counts the accepted connections, `ended` those that the client closed.
    """

    def __init__(self, write: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.write = write
        self.requests: list[RawRequest] = []
        self.connections = self.ended = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RawServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/hook"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    def stop_listening(self) -> None:
        """Refuse further connections."""
        self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append(RawRequest(lines[0].partition(" ")[0], headers, body, head))
                await self.write(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended += 1
        finally:
            writer.transport.abort()


def plain(status: int, body: bytes = b"", **headers: str) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Return a `write` function for one ordinary answer; `_` in names stands for `-`."""
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} Some\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return write
