"""A response's head and body leave in one write; what is alone leaves when the turn ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from app.corked import CorkedHttp, CorkedTransport
from app.door import ANSWER, Receive, Scope, Send


class Wire:
    """What the corked transport writes to."""

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


def corked() -> tuple[Any, Wire]:
    wire = Wire()
    return CorkedTransport(wire), wire  # type: ignore[arg-type]


async def test_head_and_body_are_one_write() -> None:
    transport, wire = corked()
    transport.write(b"head")
    assert wire.writes == []
    transport.write(b"body")
    assert wire.writes == [b"headbody"]
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody"]


async def test_what_is_alone_leaves_when_the_turn_ends() -> None:
    transport, wire = corked()
    transport.write(b"head")
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]


async def test_two_responses_of_one_turn_stay_in_order() -> None:
    transport, wire = corked()
    for part in (b"head1", b"body1", b"head2", b"body2", b"head3"):
        transport.write(part)
    await asyncio.sleep(0)
    assert b"".join(wire.writes) == b"head1body1head2body2head3"


async def test_close_sends_what_is_held_first() -> None:
    transport, wire = corked()
    transport.write(b"head")
    transport.close()
    assert (wire.writes, transport.is_closing()) == ([b"head"], True)
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once what came, or the usual way where the server says that it can't."""
    body = (await receive())["body"]
    if scope["extensions"][ANSWER](201, b"at once " + body):
        assert not scope["extensions"][ANSWER](201, b"twice")
        return
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where `echo` is served."""
    config, state = uvicorn.Config(echo, lifespan="off", ws="none", log_config=None), ServerState()
    config.load()
    state.default_headers = [(b"date", b"today")]
    server = await asyncio.get_running_loop().create_server(lambda: CorkedHttp(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST / HTTP/" + version, b"Host: localhost", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 201 Created\r\ndate: today\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def test_answers_at_once_come_in_the_order_of_their_requests(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for bodies in ([b"1"], [b"2", b"3", b"4"]):
        writer.write(b"".join(post(body) for body in bodies))
        expected = b"".join(whole(b"at once " + body) for body in bodies)
        assert await reader.readexactly(len(expected)) == expected
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "request_", [post(b"last", b"Connection: close"), post(b"last", version=b"1.0")], ids=["close", "HTTP/1.0"]
)
async def test_the_last_answer_of_a_connection_goes_the_usual_way(port: int, request_: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_)
    assert await reader.read() == (
        b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 4\r\nconnection: close\r\n\r\nlast"
    )
    writer.close()
    await writer.wait_closed()
