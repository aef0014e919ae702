"""Whole requests of the fast path are answered without a task, in order, and as the cycle with a task answers them."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.admission.authenticator import Authenticator
from app.coordinator.group_commit import GroupCommitLane
from app.coordinator.lane_call import JsonAnswer
from app.database.connection import Connection
from app.errors import DatabaseUnavailable, Overloaded, Problem
from app.ids import uuid7
from app.permissions import Role
from app.routers import events
from app.runtime.state import Runtime
from app.server.connection_limits import HttpLimits
from app.server.fast_cycle import FastCycle
from app.server.http_protocol import HttpProtocol
from app.store.coordinator.halves import Half
from tests.conftest import app_of, shares
from tests.server.raw_http import PROBE, Answer, read_answer
from tests.server.test_fast_cycle import GROUP, both, cases, comparable, end, half, request_of, served
from tests.server.test_request_pipeline import counted
from tests.support.api_keys import bearer, make

WITHIN_S = 30.0
PIPELINED = [name for name, *_ in cases() if "large" not in name]


class Taken:
    """How the requests of the fast path were answered: their targets, and how often a task was made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.whole: list[str] = []
        self.known = self.tasks = 0
        begin, begin_known, start = FastCycle.begin, HttpProtocol._begin_known, FastCycle._start_task

        def note_begin(cycle: FastCycle) -> None:
            self.whole.append(cycle.scope["path"])
            begin(cycle)

        def note_known(protocol: HttpProtocol, *rest: Any) -> None:
            self.known += 1
            begin_known(protocol, *rest)

        def note_task(cycle: FastCycle, *rest: Any) -> None:
            self.tasks += 1
            start(cycle, *rest)

        patch.setattr(FastCycle, "begin", note_begin)
        patch.setattr(HttpProtocol, "_begin_known", note_known)
        patch.setattr(FastCycle, "_start_task", note_task)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


@asynccontextmanager
async def serving(client: httpx.AsyncClient, **limits: Any) -> AsyncIterator[tuple[int, ServerState]]:
    """Serve by HttpProtocol; yield the port and what uvicorn knows about connections and tasks."""
    named = {"http_limits": HttpLimits(**limits)}
    config = uvicorn.Config(
        app_of(client), lifespan="off", ws="none", log_config=None, access_log=False, proxy_headers=False
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: HttpProtocol(config, state, named), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], state


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.005)


