"""A connection is read the same with known heads as without: the same requests, bodies and answers, and the same end.

Random reads go to two connections that differ in this alone: one looks heads up, the other parses each.
"""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import uvicorn
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.server.fast_cycle import FastCycle
from app.server.fast_path import FastPath
from app.server.http_protocol import HttpProtocol
from app.server.known_heads import KnownHeads
from app.server.request_pipeline import JSON_HEADERS
from tests.server.raw_forms import Route, raw_forms

CRLF = b"\r\n"
PATHS = [b"/half", b"/end", b"/messages"]
FORMS = raw_forms(Route(b"POST", b"/half", b'{"a":1234567890}'))
TURNS = 12
ROUNDS = 300


class FakeTransport:
    """Keeps what is written, and whether the connection ended."""

    def __init__(self) -> None:
        self.written, self.closing = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class NoHeads(KnownHeads[Any]):
    """Knows no head."""

    def find(self, data: bytes) -> None:
        return None


def echo(path: str, headers: object, body: bytes) -> bytes:
    """Return all that an app learns of a request."""
    return repr((path, headers, body)).encode()


async def echo_in_task(cycle: FastCycle, scope: Scope, receive: Receive, send: Send) -> None:
    await echo_app(scope, receive, send)


def echo_at_once(cycle: FastCycle) -> None:
    cycle._request = None
    cycle._finish(200, JSON_HEADERS, echo(cycle.scope["path"], cycle.scope["headers"], bytes(cycle.body)))


