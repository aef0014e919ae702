"""The end of a delivery is never recorded as earlier than its first attempt."""

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.relay.leases import Lease
from app.store.relay.log import Reader, window
from app.store.relay.results import DEAD, DELIVERED, Batch, Settlement, settle
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from tests.support.check_responder import Responder
from tests.support.relay_stepping import order, publish, step, subscribe


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def test_a_turn_that_began_before_the_delivery_settles_it_at_its_own_time(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await step(relay, runtime)
        began = runtime.clock.now()
        await publish(client, order(1))
        while not (row := await db.fetchrow("select first_at, settled_at from receipt")):
            runtime.wake_ups.published()
            await relay.step(runtime, began)
    assert began < row["first_at"] < row["settled_at"]


@pytest.mark.parametrize(
    ("result", "ended"), [(DELIVERED, "receipt.settled_at"), (DEAD, "dead_letter.died_at")], ids=["delivered", "dead"]
)
@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_clock_that_is_behind_the_first_attempt_s_ends_with_it(
    result: str, ended: str, attempts: int, client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
    await publish(client, order(1))
    number, now = await db.fetchval("select subscription_id from subscription"), runtime.clock.now()
    lease = Lease(f"relay:{number}:1:0", runtime.owner, 1)
    await db.execute("insert into lease values ($1, $2, 1, $3)", lease.name, lease.owner, now + timedelta(hours=1))
    reader = Reader(number, 0, Route(TopicPatterns(["order"]), None, None), 1, 0, 0)
    [message] = (await window(db, reader, 0, 10)).messages
    settlement = Settlement(message, result, attempts, now, now, digest=b"", reason="exhausted", duration_ms=1)
    batch = Batch(lease, number, 0, 1, 0, None, now, "http://x", [settlement])
    assert await settle(db, runtime.owner, [batch], now - timedelta(seconds=1)) == [True]
    table = ended.partition(".")[0]
    assert await db.fetchval(f"select {ended} from {table}") == now
