"""Requests of a producer that wait at the same time share one, and nothing else changes."""

import asyncio
import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from halfnote import COMMIT, HalfFailed, Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote import batching as rules
from halfnote.async_batching import BatchingWire
from halfnote.batching import (
    BYTES_MOST,
    BYTES_SHARED,
    TRANSACTIONS_MOST,
    UNDER_WAY_MOST,
    Single,
    combined,
    fitting,
    parted,
)
from halfnote.exchange import NoAnswer, Request, Response
from halfnote.sync_batching import Batching, _Waiting
from halfnote.testing import Coordinator

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.sdk.coordinators import Scripted, answer, problem
from tests.sdk.in_process import FromThreads, service
from tests.support.load import until

ORDER = Outgoing("order", {"order": 1030})
LIMIT_S = 30
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{:02x}"


def half(n: int, trace: str | None = None, size: int = 0, timeout_s: float = LIMIT_S) -> Request:
    content = json.dumps({"n": n, "pad": "x" * size}).encode()
    return Request("POST", "/half", content, timeout_s, {} if trace is None else {"traceparent": trace})


def numbers(request: Request) -> list[int]:
    """The numbers of the halves of a request."""
    content = json.loads(request.content)
    return [one["n"] for one in content["halves"]] if request.path == "/halves" else [content["n"]]


def outcomes(*each: dict[str, Any]) -> Response:
    return Response(200, {}, json.dumps({"outcomes": each}).encode())


def noting_paths(runtime: Runtime) -> tuple[httpx.ASGITransport, list[str]]:
    """Return the service, and the paths of the requests that come to it."""
    paths: list[str] = []
    transport = service(runtime)
    asked = transport.handle_async_request

    async def handle(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return await asked(request)

    transport.handle_async_request = handle  # type: ignore[method-assign]
    return transport, paths


class Service:
    """A wire that holds each request until `go`; its answers repeat the numbers of the halves."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.held: list[asyncio.Future[Response | NoAnswer]] = []
        self.closed = False

    async def ask(self, request: Request) -> Response | NoAnswer:
        self.asked.append(request)
        self.held.append(asyncio.get_running_loop().create_future())
        return await self.held[-1]

    async def aclose(self) -> None:
        self.closed = True

    def go(self, n: int, came: Response | NoAnswer | None = None) -> None:
        """Answer the n-th request."""
        self.held[n].set_result(well(self.asked[n]) if came is None else came)


def well(request: Request) -> Response:
    if request.path != "/halves":
        return Response(201, {}, request.content)
    return outcomes(*[{"status": 201, "n": n} for n in numbers(request)])


def number_in(came: Response | NoAnswer) -> int:
    assert isinstance(came, Response)
    found: int = (came.part or json.loads(came.content))["n"]
    return found


async def turns() -> None:
    """Let everything that can run now run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_request_has_500_transactions_and_256_kib_at_most() -> None:
    assert fitting([1] * 501) == TRANSACTIONS_MOST == 500
    assert fitting([BYTES_MOST - 1, 1, 1]) == 2
    assert fitting([BYTES_MOST + 1, 1]) == 1
    assert fitting([3]) == 1
    assert not Single(lambda: 0.0).takes(half(1, size=BYTES_SHARED))
    assert Single(lambda: 0.0).takes(half(1))


def test_only_single_halves_ends_and_plain_messages_are_combined() -> None:
    single = Single(lambda: 0.0)
    assert not single.takes(Request("PUT", "/producer-groups/shop", b"{}", 5))
    assert not single.takes(Request("POST", "/halves", b"{}", 5))
    assert not single.takes(Request("POST", "/messages", b'{"transactions":[]}', 5))
    assert single.takes(Request("POST", "/messages", b'{"producer_group":"shop"}', 5))


def test_the_trace_contexts_of_all_are_in_the_request() -> None:
    one = half(1)
    assert combined([one]) is one
    both = combined([half(1, TRACE.format(1)), half(2)])
    assert (both.path, both.headers) == ("/halves", {})
    assert json.loads(both.content)["traceparents"] == [TRACE.format(1), None]
    assert json.loads(combined([half(1), half(2)]).content).keys() == {"halves"}
    assert combined([half(1), Request("POST", "/half", b"{}", 37)]).timeout_s == 37


def test_each_gets_what_a_request_of_its_own_would_get() -> None:
    found = parted(outcomes({"status": 201, "n": 1}, {"status": 503, "retry_after_s": 4}), 2)
    assert found is not None
    first, second = found
    assert isinstance(first, Response)
    assert isinstance(second, Response)
    assert (first.status, first.part) == (201, {"status": 201, "n": 1})
    assert (second.status, second.headers) == (503, {"retry-after": "4"})
    lost = NoAnswer("reset", sent=True)
    assert parted(lost, 3) == [lost] * 3
    busy = Response(503, {"retry-after": "1"}, b"{}")
    assert parted(busy, 2) == [busy] * 2
    for status in (401, 403, 408, 425, 429, 500, 502):
        refusal = Response(status, {}, b"{}")
        assert parted(refusal, 2) == [refusal] * 2


@pytest.mark.parametrize("status", [400, 404, 405, 413, 422])
def test_a_list_that_is_refused_as_a_whole_is_sent_one_by_one(status: int) -> None:
    assert parted(Response(status, {}, b"{}"), 2) is None
    # A single request has its own refusal.
    assert parted(Response(status, {}, b"{}"), 1) == [Response(status, {}, b"{}")]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"outcomes": 3}', b'{"outcomes": [{"status": 200}]}', b'{"outcomes": [1, 2]}', b"["],
)
def test_an_answer_that_does_not_fit_may_have_stored_all(content: bytes) -> None:
    found = parted(Response(200, {}, content), 2)
    assert found is not None
    assert [isinstance(one, NoAnswer) and one.sent for one in found] == [True, True]


