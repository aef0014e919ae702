"""A worker that has lost its shard and does not know it takes no retries: the new holder has them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from aiohttp import web

from app.config import Settings
from app.database.connection import Connection, connect
from app.lifecycle.startup import assemble
from app.relay.expiry_turn import expire
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.relay import checkpoints
from app.store.relay.checkpoints import Shard
from app.store.relay.leases import Lease
from tests.coordinator.test_races import until_waiting
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, publish, step, subscribe, turn_until

# Retries are due after a minute, give or take a tenth, and messages expire after one.
LATER_S = 90
FREE = "select leased_until is null from delivery_retry"


@pytest.fixture
async def other(settings: Settings, dsn: str, group: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


async def with_retry(relay: Relay, runtime: Runtime, client: httpx.AsyncClient, db: Connection) -> None:
    """Let a relay record that a message failed, so that it is due again later."""
    await publish(client, order(1))
    await turn_until(relay, runtime, lambda: db.fetchval(f"select ({FREE})"))


async def claim_retries(relay: Relay, runtime: Runtime) -> None:
    async with runtime.database.keyed() as connection:
        await relay._claim_retries(runtime, connection, runtime.clock.now())


async def expire_retries(relay: Relay, runtime: Runtime) -> None:
    await expire(runtime, relay._assignments, runtime.clock.now())


@pytest.mark.parametrize("fields", [{}, {"ordered": "key"}], ids=["plain", "ordered"])
async def test_a_former_holder_claims_no_retries(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection, fields: dict[str, str]
) -> None:
    former, holder = Relay(runtime), Relay(other)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[60] * 9, **fields)
        await with_retry(former, runtime, client, db)
        other.clock.offset_s += 11
        await step(holder, other)
        assert holder.streams
        runtime.clock.offset_s += LATER_S
        await claim_retries(former, runtime)
        assert await db.fetchval(FREE)
        receiver.status = 200
        other.clock.offset_s += LATER_S
        await turn_until(holder, other, lambda: db.fetchval("select count(*) = 1 from receipt"))
        await former.drain(runtime)
        await holder.drain(other)


async def test_a_former_holder_expires_no_retries(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    former, holder = Relay(runtime), Relay(other)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[3600] * 9, expire_after_s=60)
        await with_retry(former, runtime, client, db)
        other.clock.offset_s += 11
        await step(holder, other)
        assert holder.streams
        runtime.clock.offset_s += LATER_S
        await expire_retries(former, runtime)
        assert await db.fetchval(FREE)
        other.clock.offset_s += LATER_S
        await turn_until(holder, other, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await former.drain(runtime)
        await holder.drain(other)


@pytest.mark.parametrize("expires", [False, True], ids=["due", "expired"])
async def test_a_claim_of_retries_waits_for_a_takeover_and_takes_none_after_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, group: str, expires: bool
) -> None:
    former = Relay(runtime)
    async with Responder(status=500) as receiver:
        fields = {"retry": [3600] * 9, "expire_after_s": 60} if expires else {"retry": [60] * 9}
        await subscribe(client, receiver, **fields)
        await with_retry(former, runtime, client, db)
        runtime.clock.offset_s += LATER_S
        other = await connect(dsn)
        async with other.transaction():
            await other.execute("update lease set epoch = epoch + 1, owner = 'other' where name ^@ 'relay:'")
            claiming = asyncio.create_task((expire_retries if expires else claim_retries)(former, runtime))
            await until_waiting(db)
        await claiming
        assert await db.fetchval(FREE)
        # What it believes to hold is not its own any more.
        await former.drain(runtime)
        await other.close()


async def test_a_holder_that_comes_too_late_frees_no_claims_of_the_next_one(
    client: httpx.AsyncClient,
    runtime: Runtime,
    other: Runtime,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stalls between the claim of its lease and its first look at the retries, until the next holder sends one."""
    late, holder = Relay(runtime), Relay(other)
    stalled, go, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    free_claims = checkpoints.free_claims

    async def stall(connection: Connection, lease: Lease, shard: Shard) -> bool:
        if lease.owner == runtime.owner:
            stalled.set()
            await go.wait()
        return await free_claims(connection, lease, shard)

    async def hang(call: Call) -> web.StreamResponse:
        await answered.wait()
        return web.Response(status=204)

    monkeypatch.setattr(checkpoints, "free_claims", stall)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[60] * 9)
        await with_retry(holder, other, client, db)
        await holder.drain(other)
        # The clock of this process may be behind, so that the lease is still held.
        stalling = asyncio.create_task(turn_until(late, runtime, stalled.is_set, within_s=120))
        await asyncio.wait([stalling, asyncio.create_task(stalled.wait())], return_when=asyncio.FIRST_COMPLETED)
        other.clock.offset_s += LATER_S
        receiver.answer = hang
        taken = Relay(other)
        await turn_until(taken, other, lambda: db.fetchval(f"select not ({FREE})"), within_s=60)
        epoch = await db.fetchval("select lease_epoch from delivery_retry")
        go.set()
        await stalling
        assert not late.streams
        assert await db.fetchval(f"select not ({FREE})")
        assert await db.fetchval("select lease_epoch from delivery_retry") == epoch
        answered.set()
        await late.drain(runtime)
        await taken.drain(other)