class HeldLane:
    """Holds the flushes of a lane until `release`."""

    def __init__(self, lane: GroupCommitLane[Any, Any], patch: pytest.MonkeyPatch) -> None:
        self.began, self.released, flush = asyncio.Event(), asyncio.Event(), lane._flush

        async def held(*rest: Any) -> Any:
            self.began.set()
            await self.released.wait()
            return await flush(*rest)

        patch.setattr(lane, "_flush", held)

    async def reached(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            await self.began.wait()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> Answer:
    async with asyncio.timeout(WITHIN_S):
        found = await read_answer(reader)
    assert found is not None
    return found


def new_id() -> Any:
    return uuid7(datetime.now(UTC))


@shares
async def test_an_ordinary_request_has_no_task(shared_client: httpx.AsyncClient, taken: Taken) -> None:
    async with served(shared_client, HttpProtocol) as port, connected(port) as (reader, writer):
        for _ in range(3):
            one = new_id()
            for path, body in (("/half", half(one)), ("/end", end(one, "commit")), ("/messages", half(None))):
                writer.write(request_of(path, body, {}))
                assert (await answer_of(reader)).status in (200, 201)
    assert taken.whole == ["/half", "/end", "/messages"] * 3
    assert taken.tasks == 0
    # The head of a connection's first request is parsed, and the head of the first request after it with the same head.
    assert taken.known >= 5


@shares
async def test_every_case_is_answered_and_counted_as_by_plain_uvicorn(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime, taken: Taken
) -> None:
    counts, found = [], []
    for kind in (HttpToolsProtocol, HttpProtocol):
        async with served(shared_client, kind) as port:
            for turn in ("parsed", "known"):
                before, answers = counted(shared_runtime), []
                async with connected(port) as (reader, writer):
                    for _, path, body, headers in cases():
                        # The head of a former case, with another length, begins the connection.
                        writer.write(request_of(path, body, headers))
                        answers.append(await answer_of(reader))
                after = counted(shared_runtime)
                counts.append({key: value - before.get(key, 0) for key, value in after.items()})
                found.append((turn, comparable(answers)))
    assert [answers for _, answers in found] == [found[0][1]] * 4
    changed = [{key: value for key, value in one.items() if value} for one in counts]
    assert changed == [changed[0]] * 4
    assert taken.known > len(PIPELINED) / 2
    # Refusals that read the database, and `unknown`.
    assert 0 < taken.tasks < len(taken.whole)
    assert (shared_runtime.load_limits.in_flight, shared_runtime.load_limits.held_bytes) == (0, 0)


@shares
async def test_pipelined_requests_are_answered_in_order_without_tasks(
    shared_client: httpx.AsyncClient, taken: Taken
) -> None:
    def pipelined() -> list[bytes]:
        new = {name: request_of(path, body, headers) for name, path, body, headers in cases()}
        return [PROBE, *(new[name] for name in PIPELINED), PROBE]

    async with served(shared_client, HttpToolsProtocol) as plain, served(shared_client, HttpProtocol) as fast:
        ports = {"plain uvicorn": plain, "fast cycle": fast}
        answers = await both(ports, pipelined, at_once=True)
        assert [status for status, *_ in answers][:4] == [200, 201, 200, 409]
        assert len(taken.whole) == len(PIPELINED)
        # Many requests that are refused at once do not nest.
        refused = await both(ports, lambda: [request_of("/half", b"{", {})] * 400, at_once=True)
        assert [status for status, *_ in refused] == [400] * 400


@shares
async def test_requests_cut_at_each_byte_are_answered_the_same(shared_client: httpx.AsyncClient) -> None:
    async with served(shared_client, HttpProtocol) as port, connected(port) as (reader, writer):
        for at in range(1, len(request_of("/half", half(new_id()), {}))):
            raw = request_of("/half", half(new_id()), {})
            writer.write(raw[:at])
            await writer.drain()
            for _ in range(3):
                await asyncio.sleep(0)
            writer.write(raw[at:] + PROBE)
            assert [(await answer_of(reader)).status for _ in range(2)] == [201, 200], at


async def test_a_client_that_leaves_before_the_answer_is_committed_and_gets_nothing(
    runtime: Runtime,
    client: httpx.AsyncClient,
    db: Connection,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    taken: Taken,
) -> None:
    held = HeldLane(runtime.lanes.half, monkeypatch)
    written: list[bytes] = []
    async with serving(client) as (port, state):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        one = new_id()
        writer.write(request_of("/half", half(one), {}))
        await held.reached()
        [protocol] = cast(set[HttpProtocol], state.connections)
        monkeypatch.setattr(protocol.transport, "_transport", Noting(protocol.transport._transport, written))  # type: ignore[attr-defined]
        writer.transport.abort()
        await until(lambda: not state.connections)
        # uvicorn waits for these before it stops.
        assert len(state.tasks) == 1
        assert runtime.load_limits.in_flight == 1
        held.released.set()
        await until(lambda: not state.tasks)
    assert taken.whole == ["/half"]
    assert written == []
    # As a task counts the answer that it could not send.
    assert counted(runtime) == {("/half", "201"): 1}
    assert (runtime.load_limits.in_flight, runtime.load_limits.held_bytes) == (0, 0)
    assert [row[0] for row in await db.fetch("select transaction_id from half")] == [one]


class Noting:
    """A transport that notes what is written."""

    def __init__(self, transport: Any, written: list[bytes]) -> None:
        self._transport, self._written = transport, written

    def write(self, data: bytes) -> None:
        self._written.append(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_a_stop_lets_the_request_under_way_end(
    runtime: Runtime, client: httpx.AsyncClient, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldLane(runtime.lanes.half, monkeypatch)
    async with serving(client) as (port, state), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}))
        await held.reached()
        for connection in list(state.connections):
            connection.shutdown()
        assert len(state.connections) == len(state.tasks) == 1
        held.released.set()
        answer = await answer_of(reader)
        assert (answer.status, answer.headers["connection"]) == (201, "close")
        assert await reader.read() == b""
        await until(lambda: not state.connections and not state.tasks)


async def test_a_stop_that_takes_too_long_cancels_the_wait(
    runtime: Runtime, client: httpx.AsyncClient, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldLane(runtime.lanes.half, monkeypatch)
    async with serving(client) as (port, state), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}))
        await held.reached()
        for task in state.tasks:
            task.cancel(msg="Task cancelled, timeout graceful shutdown exceeded")
        # As uvicorn answers for a canceled task.
        answer = await answer_of(reader)
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
        assert await reader.read() == b""
        assert (runtime.load_limits.in_flight, counted(runtime)) == (0, {})
        held.released.set()


