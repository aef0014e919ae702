"""The barrier with the real coordinator: ends race with checks, and the producer's database and the op agree in all."""

import asyncio
import random
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from halfnote import COMMIT, ROLLBACK, UNKNOWN, BarrierRefused, CheckEndpoint, Outgoing, TransactionProducer
from halfnote.testing import SECRET
from starlette.applications import Starlette

from app.database.connection import Connection
from tests.sdk.servers import asgi_server
from tests.sdk.sites import SITES, Site
from tests.sdk.test_barrier import check
from tests.support.processes import Service


async def test_op_and_producer_agree_in_any_order(
    client: httpx.AsyncClient, db: Connection, group: str, tmp_path: Path
) -> None:
    """With the real coordinator: the producer's end and the check's answer race as well."""
    hazard = random.Random(1030)
    async with SITES["asyncpg"](tmp_path) as site:
        await site.barrier.create_table()

        async def end(transaction_id: UUID, verdict: Any, *, from_check: bool) -> None:
            content = {"producer_group": group, "transaction_id": str(transaction_id), "verdict": verdict.value}
            answer = await client.post("/end", json={**content, "from_check": from_check})
            # Never a conflict: both know the same.
            assert answer.status_code == 200

        async def one(number: int) -> tuple[UUID, int]:
            half = {"producer_group": group, "messages": [{"topic": "order", "body": number}]}
            transaction_id = UUID((await client.post("/half", json=half)).json()["transaction_id"])

            async def work() -> None:
                await asyncio.sleep(hazard.random() * 0.005)
                verdict = COMMIT
                try:
                    async with site.local() as local:
                        await local.enter(transaction_id)
                        await asyncio.sleep(hazard.random() * 0.005)
                        await local.order(number)
                        if number % 4 == 0:
                            raise LookupError("no teapots left")
                except (BarrierRefused, LookupError):
                    verdict = ROLLBACK
                if number % 3:
                    await end(transaction_id, verdict, from_check=False)

            async def ask() -> None:
                await asyncio.sleep(hazard.random() * 0.005)
                while (verdict := await check(site, transaction_id)) is UNKNOWN:
                    pass
                await end(transaction_id, verdict, from_check=True)

            await asyncio.gather(work(), ask())
            return transaction_id, number

        ids = dict(await asyncio.gather(*(one(number) for number in range(60))))
        orders = site.orders()
    rows = await db.fetch("select transaction_id, verdict from op")
    assert len(rows) == 60
    assert sorted(ids[row["transaction_id"]] for row in rows if row["verdict"] == 1) == orders
    assert 0 < len(orders) < 60


class Died(BaseException):
    """The process died: nothing is done on its way out."""


async def raced(service: Service, site: Site, count: int) -> dict[UUID, int]:
    """Place orders by the client while Halfnote asks about each; return the orders by transaction id.

    One in four fails, and one in seven dies after its local work: its end is never posted.
    """
    hazard, turns = random.Random(1030), asyncio.Semaphore(16)
    app = Starlette()
    app.add_route("/check", CheckEndpoint(site.barrier, group="shop", secrets=SECRET).asgi())

    async with (
        asgi_server(app) as url,
        TransactionProducer(service.url, group="shop") as producer,
        httpx.AsyncClient(base_url=service.url, timeout=60) as api,
    ):
        await producer.register([f"{url}/check"], secret=SECRET, interval_s=1, max_checks=100)

        async def ask(transaction_id: UUID) -> None:
            await asyncio.sleep(hazard.random() * 0.03)
            answer = await api.post(f"/transactions/{transaction_id}/check")
            # 409: it is decided already.
            assert answer.status_code in (202, 409)

        async def work(number: int) -> UUID:
            tx = None
            try:
                async with producer.transaction(Outgoing("order", number)) as tx:
                    asking = asyncio.create_task(ask(tx.transaction_id))
                    await asyncio.sleep(hazard.random() * 0.02)
                    async with site.local() as local:
                        await local.enter(tx)
                        await asyncio.sleep(hazard.random() * 0.02)
                        await local.order(number)
                        if number % 4 == 0:
                            raise LookupError("no teapots left")
                    await asyncio.sleep(hazard.random() * 0.02)
                    if number % 7 == 0:
                        raise Died
            except (BarrierRefused, LookupError, Died):
                pass
            assert tx is not None
            assert tx.result is not None
            # Never a conflict: the end and the check know the same.
            assert tx.result.end in ("recorded", "left_to_check")
            await asking
            return tx.transaction_id

        async def one(number: int) -> tuple[UUID, int]:
            async with turns:
                return await work(number), number

        ids = dict(await asyncio.gather(*(one(number) for number in range(count))))
        while any(
            [(await api.get("/transactions", params={"state": s})).json()["items"] for s in ("half", "in_doubt")]
        ):
            await asyncio.sleep(0.05)
    return ids


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["asyncpg", "mariadb"])
async def test_5000_ends_race_with_halfnote_s_own_checks(
    name: str, data_dir: Path, dsn: str, db: Connection, tmp_path: Path
) -> None:
    """End to end: the client, the service as a process, its checks over HTTP, and its records."""
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    try:
        async with SITES[name](tmp_path) as site:
            await site.call(site.barrier.create_table)
            ids = await raced(service, site, 5000)
            orders = site.orders()
    finally:
        service.stop()
    rows = await db.fetch("select transaction_id, verdict, source from op")
    assert len(rows) == 5000
    assert sorted(ids[row["transaction_id"]] for row in rows if row["verdict"] == 1) == orders
    assert sorted(ids[row["transaction_id"]] for row in rows) == list(range(5000))
    assert 0 < len(orders) < 5000
    # Chance saw to it that the producer (0) and checks (1) decided some.
    assert {row["source"] for row in rows} == {0, 1}
