"""Claims of large retries: few bodies are read at once, and all are sent, in the order of their key."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.relay.loop import Relay
from app.relay.window import UNSETTLED_BYTES
from app.runtime.state import Runtime
from app.store.relay.leases import claim
from app.store.relay.log import WINDOW_BYTES
from app.store.relay.retries import Claimant, FoundRetries, claim_retries
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

LARGE = 3 * 1024 * 1024
# As many as begin within the bytes of one read.
IN_A_READ = -(-WINDOW_BYTES // LARGE)


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def publish_large(client: httpx.AsyncClient, count: int, key: str | None = None) -> list[int]:
    """Commit large messages, of one key or each of its own; return their offsets."""
    body = "x" * LARGE
    return await publish(
        client, *(order(number, body=body, **({"key": key} if key else {})) for number in range(count))
    )


async def retry_all(db: Connection) -> None:
    """Write each message of the log as a row of the subscription that is due and was not sent."""
    await db.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, '
        'first_at, due_at) select s.subscription_id, transaction_id, position, "offset", topic, key, 0, '
        "null, now() - interval '1 min' from outbox, subscription s where topic = 'order'"
    )


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_claim_reads_few_large_bodies(
    client: httpx.AsyncClient, db: Connection, group: str, ordered: bool
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
    sent = await publish_large(client, 7, "one" if ordered else None)
    await retry_all(db)
    subscription_id = await db.fetchval("select subscription_id from subscription")
    now = datetime.now(UTC)
    [lease] = await claim(db, ["relay"], "one", now + timedelta(minutes=1), 1, now)
    claimant = Claimant(lease, subscription_id, 0, 1, 0, 1 if ordered else 7, ordered=ordered, hold=False)
    for first in range(0, 7, IN_A_READ):
        [found] = await claim_retries(db, "one", [claimant], now + timedelta(minutes=1), now)
        assert [message.offset for message in found.messages] == sent[first : first + IN_A_READ]
        # As if they were settled.
        await db.execute("delete from delivery_retry where leased_until is not null")
    assert await claim_retries(db, "one", [claimant], now + timedelta(minutes=1), now) == [FoundRetries([])]


async def test_large_retries_that_are_not_settled_are_few(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    count = 2 * -(-UNSETTLED_BYTES // LARGE)
    answered = asyncio.Event()

    async def wait(call: Call) -> web.Response:
        await answered.wait()
        return web.Response()

    async with Responder(wait) as receiver:
        await subscribe(client, receiver, max_in_flight=4 * count, timeout_s=60)
        sent = await publish_large(client, count)
        await retry_all(db)
        await db.execute('update checkpoint set "offset" = (select max("offset") from outbox)')
        claimed = "select count(*) from delivery_retry where leased_until is not null"
        await turn_until(relay, runtime, lambda: db.fetchval(f"select ({claimed}) >= {UNSETTLED_BYTES // LARGE}"))
        for _ in range(5):
            runtime.clock.offset_s += 1
            await step(relay, runtime)
        assert await db.fetchval(claimed) * LARGE < UNSETTLED_BYTES + WINDOW_BYTES + LARGE
        answered.set()
        await turn_until(relay, runtime, lambda: db.fetchval(f"select count(*) = {count} from receipt"))
    assert sorted(offsets(receiver)) == sent
    assert [stream.outcomes.unsettled_retry_bytes for stream in relay.streams.values()] == [0]


async def test_large_retries_of_a_key_arrive_in_order(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, ordered="key", timeout_s=60)
        sent = await publish_large(client, 7, "one")
        await retry_all(db)
        await db.execute('update checkpoint set "offset" = (select max("offset") from outbox)')
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 7 from receipt"))
    assert offsets(receiver) == sent
    assert all(len(json.loads(call.body)) == LARGE for call in receiver.calls)