async def test_callers_of_one_turn_share_a_request_and_later_ones_wait_for_a_place() -> None:
    far = Service()
    wire = BatchingWire(far, LIMIT_S)
    asking = [asyncio.create_task(wire.ask(half(n))) for n in range(40)]
    await turns()
    assert [numbers(request) for request in far.asked] == [list(range(40))]
    asking.append(asyncio.create_task(wire.ask(half(40))))
    await turns()
    assert far.asked[1].path == "/half"
    asking += [asyncio.create_task(wire.ask(half(n))) for n in (41, 42)]
    await turns()
    assert len(far.asked) == UNDER_WAY_MOST
    far.go(1)
    await turns()
    assert numbers(far.asked[2]) == [41, 42]
    # Ends have places of their own.
    ending = asyncio.create_task(wire.ask(Request("POST", "/end", b'{"n": 99}', 5)))
    await turns()
    assert far.asked[3].path == "/end"
    for n in (0, 2, 3):
        far.go(n)
    assert [number_in(came) for came in await asyncio.gather(*asking)] == list(range(43))
    assert number_in(await ending) == 99
    await wire.aclose()
    assert far.closed


async def test_more_callers_than_fit_wait_for_a_place() -> None:
    far = Service()
    wire = BatchingWire(far, LIMIT_S)
    count = UNDER_WAY_MOST * TRANSACTIONS_MOST + 1
    asking = [asyncio.create_task(wire.ask(half(n))) for n in range(count)]
    await turns()
    assert [len(numbers(request)) for request in far.asked] == [TRANSACTIONS_MOST] * UNDER_WAY_MOST
    for n in range(UNDER_WAY_MOST):
        far.go(n)
    await turns()
    assert numbers(far.asked[-1]) == [count - 1]
    far.go(UNDER_WAY_MOST)
    assert [number_in(came) for came in await asyncio.gather(*asking)] == list(range(count))


async def test_a_caller_that_is_canceled_while_it_waits_sends_nothing() -> None:
    far = Service()
    wire = BatchingWire(far, LIMIT_S)
    first, second = (asyncio.create_task(wire.ask(half(n))) for n in (1, 2))
    await turns()
    third = asyncio.create_task(wire.ask(half(3)))
    await turns()
    waiting, other = (asyncio.create_task(wire.ask(half(n))) for n in (4, 5))
    await turns()
    waiting.cancel()
    # One that is canceled while its request is under way disturbs no other.
    first.cancel()
    far.go(0)
    far.go(1)
    await turns()
    assert numbers(far.asked[2]) == [5]
    far.go(2)
    assert [number_in(one) for one in await asyncio.gather(second, third, other)] == [2, 3, 5]
    assert waiting.cancelled()
    assert first.cancelled()