async def echo_app(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    body = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    if message["type"] == "http.disconnect":
        return
    text = echo(scope["path"], scope["headers"], body)
    headers = [*JSON_HEADERS, (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def endpoint(*_: object) -> Any: ...


def protocol_of(*, knows_heads: bool) -> tuple[HttpProtocol, FakeTransport]:
    app = FastPath(echo_app, State(), {path.decode(): endpoint for path in PATHS})
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False, proxy_headers=False)
    config.load()
    state, transport = ServerState(), FakeTransport()
    state.default_headers = [(b"date", b"now")]
    protocol = HttpProtocol(config, state, {}, asyncio.get_running_loop())
    protocol.connection_made(transport)  # type: ignore[arg-type]
    if not knows_heads:
        protocol._fast.heads = NoHeads()
    return protocol, transport


def lines_of_length(random: Random, length: int) -> bytes:
    """Return a Content-Length, most often an ordinary one."""
    text = b"%d" % length
    if random.random() < 0.75:
        return b"Content-Length: " + text
    return random.choice(
        [
            b"content-length:" + text,
            b"CONTENT-LENGTH:  " + text,
            b"Content-Length: 0" + text,
            b"Content-Length: +" + text,
            b"Content-Length: " + text + b" ",
            b"Content-Length: " + text + b"\r\n ",
            b"Content-Length: " + text + b"\r\n 1",
            b"Content-Length: " + text + b", " + text,
            b"Content-Length: " + text + b"\r\nContent-Length: " + text,
            b"Content-Length: " + text + b"\r\nContent-Length: ",
            b"Content-Length: \r\nContent-Length: " + text,
            b"Content-Length : " + text,
            b" Content-Length: " + text,
            b"X-Length: 1\r\n Content-Length: " + text,
            b"Content-Length: " + b"%d" % (length + random.choice([-1, 1])),
            b"Content-Length: " + text + b"\n",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nContent-Length: " + text,
        ]
    )


MORE = [
    b"Authorization: Bearer a",
    b"Authorization: Bearer b",
    b"X-A: b",
    b"X-A: b\r\n folded",
    b"Connection: keep-alive",
]
RARE = [
    b"Connection: close",
    b"Connection: Upgrade\r\nUpgrade: h2c",
    b"Connection: Upgrade",
    b"Expect: 100-continue",
    b"Traceparent: 00-11111111111111111111111111111111-1111111111111111-01",
    b"Host: other",
    b"X-A: RTSP/",
    b"X-A: b\n\r\nPOST /end HTTP/1.1",
    b"X-A: b\r\rX-B: c",
]


BODIES = [
    b"",
    b"{}",
    b'{"a":"%s"}' % (b"x" * 30),
    b"2\r\n{}\r\n0\r\n\r\n",
    b"POST /end HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
]


def plain_request(random: Random) -> bytes:
    """Return a request of a few ordinary heads."""
    body = random.choice(BODIES)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % (random.choice(PATHS), len(body))
    return head + random.choice([b"", MORE[0] + CRLF, MORE[1] + CRLF]) + CRLF + body


def wild_request(random: Random) -> bytes:
    """Return a request that may have anything unusual."""
    body = random.choice(BODIES)
    method = random.choice([b"POST"] * 15 + [b"GET", b"PUT"])
    target = random.choice(PATHS * 5 + [b"/livez", b"/half?a=b", b"http://localhost/half"])
    version = random.choice([b"HTTP/1.1"] * 20 + [b"HTTP/1.0", b"HTTP/2.0", b"RTSP/1.0"])
    headers = [
        b"Host: localhost",
        lines_of_length(random, len(body)),
        *random.sample(MORE, random.choice([0, 0, 1, 2])),
    ]
    if random.random() < 0.1:
        headers.append(random.choice(RARE))
    if random.random() < 0.3:
        random.shuffle(headers)
    before = random.choice([b""] * 20 + [b"\r\n", b"\n", b"\r\n\r\n"])
    return before + b"%s %s %s\r\n" % (method, target, version) + CRLF.join(headers) + CRLF * 2 + body


def reads(random: Random) -> Iterator[bytes]:
    """Yield what one connection reads: whole requests mostly, and pieces and joins of them."""
    yield plain_request(random)
    for _ in range(random.randrange(2, 12)):
        if random.random() < 0.05:
            yield from random.choice(FORMS).pieces
            continue
        if random.random() < 0.6:
            yield plain_request(random)
            continue
        data = wild_request(random)
        if random.random() < 0.05:
            at = random.randrange(len(data))
            data = data[:at] + bytes([random.choice(b"\r\n\0 :a1")]) + data[at + random.randrange(2) :]
        if random.random() < 0.15:
            data += plain_request(random)
        if random.random() < 0.15:
            at = random.randrange(len(data))
            yield data[:at]
            data = data[at:]
        yield data


async def read_by(data: list[bytes], *, knows_heads: bool, keep: list[Any]) -> list[tuple[bytes, bool]]:
    """Return what was answered after each read, and whether the connection ended. `keep`: heads known before."""
    protocol, transport = protocol_of(knows_heads=knows_heads)
    if knows_heads:
        if keep:
            protocol._fast.heads = keep[0]
        keep[:] = [protocol._fast.heads]
    found = []
    for one in data:
        if transport.closing:
            break
        protocol.data_received(one)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        found.append((transport.written, transport.closing))
    protocol._unset_keepalive_if_required()
    protocol.connection_lost(None)
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_a_connection_is_read_the_same_with_known_heads(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    taken: list[bytes] = []
    begin_known = HttpProtocol._begin_known

    def note(protocol: HttpProtocol, *rest: Any) -> None:
        taken.append(rest[2])
        begin_known(protocol, *rest)

    monkeypatch.setattr(HttpProtocol, "_begin_known", note)
    monkeypatch.setattr(FastCycle, "respond", echo_in_task)
    monkeypatch.setattr(FastCycle, "begin", echo_at_once)
    keep: list[Any] = []
    for number in range(ROUNDS):
        random = Random(f"{seed} {number}")
        data = list(reads(random))
        parsed = await read_by(data, knows_heads=False, keep=[])
        known = await read_by(data, knows_heads=True, keep=keep)
        assert known == parsed, data
    assert len(taken) > ROUNDS / 4
