"""Shards: several workers share one subscription by key, and changing their number loses nothing and keeps order."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import assemble
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.relay import checkpoints
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, publish, step, subscribe

KEYS = 12


@pytest.fixture
async def workers(settings: Settings, dsn: str, group: str) -> AsyncIterator[list[tuple[Relay, Runtime]]]:
    """Four processes over one database."""
    async with AsyncExitStack() as stack:
        runtimes = [await assemble(settings, dsn, stack) for _ in range(4)]
        made = [(Relay(runtime), runtime) for runtime in runtimes]
        # A machine that stalls must not let leases expire.
        began = runtimes[0].clock.now()
        for runtime in runtimes:
            runtime.clock.fixed = began
        yield made
        for relay, runtime in made:
            await relay.drain(runtime)


async def step_until(workers: list[tuple[Relay, Runtime]], reached: Callable[[], Any]) -> None:
    """Step every worker in turn until `reached()`, which may be awaitable, is true. A turn takes 0.1 s."""
    async with asyncio.timeout(30):
        while True:
            result = reached()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.gather(*(step(relay, runtime) for relay, runtime in workers))
            pass_time(workers, 0.1)


def pass_time(workers: list[tuple[Relay, Runtime]], seconds: float) -> None:
    for _, runtime in workers:
        assert runtime.clock.fixed is not None
        runtime.clock.fixed += timedelta(seconds=seconds)


async def slow(call: Call) -> web.Response:
    await asyncio.sleep(random.uniform(0, 0.005))
    return web.Response()


def by_key(receiver: Responder) -> dict[str, list[int]]:
    offsets: dict[str, list[int]] = defaultdict(list)
    for call in receiver.calls:
        offsets[call.headers["ce-subject"]].append(int(call.headers["halfnote-offset"]))
    return offsets


def numbered(first: int, count: int) -> list[dict[str, Any]]:
    return [{**order(n), "key": f"k{n % KEYS}"} for n in range(first, first + count)]


async def put_subscription(client: httpx.AsyncClient, receiver: Responder, **fields: Any) -> None:
    subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, **fields}
    answer = await client.put("/subscriptions/mailer", json=subscription)
    assert answer.status_code == 200, answer.text


async def test_workers_share_the_shards_and_each_key_has_one_of_them(
    client: httpx.AsyncClient, db: Connection, workers: list[tuple[Relay, Runtime]]
) -> None:
    async with Responder(slow) as receiver:
        await subscribe(client, receiver, shards=4, ordered="key")
        pass_time(workers, 4)

        def spread() -> bool:
            pass_time(workers, 4)
            return all(len(relay.streams) == 1 for relay, _ in workers)

        await step_until(workers, spread)
        sent = await publish(client, *numbered(0, 120))
        await step_until(workers, lambda: db.fetchval("select count(*) = 120 from receipt"))
        assert await db.fetchval('select count(distinct "offset") from receipt') == 120
        pass_time(workers, 2)
        reached = 'select count(*) = 4 from checkpoint where "offset" >= $1'
        await step_until(workers, lambda: db.fetchval(reached, sent[-1]))
    assert len(receiver.calls) == 120
    assert all(received == sorted(received) for received in by_key(receiver).values())


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 64)])
async def test_a_change_of_the_number_of_shards_loses_nothing_and_keeps_the_order_of_keys(
    client: httpx.AsyncClient, db: Connection, workers: list[tuple[Relay, Runtime]], before: int, after: int
) -> None:
    async with Responder(slow) as receiver:
        await subscribe(client, receiver, shards=before, ordered="key")
        sent = await publish(client, *numbered(0, 60))
        await step_until(workers, lambda: db.fetchval("select count(*) >= 20 from receipt"))
        await put_subscription(client, receiver, shards=after, ordered="key")
        sent += await publish(client, *numbered(60, 60))

        async def done() -> bool:
            # The old holders release their leases by themselves; the new ones look once a second.
            pass_time(workers, 1)
            return bool(await db.fetchval("select count(*) = 120 from receipt"))

        await step_until(workers, done)
        layout = await db.fetch("select shards, shard from checkpoint order by shard")
        assert [tuple(row) for row in layout] == [(after, number) for number in range(after)]
    assert sorted(int(call.headers["halfnote-offset"]) for call in receiver.calls) == sent
    assert all(received == sorted(received) for received in by_key(receiver).values())


async def test_a_dead_worker_delays_the_change_only_until_its_lease_expires(
    client: httpx.AsyncClient, db: Connection, workers: list[tuple[Relay, Runtime]]
) -> None:
    first, others = workers[:1], workers[1:]
    async with Responder() as receiver:
        await subscribe(client, receiver, shards=1)
        await step_until(first, lambda: first[0][0].streams)
        for stream in first[0][0].streams.values():
            stream.drop()
        await put_subscription(client, receiver, shards=2)
        await publish(client, *numbered(0, 10))
        for _ in range(3):
            await asyncio.gather(*(step(relay, runtime) for relay, runtime in others))
        assert receiver.calls == []
        pass_time(others, 11)
        await step_until(others, lambda: db.fetchval("select count(*) = 10 from receipt"))
    assert len(receiver.calls) == 10


async def test_of_two_workers_that_see_a_change_one_makes_it(
    client: httpx.AsyncClient, db: Connection, workers: list[tuple[Relay, Runtime]]
) -> None:
    """The second one would end the leases of the new shards, whose holders may have messages in flight."""
    first = workers[:1]
    async with Responder() as receiver:
        await subscribe(client, receiver, shards=1)
        await step_until(first, lambda: first[0][0].streams)
        await put_subscription(client, receiver, shards=2)
    subscription_id = await db.fetchval("select subscription_id from checkpoint")
    runtime = workers[1][1]
    later = runtime.clock.now() + timedelta(seconds=60)

    async def resized() -> bool:
        async with runtime.database.transaction() as connection:
            return await checkpoints.resize(connection, subscription_id, 2, later)

    async with workers[2][1].database.transaction() as connection:
        assert await checkpoints.resize(connection, subscription_id, 2, later)
        second = asyncio.create_task(resized())
        waits = (
            "select count(*) = 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        async with asyncio.timeout(30):
            while not await db.fetchval(waits):
                assert not second.done()
                await asyncio.sleep(0.01)
    assert await second is False
    assert await db.fetch("select shards, shard from checkpoint order by shard") == [(2, 0), (2, 1)]
    assert await db.fetchval("select epoch from lease where name like 'relay:%'") == 2