async def test_a_service_without_lists_is_asked_one_by_one_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    asked: list[str] = []

    class Old:
        async def ask(self, request: Request) -> Response | NoAnswer:
            asked.append(request.path)
            return Response(404, {}, b"{}") if request.path == "/halves" else well(request)

        async def aclose(self) -> None:
            pass

    wire = BatchingWire(Old())

    async def both() -> None:
        found = await asyncio.gather(*[wire.ask(half(n)) for n in (1, 2)])
        assert [number_in(one) for one in found] == [1, 2]

    await both()
    assert asked == ["/halves", "/half", "/half"]
    await both()
    assert asked[3:] == ["/half", "/half"]
    now[0] += rules.SINGLE_FOR_S
    await both()
    assert asked[5:] == ["/halves", "/half", "/half"]


async def test_an_exception_of_the_transport_reaches_each_caller_and_frees_the_place() -> None:
    class Broken:
        async def ask(self, request: Request) -> Response | NoAnswer:
            raise LookupError("no such transport")

        async def aclose(self) -> None:
            pass

    wire = BatchingWire(Broken())
    for _ in range(UNDER_WAY_MOST + 1):
        found = await asyncio.gather(*[wire.ask(half(n)) for n in (1, 2)], return_exceptions=True)
        assert [type(one) for one in found] == [LookupError] * 2


async def test_closing_answers_what_is_under_way_and_what_waits() -> None:
    far = Service()
    wire = BatchingWire(far, LIMIT_S)
    under_way = []
    for n in range(UNDER_WAY_MOST):
        under_way.append(asyncio.create_task(wire.ask(half(n))))
        await turns()
    waiting = [asyncio.create_task(wire.ask(half(n))) for n in (10, 11)]
    await turns()
    # The task of this one is made, and has not begun.
    ending = asyncio.create_task(wire.ask(Request("POST", "/end", b'{"n": 99}', 5)))
    while not (lane := wire._lanes.get("/end")) or not lane._under_way:
        await asyncio.sleep(0)
    await asyncio.wait_for(wire.aclose(), LIMIT_S)
    found = await asyncio.wait_for(asyncio.gather(*under_way, *waiting, ending), LIMIT_S)
    assert [one.sent for one in found if isinstance(one, NoAnswer)] == [True] * UNDER_WAY_MOST + [False] * 2 + [True]
    assert len(far.asked) <= UNDER_WAY_MOST + 1
    late = await asyncio.wait_for(wire.ask(half(12)), LIMIT_S)
    assert isinstance(late, NoAnswer)
    assert not late.sent


async def test_a_request_has_the_context_of_its_caller_and_a_shared_one_has_none() -> None:
    var: ContextVar[str] = ContextVar("var", default="none")
    seen: list[tuple[str, str]] = []

    class Seeing(Service):
        async def ask(self, request: Request) -> Response | NoAnswer:
            seen.append((request.path, var.get()))
            return await super().ask(request)

    far = Seeing()
    wire = BatchingWire(far, LIMIT_S)

    async def caller(n: int) -> Response | NoAnswer:
        var.set(f"caller {n}")
        return await wire.ask(half(n))

    asking = []
    for n in range(UNDER_WAY_MOST):
        asking.append(asyncio.create_task(caller(n)))
        await turns()
    # The end of another caller's request sends this one.
    asking.append(asyncio.create_task(caller(2)))
    await turns()
    far.go(0)
    await turns()
    asking += [asyncio.create_task(caller(n)) for n in (3, 4)]
    await turns()
    far.go(1)
    await turns()
    far.go(2)
    far.go(3)
    await asyncio.gather(*asking)
    assert seen == [("/half", "caller 0"), ("/half", "caller 1"), ("/half", "caller 2"), ("/halves", "none")]


