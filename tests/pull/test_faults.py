"""Claims while clocks step and a producer group is deleted."""

import httpx

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.support.consumers import Consumer, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish


async def test_a_clock_that_steps_forward_ends_what_is_held_and_loses_nothing(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await put_pulled(client)
    consumer = Consumer(client)
    await publish(client, *(order(n) for n in range(5)))
    held = await consumer.claim(max=3)
    [failed] = await consumer.claim(max=1)
    await consumer.settle("nack", failed["handle"], retry_after_s=0)
    [retried] = await consumer.claim(max=1)
    runtime.clock.offset_s += 3600
    assert await consumer.ack(*held, retried) == [409] * 4
    await sweep_after(runtime)
    again = [*await consumer.claim(max=10), *await consumer.claim(max=10)]
    assert sorted((one["offset"], one["attempt"]) for one in again) == [
        *((one["offset"], 2) for one in held),
        (failed["offset"], 3),
        (failed["offset"] + 1, 1),
    ]
    runtime.clock.offset_s -= 3600
    # In the time before the step they are held even longer.
    assert await consumer.claim() == []
    assert await consumer.ack(*again) == [200] * 5
    assert await db.fetchval("select count(*) from receipt where settled_at >= first_at and duration_ms >= 0") == 5


async def test_a_clock_that_steps_back_lets_what_is_held_be_settled_and_its_leases_end(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await put_pulled(client)
    consumer = Consumer(client)
    await publish(client, *(order(n) for n in range(4)))
    first, second, third = await consumer.claim(max=3)
    runtime.clock.offset_s -= 3600
    assert await consumer.ack(first) == [200]
    [outcome] = await consumer.settle("nack", second["handle"], retry_after_s=0)
    assert outcome["result"] == "retry"
    [again] = await consumer.claim(max=1)
    assert (again["offset"], again["attempt"]) == (second["offset"], 2)
    assert [one["attempt"] for one in await consumer.claim(max=10)] == [1]
    await sweep_after(runtime, 3600 + 31)
    assert sorted((one["offset"], one["attempt"]) for one in await consumer.claim(max=10)) == []
    runtime.clock.offset_s += 3600 + 40
    lapsed = await consumer.claim(max=10)
    assert sorted((one["offset"], one["attempt"]) for one in lapsed) == [
        (second["offset"], 3),
        (third["offset"], 2),
        (third["offset"] + 1, 2),
    ]
    assert await consumer.ack(*lapsed) == [200] * 3
    assert await db.fetchval("select count(*) from receipt where settled_at >= first_at") == 4


async def test_messages_of_a_producer_group_that_is_deleted_are_claimed_and_settled(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await put_pulled(client)
    consumer = Consumer(client)
    await publish(client, *(order(n) for n in range(4)))
    held = await consumer.claim(max=2)
    assert (await client.delete("/producer-groups/shop")).status_code == 204
    [_, failed] = held
    assert await consumer.ack(held[0]) == [200]
    await consumer.settle("nack", failed["handle"], retry_after_s=0)
    rest = [*await consumer.claim(max=10), *await consumer.claim(max=10)]
    assert [(one["offset"], one["attempt"], one["producer_group"]) for one in rest] == [
        (failed["offset"], 2, "shop"),
        (failed["offset"] + 1, 1, "shop"),
        (failed["offset"] + 2, 1, "shop"),
    ]
    assert await consumer.ack(*rest) == [200] * 3
    assert await db.fetchval("select count(*) from receipt") == 4
