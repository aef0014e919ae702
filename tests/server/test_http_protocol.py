"""A response's head and body leave in one write. A single write leaves when the turn ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from app.server.coalescing_transport import CoalescingTransport
from app.server.http_protocol import HttpProtocol, places_in_lines
from app.server.request_pipeline import COUNT_AS_IDLE


class Wire:
    """The transport underneath; records the writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def coalescing() -> tuple[Any, Wire]:
    wire = Wire()
    return CoalescingTransport(wire), wire  # type: ignore[arg-type]


async def test_head_and_body_are_one_write() -> None:
    transport, wire = coalescing()
    transport.write(b"head")
    assert wire.writes == []
    transport.write(b"body")
    assert wire.writes == [b"headbody"]
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody"]


async def test_a_single_write_is_sent_when_the_turn_ends() -> None:
    transport, wire = coalescing()
    transport.write(b"head")
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]


async def test_two_responses_of_one_turn_stay_in_order() -> None:
    transport, wire = coalescing()
    for part in (b"head1", b"body1", b"head2", b"body2", b"head3"):
        transport.write(part)
    await asyncio.sleep(0)
    assert b"".join(wire.writes) == b"head1body1head2body2head3"


async def test_close_sends_what_is_held_first() -> None:
    transport, wire = coalescing()
    transport.write(b"head")
    transport.close()
    assert (wire.writes, transport.is_closing()) == ([b"head"], True)
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Echo the body."""
    body = (await receive())["body"]
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serve(app: ASGIApp, connections: list[HttpProtocol]) -> AsyncIterator[int]:
    """Serve an app at a port; its connections are added to the list."""
    config, state = uvicorn.Config(app, lifespan="off", ws="none", log_config=None), ServerState()
    config.load()
    state.default_headers = [(b"date", b"today")]

    def connection() -> HttpProtocol:
        connections.append(HttpProtocol(config, state, {}))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where `echo` is served."""
    async with serve(echo, []) as port:
        yield port


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST / HTTP/" + version, b"Host: localhost", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for bodies in ([b"1"], [b"2", b"3", b"4"]):
        writer.write(b"".join(map(post, bodies)))
        expected = b"".join(map(whole, bodies))
        assert await reader.readexactly(len(expected)) == expected
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "request_", [post(b"last", b"Connection: close"), post(b"last", version=b"1.0")], ids=["close", "HTTP/1.0"]
)
async def test_the_last_answer_of_a_connection_closes_it(port: int, request_: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_)
    assert await reader.read() == (
        b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 4\r\nconnection: close\r\n\r\nlast"
    )
    writer.close()
    await writer.wait_closed()


async def test_a_connection_counts_as_idle_while_an_unknown_body_comes() -> None:
    """From the call until the body is whole, not while the answer is made; a queued request waits for its turn."""
    connections: list[HttpProtocol] = []
    idle: list[bool] = []
    reading, answering = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def note() -> None:
            idle.append(connections[0].idle_since is not None)

        note()
        scope["state"][COUNT_AS_IDLE](scope)
        note()
        reading.set()
        more = True
        while more:
            more = (await receive())["more_body"]
        note()
        await answering.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serve(app, connections) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"body")[:-1])
        async with asyncio.timeout(60):
            await reading.wait()
            assert idle == [False, True]
            # A part of the next request comes with the rest of this one.
            writer.write(b"y" + post(b"rest")[:-1])
            while len(idle) < 3:
                await asyncio.sleep(0.001)
            assert idle == [False, True, False]
            assert connections[0].idle_since is None
            reading.clear()
            answering.set()
            await reading.wait()
            assert idle[3:] == [False, True]
            assert connections[0].idle_since is not None
            writer.write(b"t")
            expected = len(whole(b"")) * 2
            await reader.readexactly(expected)
            assert idle[3:] == [False, True, False]
            # A whole request at once is in progress.
            writer.write(post(b"whole"))
            await reader.readexactly(len(whole(b"")))
            assert idle[6:] == [False, False, False]
        writer.close()
        await writer.wait_closed()


class Searched(bytes):
    """Bytes that count how many of them were searched."""

    count = 0

    def find(self, *args: Any) -> int:
        found = super().find(*args)
        self.count += (len(self) if found < 0 else found) - (args[1] if len(args) > 1 else 0)
        return found

    def rfind(self, *args: Any) -> int:
        _, since, until = args
        self.count += until - since
        return super().rfind(*args)


@pytest.mark.parametrize("part", [b" RTSP/", b"\n RTSP/", b"\nGET / RTSP/ RTSP/"])
def test_a_read_is_searched_for_another_protocol_in_linear_time(part: bytes) -> None:
    text = Searched(part * 10_000)
    places = list(places_in_lines(text, b" RTSP/"))
    assert places == [
        (text[:at].rfind(b"\n", 0, at) + 1 if b"\n" in part else 0, at)
        for at in (n * len(part) + offset for n in range(10_000) for offset in _places(part))
    ]
    assert text.count <= 3 * len(text)


def _places(part: bytes) -> list[int]:
    return [at for at in range(len(part)) if part.startswith(b" RTSP/", at)]