async def test_a_request_without_an_answer_keeps_others_waiting_for_a_short_time_only() -> None:
    far = Service()
    wire = BatchingWire(far, slow_s=0.05)
    held = []
    for n in range(UNDER_WAY_MOST):
        held.append(asyncio.create_task(wire.ask(half(n))))
        await turns()
    others = [asyncio.create_task(wire.ask(half(n))) for n in (10, 11)]
    await until(lambda: len(far.asked) == UNDER_WAY_MOST + 1)
    assert numbers(far.asked[-1]) == [10, 11]
    far.go(UNDER_WAY_MOST)
    assert [number_in(one) for one in await asyncio.gather(*others)] == [10, 11]
    assert not any(one.done() for one in held)
    for n in range(UNDER_WAY_MOST):
        far.go(n)
    assert [number_in(one) for one in await asyncio.gather(*held)] == list(range(UNDER_WAY_MOST))
    # No place is lost, and no timer is left.
    await turns()
    assert [(lane._under_way, lane._awaited) for lane in wire._lanes.values()] == [({}, {})]


async def test_each_caller_waits_for_its_own_time_at_most() -> None:
    far = Service()
    wire = BatchingWire(far, LIMIT_S)
    asking = [asyncio.create_task(wire.ask(half(n, timeout_s=s))) for n, s in ((1, 0.05), (2, LIMIT_S))]
    came = await asking[0]
    assert isinstance(came, NoAnswer)
    assert (came.sent, numbers(far.asked[0])) == (True, [1, 2])
    # Nothing is sent of one that waits for a place for all of its time.
    other = asyncio.create_task(wire.ask(half(3)))
    await turns()
    came = await wire.ask(half(4, timeout_s=0.05))
    assert isinstance(came, NoAnswer)
    assert not came.sent
    for n in range(2):
        far.go(n)
    assert [number_in(one) for one in await asyncio.gather(asking[1], other)] == [2, 3]
    await turns()
    assert len(far.asked) == 2


async def test_a_request_with_an_answer_has_no_timer() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    far = Service()
    wire = BatchingWire(far, slow_s=0.01)
    asking = asyncio.create_task(wire.ask(half(1)))
    await turns()
    far.go(0)
    assert number_in(await asking) == 1
    await asyncio.sleep(0.05)
    assert errors == []


