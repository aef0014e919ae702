"""The fast path answers the same bytes with its own cycle as under plain uvicorn, in every case of its contract."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from typing import Any
from uuid import UUID

import httpx
import pytest
import pytest_asyncio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.ids import uuid7
from app.server.fast_cycle import FastCycle
from app.server.http_protocol import HttpProtocol
from tests.conftest import app_of, shares
from tests.server.raw_http import Answer, read_answer

GROUP = "shop"
KINDS = {"plain uvicorn": HttpToolsProtocol, "fast cycle": HttpProtocol}


@asynccontextmanager
async def served(client: httpx.AsyncClient, kind: type[asyncio.Protocol], **options: Any) -> AsyncIterator[int]:
    """Serve a service by a protocol; yield the port."""
    config = uvicorn.Config(
        app_of(client), lifespan="off", ws="none", log_config=None, access_log=False, proxy_headers=False, **options
    )
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"Mon, 23 Nov 2026 08:00:00 GMT")]
    make = lambda: kind(config, state, {})  # type: ignore[call-arg]  # noqa: E731
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports(shared_client: httpx.AsyncClient) -> AsyncIterator[dict[str, int]]:
    """The same service under both protocols."""
    async with (
        served(shared_client, HttpToolsProtocol) as plain,
        served(shared_client, HttpProtocol) as fast,
    ):
        yield {"plain uvicorn": plain, "fast cycle": fast}


def half(transaction_id: UUID | None, **fields: Any) -> dict[str, Any]:
    chosen = {} if transaction_id is None else {"transaction_id": str(transaction_id)}
    return {"producer_group": GROUP, "messages": [{"topic": "order", "body": {"n": 1}}], **chosen, **fields}


def end(transaction_id: UUID, verdict: str, **fields: Any) -> dict[str, Any]:
    return {"transaction_id": str(transaction_id), "producer_group": GROUP, "verdict": verdict, **fields}


def cases() -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Yield name, path, body (JSON, or bytes as they are) and further headers. The ids are new each time."""
    ids = [uuid7(datetime.now(UTC)) for _ in range(4)]
    first, second, third, unknown = ids
    yield "a half", "/half", half(first), {}
    yield "a repeated half", "/half", half(first), {}
    yield "other content", "/half", half(first, messages=[{"topic": "order", "body": {"n": 2}}]), {}
    yield "an id of the service's", "/half", half(None), {}
    yield "an unregistered group", "/half", half(None, producer_group="unregistered"), {}
    yield "an id of another time", "/half", half(UUID(int=(1 << 80) | 7 << 76 | 2 << 62)), {}
    yield "no messages", "/half", half(None, messages=[]), {}
    yield "a wrong verdict", "/end", end(first, "maybe"), {}
    yield "unknown", "/end", end(first, "unknown"), {}
    yield "a commit", "/end", end(first, "commit"), {}
    yield "a repeated commit", "/end", end(first, "commit"), {}
    yield "the opposite verdict", "/end", end(first, "rollback"), {}
    yield "another group", "/end", end(first, "commit", producer_group="other"), {}
    yield "a second half", "/half", half(second), {}
    yield "a rollback", "/end", end(second, "rollback", reason="out of stock"), {}
    yield "a half that was committed", "/half", half(first), {}
    yield "a half that was rolled back", "/half", half(second), {}
    yield "halves with a verdict", "/halves", {"halves": [half(second), half(None), half(first), half(second)]}, {}
    yield "a half that never was", "/end", end(unknown, "commit"), {}
    yield "unknown of a half that never was", "/end", end(unknown, "unknown"), {}
    yield "messages", "/messages", half(third), {}
    yield "repeated messages", "/messages", half(third), {}
    many, others = [uuid7(datetime.now(UTC)) for _ in range(3)], [uuid7(datetime.now(UTC)) for _ in range(2)]
    yield "halves", "/halves", {"halves": [half(one) for one in many]}, {}
    yield "repeated halves", "/halves", {"halves": [half(one) for one in many[::-1]]}, {}
    yield (
        "halves, some refused",
        "/halves",
        {"halves": [half(None), half(None, messages=[]), half(first, messages=1)]},
        {},
    )
    yield "no halves", "/halves", {"halves": []}, {}
    yield "ends", "/ends", {"ends": [end(many[0], "commit"), end(many[1], "rollback"), end(many[2], "unknown")]}, {}
    yield "ends, some refused", "/ends", {"ends": [end(many[0], "rollback"), end(unknown, "commit"), {}]}, {}
    yield "many transactions of messages", "/messages", {"transactions": [half(one) for one in others]}, {}
    yield "no transactions of messages", "/messages", {"transactions": []}, {}
    for path in ("/half", "/end", "/messages", "/halves", "/ends"):
        yield f"no body at {path}", path, b"", {}
        yield f"no JSON at {path}", path, b"{", {}
        yield f"no UTF-8 at {path}", path, b'{"a":"\xff"}', {}
        yield f"a surplus field at {path}", path, {"surprise": 1}, {}
        yield f"another type at {path}", path, b"{}", {"content-type": "text/plain"}
        yield f"an encoded body at {path}", path, b"{}", {"content-encoding": "gzip"}
        yield f"a foreign host at {path}", path, b"{}", {"host": "evil.example"}
        yield f"a foreign origin at {path}", path, b"{}", {"origin": "https://evil.example"}
        yield f"a large body at {path}", path, half(None, messages=[{"topic": "t", "body": "x" * 300_000}]), {}