async def test_an_answer_waits_for_a_client_that_does_not_read(
    runtime: Runtime, client: httpx.AsyncClient, group: str, monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    held = HeldLane(runtime.lanes.half, monkeypatch)
    async with serving(client) as (port, state), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}))
        await held.reached()
        [protocol] = cast(set[HttpProtocol], state.connections)
        protocol.pause_writing()
        held.released.set()
        await until(lambda: taken.tasks == 1)
        assert not protocol.cycle.response_started
        assert runtime.load_limits.in_flight == 0
        protocol.resume_writing()
        assert (await answer_of(reader)).status == 201
        await until(lambda: not state.tasks)
        # The connection serves on.
        writer.write(request_of("/half", half(None), {}))
        assert (await answer_of(reader)).status == 201
    assert counted(runtime) == {("/half", "201"): 2}


async def test_a_client_that_sends_on_and_does_not_read_is_disconnected(client: httpx.AsyncClient, group: str) -> None:
    async with serving(client, request_timeout_s=0.5) as (port, state), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}))
        assert (await answer_of(reader)).status == 201
        [protocol] = cast(set[HttpProtocol], state.connections)
        protocol.pause_writing()
        # A whole request, whose answer cannot be sent.
        writer.write(request_of("/half", half(None), {}))
        await until(lambda: not state.connections)


async def test_a_request_that_does_not_arrive_is_refused_also_if_the_client_reads_meanwhile(
    runtime: Runtime, client: httpx.AsyncClient, group: str
) -> None:
    async with serving(client, request_timeout_s=0.5) as (port, state), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}))
        assert (await answer_of(reader)).status == 201
        [protocol] = cast(set[HttpProtocol], state.connections)
        protocol.pause_writing()
        writer.write(request_of("/half", half(None), {})[:-10])
        await until(lambda: runtime.load_limits.in_flight == 1)
        protocol.resume_writing()
        assert (await answer_of(reader)).status == 408
        await until(lambda: not state.connections)
        assert runtime.load_limits.in_flight == 0


async def test_a_request_that_waits_for_an_earlier_one_is_not_late(
    runtime: Runtime, client: httpx.AsyncClient, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldLane(runtime.lanes.half, monkeypatch)
    second = request_of("/half", half(None), {})
    async with serving(client, request_timeout_s=0.5) as (port, _), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}) + second[:-10])
        await held.reached()
        # The connections are swept each second.
        await asyncio.sleep(2.5)
        held.released.set()
        assert (await answer_of(reader)).status == 201
        writer.write(second[-10:])
        assert (await answer_of(reader)).status == 201


@pytest.mark.parametrize("target", ["/end", "/transactions/check"])
async def test_no_more_is_read_while_requests_wait_for_an_earlier_one(client: httpx.AsyncClient, target: str) -> None:
    bare = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    # What one read of the event loop takes.
    one_read = 262_144 // len(bare) + 1
    count, most = one_read + 1000, 0
    async with serving(client) as (port, state), connected(port) as (reader, writer):
        writer.write(bare * count)

        async def answers() -> int:
            nonlocal most
            found = 0
            while found < count:
                [protocol] = cast(set[HttpProtocol], state.connections)
                most = max(most, len(protocol.pipeline))
                chunk = await reader.read(1 << 16)
                assert chunk
                found += chunk.count(b"HTTP/1.1 4")
            return found

        async with asyncio.timeout(120):
            assert await answers() == count
    assert most <= one_read


@pytest.mark.parametrize(
    "problem",
    [
        Overloaded("10000 requests wait for the database already; repeat later.", retry_after_s=1),
        DatabaseUnavailable("The database cannot be reached; repeat later.", retry_after_s=1),
    ],
)
@pytest.mark.parametrize("is_queued", [False, True])
async def test_a_lane_that_refuses_or_fails_is_answered_the_same(
    runtime: Runtime,
    client: httpx.AsyncClient,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
    problem: Problem,
    is_queued: bool,
) -> None:
    def enqueue(request: object) -> "asyncio.Future[Any]":
        if not is_queued:
            raise problem
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.get_loop().call_soon(future.set_exception, problem)
        return future

    monkeypatch.setattr(runtime.lanes.half, "enqueue", enqueue)
    async with served(client, HttpToolsProtocol) as plain, served(client, HttpProtocol) as fast:
        ports = {"plain uvicorn": plain, "fast cycle": fast}
        answers = await both(ports, lambda: [request_of("/half", half(None), {})])
    assert [(status, json.loads(body)["type"]) for status, _, body in answers] == [
        (503, f"/problems/{problem.slug}"),
    ]
    assert (runtime.load_limits.in_flight, runtime.load_limits.held_bytes) == (0, 0)


