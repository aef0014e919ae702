"""Claims that wait for messages: what wakes them, how many, and when they end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.database.notifier import CLAIMABLE, WakeUps
from app.pull import wake
from app.pull.wake import ConsumerListener, wake_consumers
from app.relay.loop import Relay
from app.routers import claims
from app.runtime.state import Runtime
from tests.conftest import app_of
from tests.support.consumers import Consumer, lapse, put_pulled
from tests.support.relay_stepping import order, publish


@pytest.fixture
async def consumer(client: httpx.AsyncClient, group: str) -> Consumer:
    """A consumer of `worker`, which takes `order`."""
    await put_pulled(client)
    return Consumer(client)


Claims = list["asyncio.Task[list[dict[str, Any]]]"]
Answers = list["asyncio.Task[httpx.Response]"]


@asynccontextmanager
async def waiting(runtime: Runtime, consumer: Consumer, count: int = 1, **fields: Any) -> AsyncIterator[Claims]:
    """Let so many claims wait."""
    tasks = [asyncio.create_task(consumer.claim(wait_s=25, **fields)) for _ in range(count)]
    async with asyncio.timeout(20):
        while sum(map(len, runtime.waiting_consumers._by_group.values())) < count:
            await asyncio.sleep(0.01)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def look(runtime: Runtime) -> None:
    await wake_consumers(runtime, runtime.clock.now())


async def first_of(tasks: Claims) -> list[dict[str, Any]]:
    done, _ = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    [task] = done
    return task.result()


async def test_a_publication_asks_for_a_look_and_wakes_one_claim_for_one_message(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    async with waiting(runtime, consumer, 3, max=2) as tasks:
        assert not runtime.waiting_consumers.look.is_set()
        sent = await publish(client, order(1))
        assert runtime.waiting_consumers.look.is_set()
        await look(runtime)
        assert [one["offset"] for one in await first_of(tasks)] == sent
        assert sum(not task.done() for task in tasks) == 2
        await look(runtime)
        sent = await publish(client, *(order(n) for n in range(4)))
        await look(runtime)
        rest = await asyncio.gather(*(task for task in tasks if not task.done()))
        assert sorted(one["offset"] for claim in rest for one in claim) == sent


async def test_no_more_claims_are_woken_than_there_are_messages(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    async with waiting(runtime, consumer, 4, max=1) as tasks:
        sent = await publish(client, order(1), order(2))
        await look(runtime)
        # Those that are woken have not run yet.
        assert sum(map(len, runtime.waiting_consumers._by_group.values())) == 2
        async with asyncio.timeout(60):
            while sum(task.done() for task in tasks) < 2:
                await asyncio.sleep(0.01)
        assert sorted(one["offset"] for task in tasks if task.done() for one in task.result()) == sent


async def test_what_is_given_back_or_lapses_wakes_a_claim(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    async with waiting(runtime, consumer) as tasks:
        await look(runtime)
        assert not tasks[0].done()
        await consumer.settle("nack", message["handle"], retry_after_s=0)
        await look(runtime)
        [again] = await first_of(tasks)
        assert again["attempt"] == 2
    async with waiting(runtime, consumer) as tasks:
        await lapse(db, runtime)
        await look(runtime)
        [again] = await first_of(tasks)
        assert again["attempt"] == 3


async def test_the_next_look_is_when_the_next_retry_is_due(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    await consumer.settle("nack", message["handle"], retry_after_s=1000)
    async with waiting(runtime, consumer):
        result = await wake_consumers(runtime, runtime.clock.now())
        assert result.within_s is not None
        assert 900 < result.within_s <= 1000


async def test_a_resumed_subscription_wakes_its_claims(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    await client.post("/subscriptions/worker/pause")
    sent = await publish(client, order(1))
    async with waiting(runtime, consumer) as tasks:
        await look(runtime)
        assert runtime.waiting_consumers.any_waiting
        await client.post("/subscriptions/worker/resume")
        await look(runtime)
        assert [one["offset"] for one in await first_of(tasks)] == sent


async def test_messages_of_other_topics_wake_no_claim(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[tuple[str, int]] = []
    wake = runtime.waiting_consumers.wake
    monkeypatch.setattr(runtime.waiting_consumers, "wake", lambda *call: (woken.append(call), wake(*call)))
    async with waiting(runtime, consumer):
        await publish(client, *(order(n, topic="other") for n in range(5)))
        await look(runtime)
    assert [count for _, count in woken] == [0]


async def test_a_claim_ends_without_messages_when_its_time_is_over(consumer: Consumer, runtime: Runtime) -> None:
    assert await consumer.claim(wait_s=0.05) == []
    assert not runtime.waiting_consumers.any_waiting


async def test_waiting_claims_are_answered_before_the_process_stops(consumer: Consumer, runtime: Runtime) -> None:
    async with waiting(runtime, consumer, 2) as tasks:
        runtime.waiting_consumers.close()
        assert await asyncio.gather(*tasks) == [[], []]


@asynccontextmanager
async def asking(client: httpx.AsyncClient, runtime: Runtime, wait_s: float) -> AsyncIterator[Answers]:
    """Let two claims of `worker` wait, and give their answers."""
    claim = {"max": 1, "wait_s": wait_s}
    tasks = [asyncio.create_task(client.post("/subscriptions/worker/claim", json=claim)) for _ in range(2)]
    async with asyncio.timeout(20):
        while sum(map(len, runtime.waiting_consumers._by_group.values())) < len(tasks):
            await asyncio.sleep(0.01)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_subscription_is_deleted_while_claims_wait(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    async with asking(client, runtime, 25) as answers:
        await client.delete("/subscriptions/worker")
        await look(runtime)
        async with asyncio.timeout(20):
            assert [answer.status_code for answer in await asyncio.gather(*answers)] == [404, 404]


async def test_claims_that_wait_over_a_new_subscription_of_the_name_get_its_messages(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    async with asking(client, runtime, 25) as answers:
        await client.delete("/subscriptions/worker")
        await put_pulled(client)
        sent = await publish(client, order(1), order(2))
        await look(runtime)
        async with asyncio.timeout(20):
            claimed = [answer.json()["messages"] for answer in await asyncio.gather(*answers)]
    assert sorted(one["offset"] for messages in claimed for one in messages) == sent


async def test_a_claim_asks_for_a_new_subscription_of_the_name_when_its_time_is_over(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, over = asyncio.Event(), asyncio.Event()

    async def wait(group: str, most: int, within_s: float) -> bool:
        waits.set()
        await over.wait()
        return False

    monkeypatch.setattr(runtime.waiting_consumers, "wait", wait)
    for then in ("new", "gone", "same"):
        waits.clear()
        over.clear()
        task = asyncio.create_task(client.post("/subscriptions/worker/claim", json={"wait_s": 25}))
        async with asyncio.timeout(20):
            await waits.wait()
        if then != "same":
            await client.delete("/subscriptions/worker")
        if then == "new":
            await put_pulled(client)
            sent = await publish(client, order(1))
        over.set()
        answer = await task
        if then == "gone":
            assert answer.status_code == 404
            await put_pulled(client)
        else:
            assert [one["offset"] for one in answer.json()["messages"]] == (sent if then == "new" else [])


async def test_of_the_claims_that_read_on_one_has_a_connection(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.pull.claiming.PUT_OFF_AT_ONCE", 1)
    monkeypatch.setattr("app.pull.claiming.SPAN", 2)
    monkeypatch.setattr("app.pull.claiming.SPAN_LEAST", 2)
    await publish(client, *(order(n, deliver_after_s=3600) for n in range(60)))
    claim, out, most = claims._claim_connected, 0, 0
    begun: set[Any] = set()

    async def counted(*arguments: Any) -> Any:
        nonlocal out, most
        # The first claim of each request finds something to read.
        if (task := asyncio.current_task()) not in begun:
            begun.add(task)
            return await claim(*arguments)
        out += 1
        most = max(most, out)
        try:
            return await claim(*arguments)
        finally:
            out -= 1

    monkeypatch.setattr(claims, "_claim_connected", counted)
    async with waiting(runtime, consumer, 6, max=1) as tasks:
        assert most == 1
        sent = await publish(client, *(order(n) for n in range(6)))
        await look(runtime)
        async with asyncio.timeout(20):
            claimed = await asyncio.gather(*tasks)
    assert sorted(one["offset"] for messages in claimed for one in messages) == sent


async def test_claims_of_a_paused_subscription_wait_on(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    async with asking(client, runtime, 25):
        await client.post("/subscriptions/worker/pause")
        await look(runtime)
        assert sum(map(len, runtime.waiting_consumers._by_group.values())) == 2


async def test_nothing_is_claimed_for_a_consumer_that_has_gone(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    body, gone = b'{"wait_s": 25}', asyncio.Event()
    parts = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        assert gone.is_set()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/subscriptions/worker/claim",
        "raw_path": b"/subscriptions/worker/claim",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    call = asyncio.create_task(app_of(client)(scope, receive, send))
    async with asyncio.timeout(20):
        while not runtime.waiting_consumers.any_waiting:
            await asyncio.sleep(0.01)
    gone.set()
    await publish(client, order(1))
    await look(runtime)
    async with asyncio.timeout(20):
        await call
    assert await db.fetchval("select count(*) from pull_claim") == 0
    [message] = await consumer.claim()
    assert message["attempt"] == 1


async def test_an_api_process_listens_once_a_consumer_has_waited(consumer: Consumer, runtime: Runtime) -> None:
    listener = ConsumerListener()
    assert (await listener.step(runtime, runtime.clock.now())).done == 0
    async with waiting(runtime, consumer):
        assert (await listener.step(runtime, runtime.clock.now())).done == 1
        async with runtime.database.connection() as connection:
            await connection.execute("select pg_notify('halfnote_outbox', 'order')")
        async with asyncio.timeout(20):
            await runtime.waiting_consumers.look.wait()
    assert (await listener.step(runtime, runtime.clock.now())).done == 1


class Beside:
    """The worker process beside an API process: what it was sent."""

    def __init__(self) -> None:
        self.topics: list[Any] = []

    def published(self, topics: Any, messages: Any = (), complete: bool = False) -> None:
        self.topics.append(topics)


@pytest.mark.parametrize("act", ["ack", "nack", "reject"])
async def test_a_consumer_that_waits_at_another_process_looks_again_when_a_key_is_free(
    client: httpx.AsyncClient, runtime: Runtime, group: str, act: str
) -> None:
    await put_pulled(client, ordered="key")
    consumer, elsewhere, heard = Consumer(client), WakeUps(runtime.database), asyncio.Event()
    await publish(client, {**order(1), "key": "a"})
    [first] = await consumer.claim()
    elsewhere.on_wake = heard.set
    await elsewhere.listen()
    await runtime.wake_ups.notify()
    await asyncio.sleep(0)
    heard.clear()
    await consumer.settle(act, first["handle"])
    assert await runtime.wake_ups.notify()
    async with asyncio.timeout(20):
        await heard.wait()
    await elsewhere.close()


async def test_a_worker_beside_passes_on_that_a_key_is_free(
    client: httpx.AsyncClient, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_pulled(client, ordered="key")
    consumer, beside = Consumer(client), Beside()
    await publish(client, {**order(1), "key": "a"})
    [first] = await consumer.claim()
    monkeypatch.setattr(runtime.wake_ups, "worker", beside)
    assert await consumer.ack(first) == [200]
    assert beside.topics == [[CLAIMABLE]]
    # The worker: other processes may have consumers of this subscription.
    monkeypatch.setattr(runtime.wake_ups, "worker", None)
    relay = Relay(runtime)
    await relay.step(runtime, runtime.clock.now())
    assert runtime.wake_ups.elsewhere is not None
    await runtime.wake_ups.notify()
    runtime.publications.received([CLAIMABLE], (), False)
    assert await runtime.wake_ups.notify()


async def test_an_acknowledgement_without_an_order_of_keys_wakes_no_one(
    client: httpx.AsyncClient, runtime: Runtime, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside()
    await publish(client, order(1))
    [first] = await consumer.claim()
    monkeypatch.setattr(runtime.wake_ups, "worker", beside)
    assert await consumer.ack(first) == [200]
    assert beside.topics == []


@pytest.mark.parametrize("wait_s", [-1, 31, "5"])
async def test_a_wait_out_of_bounds_is_refused(client: httpx.AsyncClient, consumer: Consumer, wait_s: Any) -> None:
    answer = await client.post("/subscriptions/worker/claim", json={"wait_s": wait_s})
    assert (answer.status_code, answer.json()["field"]) == (422, "wait_s")


async def waits(client: httpx.AsyncClient, runtime: Runtime, wait_s: int) -> asyncio.Task[httpx.Response]:
    """Begin a claim; return its task once it waits."""
    await put_pulled(client)
    task = asyncio.create_task(client.post("/subscriptions/worker/claim", json={"wait_s": wait_s}))
    async with asyncio.timeout(20):
        while not runtime.waiting_consumers.any_waiting:
            await asyncio.sleep(0.01)
    return task


async def test_the_last_claim_of_a_removed_subscription_may_end_during_the_look(
    client: httpx.AsyncClient, group: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await waits(client, runtime, 25)
    await client.delete("/subscriptions/worker")
    look = wake.removed

    async def ends_meanwhile(*arguments: Any) -> Any:
        found = await look(*arguments)
        task.cancel()
        await asyncio.wait([task])
        return found

    monkeypatch.setattr(wake, "removed", ends_meanwhile)
    await wake.wake_consumers(runtime, runtime.clock.now())
    assert not runtime.waiting_consumers.limits


async def test_a_claim_that_waited_in_vain_ends_also_without_a_connection(
    client: httpx.AsyncClient, group: str, runtime: Runtime
) -> None:
    task = await waits(client, runtime, 1)
    async with AsyncExitStack() as stack:
        for _ in range(runtime.settings.claim_connections):
            await stack.enter_async_context(runtime.claim_connections.connection())
        # Only now: on a busy machine a new connection takes longer.
        runtime.database.pool_timeout_s = 0.5
        answer = await task
    assert (answer.status_code, answer.json()["messages"]) == (200, [])
