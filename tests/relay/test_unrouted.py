"""Messages without a subscription are counted once, by one process; inactive subscriptions show their lag."""

import asyncio
from pathlib import Path

import httpx

from app.database.connection import Connection
from app.relay.unrouted import SPAN, Routing, unrouted_of
from app.runtime.state import Runtime
from app.store.relay.unrouted import count, counted, topics_after
from app.store.retention.days import partition_name
from app.topic_patterns import TopicPatterns
from tests.support.check_responder import Responder
from tests.support.days import write_transactions
from tests.support.processes import Service
from tests.support.relay_stepping import order, publish, subscribe


def metric(runtime: Runtime, name: str) -> float:
    line = next(line for line in runtime.metrics.exposition().decode().splitlines() if line.startswith(name))
    return float(line.rpartition(" ")[2])


def test_a_topic_is_routed_by_its_name_or_beginning() -> None:
    counts = {"order": 1, "orders": 2, "billing.eu": 4, "billing": 8}
    assert unrouted_of(counts, TopicPatterns([])) == 15
    assert unrouted_of(counts, TopicPatterns(["order", "billing.*"])) == 10
    assert unrouted_of(counts, TopicPatterns(["order*"])) == 12
    assert unrouted_of(counts, TopicPatterns(["*"])) == 0
    assert unrouted_of({"halfnote.delivery.dead": 16}, TopicPatterns(["order"])) == 0


async def test_unrouted_messages_are_counted_by_one_process(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    first, second = Routing(), Routing()
    await publish(client, {"topic": "ordre", "body": 0})
    assert (await first.step(runtime, runtime.clock.now())).done == 1
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1), {"topic": "ordre", "body": 1}, {"topic": "odrer", "body": 1})
    runtime.owner, owner = "another", runtime.owner
    assert (await second.step(runtime, runtime.clock.now())).done == 0
    # It does not count, and shows what is counted.
    assert metric(runtime, "halfnote_unrouted_messages") == 1
    runtime.owner = owner
    assert (await first.step(runtime, runtime.clock.now())).done == 2
    assert (await first.step(runtime, runtime.clock.now())).done == 0
    assert metric(runtime, "halfnote_unrouted_messages") == 3
    await first.drain(runtime)
    runtime.owner = "another"
    await publish(client, {"topic": "ordre", "body": 1})
    assert (await second.step(runtime, runtime.clock.now())).done == 1
    assert (await second.step(runtime, runtime.clock.now())).done == 0
    assert metric(runtime, "halfnote_unrouted_messages") == 4


async def test_a_message_that_two_processes_read_is_counted_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await publish(client, {"topic": "ordre", "body": 0})
    before = await counted(db)
    topics, reached = await topics_after(db, before.offset, SPAN)
    # Another holder of the lease counts between this one's read and its write.
    assert (await Routing().step(runtime, runtime.clock.now())).done == 1
    assert await count(db, before.offset, reached, sum(topics.values())) is None
    assert (await counted(db)).unrouted == 1


async def shown_by(service: Service, count: int) -> None:
    """Wait until a service shows that many unrouted messages."""
    async with asyncio.timeout(30), httpx.AsyncClient(base_url=service.url) as client:
        while f"\nhalfnote_unrouted_messages {count}.0\n" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.05)


async def test_the_count_survives_a_kill(
    client: httpx.AsyncClient, dsn: str, db: Connection, group: str, data_dir: Path
) -> None:
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    try:
        await publish(client, {"topic": "ordre", "body": 1}, {"topic": "ordre", "body": 2})
        await service.start()
        await shown_by(service, 2)
        service.kill()
        # This is committed while no worker runs. The lease that the killed process held expires.
        await publish(client, {"topic": "ordre", "body": 3})
        await db.execute("update lease set expires_at = now()")
        await service.start()
        await shown_by(service, 3)
    finally:
        service.kill()


async def test_a_paused_subscription_shows_the_lag_of_its_slowest_shard(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, shards=3)
    await client.post("/subscriptions/mailer/pause")
    sent = await publish(client, order(1), order(2))
    await db.execute('update checkpoint set "offset" = $1 where shard <> 1', sent[-1])
    runtime.clock.offset_s += 30
    await Routing().step(runtime, runtime.clock.now())
    assert metric(runtime, "halfnote_relay_lag_messages{") == 2
    assert metric(runtime, "halfnote_relay_lag_seconds{") >= 30


async def test_a_plan_that_was_made_while_the_day_was_empty_reads_no_whole_day_later(
    runtime: Runtime, db: Connection
) -> None:
    await db.execute("vacuum analyze outbox")
    routing, now = Routing(), runtime.clock.now()
    # From the sixth time on, a session may keep one plan for any values.
    for _ in range(7):
        await routing.step(runtime, now)
    await write_transactions(db, now, 3000)
    assert (await routing.step(runtime, now)).done == 3000
    # The pool lends its connections in turn.
    for lend in (runtime.database.keyed, *[runtime.database.connection] * runtime.settings.pool_size):
        async with lend() as used:
            await used.execute("select pg_stat_force_next_flush()")
    found = await db.fetchrow(
        "select seq_tup_read as whole, idx_tup_fetch as by_index from pg_stat_user_tables where relname = $1",
        partition_name("outbox", now.date()),
    )
    assert found is not None
    assert (found["whole"], found["by_index"] >= 3000) == (0, True)
