"""Both producers and the real service in one process."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    BarrierRefused,
    CheckEndpoint,
    PlainFailed,
    SyncTransactionProducer,
    Transaction,
    TransactionProducer,
    Verdict,
)
from halfnote.barrier_mark import marked
from halfnote.conversation import NOTHING_DONE
from starlette.applications import Starlette

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.sdk.in_process import FromThreads, service
from tests.sdk.servers import asgi_server
from tests.sdk.sites import SITES
from tests.sdk.test_producer import ORDER, Shop
from tests.support.check_stepping import SECRET, turn, verdict


async def test_against_the_real_service(runtime: Runtime, db: Connection, group: str) -> None:
    transport = service(runtime)
    async with TransactionProducer("http://localhost", group=group, transport=transport) as producer:
        async with producer.transaction([ORDER, ORDER], context={"order": 1030}) as tx:
            pass
        assert tx.result is not None
        assert tx.result.end == "recorded"
        plain = await producer.send_plain(ORDER)
        again = await producer.send_plain(ORDER, transaction_id=plain.transaction_id)
        assert (again.offsets, again.replayed) == (plain.offsets, True)
        made = await producer.register(["http://127.0.0.1:9/check"], immunity_s=7)
        assert not made.created
    async with TransactionProducer("http://localhost", group="nobody", transport=transport) as nobody:
        with pytest.raises(PlainFailed, match="group-unregistered"):
            await nobody.send_plain(ORDER)
    rows = await db.fetch("select transaction_id, verdict from op order by transaction_id")
    assert [tuple(row) for row in rows] == [(tx.transaction_id, 1), (plain.transaction_id, 1)]


async def test_the_sync_one_against_the_real_service(runtime: Runtime, db: Connection, group: str) -> None:
    transport = FromThreads(service(runtime))

    def work() -> Verdict:
        raise LookupError("no teapots left")

    def inside() -> Any:
        with SyncTransactionProducer("http://localhost", group=group, listener=Shop(work), transport=transport) as one:
            return one.send(ORDER)

    result = await asyncio.to_thread(inside)
    assert result.end == "recorded"
    row = await db.fetchrow("select transaction_id, verdict, reason from op")
    assert tuple(row) == (result.transaction_id, 2, "LookupError: no teapots left")


async def test_a_half_that_arrives_after_its_caller_was_canceled_is_rolled_back(
    runtime: Runtime, db: Connection, group: str
) -> None:
    """The request is one of several callers', so it goes on; the first withdrawal comes before it."""
    inner, came, asked = service(runtime), asyncio.Event(), asyncio.Event()

    async def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/half":
            came.set()
            await asked.wait()
        answered = await inner.handle_async_request(request)
        if request.url.path == "/end":
            asked.set()
        return httpx.Response(answered.status_code, headers=answered.headers, content=await answered.aread())

    async def place() -> None:
        async with producer.transaction(ORDER):
            pass

    transport = httpx.MockTransport(answers)
    async with TransactionProducer("http://localhost", group=group, transport=transport) as producer:
        task = asyncio.create_task(place())
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await db.fetchval("select count(*) from half") == 1
    assert await db.fetch("select verdict, reason from op") == [(2, NOTHING_DONE)]


async def test_local_work_that_begins_after_its_check_is_refused_and_reported(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, tmp_path: Path
) -> None:
    """It waited for longer than `immunity_s`; nothing of it is kept, and the caller hears of it."""
    async with SITES["asyncpg"](tmp_path) as site:
        await site.barrier.create_table()
        app = Starlette()
        app.add_route("/check", CheckEndpoint(site.barrier, group="shop", secrets=SECRET).asgi())
        async with asgi_server(app) as url:
            await register_group(db, "shop", check_urls=[f"{url}/check"])

            class Slow:
                check_local = site.barrier.check_local

                async def execute_local(self, transaction: Transaction, number: int) -> Verdict:
                    asked = await client.post(f"/transactions/{transaction.transaction_id}/check")
                    assert asked.status_code == 202
                    assert await turn(runtime, CheckBack()) == 1
                    async with site.local() as local:
                        await local.enter(transaction)
                        await local.order(number)
                    return COMMIT

            slow = Slow()
            async with TransactionProducer(
                "http://localhost", group="shop", listener=slow, transport=service(runtime)
            ) as producer:
                result = await producer.send(ORDER, 1030, context=marked(None))
                assert (result.local_verdict, result.end) == (ROLLBACK, "recorded")
                assert isinstance(result.error, BarrierRefused)
                with pytest.raises(BarrierRefused, match="a check that came first answered rollback"):
                    async with producer.transaction(ORDER, context=marked(None)) as tx:
                        await slow.execute_local(tx, 1031)
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end) == (ROLLBACK, "recorded")
        assert [await verdict(db, one) for one in (result.transaction_id, tx.transaction_id)] == [(2, 1), (2, 1)]
        assert site.orders() == []
