"""Clients that connect and then send little, nothing, or without end: over real sockets, they block no other client."""

import asyncio
import contextlib
import re
import resource
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from app.server.connection_limits import most_connections
from tests.server.own_settings import Start, started_by_need
from tests.server.raw_http import last_words, trickle
from tests.support.processes import Service
from tests.support.requirements import absent

ORDER = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}
HEAD = b"POST /half HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def served(dsn: str, db: Connection, tmp_path: Path) -> AsyncIterator[Start]:
    """Start the service with settings of its own; the group `shop` is registered."""
    async with started_by_need(dsn, db, tmp_path) as start:
        yield start


@contextlib.asynccontextmanager
async def connected(service: Service) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answered_in_full(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        assert (await client.post("/half", json=ORDER)).status_code == 201
        assert (await client.get("/livez")).status_code == 200


async def write_on(writer: asyncio.StreamWriter) -> None:
    """Send without end. Raises ConnectionError when the connection is gone."""
    while True:
        writer.write(b"more")
        await writer.drain()
        await asyncio.sleep(0.01)


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
# What a client sends first, what it then sends again and again, and the statuses of the answers.
SLOW = {
    "says nothing": (b"", b"", []),
    "blank lines": (b"", b"\r\n", [408]),
    "a head that never ends": (b"POST /half HTTP/1.1\r\n", b"x-a: b\r\n", [408]),
    "a part of a head after a request": (GET + b"POST /half HT", b"", [200, 408]),
    "a body that never ends": (HEAD + b"Content-Length: 100000\r\n\r\n", b" ", [408]),
    "the body of an upgrade that never ends": (
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 100000\r\n\r\n",
        b" ",
        [408],
    ),
    "chunks that never end": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", [408]),
    "a body after its answer": (
        b"POST /half HTTP/1.1\r\nHost: evil\r\nContent-Length: 100000\r\n\r\n",
        b" ",
        [421],
    ),
    "blank lines after an answer": (GET, b"\r\n", [200]),
}


async def test_slow_clients_are_disconnected(served: Start) -> None:
    service = await served(request_timeout_s=1)

    async def slow(begin: bytes, piece: bytes, statuses: list[int]) -> None:
        async with connected(service) as (reader, writer):
            writer.write(begin)
            trickling = asyncio.create_task(trickle(writer, piece) if piece else asyncio.sleep(0))
            found = re.findall(rb"HTTP/1.1 ([0-9]+) ", await last_words(reader))
            assert [int(status) for status in found] == statuses, begin
            trickling.cancel()

    await asyncio.gather(*(slow(*one) for one in SLOW.values()))
    await answered_in_full(service)


async def test_heads_have_a_limit(served: Start) -> None:
    limit = 32 * 1024
    service = await served(head_limit_bytes=limit)
    for begin, piece in (
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"x-a: " + b"b" * 1000 + b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nx-a: ", b"b" * 1000),
        (b"GET /", b"b" * 1000),
    ):
        async with connected(service) as (reader, writer):
            reading, sent = asyncio.create_task(last_words(reader)), 0
            writer.write(begin)
            with contextlib.suppress(ConnectionError):
                while not reading.done() and sent < 1000 * limit:
                    writer.write(piece)
                    await writer.drain()
                    # `drain` returns at once while the socket takes bytes, so the answer would not be read.
                    await asyncio.sleep(0)
                    sent += len(piece)
            said = await reading
            assert said == b"" or said.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), said
            assert sent < 1000 * limit
    async with connected(service) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nx-a: " + b"b" * 20_000 + b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with connected(service) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nx-a: " + b"b" * limit + b"\r\n\r\n")
        said = await last_words(reader)
        assert said.startswith(b"HTTP/1.1 431"), said
        assert f"over {limit} bytes".encode() in said


async def test_an_idle_connection_is_closed_after_the_setting(served: Start) -> None:
    service = await served(keep_alive_s=1)
    async with connected(service) as (reader, writer):
        began = time.monotonic()
        writer.write(GET)
        said = await last_words(reader)
        assert said.startswith(b"HTTP/1.1 200"), said
        # The default is 75 s.
        assert 0.9 < time.monotonic() - began < 60


async def test_a_refused_client_that_does_not_close_is_disconnected(served: Start) -> None:
    """The other side stays open, so only the service can end the connection."""
    service = await served(refusal_read_s=0.5)
    async with connected(service) as (reader, writer):
        began = time.monotonic()
        writer.write(b"hello\r\n\r\n")
        assert (await last_words(reader)).startswith(b"HTTP/1.1 400")
        # The answer has ended. A write to a connection that is gone fails.
        with pytest.raises(ConnectionError):
            await write_on(writer)
        assert 0.4 < time.monotonic() - began < 60


async def test_connections_that_rest_make_room(served: Start) -> None:
    service = await served(connections_max=16)
    async with contextlib.AsyncExitStack() as stack:
        active = await stack.enter_async_context(httpx.AsyncClient(base_url=service.url, timeout=60))
        for _ in range(4):
            for _ in range(20):
                await stack.enter_async_context(connected(service))
            # It has asked, so others go before it.
            assert (await active.post("/half", json=ORDER)).status_code == 201
        await answered_in_full(service)


async def test_connections_that_rest_make_room_for_the_newest(served: Start) -> None:
    service = await served(connections_max=16)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=service.url, timeout=60))
            assert (await client.get("/livez")).status_code == 200
        # All rest between requests, so the newest is the only one that has sent nothing.
        await answered_in_full(service)


async def test_a_request_on_many_connections_at_once(served: Start) -> None:
    service = await served(request_timeout_s=1)
    # The connection lasts longer than the limit of one request: the limit is for a request.
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert (await client.post("/half", json=ORDER)).status_code == 201
            await asyncio.sleep(0.05)


def test_the_limit_of_files_is_raised_as_far_as_it_may() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        soft = min(2048, before[1]) if before[1] != resource.RLIM_INFINITY else 2048
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        allowed = most_connections(1000)
        assert allowed == 1000
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
async def test_ten_thousand_idle_connections(served: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the clients send nothing, half send part of a head; halves and ends are as fast as without them."""
    count = 10_000
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < count + 1000:
        absent(f"this machine lets a process open {before[1]} files; 11,000 are needed (ulimit -n)", "MACHINE")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], count + 1000), before[1]))
    service = await served(request_timeout_s=600)
    writers = []
    try:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            alone = await timed(client)
            for number in range(count):
                _, writer = await asyncio.open_connection("127.0.0.1", service.port)
                if number % 2:
                    writer.write(b"POST /half HTTP/1.1\r\nHost: loc")
                writers.append(writer)
            beside = await timed(client)
        with capsys.disabled():
            print(f"\n/half alone {alone * 1000:.2f} ms, beside {count} idle ones {beside * 1000:.2f} ms (median)")
        assert service.process is not None
        assert service.process.poll() is None
    finally:
        for writer in writers:
            writer.transport.abort()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def timed(client: httpx.AsyncClient) -> float:
    """The median time of a half, in seconds."""
    taken = []
    for _ in range(200):
        began = time.perf_counter()
        assert (await client.post("/half", json=ORDER)).status_code == 201
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
