"""Connections that open slowly or not at all: claims take what others give back, and an answer says what failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from app.database.connection import Connection, Database, NoConnection, PoolBusy
from app.database.keyed_share import KeyedShare
from tests.conftest import assembled, client_of, register_group, settings_of
from tests.database.test_not_connected import TEXT, refuse
from tests.support.consumers import Consumer, put_pulled
from tests.support.faulty_proxy import FaultyProxy, through
from tests.support.relay_stepping import order, publish

# Far below the 10 s in which a connection must be open, and far above what a free one takes.
SOON_S = 5


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(urlsplit(dsn).port or 5432) as made:
        yield made


@asynccontextmanager
async def share_of(dsn: str, most: int, **fields: Any) -> AsyncIterator[KeyedShare]:
    database = Database(dsn, pool_size=1, **fields)
    share = KeyedShare(database, most)
    try:
        yield share
    finally:
        await share.close()
        await database.close()


async def used(share: KeyedShare) -> Connection:
    """Use a connection for one statement; return it."""
    async with share.connection() as connection:
        assert await connection.fetchval("select 1") == 1
    return connection


async def until_logged(lines: list[Any], event: str) -> None:
    async with asyncio.timeout(30):
        while not any(line["event"] == event for line in lines):
            await asyncio.sleep(0.01)


async def until_accepted(proxy: FaultyProxy, count: int) -> None:
    async with asyncio.timeout(30):
        while proxy.connections < count:
            await asyncio.sleep(0.01)


async def test_a_request_takes_what_another_gives_back_while_a_connection_opens_slowly(
    proxy: FaultyProxy, dsn: str
) -> None:
    async with share_of(through(proxy, dsn), 2) as share:
        async with share.connection() as first:
            proxy.hold_new()
            waiting = asyncio.create_task(used(share))
            await until_accepted(proxy, 2)
        async with asyncio.timeout(SOON_S):
            assert await waiting is first
        # The slow one is there for the requests after it.
        proxy.release()
        async with asyncio.timeout(30), share.connection() as one, share.connection() as other:
            assert {one, other} > {first}
            assert await other.fetchval("select 1") == 1
        assert proxy.connections == 2


async def test_a_connection_that_is_refused_fails_no_request_that_another_one_can_serve(dsn: str) -> None:
    async with share_of(dsn, 3) as share:
        with capture_logs() as lines:
            async with share.connection() as first:
                await refuse(dsn)
                waiting = [asyncio.create_task(used(share)) for _ in range(4)]
                await until_logged(lines, "connection_not_opened")
            async with asyncio.timeout(SOON_S):
                assert await asyncio.gather(*waiting) == [first] * 4
        refused = next(line for line in lines if line["event"] == "connection_not_opened")
        assert (refused["in_use"], refused["log_level"]) == (1, "warning")
        assert "not currently accepting connections" in refused["error"]


async def test_a_connection_that_was_refused_is_opened_again_for_who_waits(dsn: str) -> None:
    async with share_of(dsn, 2) as share:
        with capture_logs() as lines:
            async with share.connection() as first:
                await refuse(dsn)
                waiting = asyncio.create_task(used(share))
                await until_logged(lines, "connection_not_opened")
                await refuse(dsn, refuses=False)
                async with asyncio.timeout(SOON_S):
                    assert await waiting is not first


async def test_requests_fail_at_once_if_no_connection_is_there_or_can_be_opened(dsn: str) -> None:
    async with share_of(dsn, 2) as share:
        broken = await used(share)
        await refuse(dsn)
        broken.terminate()
        async with asyncio.timeout(SOON_S):
            failed = await asyncio.gather(*(used(share) for _ in range(4)), return_exceptions=True)
        for error in failed:
            assert isinstance(error, NoConnection)
            assert isinstance(error.__cause__, asyncpg.ObjectNotInPrerequisiteStateError)
        await refuse(dsn, refuses=False)
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(used(share) for _ in range(4)))


async def test_what_is_not_open_in_time_is_not_connected_and_what_stays_in_use_is_busy(
    proxy: FaultyProxy, dsn: str
) -> None:
    async with share_of(through(proxy, dsn), 1, pool_timeout_s=0.2) as share:
        proxy.hold_new()
        with pytest.raises(NoConnection, match=r"within 0\.2 s"):
            await used(share)
        proxy.release()
        async with AsyncExitStack() as stack:
            for _ in range(100):
                with suppress(NoConnection):
                    await stack.enter_async_context(share.connection())
                    break
            with pytest.raises(PoolBusy):
                await used(share)
        await used(share)


async def test_one_that_breaks_while_a_request_waits_is_replaced(dsn: str) -> None:
    async with share_of(dsn, 1) as share:
        async with share.connection() as first:
            waiting = asyncio.create_task(used(share))
            await asyncio.sleep(0)
            first.terminate()
        async with asyncio.timeout(SOON_S):
            assert await waiting is not first


async def test_a_canceled_wait_keeps_no_connection(dsn: str) -> None:
    """Before, in and after the turn in which it is handed one."""
    async with share_of(dsn, 1) as share:
        for turns in range(8):
            async with asyncio.timeout(SOON_S), share.connection() as first:
                waiting = [asyncio.create_task(used(share)) for _ in range(2)]
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting[0].cancel()
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*waiting, return_exceptions=True)
                assert await used(share) is first


async def test_a_claim_says_that_the_database_could_not_be_connected(
    dsn: str, proxy: FaultyProxy, db: Connection
) -> None:
    await register_group(db, "shop")
    url = through(proxy, dsn)
    async with assembled(settings_of(url), url) as runtime, client_of(runtime) as client:
        await put_pulled(client)
        await publish(client, order(1))
        runtime.database.pool_timeout_s = 0.2
        proxy.hold_new()
        with capture_logs() as lines:
            answer = await client.post("/subscriptions/worker/claim", json={})
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (503, "/problems/database-unavailable")
        assert (problem["detail"], answer.headers["retry-after"]) == (TEXT, "1")
        [line] = [line for line in lines if line["event"] == "not_connected"]
        assert line["error"] == "no connection was opened within 0.2 s"
        proxy.release()
        runtime.database.pool_timeout_s = 30
        [message] = await Consumer(client).claim()
        assert message["body"] == {"order": 1}


async def test_a_share_that_is_closed_keeps_and_opens_no_connection(dsn: str) -> None:
    async with share_of(dsn, 1) as share:
        async with share.connection() as held:
            waiting = asyncio.create_task(used(share))
            await asyncio.sleep(0)
            await share.close()
            async with asyncio.timeout(SOON_S):
                with pytest.raises(NoConnection, match="the process ends"):
                    await waiting
        assert held.is_closed()
        with pytest.raises(NoConnection, match="the process ends"):
            await used(share)
