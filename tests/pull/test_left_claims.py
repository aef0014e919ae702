"""Claims whose client is gone before the answer: their messages are given back, and come again soon."""

import asyncio
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.support.consumers import Consumer, put_pulled
from tests.support.leaving_client import leave_while_locked
from tests.support.relay_stepping import order, publish

CLAIM = "/subscriptions/worker/claim"
CURSOR = "select from pull_cursor for update"


async def claimed_soon(consumer: Consumer, runtime: Runtime, count: int) -> list[dict[str, Any]]:
    """Claim what was given back, which comes again after a second."""
    runtime.clock.offset_s += 2
    return await consumer.claim(max=count)


@pytest.mark.parametrize("ordered", ["none", "key"])
@pytest.mark.parametrize("wait_s", [0, 25])
async def test_messages_of_a_client_that_left_during_its_claim_come_again_as_the_same_attempt(
    client: httpx.AsyncClient, group: str, runtime: Runtime, db: Connection, dsn: str, ordered: str, wait_s: float
) -> None:
    await put_pulled(client, ordered=ordered)
    await publish(client, *(order(n) for n in range(3)))
    await leave_while_locked(client, db, dsn, CURSOR, CLAIM, invisible_s=600, wait_s=wait_s)
    assert await db.fetchval("select count(*) from pull_claim") == 0
    again = await claimed_soon(Consumer(client), runtime, 10)
    assert [(one["body"]["order"], one["attempt"]) for one in again] == [(0, 1), (1, 1), (2, 1)]
    assert await db.fetchval("select count(*) from attempt") == 0


async def test_a_give_back_beside_an_acknowledgement_leaves_one_outcome(
    client: httpx.AsyncClient, group: str, db: Connection
) -> None:
    await put_pulled(client)
    await publish(client, *(order(n) for n in range(30)))
    consumer = Consumer(client)
    handles = [one["handle"] for one in await consumer.claim(max=30)]
    settled = await asyncio.gather(
        *(consumer.settle("nack", *handles[n : n + 3], begun=False, error="the client left") for n in range(0, 30, 3)),
        *(consumer.settle("ack", *handles[n : n + 3]) for n in range(0, 30, 3)),
    )
    statuses = [[one["status"] for outcomes in half for one in outcomes] for half in (settled[:10], settled[10:])]
    assert all(sorted(pair) == [200, 409] for pair in zip(*statuses, strict=True))
    counts = "select (select count(*) from receipt), (select count(*) from delivery_retry), count(*) from pull_claim"
    row = await db.fetchrow(counts)
    assert tuple(row or ()) == (statuses[1].count(200), statuses[0].count(200), 0)
