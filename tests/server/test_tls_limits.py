"""The limits of connections hold over TLS, from the first byte of a handshake, on both event loops."""

import asyncio
import contextlib
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.runtime.server_certificate import ServerCertificate
from app.server.connection_limits import HttpLimits
from app.server.tls_protocol import TlsProtocol
from tests.server.raw_http import PROBE, last_words, read_answer, trickle
from tests.support.certificates import Authority, client_hello

HELLO = client_hello()
Test = Callable[["Server"], Awaitable[None]]
Run = Callable[[HttpLimits, Test], None]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer when the whole request is there."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Server:
    """Where `app` is served, and how to trust it."""

    def __init__(self, port: int, trusted: ssl.SSLContext, state: ServerState) -> None:
        self.port, self.trusted, self.state = port, trusted, state

    @contextlib.asynccontextmanager
    async def connected(
        self, *, handshake: bool = True
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Yield a connection, with the handshake done or not begun."""
        tls = self.trusted if handshake else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def until_connections(self, count: int) -> None:
        """Wait until the server counts so many connections."""
        async with asyncio.timeout(20):
            while len(self.state.connections) != count:
                await asyncio.sleep(0.01)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a test beside a server with these limits."""
    authority = Authority(tmp_path)
    certificate = ServerCertificate(*authority.issue("127.0.0.1").write(tmp_path / "pair"))

    async def beside(limits: HttpLimits, test: Test) -> None:
        config, state = uvicorn.Config(app, lifespan="off", ws="none", log_config=None), ServerState()
        config.load()
        app_state = {"http_limits": limits, "server_certificate": certificate}
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        server = await asyncio.get_running_loop().create_server(
            lambda: TlsProtocol(config, state, app_state), "127.0.0.1", 0
        )
        async with server:
            served = Server(server.sockets[0].getsockname()[1], authority.client_context(), state)
            await test(served)
            await served.until_connections(0)
        assert errors == []

    def run(limits: HttpLimits, test: Test) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(beside(limits, test))

    return run


async def answered(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    reader, writer = connection
    writer.write(PROBE)
    answer = await read_answer(reader)
    assert answer is not None
    assert answer.status == 200


def test_slow_clients_are_disconnected(run: Run) -> None:
    async def during_handshake(server: Server, begin: bytes, piece: bytes) -> None:
        async with server.connected(handshake=False) as (reader, writer):
            writer.write(begin)
            trickling = asyncio.create_task(trickle(writer, piece) if piece else asyncio.sleep(0))
            await last_words(reader)
            trickling.cancel()

    async def answers(server: Server, begin: bytes, piece: bytes) -> list[int]:
        async with server.connected() as (reader, writer):
            writer.write(begin)
            trickling = asyncio.create_task(trickle(writer, piece) if piece else asyncio.sleep(0))
            found = re.findall(rb"HTTP/1.1 ([0-9]+) ", await last_words(reader))
            trickling.cancel()
            return [int(status) for status in found]

    async def after_handshake(server: Server, begin: bytes, piece: bytes, statuses: list[int]) -> None:
        async with asyncio.timeout(60):
            while True:
                # A busy machine may need more than the limit for the handshake, or for the first bytes after it.
                with contextlib.suppress(ConnectionError):
                    if await answers(server, begin, piece) == statuses:
                        return

    async def test(server: Server) -> None:
        await asyncio.gather(
            during_handshake(server, b"", b""),
            during_handshake(server, HELLO[:50], b""),
            during_handshake(server, HELLO[:50], HELLO[50:51]),
            during_handshake(server, HELLO, b""),
            after_handshake(server, b"", b"", []),
            after_handshake(server, b"POST / HTTP/1.1\r\n", b"x-a: b\r\n", [408]),
        )

    run(HttpLimits(request_timeout_s=1), test)


def test_the_first_request_has_the_rest_of_the_time_of_the_handshake(run: Run) -> None:
    """A client cannot begin the time again by ending its handshake."""

    async def test(server: Server) -> None:
        async with server.connected(handshake=False) as (_, raw):
            await server.until_connections(1)
            [before] = list(server.state.connections)
            tls = asyncio.create_task(raw.start_tls(server.trusted, server_hostname="127.0.0.1"))
            await tls
            async with asyncio.timeout(20):
                while before in server.state.connections:
                    await asyncio.sleep(0.01)
            [after] = list(server.state.connections)
            assert type(after) is not type(before)
            assert after.deadline == before.deadline  # type: ignore[attr-defined]

    run(HttpLimits(request_timeout_s=600), test)


async def read_to_the_end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while await reader.read(65_536):
            pass


def test_handshakes_count_and_make_room(run: Run) -> None:
    """The time limit is too long to play a part."""

    async def test(server: Server) -> None:
        async with contextlib.AsyncExitStack() as stack:
            active = await stack.enter_async_context(server.connected())
            await answered(active)
            readers = []
            for number in range(40):
                reader, writer = await stack.enter_async_context(server.connected(handshake=False))
                writer.write(HELLO[:50] if number % 2 else HELLO)
                readers.append(reader)
            # The server accepts several in one turn of its loop, so it may close any of those first.
            endings = [asyncio.create_task(read_to_the_end(reader)) for reader in readers]
            async with asyncio.timeout(20):
                while sum(ending.done() for ending in endings) < 25:
                    await asyncio.sleep(0.01)
                while len(server.state.connections) > 16:
                    await asyncio.sleep(0.01)
            # It has sent a request, so others go before it.
            await answered(active)
            for ending in endings:
                ending.cancel()
            await asyncio.gather(*endings, return_exceptions=True)

    run(HttpLimits(request_timeout_s=600, connections_max=16), test)


def test_idle_connections_make_room(run: Run) -> None:
    """Their answers to TLS's alert are not awaited."""

    async def test(server: Server) -> None:
        async with contextlib.AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(server.connected()) for _ in range(16)]
            for reader, _ in idle:
                # A client that reads nothing answers nothing.
                reader._transport.pause_reading()  # type: ignore[attr-defined]
            await answered(await stack.enter_async_context(server.connected()))
            assert len(server.state.connections) <= 16

    run(HttpLimits(request_timeout_s=600, connections_max=16), test)


def test_clients_that_leave(run: Run) -> None:
    """Without TLS's alert, by a reset, with half of the connection closed, with plain HTTP: no error is left."""

    async def test(server: Server) -> None:
        for ending in ("alert", "no alert", "reset", "half"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=server.trusted)
            writer.write(PROBE if ending == "half" else PROBE[:-3])
            await writer.drain()
            # uvloop's own object for a socket has no such calls.
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
                if ending == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                if ending == "half":
                    sock.shutdown(socket.SHUT_WR)
            if ending == "half":
                # The answer or not, but then the end.
                await last_words(reader)
            if ending == "alert":
                writer.close()
                await writer.wait_closed()
            else:
                writer.transport.abort()
            await server.until_connections(0)
        async with server.connected(handshake=False) as (reader, writer):
            writer.write(PROBE)
            assert b"HTTP" not in await last_words(reader)
        async with server.connected(handshake=False) as (_, writer):
            writer.write(HELLO)
            await server.until_connections(1)
        await server.until_connections(0)

    run(HttpLimits(request_timeout_s=600), test)
