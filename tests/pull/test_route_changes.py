"""A change of topics or filters while a claim is under way: nothing that was committed after it is passed over."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection, connect
from app.pull.claiming import claim
from app.runtime.state import Runtime
from app.store.pull.claims import PulledSubscription, pulled
from app.store.pull.ordered_claims import lock
from app.store.pull.waiting_limits import pass_over
from app.store.subscriptions.subscriptions import limited_pulled
from tests.coordinator.test_races import until_waiting
from tests.support.consumers import Consumer, put_pulled
from tests.support.relay_stepping import order, publish

HELD = timedelta(seconds=30)
WAYS = pytest.mark.parametrize(
    "fields",
    [{}, {"ordered": "key"}, {"rate_per_s": 1000}, {"ordered": "key", "rate_per_s": 1000}],
    ids=["plain", "ordered", "rate", "both"],
)


def refund(number: int) -> dict[str, Any]:
    return {"topic": "refund", "key": f"refund-{number}", "body": {"refund": number}}


async def widen(client: httpx.AsyncClient, **fields: Any) -> None:
    put = {"topics": ["order", "refund"], "destination": {"type": "pull"}, **fields}
    answer = await client.put("/subscriptions/worker", json=put)
    assert answer.status_code == 200, answer.text


@WAYS
@pytest.mark.usefixtures("group")
async def test_a_claim_of_a_subscription_that_was_read_before_its_change_passes_nothing_over(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, fields: dict[str, Any]
) -> None:
    await put_pulled(client, **fields)
    known = await pulled(db, "worker")
    assert isinstance(known, PulledSubscription)
    await widen(client, **fields)
    sent = await publish(client, refund(1), order(2))
    found = await claim(db, runtime.clock, known, 10, HELD)
    assert (found.messages, found.more) == ([], True)
    assert [one["offset"] for one in await Consumer(client).claim()] == sent


@WAYS
@pytest.mark.usefixtures("group")
async def test_a_claim_that_waits_while_its_subscription_changes_claims_by_the_new_topics(
    client: httpx.AsyncClient, db: Connection, dsn: str, fields: dict[str, Any]
) -> None:
    await put_pulled(client, **fields)
    await publish(client, refund(0))
    other = await connect(dsn)
    async with other.transaction():
        await lock(other, await db.fetchval("select subscription_id from subscription"))
        claiming = asyncio.create_task(Consumer(client).claim(wait_s=1))
        await until_waiting(db)
        await widen(client, **fields)
        sent = await publish(client, refund(1), order(2))
    await other.close()
    claimed = await claiming
    claimed += await Consumer(client).claim() if len(claimed) < len(sent) else []
    assert [one["offset"] for one in claimed if one["offset"] >= sent[0]] == sent


@WAYS
@pytest.mark.usefixtures("group")
async def test_a_claim_of_a_subscription_that_was_read_before_its_pause_hands_out_nothing_stored(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, fields: dict[str, Any]
) -> None:
    await put_pulled(client, **fields)
    consumer = Consumer(client)
    await publish(client, order(1))
    [message] = await consumer.claim()
    await consumer.settle("nack", message["handle"], retry_after_s=0)
    known = await pulled(db, "worker")
    assert isinstance(known, PulledSubscription)
    assert (await client.post("/subscriptions/worker/pause")).status_code == 200
    # A rate allows the next message a moment after the first.
    runtime.clock.offset_s += 1
    found = await claim(db, runtime.clock, known, 10, HELD)
    assert (found.messages, found.more) == ([], True)
    assert await consumer.claim() == []
    assert (await client.post("/subscriptions/worker/resume")).status_code == 200
    assert [one["attempt"] for one in await consumer.claim()] == [2]


@pytest.mark.usefixtures("group")
async def test_a_worker_that_read_a_subscription_before_its_change_passes_nothing_over(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    await put_pulled(client, expire_after_s=60)
    [known] = await limited_pulled(db)
    await widen(client, expire_after_s=60)
    sent = await publish(client, refund(1), order(2))
    now = runtime.clock.now()
    assert await pass_over(db, known, 10, now, now) == (0, False)
    assert [one["offset"] for one in await Consumer(client).claim()] == sent
    [known] = await limited_pulled(db)
    sent = await publish(client, refund(3), order(4))
    now = runtime.clock.now()
    assert await pass_over(db, known, 10, now, now) == (2, False)