class HeldService:
    """The same for threads."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.goes_on = threading.Semaphore(0)

    def ask(self, request: Request) -> Response | NoAnswer:
        self.asked.append(request)
        assert self.goes_on.acquire(timeout=LIMIT_S)
        return well(request)


def waiting_in(batching: Batching) -> int:
    return sum(len(lane._waiting) for lane in batching._lanes.values())


async def test_threads_share_requests() -> None:
    far = HeldService()
    batching = Batching(far.ask, LIMIT_S)
    with ThreadPoolExecutor(20) as pool:
        leaders = [pool.submit(batching.ask, half(n)) for n in range(UNDER_WAY_MOST)]
        await until(lambda: len(far.asked) == UNDER_WAY_MOST)
        asking = [pool.submit(batching.ask, half(n)) for n in range(10, 25)]
        await until(lambda: waiting_in(batching) == 15)
        far.goes_on.release()
        await until(lambda: len(far.asked) == UNDER_WAY_MOST + 1)
        assert sorted(numbers(far.asked[-1])) == list(range(10, 25))
        far.goes_on.release(2)
        assert [number_in(one.result(LIMIT_S)) for one in asking] == list(range(10, 25))
        assert [number_in(one.result(LIMIT_S)) for one in leaders] == list(range(UNDER_WAY_MOST))
        # No place is lost.
        far.goes_on.release(UNDER_WAY_MOST)
        again = [pool.submit(batching.ask, half(n)) for n in range(UNDER_WAY_MOST)]
        assert [number_in(one.result(LIMIT_S)) for one in again] == list(range(UNDER_WAY_MOST))


async def test_a_thread_without_an_answer_keeps_others_waiting_for_a_short_time_only() -> None:
    goes_on, lock, asked = threading.Event(), threading.Lock(), []

    def ask(request: Request) -> Response | NoAnswer:
        with lock:
            asked.append(request)
            number = len(asked)
        if number <= UNDER_WAY_MOST:
            assert goes_on.wait(LIMIT_S)
        elif number == UNDER_WAY_MOST + 1:
            # The threads whose requests are parts of this one wait for it, however long it takes.
            time.sleep(1.2)
        return well(request)

    batching = Batching(ask, slow_s=0.5)
    with ThreadPoolExecutor(20) as pool:
        held = []
        for n in range(UNDER_WAY_MOST):
            held.append(pool.submit(batching.ask, half(n)))
            await until(lambda: len(asked) == len(held))
        others = [pool.submit(batching.ask, half(n)) for n in range(10, 25)]
        try:
            assert [number_in(one.result(LIMIT_S)) for one in others] == list(range(10, 25))
            assert not any(one.done() for one in held)
        finally:
            goes_on.set()
        assert [number_in(one.result(LIMIT_S)) for one in held] == list(range(UNDER_WAY_MOST))
    assert sorted(n for request in asked for n in numbers(request)) == [*range(UNDER_WAY_MOST), *range(10, 25)]
    assert [lane._under_way for lane in batching._lanes.values()] == [{}]


async def test_each_thread_waits_for_its_own_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("halfnote.sync_batching.time", SimpleNamespace(monotonic=lambda: now[0]))
    far = HeldService()
    batching = Batching(far.ask, slow_s=0.05)
    with ThreadPoolExecutor(20) as pool:
        asking = []
        for n in range(UNDER_WAY_MOST):
            asking.append(pool.submit(batching.ask, half(n)))
            await until(lambda: len(far.asked) == len(asking))
        for n, timeout_s in enumerate((5.0, 5.0, 1.0, 6.0), UNDER_WAY_MOST):
            asking.append(pool.submit(batching.ask, half(n, timeout_s=timeout_s)))
            await until(lambda: waiting_in(batching) == len(asking) - UNDER_WAY_MOST)
        now[0] += 0.03125
        far.goes_on.release()
        await until(lambda: len(far.asked) == UNDER_WAY_MOST + 1)
        # The thread that sends waits no longer than its own time, so it sends nothing that may take longer.
        first, second, third, last = range(UNDER_WAY_MOST, UNDER_WAY_MOST + 4)
        assert (numbers(far.asked[-1]), far.asked[-1].timeout_s) == ([first, second, third], 4.96875)
        assert waiting_in(batching) == 1
        now[0] += 1.5
        came = asking[third].result(LIMIT_S)
        assert isinstance(came, NoAnswer)
        assert came.sent
        # Its place came late: the rest of its time is left.
        await until(lambda: len(far.asked) == UNDER_WAY_MOST + 2)
        assert (numbers(far.asked[-1]), far.asked[-1].timeout_s) == ([last], 4.46875)
        far.goes_on.release(10)
        answered = [0, 1, first, second, last]
        assert [number_in(asking[n].result(LIMIT_S)) for n in answered] == answered


async def test_a_thread_without_a_place_in_its_time_sends_nothing() -> None:
    far = HeldService()
    batching = Batching(far.ask, LIMIT_S)
    with ThreadPoolExecutor(20) as pool:
        held = [pool.submit(batching.ask, half(n)) for n in range(UNDER_WAY_MOST)]
        await until(lambda: len(far.asked) == UNDER_WAY_MOST)
        came = await asyncio.to_thread(batching.ask, half(10, timeout_s=0.05))
        assert isinstance(came, NoAnswer)
        assert not came.sent
        far.goes_on.release(UNDER_WAY_MOST)
        assert [number_in(one.result(LIMIT_S)) for one in held] == list(range(UNDER_WAY_MOST))
    assert (waiting_in(batching), len(far.asked)) == (0, UNDER_WAY_MOST)
    assert [lane._under_way for lane in batching._lanes.values()] == [{}]


@pytest.mark.parametrize("has_place", [False, True])
async def test_a_thread_that_is_interrupted_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, has_place: bool
) -> None:
    class Stopped(BaseException):
        pass

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if has_place:
                assert super().wait(LIMIT_S)
            raise Stopped

    far = HeldService()
    batching = Batching(far.ask, LIMIT_S)
    with ThreadPoolExecutor(20) as pool:
        leaders = [pool.submit(batching.ask, half(n)) for n in range(UNDER_WAY_MOST)]
        await until(lambda: len(far.asked) == UNDER_WAY_MOST)
        monkeypatch.setattr("halfnote.sync_batching.threading", SimpleNamespace(Event=Interrupted, Lock=threading.Lock))
        interrupted = pool.submit(batching.ask, half(10))
        if has_place:
            await until(lambda: waiting_in(batching) == 1)
        else:
            assert isinstance(interrupted.exception(LIMIT_S), Stopped)
        far.goes_on.release(UNDER_WAY_MOST)
        assert isinstance(interrupted.exception(LIMIT_S), Stopped)
        assert [number_in(one.result(LIMIT_S)) for one in leaders] == list(range(UNDER_WAY_MOST))
    assert waiting_in(batching) == 0
    assert [lane._under_way for lane in batching._lanes.values()] == [{}]
    assert len(far.asked) == UNDER_WAY_MOST


async def test_a_thread_whose_request_fails_frees_the_others() -> None:
    held, broken = threading.Semaphore(0), [True]

    def ask(request: Request) -> Response | NoAnswer:
        assert held.acquire(timeout=LIMIT_S)
        if request.path == "/halves" and broken.pop():
            raise LookupError("no such transport")
        return well(request)

    batching = Batching(ask, LIMIT_S)
    with ThreadPoolExecutor(20) as pool:
        asking = [pool.submit(batching.ask, half(n)) for n in range(UNDER_WAY_MOST)]
        await until(lambda: sum(len(lane._under_way) for lane in batching._lanes.values()) == UNDER_WAY_MOST)
        late = [pool.submit(batching.ask, half(n)) for n in (10, 11, 12)]
        await until(lambda: waiting_in(batching) == 3)
        # The first place that is free sends for all three.
        held.release()
        await until(lambda: waiting_in(batching) == 0)
        held.release(10)
        found = [one.exception(LIMIT_S) or one.result() for one in late]
        assert sum(isinstance(one, LookupError) for one in found) == 1
        lost = [one for one in found if isinstance(one, NoAnswer)]
        assert [one.sent for one in lost] == [True, True]
        assert all(isinstance(one.result(LIMIT_S), Response) for one in asking)
        assert number_in(pool.submit(batching.ask, half(7)).result(LIMIT_S)) == 7


async def test_the_service_decides_transactions_of_many_callers(runtime: Runtime, db: Connection, group: str) -> None:
    transport, paths = noting_paths(runtime)
    current: dict[str, str] = {}

    def trace() -> str | None:
        task = asyncio.current_task()
        return current.get(task.get_name()) if task is not None else None

    async with TransactionProducer("http://localhost", group=group, transport=transport, traceparent=trace) as producer:

        async def one(n: int) -> str:
            if n % 2:
                current[f"caller-{n}"] = TRACE.format(n)
            try:
                async with producer.transaction(Outgoing("order", n)) as tx:
                    if n % 5 == 0:
                        raise RuntimeError("no stock")
            except RuntimeError:
                assert tx.result is not None
                return f"{n} {tx.result.local_verdict.value} {tx.result.end}"
            assert tx.result is not None
            return f"{n} {tx.result.local_verdict.value} {tx.result.end}"

        found = await asyncio.gather(*[asyncio.create_task(one(n), name=f"caller-{n}") for n in range(100)])
        plain = await asyncio.gather(*[producer.send_plain(Outgoing("order", -1)) for _ in range(20)])
    assert found == [f"{n} {'rollback' if n % 5 == 0 else 'commit'} recorded" for n in range(100)]
    assert len({one.transaction_id for one in plain}) == 20
    assert await db.fetchval("select count(*) from op where verdict = 1") == 80 + 20
    assert await db.fetchval("select count(*) from outbox") == 80 + 20
    traces = dict(await db.fetch("select convert_from(body, 'UTF8')::int, traceparent from half where body <> '-1'"))
    assert traces == {n: TRACE.format(n) if n % 2 else None for n in range(100)}
    assert paths.count("/half") == 0
    assert paths.count("/halves") == paths.count("/ends") == 1
    assert paths.count("/messages") == 1


async def test_threads_decide_transactions_together(runtime: Runtime, db: Connection, group: str) -> None:
    with SyncTransactionProducer("http://localhost", group=group, transport=FromThreads(service(runtime))) as producer:

        def one(n: int) -> str:
            with producer.transaction(Outgoing("order", n)) as tx:
                pass
            assert tx.result is not None
            return tx.result.end

        def work() -> list[str]:
            with ThreadPoolExecutor(16) as pool:
                return list(pool.map(one, range(200)))

        assert set(await asyncio.to_thread(work)) == {"recorded"}
    assert await db.fetchval("select count(*) from op where verdict = 1") == 200


async def test_callers_that_do_not_share_have_requests_of_their_own(
    runtime: Runtime, db: Connection, group: str
) -> None:
    transport, paths = noting_paths(runtime)
    async with TransactionProducer("http://localhost", group=group, transport=transport, batching=False) as producer:

        async def one(n: int) -> None:
            async with producer.transaction(Outgoing("order", n)):
                pass

        await asyncio.gather(*[one(n) for n in range(20)])
    assert sorted(paths) == ["/end"] * 20 + ["/half"] * 20
    paths.clear()
    with SyncTransactionProducer(
        "http://localhost", group=group, transport=FromThreads(transport), batching=False
    ) as in_threads:

        def in_thread(n: int) -> None:
            with in_threads.transaction(Outgoing("order", n)):
                pass

        def work() -> None:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(in_thread, range(100)))

        await asyncio.to_thread(work)
    assert sorted(paths) == ["/end"] * 100 + ["/half"] * 100
    assert await db.fetchval("select count(*) from op where verdict = 1") == 120


async def test_one_refused_half_refuses_no_other() -> None:
    coordinator = Coordinator("shop")
    async with TransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:

        async def one(topic: str) -> str:
            try:
                async with producer.transaction(Outgoing(topic, 1)):
                    pass
            except HalfFailed:
                return "failed"
            return "committed"

        assert await asyncio.gather(one("order"), one("o" * 300), one("order")) == ["committed", "failed", "committed"]


async def test_a_half_that_may_come_again_is_repeated_alone() -> None:
    good = {"status": 201, "born_at": "2026-11-21T08:00:00Z", "first_check_at": "2026-11-21T08:00:06Z"}
    busy = {"type": "/problems/overloaded", "title": "busy", "status": 503, "detail": "no", "retry_after_s": 0}
    halfnote = Scripted({"/halves": [answer(200, {"outcomes": [good, busy]})], "/ends": [well_ended]})
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:

        async def one() -> str:
            async with producer.transaction(ORDER) as tx:
                pass
            assert tx.result is not None
            return tx.result.end

        assert await asyncio.gather(one(), one()) == ["recorded", "recorded"]
    [both] = halfnote.asked("/halves")
    [again] = halfnote.asked("/half")
    assert again["transaction_id"] == both["halves"][1]["transaction_id"]


def well_ended(request: httpx.Request) -> httpx.Response:
    ends = json.loads(request.content)["ends"]
    return answer(200, {"outcomes": [{"status": 200, "verdict": one["verdict"]} for one in ends]})


async def test_a_refusal_of_the_key_is_each_callers() -> None:
    halfnote = Scripted({"/halves": [problem(401, "unauthenticated")]})
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:

        async def one() -> None:
            async with producer.transaction(ORDER):
                pass

        found = await asyncio.gather(one(), one(), return_exceptions=True)
    assert [type(one) for one in found] == [HalfFailed] * 2
    assert halfnote.asked("/half") == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    coordinator = Coordinator("shop")
    producer = SyncTransactionProducer("http://halfnote", group="shop", transport=coordinator.transport())

    def committed() -> bool:
        with producer.transaction(ORDER) as tx:
            pass
        return tx.result is not None and tx.result.local_verdict is COMMIT

    assert committed()
    assert producer._driver._batching is not None
    for lane in producer._driver._batching[1]._lanes.values():
        # As at a fork while other threads send.
        lane._under_way = {_Waiting(half(n)): math.inf for n in range(UNDER_WAY_MOST)}
    child = os.fork()
    if child == 0:
        threading.Timer(LIMIT_S, os._exit, (2,)).start()
        os._exit(0 if committed() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
