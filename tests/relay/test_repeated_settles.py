"""A settle that is repeated changes nothing more, also if other outcomes of its messages are known meanwhile."""

from dataclasses import replace
from datetime import timedelta

import httpx

from app.database.connection import Connection
from app.relay.settle_buffer import SettleBuffer
from app.runtime.state import Runtime
from app.store.relay.results import DELIVERED, RETRY, Settlement, settle
from app.store.relay.retries import Claimant, claim_retries
from tests.relay.test_postponements import settlements


async def test_a_retry_that_was_delivered_meanwhile_is_not_stored_again(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """The answer to its settle was lost, and it was claimed before the settle was repeated."""
    batch, now = await settlements(client, runtime, db), runtime.clock.now()
    retry = Settlement(batch.settlements[0].message, RETRY, 0, now, due_at=now)
    buffer = SettleBuffer(lambda: None)

    async def record() -> None:
        recorded = replace(batch, settlements=buffer.begin_settle())
        assert await settle(db, runtime.owner, [recorded], now) == [True]

    buffer.add(retry, 0)
    await record()
    buffer.restore()
    claimant = Claimant(batch.lease, batch.subscription_id, 0, 1, 0, 10, ordered=False, hold=False)
    [found] = await claim_retries(db, runtime.owner, [claimant], now + timedelta(minutes=1), now)
    [claimed] = found.messages
    buffer.add(Settlement(claimed, DELIVERED, 1, now, now, status=200, duration_ms=1, digest=b"x"), 0)
    while buffer.due:
        await record()
        buffer.recorded()
    assert len(buffer) == 0
    assert await db.fetchval("select count(*) from receipt") == 1
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_a_probe_that_was_counted_is_not_counted_again_with_the_next_one(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    batch, now = await settlements(client, runtime, db), runtime.clock.now()
    buffer = SettleBuffer(lambda: None)
    first, second, _ = batch.settlements
    buffer.add(first, 0)
    await settle(db, runtime.owner, [replace(batch, settlements=buffer.begin_settle())], now)
    buffer.restore()
    buffer.add(second, 0)
    while buffer.due:
        await settle(db, runtime.owner, [replace(batch, settlements=buffer.begin_settle())], now)
        buffer.recorded()
    assert await db.fetchval("select times from postponement") == 2
