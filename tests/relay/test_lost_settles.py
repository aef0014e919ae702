"""A settle that is committed and whose answer is lost: nothing of it is recorded or announced once more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.announcements import BREAKER_OPENED, DEAD
from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.relay.test_faults import running
from tests.support.check_responder import Call, Responder
from tests.support.faulty_proxy import FaultyProxy
from tests.support.load import until
from tests.support.relay_stepping import order, publish, subscribe

DIED = "select count(*) = 1 from dead_letter"
ANNOUNCED = "select count(*) from outbox where topic = $1"
HELD_BACK = "select coalesce(sum(held_back), 0) from announced"
WAITS = """select count(*) > 0 from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and wait_event = $1"""
# The first attempt of a message is the last, or its second one is: then it is dead as a row of delivery_retry.
FIRST: dict[str, Any] = {"retry": []}
SECOND: dict[str, Any] = {"retry": [0.1]}


@asynccontextmanager
async def losing_commit(proxy: FaultyProxy) -> AsyncIterator[None]:
    """Hold the answer to the relay's next commit, and lose it at the end."""
    proxy.hold_answer(b"COMMIT")
    try:
        yield
    finally:
        proxy.cut()


async def die(client: httpx.AsyncClient, proxy: FaultyProxy, db: Connection) -> None:
    """Let a message die."""
    await publish(client, order(1))
    await proxy.holding_answer.wait()
    await until(lambda: db.fetchval(DIED))


async def act(client: httpx.AsyncClient, method: str, path: str) -> None:
    """Redeliver or drop the dead letter, as a person does."""
    [one] = (await client.get("/dead-letters")).json()["items"]
    ids = [{"subscription": one["subscription"], "message_id": one["message_id"]}]
    answer = await client.request(method, path, json={"ids": ids, "reason": "the receiver is repaired"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["not_found"] == 0


@pytest.mark.parametrize("fields", [FIRST, SECOND, {**SECOND, "ordered": "key", "on_dead": "hold"}])
async def test_a_dead_letter_that_was_redelivered_does_not_come_back(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str, fields: dict[str, Any]
) -> None:
    async with Responder(status=500) as receiver, running(worker):
        await subscribe(client, receiver, **fields)
        async with losing_commit(proxy):
            await die(client, proxy, db)
            failed = len(receiver.calls)
            receiver.status = 200
            await act(client, "POST", "/dead-letters/redeliver")
            # The relay claims the message before it settles again.
            worker.clock.offset_s += 1
        await until(lambda: db.fetchval("select count(*) = 1 from receipt"))
        # A message of the same key follows it.
        await publish(client, order(1))
        await until(lambda: db.fetchval("select count(*) = 2 from receipt"))
    assert await db.fetchval("select count(*) from dead_letter") == 0
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    assert await db.fetchval("select count(*) from receipt where outcome = 'delivered'") == 2
    assert len(receiver.calls) == failed + 2
    assert await db.fetchval("select count(*) from attempt") == failed


@pytest.mark.parametrize("fields", [FIRST, SECOND])
async def test_a_dead_letter_that_was_dropped_does_not_come_back(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str, fields: dict[str, Any]
) -> None:
    async with Responder(status=500) as receiver, running(worker):
        await subscribe(client, receiver, **fields)
        async with losing_commit(proxy):
            await die(client, proxy, db)
            failed = len(receiver.calls)
            receiver.status = 200
            await act(client, "DELETE", "/dead-letters")
        await publish(client, order(2))
        await until(lambda: db.fetchval("select count(*) = 1 from receipt where outcome = 'delivered'"))
        await until(lambda: db.fetchval('select "offset" = (select max("offset") from outbox) from checkpoint'))
    assert await db.fetchval("select count(*) from dead_letter") == 0
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    assert await db.fetchval("select count(*) from receipt where outcome = 'dropped'") == 1
    assert len(receiver.calls) == failed + 1


@pytest.mark.parametrize("fields", [FIRST, SECOND])
async def test_a_dead_letter_is_announced_once(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str, fields: dict[str, Any]
) -> None:
    async with Responder(status=500) as receiver, running(worker):
        await subscribe(client, receiver, **fields)
        async with losing_commit(proxy):
            await die(client, proxy, db)
            receiver.status = 200
        await publish(client, order(2))
        await until(lambda: db.fetchval("select count(*) = 1 from receipt"))
    assert await db.fetchval(ANNOUNCED, DEAD) == 1
    assert await db.fetchval(HELD_BACK) == 0
    assert await db.fetchval("select count(*) from dead_letter") == 1


async def test_an_opened_breaker_is_announced_once(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str
) -> None:
    async with Responder(status=500) as receiver, running(worker):
        await subscribe(client, receiver, retry=[600] * 10, max_in_flight=8)
        async with losing_commit(proxy):
            await publish(client, *(order(number) for number in range(30)))
            await proxy.holding_answer.wait()
            await until(lambda: db.fetchval("select opened_at is not null from checkpoint"))
        await until(lambda: db.fetchval('select "offset" > 0 from checkpoint'))
        receiver.status = 200
        await publish(client, order(99))
        worker.clock.offset_s += 700
        await until(lambda: db.fetchval("select count(*) = 31 from receipt"))
    assert await db.fetchval(ANNOUNCED, BREAKER_OPENED) == 1
    assert await db.fetchval("select held_back from announced where topic = $1", BREAKER_OPENED) == 0


async def test_a_settle_that_the_server_ends_late_and_without_a_commit_is_repeated(
    client: httpx.AsyncClient, worker: Runtime, proxy: FaultyProxy, db: Connection, group: str
) -> None:
    locked = asyncio.Event()

    async def refuse(_: Call) -> web.Response:
        await locked.wait()
        return web.Response(status=500)

    async with Responder(refuse) as receiver, running(worker):
        await subscribe(client, receiver, **FIRST)
        await publish(client, order(1))
        await db.execute("select pg_advisory_lock($1)", AdvisoryLock.OFFSET)
        try:
            locked.set()
            # All of the settle is written, and its announcement waits for the lock.
            await until(lambda: db.fetchval(WAITS, "advisory"))
            proxy.cut()
            await until(lambda: db.fetchval(WAITS, "transactionid"))
            assert await db.fetchval("select count(*) from dead_letter") == 0
        finally:
            await db.execute("select pg_advisory_unlock($1)", AdvisoryLock.OFFSET)
        await until(lambda: db.fetchval(DIED))
        await until(lambda: db.fetchval(ANNOUNCED + " having count(*) = 1", DEAD))
    assert len(receiver.calls) == 1
    assert await db.fetchval(ANNOUNCED, DEAD) == 1
    assert await db.fetchval(HELD_BACK) == 0
