"""Postponements are counted: one row for each attempt and cause, however many there are."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.retention.loop import clear_leftovers
from app.runtime.state import Runtime
from app.store.relay.leases import Lease
from app.store.relay.log import Reader, window
from app.store.relay.results import NOTE, Batch, Settlement, settle
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from app.verdicts import DeliveryOutcome
from tests.support.check_responder import Responder
from tests.support.relay_stepping import order, publish, subscribe, turn_until

ATTEMPTS = "select number, outcome, status from attempt order by attempt_id"
COUNTED = "select number, outcome, cause, times from postponement order by first_at"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    """The relay of a process, stepped by the tests."""
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def answers(relay: Relay, runtime: Runtime, receiver: Responder, count: int) -> None:
    """Let the receiver answer `count` times more, each time after the pause that it asked for."""
    for _ in range(count):
        before = len(receiver.calls)
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda at=before: len(receiver.calls) > at)


async def test_postponements_of_one_attempt_are_one_row_for_each_cause(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=503, **{"retry-after": "10"}) as receiver:
        await subscribe(client, receiver, retry=[1, 1])
        await publish(client, order(1))
        await answers(relay, runtime, receiver, 5)
        receiver.status = 429
        await answers(relay, runtime, receiver, 3)
        receiver.status, receiver.headers = 500, {}
        await answers(relay, runtime, receiver, 1)
        receiver.status, receiver.headers = 503, {"retry-after": "10"}
        await answers(relay, runtime, receiver, 2)
        receiver.status = 200
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
    assert [tuple(row) for row in await db.fetch(ATTEMPTS)] == [
        (1, "postponed", 503),
        (1, "postponed", 429),
        (1, "failed", 500),
        (2, "postponed", 503),
    ]
    counted = [tuple(row) for row in await db.fetch(COUNTED)]
    assert [(number, outcome, times) for number, outcome, _, times in counted] == [
        (1, "postponed", 5),
        (1, "postponed", 3),
        (2, "postponed", 2),
    ]
    assert await db.fetchval("select attempts from receipt") == 2
    one = await db.fetchval("select transaction_id from receipt")
    timeline = (await client.get(f"/transactions/{one}")).json()["timeline"]
    shown = [entry for entry in timeline if entry["what"] == "attempt"]
    assert [entry.get("times") for entry in shown] == [5, 3, None, 2]
    assert all(entry["last_at"] > entry["at"] for entry in shown if "times" in entry)
    assert len(receiver.calls) == 12


async def test_probes_of_a_message_are_one_row(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[10, 30], max_in_flight=1)
        await publish(client, *(order(number) for number in range(8)))
        await turn_until(
            relay, runtime, lambda: db.fetchval("select count(*) > 0 from checkpoint where opened_at is not null")
        )
        for _ in range(20):
            before = len(receiver.calls)
            runtime.clock.offset_s += 31
            await turn_until(relay, runtime, lambda at=before: len(receiver.calls) > at)
        await turn_until(
            relay, runtime, lambda: db.fetchval("select sum(times) >= 20 from postponement where outcome = 'probe'")
        )
        receiver.status = 200
    rows = "select count(*), count(distinct (position, transaction_id, number)) from attempt where outcome = 'probe'"
    every, distinct = await db.fetchrow(rows)
    assert every == distinct


async def settlements(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> Batch:
    """Return a batch with three probes of one message, under a lease."""
    async with Responder() as receiver:
        await subscribe(client, receiver)
    await publish(client, order(1))
    number, now = await db.fetchval("select subscription_id from subscription"), runtime.clock.now()
    lease = Lease(f"relay:{number}:1:0", runtime.owner, 1)
    await db.execute("insert into lease values ($1, $2, 1, $3)", lease.name, lease.owner, now + timedelta(hours=1))
    route = Route(TopicPatterns(["order"]), None, None)
    reader = Reader(subscription_id=number, replay=0, route=route, shards=1, shard=0, settled_to=0)
    [message] = (await window(db, reader, 0, 10)).messages
    first = Settlement(message, NOTE, 0, now, what=DeliveryOutcome.PROBE, error="e" * 1000, duration_ms=1)
    probes = [replace(first, at=now + timedelta(seconds=second)) for second in range(3)]
    return Batch(lease, number, 0, 1, 0, None, now, "http://x", probes)


async def test_a_repeated_settle_counts_nothing_twice(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    batch = await settlements(client, runtime, db)
    for _ in range(2):
        assert await settle(db, runtime.owner, [batch], runtime.clock.now()) == [True]
        assert await db.fetchval("select times from postponement") == 3
        assert await db.fetchval("select count(*) from attempt") == 1
    later = [replace(one, at=one.at + timedelta(minutes=1)) for one in batch.settlements]
    await settle(db, runtime.owner, [replace(batch, settlements=later)], runtime.clock.now())
    row = await db.fetchrow("select times, first_at, last_at from postponement")
    assert tuple(row) == (6, batch.settlements[0].at, later[-1].at)
    assert await db.fetchval("select count(*) from attempt") == 1


async def test_the_counts_leave_with_their_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    batch = await settlements(client, runtime, db)
    await settle(db, runtime.owner, [batch], runtime.clock.now())
    await clear_leftovers(db, runtime.clock.now())
    assert await db.fetchval("select count(*) from postponement") == 1
    await db.execute("update day set state = 'gone', changed_at = now()")
    await clear_leftovers(db, runtime.clock.now())
    assert await db.fetchval("select count(*) from postponement") == 0