@pytest.mark.parametrize("where", ["before the lane", "after it"])
async def test_a_defect_is_answered_as_500(
    runtime: Runtime, client: httpx.AsyncClient, group: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: object) -> Awaitable[JsonAnswer]:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(f"app.routers.half.{'half_of' if where == 'before the lane' else 'HalfAnswer'}", fails)
    async with serving(client) as (port, _), connected(port) as (reader, writer):
        writer.write(request_of("/half", half(None), {}))
        answer = await answer_of(reader)
        assert (answer.status, json.loads(answer.body)["type"]) == (500, "/problems/internal")
    assert counted(runtime) == {("/half", "500"): 1}
    assert (runtime.load_limits.in_flight, runtime.load_limits.held_bytes) == (0, 0)


async def test_a_known_head_is_admitted_anew(
    runtime: Runtime, client: httpx.AsyncClient, group: str, taken: Taken
) -> None:
    """The head holds the key, so only parsing is spared."""
    runtime.settings = runtime.settings.model_copy(update={"auth": "keys", "body_limit_bytes": 2000})
    runtime.authenticator = Authenticator(runtime.settings, runtime.clock)
    runtime.guard.limit_bytes = 2000
    key = bearer(await make(runtime, Role.PRODUCER, producer_groups=[GROUP], topics=["*"]))
    async with serving(client) as (port, _), connected(port) as (reader, writer):
        statuses = []
        for size in (1, 2, 500, 3000):
            body = half(None, messages=[{"topic": "order", "body": "x" * size}])
            writer.write(request_of("/half", body, key))
            statuses.append((await answer_of(reader)).status)
        assert statuses == [201, 201, 201, 413]
        runtime.refusing_halves = True
        writer.write(request_of("/half", half(None), key))
        assert (await answer_of(reader)).status == 503
        runtime.authenticator.learn([], None)
        writer.write(request_of("/half", half(None), key))
        assert (await answer_of(reader)).status == 401
    # The sizes have one to four digits, and the first head of a connection is not looked up.
    assert taken.known == 4


async def test_an_idle_connection_holds_no_content(
    runtime: Runtime, client: httpx.AsyncClient, group: str, taken: Taken
) -> None:
    async with serving(client) as (port, state), connected(port) as (reader, writer):
        for number in range(4):
            one = new_id()
            writer.write(request_of("/half", half(one), {}))
            assert (await answer_of(reader)).status == 201
            [protocol] = cast(set[HttpProtocol], state.connections)
            assert bytes(protocol.cycle.body) == b"", number
            # A half is kept until its end, and the lane's runner ends in a turn of its own.
            body = {"transaction_id": str(one), "producer_group": "shop", "verdict": "rollback"}
            assert (await client.post("/end", json=body)).status_code == 200
            await until(lambda one=one: not halves_of(one))  # type: ignore[misc]
    # Both ways were taken.
    assert 2 <= taken.known <= 3


def halves_of(transaction_id: Any) -> list[Half]:
    # `isinstance` would ask lazy objects of other libraries, such as unconfigured settings, for their class.
    return [found for found in gc.get_objects() if type(found) is Half and found.transaction_id == transaction_id]


@shares
@pytest.mark.parametrize("following", [PROBE, request_of("/messages", half(None), {})], ids=["framework", "fast path"])
async def test_a_client_that_leaves_ends_its_stream_also_if_it_sent_another_request(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime, following: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    feed = shared_runtime.state_feed
    async with asyncio.timeout(WITHIN_S), serving(shared_client) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n" + following)
        await reader.readuntil(b"data:")
        assert feed.streams == 1
        writer.transport.abort()
        while feed.streams:
            await asyncio.sleep(0.01)


@shares
async def test_a_trailer_may_end_the_connection(shared_client: httpx.AsyncClient) -> None:
    body = json.dumps(half(None)).encode()
    chunked = b"%x\r\n%s\r\n0\r\nConnection: close\r\n\r\n" % (len(body), body)
    head = b"POST /messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with asyncio.timeout(WITHIN_S), serving(shared_client) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # The parser reads no request behind such a trailer.
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + PROBE)
        answer = await read_answer(reader)
        assert answer is not None
        assert (answer.status, answer.headers.get("connection")) == (201, "close")
        assert await reader.read() == b""
        writer.close()
