"""First tries are settled without looking for their receipts; one that is there fails no other."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.relay.log import Reader, window
from app.store.relay.results import (
    DELIVERED,
    SETTLE_FIRST_TRIES,
    SETTLE_NEW_FIRST_TRIES,
    Settlement,
    settle,
)
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from tests.relay.test_postponements import settlements
from tests.support.relay_stepping import order, publish

RECEIPTS = 'select "offset", attempts, status from receipt order by 1'


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_receipt_that_is_there_fails_no_other(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, in_transaction: bool
) -> None:
    batch, now = await settlements(client, runtime, db), runtime.clock.now()
    batch = replace(batch, matches_since=await db.fetchval("select matches_since from subscription"))
    await publish(client, order(2), order(3))
    route = Route(TopicPatterns(["order"]), None, None)
    reader = Reader(subscription_id=batch.subscription_id, replay=0, route=route, shards=1, shard=0, settled_to=0)
    messages = (await window(db, reader, 0, 10)).messages
    first, second, third = (
        Settlement(message, DELIVERED, 1, now, now, status=200, duration_ms=1, digest=b"x") for message in messages
    )
    ran: list[str] = []

    async def settled(*outcomes: Settlement, target: int) -> None:
        one = replace(batch, settlements=list(outcomes), target=target)
        with db.query_logger(lambda record: ran.append(record.query)):
            if in_transaction:
                async with db.transaction():
                    assert await settle(db, runtime.owner, [one], now) == [True]
            else:
                assert await settle(db, runtime.owner, [one], now) == [True]
            # The driver calls the logger in the next turn of the event loop.
            await asyncio.sleep(0)

    offsets = [message.offset for message in messages]
    await settled(first, target=offsets[0])
    await settled(replace(first, status=202), second, third, target=offsets[2])
    assert [tuple(row) for row in await db.fetch(RECEIPTS)] == [(offset, 1, 200) for offset in offsets]
    assert await db.fetchval('select "offset" from checkpoint') == offsets[2]
    forms = [query for query in ran if query in (SETTLE_FIRST_TRIES, SETTLE_NEW_FIRST_TRIES)]
    fast = [SETTLE_NEW_FIRST_TRIES, SETTLE_NEW_FIRST_TRIES, SETTLE_FIRST_TRIES]
    assert forms == ([SETTLE_FIRST_TRIES] * 2 if in_transaction else fast)
