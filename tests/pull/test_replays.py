"""Replays of subscriptions whose consumers claim: beside the live messages, with their own handles and receipts."""

import asyncio
from typing import Any

import httpx
import pytest

from app.database.connection import Connection, connect
from app.pull.replaying import feed_replays
from app.runtime.state import Runtime
from app.store.retention.orphans import clear_cancelled_replays
from tests.coordinator.test_races import until_waiting
from tests.support.consumers import Consumer, lapse, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish

REASON = {"reason": "the shop lost its table"}


@pytest.fixture
async def consumer(client: httpx.AsyncClient, group: str) -> Consumer:
    """A consumer of `worker`, which takes `order` in the order of keys."""
    await put_pulled(client, ordered="key")
    return Consumer(client)


async def replay(client: httpx.AsyncClient, **fields: Any) -> int:
    answer = await client.post("/subscriptions/worker/replay", json={"from": "earliest", **REASON, **fields})
    assert answer.status_code == 202, answer.text
    number: int = answer.json()["replay_id"]
    return number


async def state(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    shown = (await client.get(f"/subscriptions/worker/replays/{number}")).json()
    return {name: shown[name] for name in ("state", "delivered", "retrying", "dead")}


async def all_of(consumer: Consumer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while claimed := await consumer.claim(max=100):
        found += claimed
        assert set(await consumer.ack(*claimed)) == {200}
    return found


async def test_a_part_of_the_log_comes_again_with_its_ids_and_the_replay_ends(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(6)))
    live = await all_of(consumer)
    number = await replay(client, **{"from": {"offset": sent[1]}, "until": {"offset": sent[4]}})
    assert await consumer.claim() == []
    await sweep_after(runtime)
    assert (await state(client, number))["state"] == "running"
    again = await all_of(consumer)
    assert [(one["offset"], one["replay"], one["attempt"]) for one in again] == [(n, number, 1) for n in sent[1:5]]
    assert [one["message_id"] for one in again] == [one["message_id"] for one in live[1:5]]
    assert {one["handle"] for one in again}.isdisjoint(one["handle"] for one in live)
    await sweep_after(runtime)
    assert await state(client, number) == {"state": "done", "delivered": 4, "retrying": 0, "dead": 0}
    assert await db.fetchval("select count(*) from receipt where replay = 0") == 6


async def test_filters_choose_what_comes_again(client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime) -> None:
    eu = {"headers": {"region": "eu"}}
    sent = await publish(
        client,
        {**order(1), "tag": "new", **eu},
        {**order(2), "tag": "old", **eu},
        {**order(3), "tag": "new", "headers": {"region": "us"}},
        {**order(1), "tag": "new", **eu, "topic": "other"},
        {**order(4), "tag": "new", **eu},
        {**order(1), "tag": "new", **eu},
    )
    await all_of(consumer)
    await replay(client, filters={"keys": ["order-1"], "tags": ["new"], "headers": {"region": "eu"}})
    await sweep_after(runtime)
    assert [one["offset"] for one in await all_of(consumer)] == [sent[0], sent[5]]


async def test_a_replay_has_attempts_dead_letters_and_the_order_of_keys_of_its_own(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, *({**order(n), "key": "a"} for n in range(3)))
    await all_of(consumer)
    number = await replay(client)
    await sweep_after(runtime)
    live = await publish(client, {**order(3), "key": "a"})
    [first] = await consumer.claim(max=1)
    assert first["replay"] == number
    # The live message of the key does not wait for the replay, and the replay's do.
    [other] = await consumer.claim()
    assert ([other["offset"]], other["replay"]) == (live, None)
    await lapse(db, runtime)
    claimed = await consumer.claim()
    assert [(one["attempt"], one["replay"]) for one in claimed] == [(2, number), (1, number), (1, number), (2, None)]
    await consumer.settle("reject", claimed[0]["handle"], reason="no address")
    assert await consumer.ack(*claimed[1:]) == [200] * 3
    await sweep_after(runtime)
    assert await state(client, number) == {"state": "done", "delivered": 2, "retrying": 0, "dead": 1}


async def test_a_receipt_of_a_replay_is_not_that_of_the_live_delivery(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    [first] = await consumer.claim()
    await replay(client)
    await lapse(db, runtime)
    live, again = sorted(await consumer.claim(), key=lambda one: one["replay"] or 0)
    assert (live["replay"], live["attempt"], again["attempt"]) == (None, 2, 1)
    assert await consumer.ack(again) == [200]
    # The same message, body and attempt, but the handle of the live delivery.
    assert await consumer.ack(first) == [409]
    assert await consumer.ack(live, again) == [200, 200]
    assert await db.fetchval("select array_agg(attempts order by replay) from receipt") == [2, 1]


async def test_a_long_replay_is_fed_in_parts_and_canceled(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.store.pull import replay_feed

    statement = replay_feed.FEED.replace("2000", "20").replace("1000", "8")
    monkeypatch.setattr(replay_feed, "FEED", statement)
    sent = await publish(client, *(order(n) for n in range(60)))
    await all_of(consumer)
    number = await replay(client)
    await sweep_after(runtime)
    assert await db.fetchval("select count(*) from delivery_retry") == 24
    first = await consumer.claim(max=10)
    assert [one["offset"] for one in first] == sent[:10]
    await consumer.ack(*first)
    await sweep_after(runtime)
    assert await db.fetchval("select count(*) from delivery_retry") == 22
    held, given_back = await consumer.claim(max=2)
    assert (await client.delete(f"/subscriptions/worker/replays/{number}")).status_code == 204
    await sweep_after(runtime)
    assert await consumer.claim() == []
    assert await consumer.ack(held) == [200]
    # What is given back comes no more, beside a live message that does.
    await publish(client, order(60))
    [live] = await consumer.claim()
    for one in (given_back, live):
        [outcome] = await consumer.settle("nack", one["handle"], retry_after_s=0)
        assert outcome["status"] == 200
    assert [one["message_id"] for one in await consumer.claim()] == [live["message_id"]]
    assert await clear_cancelled_replays(db, runtime.clock.now()) == 1
    assert await db.fetchval("select count(*) from delivery_retry where replay <> 0") == 0
    assert (await state(client, number))["state"] == "cancelled"


async def test_a_paused_subscription_is_fed_when_it_is_resumed(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    await all_of(consumer)
    await client.post("/subscriptions/worker/pause")
    await replay(client)
    await sweep_after(runtime)
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    await client.post("/subscriptions/worker/resume")
    await sweep_after(runtime)
    assert len(await all_of(consumer)) == 1


async def test_one_transaction_comes_again(client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime) -> None:
    await publish(client, order(1), order(2))
    first, _ = await all_of(consumer)
    transaction_id = first["message_id"].rpartition("-")[0]
    answer = await client.post(f"/transactions/{transaction_id}/replay", json={"subscription": "worker", **REASON})
    assert answer.status_code == 202, answer.text
    await sweep_after(runtime)
    assert [one["message_id"] for one in await all_of(consumer)] == [first["message_id"]]


async def test_a_cancellation_removes_what_a_worker_was_adding(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, dsn: str
) -> None:
    await publish(client, *(order(n) for n in range(6)))
    await all_of(consumer)
    number = await replay(client)
    subscriptions = [await db.fetchval("select subscription_id from subscription where name = 'worker'")]
    worker = await connect(dsn)
    async with worker.transaction():
        await feed_replays(worker, subscriptions, runtime.clock.now())
        canceling = asyncio.create_task(client.delete(f"/subscriptions/worker/replays/{number}"))
        await until_waiting(db)
    assert (await canceling).status_code == 204
    await worker.close()
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    assert (await state(client, number))["state"] == "cancelled"
