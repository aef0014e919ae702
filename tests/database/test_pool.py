"""The pool of connections: requests use a part of it, and a busy pool is a 503 and no defect."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress

import asyncpg
import httpx
import pytest
from sqlalchemy.exc import DBAPIError

from app.database.connection import (
    KEYED_CONNECTIONS,
    LOOP_CONNECTIONS,
    Connection,
    Database,
    PoolBusy,
    PoolShare,
    connect,
)
from app.database.errors import problem_of
from app.database.keyed_share import KeyedShare
from app.ids import uuid7
from app.runtime.state import Runtime
from tests.coordinator.test_races import end_of, now


@asynccontextmanager
async def held(lender: Database | PoolShare) -> AsyncIterator[None]:
    """Keep one connection in use by another task."""
    taken, over = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with lender.connection():
            taken.set()
            await over.wait()

    holder = asyncio.create_task(hold())
    await taken.wait()
    try:
        yield
    finally:
        over.set()
        await holder


def failed(readiness: httpx.Response) -> list[str]:
    """Return the checks of `/readyz` that failed."""
    return [check["name"] for check in readiness.json()["checks"] if not check["ok"]]


async def take(lender: Database | PoolShare) -> None:
    """Take a connection and give it back."""
    async with lender.connection():
        pass


async def test_many_ends_of_unknown_ids_are_answered(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    """More requests than connections, each of which reads the transaction and then its day."""
    ends = [end_of(uuid7(now()), "unknown") for _ in range(40)]
    async with asyncio.timeout(runtime.settings.pool_timeout_s):
        answers = await asyncio.gather(*(client.post("/end", json=end) for end in ends))
    assert {answer.status_code for answer in answers} == {404}


async def test_a_burst_of_requests_leaves_connections_to_the_loops(client: httpx.AsyncClient, runtime: Runtime) -> None:
    runtime.database.pool_timeout_s = 0.05
    async with AsyncExitStack() as stack:
        for _ in range(runtime.settings.pool_size - LOOP_CONNECTIONS):
            await stack.enter_async_context(held(runtime.request_pool))
        for request in (
            client.get("/producer-groups"),
            client.post("/end", json=end_of(uuid7(now()), "unknown")),
        ):
            busy = await request
            assert (busy.status_code, busy.json()["type"]) == (503, "/problems/database-unavailable")
            assert busy.headers["retry-after"] == "1"
        assert "database" not in failed(await client.get("/readyz"))
        async with runtime.database.transaction() as connection:
            assert await connection.fetchval("select 1") == 1
    assert (await client.get("/producer-groups")).status_code == 200


async def test_a_canceled_wait_takes_no_part_of_the_share(dsn: str) -> None:
    database = Database(dsn, pool_size=2)
    share = PoolShare(database, 1)
    async with held(share):
        waiting = asyncio.create_task(take(share))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await take(share)
    await database.close()


async def test_a_pool_that_stays_in_use_is_busy(dsn: str) -> None:
    database = Database(dsn, pool_size=1, pool_timeout_s=0.05)
    async with held(database):
        with pytest.raises(PoolBusy) as busy:
            await take(database)
    assert problem_of(busy.value).status == 503
    await take(database)
    await database.close()


async def test_an_error_that_sqlalchemy_wraps_is_the_databases() -> None:
    class Adapted(Exception):
        pass

    wrapped = Adapted("starting up")
    wrapped.__cause__ = asyncpg.CannotConnectNowError("the database system is starting up")
    assert problem_of(DBAPIError("select 1", None, wrapped)).slug == "database-read-only"
    assert problem_of(DBAPIError("select 1", None, Adapted("no cause"))).slug == "database-unavailable"


async def test_connections_that_keep_plans_are_lent_again_before_those_of_the_pool(dsn: str) -> None:
    database = Database(dsn, pool_size=1, pool_timeout_s=0.05)
    async with AsyncExitStack() as stack:
        lent = [await stack.enter_async_context(database.keyed()) for _ in range(KEYED_CONNECTIONS)]
        assert database.connections_in_use == 0
        for kept in lent:
            assert await kept.fetchval("show plan_cache_mode") == "force_generic_plan"
        async with database.keyed() as pooled:
            assert database.connections_in_use == 1
            assert await pooled.fetchval("show plan_cache_mode") == "auto"
        assert not pooled.is_closed()
    async with database.keyed() as again:
        assert again in lent
    await database.close()
    assert all(kept.is_closed() for kept in lent)


async def test_a_connection_that_keeps_plans_is_replaced_when_it_is_broken(dsn: str) -> None:
    database = Database(dsn, pool_size=1)
    async with database.keyed() as closed:
        closed.terminate()

    async def fail_in_transaction() -> None:
        async with database.keyed() as connection:
            left.append(connection)
            await connection.execute("begin")
            raise ZeroDivisionError

    left: list[Connection] = []
    with pytest.raises(ZeroDivisionError):
        await fail_in_transaction()
    assert left[0].is_closed()
    async with database.keyed() as died:
        pass
    died.terminate()
    async with AsyncExitStack() as stack:
        lent = [await stack.enter_async_context(database.keyed()) for _ in range(KEYED_CONNECTIONS)]
        assert [await kept.fetchval("select 1") for kept in lent] == [1] * KEYED_CONNECTIONS
        assert database.connections_in_use == 0
        assert not {closed, *left, died} & set(lent)
    await database.close()


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("lender", ["pool", "share", "keyed", "keyed share", "dry run"])
async def test_what_was_canceled_while_a_transaction_began_leaves_nothing_open(
    dsn: str, lender: str, hides: bool
) -> None:
    """Else the next one to get the connection works in a database transaction that nothing commits."""
    database = Database(dsn, pool_size=1)
    share, keyed_share = PoolShare(database, 1), KeyedShare(database, 1)
    lend = {"pool": database.connection, "keyed": database.keyed, "keyed share": keyed_share.connection}.get(
        lender, share.connection
    )

    async def hang() -> None:
        if lender == "dry run":
            async with share.transaction(dry_run=True):
                await asyncio.sleep(60)
        async with lend() as connection:
            # As a time limit within the block does.
            with suppress(asyncio.CancelledError) if hides else nullcontext():
                async with connection.transaction():
                    await asyncio.sleep(60)

    other = await connect(dsn)
    try:
        await other.execute("create table written (number int)")
        async with lend():
            pass
        for turns in range(40):
            # Before, in, and after the statement that begins it.
            hanging = asyncio.create_task(hang())
            for _ in range(turns):
                await asyncio.sleep(0)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
            async with asyncio.timeout(20), lend() as connection, connection.transaction():
                await connection.execute("insert into written values ($1)", turns)
            assert await other.fetchval("select count(*) from written") == turns + 1
    finally:
        await other.close()
        await keyed_share.close()
        await database.close()