def request_of(path: str, body: Any, headers: dict[str, str], *, last: bool = False) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"host": "localhost", "content-type": "application/json", "content-length": str(len(raw)), **headers}
    if last:
        sent["connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + raw


ID_OR_OFFSET = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}|(?<=\"offset\":)\d+")
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)|-\d+(?= s from)|(?<=\"skew_s\":)-[\d.]+")


def comparable(answers: list[Answer]) -> list[Any]:
    """Return answers without their times, and with ids and offsets numbered in the order in which they come."""
    known: dict[str, str] = {}
    numbers = count()
    found = []
    for answer in answers:
        headers = dict(answer.headers)
        assert headers.pop("content-length") == str(len(answer.body))
        body = TIME.sub("time", answer.body.decode())
        body = ID_OR_OFFSET.sub(lambda match: known.setdefault(match[0], f"#{next(numbers)}"), body)
        found.append((answer.status, list(headers.items()), body))
    return found


async def answers_of(port: int, requests: list[bytes], *, at_once: bool = False) -> list[Answer]:
    """Send requests over one connection, each after the answer to the one before it, or all at once."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answers = []
        try:
            if at_once:
                writer.write(b"".join(requests))
            for request in requests:
                if not at_once:
                    writer.write(request)
                answer = await read_answer(reader)
                assert answer is not None, request[:200]
                answers.append(answer)
            return answers
        finally:
            writer.close()
            await writer.wait_closed()


async def both(ports: dict[str, int], make: Callable[[], list[bytes]], *, at_once: bool = False) -> list[Any]:
    """Return the answers, which are equal under both protocols."""
    plain, fast = [comparable(await answers_of(ports[kind], make(), at_once=at_once)) for kind in KINDS]
    assert fast == plain
    return fast


@shares
async def test_every_case_has_the_same_answer(ports: dict[str, int]) -> None:
    names = [name for name, *_ in cases()]
    found = await both(ports, lambda: [request_of(path, body, headers) for _, path, body, headers in cases()])
    statuses = dict(zip(names, (status for status, *_ in found), strict=True))
    assert (statuses["a half"], statuses["a repeated half"], statuses["other content"]) == (201, 200, 409)
    assert (statuses["unknown"], statuses["a commit"], statuses["the opposite verdict"]) == (202, 200, 409)
    assert {400, 403, 404, 415, 421, 422} <= set(statuses.values())


@shares
async def test_pipelined_requests_are_answered_in_order(ports: dict[str, int]) -> None:
    chosen = [(path, body, headers) for name, path, body, headers in cases() if "large" not in name]
    paths = ["/livez", *(path for path, _, _ in chosen)]

    def pipelined() -> list[bytes]:
        new = [(path, body, headers) for name, path, body, headers in cases() if "large" not in name]
        return [b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n", *(request_of(*one) for one in new)]

    found = await both(ports, pipelined, at_once=True)
    assert len(found) == len(paths)
    assert [status for status, *_ in found][:5] == [200, 201, 200, 409, 201]


@shares
@pytest.mark.parametrize("pieces", [2, 7])
async def test_a_body_in_pieces_has_the_same_answer(ports: dict[str, int], pieces: int) -> None:
    for port in ports.values():
        raw = request_of("/half", half(None), {})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        step = len(raw) // pieces
        for at in range(0, len(raw), step):
            writer.write(raw[at : at + step])
            await writer.drain()
            await asyncio.sleep(0)
        answer = await read_answer(reader)
        assert answer is not None
        assert answer.status == 201
        writer.close()
        await writer.wait_closed()


@shares
async def test_the_last_request_of_a_connection_closes_it(ports: dict[str, int]) -> None:
    for port in ports.values():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_of("/half", half(None), {}, last=True))
        answer = await read_answer(reader)
        assert answer is not None
        assert (answer.status, answer.headers["connection"]) == (201, "close")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


@shares
async def test_the_fast_cycle_is_taken_for_the_fast_path_alone(
    shared_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other tests would compare uvicorn with itself."""
    taken: list[str] = []
    made = FastCycle.__init__

    def note(self: FastCycle, connection: Any, *rest: Any, **named: Any) -> None:
        taken.append(connection.url.decode())
        made(self, connection, *rest, **named)

    monkeypatch.setattr(FastCycle, "__init__", note)
    requests = [
        request_of("/half", half(None), {}),
        request_of("/half?x=1", half(None), {}),
        request_of("/half", half(None), {}).replace(b"POST", b"PUT"),
        request_of("/topics", {}, {}),
    ]
    async with served(shared_client, HttpProtocol) as port:
        await answers_of(port, requests)
        assert taken == ["/half"]
    # What these options do is done in uvicorn's own cycle.
    for options in ({"root_path": "/hn"}, {"limit_concurrency": 100}):
        async with served(shared_client, HttpProtocol, **options) as port:
            await answers_of(port, requests[:1])
    assert taken == ["/half"]


@shares
async def test_a_client_that_leaves_within_its_body_changes_nothing(ports: dict[str, int]) -> None:
    raw = request_of("/half", half(None), {})
    for port in ports.values():
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw[:-5])
        await writer.drain()
        writer.transport.abort()
        [answer] = await answers_of(port, [raw])
        assert answer.status == 201
