"""Claims that a consumer gives up after the service has recorded them: their messages come again at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from halfnote import Consumer, SyncConsumer, time_limits

from app.database.connection import Connection, connect
from app.runtime.state import Runtime
from tests.conftest import app_of, client_of
from tests.coordinator.test_races import until_waiting
from tests.sdk.pulled import CLAIM, claimed, outcomes
from tests.sdk.servers import asgi_server
from tests.support.consumers import put_pulled
from tests.support.relay_stepping import order, publish

# For a busy machine.
SOON_S = 50.0
WITHIN_S = 5.0


@pytest.fixture
async def url(runtime: Runtime, client: httpx.AsyncClient, group: str) -> AsyncIterator[str]:
    """The service on a socket, with two messages for the subscription `worker`."""
    await put_pulled(client, retry=[1000.0] * 16)
    await publish(client, order(1), order(2))
    async with asgi_server(app_of(client_of(runtime))) as address:
        yield address


class Slow(httpx.AsyncHTTPTransport):
    """Connections whose answers to claims come when `goes_on` is set. `recorded`: the service has answered one."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.goes_on = asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        if request.url.path.endswith("/claim"):
            self.recorded.set()
            await self.goes_on.wait()
        return answer


async def left(client: httpx.AsyncClient, count: int = 2) -> list[tuple[Any, int]]:
    """Claim as another consumer, until there are so many messages; return each body and attempt."""
    found: list[tuple[Any, int]] = []
    began = time.monotonic()
    while len(found) < count and time.monotonic() - began < SOON_S:
        # What is given back comes again after a second.
        await asyncio.sleep(0.1)
        answer = await client.post("/subscriptions/worker/claim", json={})
        found += [(one["body"]["order"], one["attempt"]) for one in answer.json()["messages"]]
    return sorted(found)


Ends = Callable[[Consumer, "asyncio.Task[Any]"], Awaitable[Any]]


async def cancels(consumer: Consumer, work: "asyncio.Task[Any]") -> None:
    work.cancel()


async def stops(consumer: Consumer, work: "asyncio.Task[Any]") -> None:
    consumer.stop()


async def stops_and_is_canceled(consumer: Consumer, work: "asyncio.Task[Any]") -> None:
    consumer.stop()
    await asyncio.sleep(0.05)
    work.cancel()


async def closes(consumer: Consumer, work: "asyncio.Task[Any]") -> None:
    await consumer.close()


async def loops(consumer: Consumer) -> None:
    async with consumer:
        async for _ in consumer.messages():
            pytest.fail("nothing is worked on")


async def runs(consumer: Consumer) -> None:
    async def handler(_: Any) -> None:
        pytest.fail("nothing is worked on")

    async with consumer:
        await consumer.run(handler, at_once=2)


@pytest.mark.parametrize("work", [loops, runs])
@pytest.mark.parametrize("ends", [cancels, stops, stops_and_is_canceled, closes])
async def test_messages_of_a_claim_that_is_given_up_come_again_at_once(
    url: str,
    client: httpx.AsyncClient,
    work: Callable[[Consumer], Awaitable[None]],
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "LOOKED_WITHIN_S", SOON_S)
    transport = Slow()
    consumer = Consumer(url, "worker", invisible_s=600, transport=transport)
    working = asyncio.ensure_future(work(consumer))
    await asyncio.wait_for(transport.recorded.wait(), SOON_S)
    ending = asyncio.ensure_future(ends(consumer, working))
    await asyncio.sleep(0.1)
    transport.goes_on.set()
    await asyncio.wait_for(asyncio.gather(ending, working, return_exceptions=True), SOON_S)
    assert await left(client) == [(1, 1), (2, 1)]


@pytest.mark.parametrize("work", [loops, runs])
@pytest.mark.parametrize("ends", [cancels, stops])
@pytest.mark.parametrize("wire", ["own", "httpx"])
async def test_messages_that_are_handed_out_after_a_claim_was_given_up_come_again_at_once(
    url: str,
    client: httpx.AsyncClient,
    db: Connection,
    dsn: str,
    work: Callable[[Consumer], Awaitable[None]],
    ends: Ends,
    wire: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "LOOKED_WITHIN_S", 0.0)
    consumer = Consumer(
        url, "worker", invisible_s=600, transport=httpx.AsyncHTTPTransport() if wire == "httpx" else None
    )
    other = await connect(dsn)
    try:
        async with other.transaction():
            await other.execute("select from pull_cursor for update")
            working = asyncio.ensure_future(work(consumer))
            await until_waiting(db)
            await ends(consumer, working)
            await asyncio.wait([working], timeout=SOON_S)
            assert working.done()
    finally:
        await other.close()
    assert await left(client) == [(1, 1), (2, 1)]


@pytest.mark.parametrize("work", [loops, runs])
async def test_without_an_answer_a_stop_ends_when_the_claim_only_waits(
    url: str, work: Callable[[Consumer], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "LOOKED_WITHIN_S", 0.2)
    await ends_without_an_answer(url, work, lambda consumer, _: consumer.stop())


@pytest.mark.parametrize("work", [loops, runs])
async def test_without_an_answer_a_second_cancellation_ends_a_consumer(
    url: str, work: Callable[[Consumer], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "LOOKED_WITHIN_S", 1000.0)

    def cancel_twice(_: Consumer, working: "asyncio.Task[Any]") -> None:
        working.cancel()
        asyncio.get_running_loop().call_later(0.1, working.cancel)

    await ends_without_an_answer(url, work, cancel_twice)


async def ends_without_an_answer(
    url: str, work: Callable[[Consumer], Awaitable[None]], ends: Callable[[Consumer, "asyncio.Task[Any]"], None]
) -> None:
    before = asyncio.all_tasks()
    transport = Slow()
    consumer = Consumer(url, "worker", transport=transport)
    working = asyncio.ensure_future(work(consumer))
    await asyncio.wait_for(transport.recorded.wait(), SOON_S)
    ends(consumer, working)
    _, left = await asyncio.wait([working], timeout=SOON_S)
    assert not left
    # The service's requests end as well.
    await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True), SOON_S)


async def test_a_run_that_is_canceled_gives_back_what_it_holds_before_its_consumer_is_closed(
    url: str, client: httpx.AsyncClient
) -> None:
    consumer, began = Consumer(url, "worker", invisible_s=600), asyncio.Event()

    async def handler(_: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    working = asyncio.ensure_future(consumer.run(handler))
    await asyncio.wait_for(began.wait(), SOON_S)
    working.cancel()
    await asyncio.wait([working])
    # The work on the first one was begun.
    assert await left(client) == [(1, 2), (2, 1)]
    await consumer.close()


async def test_a_run_of_threads_that_ends_by_an_exception_gives_back_what_it_holds(
    url: str, client: httpx.AsyncClient
) -> None:
    consumer = SyncConsumer(url, "worker", invisible_s=600)

    def handler(_: Any) -> None:
        raise SystemExit

    def on_a_thread() -> None:
        with pytest.raises(SystemExit):
            consumer.run(handler)

    await asyncio.to_thread(on_a_thread)
    # The first one comes again as `retry` says, because the exception may be the work's own.
    assert await left(client, 1) == [(2, 1)]
    await asyncio.to_thread(consumer.close)


async def test_a_consumer_works_on_a_loop_after_the_one_before_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LOOKED_WITHIN_S", 0.0)
    claims, found = list[str](), list[Any]()

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path != CLAIM:
            return outcomes(request)
        claims.append(CLAIM)
        if len(claims) == 2:
            await asyncio.Event().wait()
        for _ in range(100):
            await asyncio.sleep(0)
        return claimed(len(claims))

    consumer = Consumer("http://localhost", "worker", transport=httpx.MockTransport(handle))

    async def work(ends: bool) -> None:
        async for message in consumer.messages():
            found.append(message.json())
            if ends:
                assert consumer._keeper is not None
                assert not consumer._keeper.done()
                consumer.stop()

    async def canceled() -> None:
        working = asyncio.ensure_future(work(ends=False))
        while len(claims) < 2:
            await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.wait([working])

    await asyncio.to_thread(asyncio.run, canceled())
    await asyncio.to_thread(asyncio.run, asyncio.wait_for(work(ends=True), SOON_S))
    assert found == [1, 3]
