"""A producer that is killed between its commit and its end, with the real service and a real database."""

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import psycopg
import pytest
from halfnote import CheckEndpoint
from halfnote.barrier import Barrier
from halfnote.databases.dbapi import DbApi
from starlette.applications import Starlette

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import app_of, register_group
from tests.sdk.doc_blocks import ROOT
from tests.sdk.servers import asgi_server
from tests.sdk.shop import fresh
from tests.sdk.sites import ORDERS
from tests.support.check_stepping import SECRET, turn, verdict

COMMITTED_BY_A_CHECK = (1, 1)


@pytest.mark.parametrize(
    ("form", "decided"),
    [
        ("begin", COMMITTED_BY_A_CHECK),
        ("sync begin", COMMITTED_BY_A_CHECK),
        ("forgotten", None),
        ("not awaited", None),
        ("without a barrier", None),
    ],
)
async def test_a_stored_order_is_never_rolled_back_by_a_check(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    caplog: pytest.LogCaptureFixture,
    form: str,
    decided: tuple[int, int] | None,
) -> None:
    """`begin` has written the row. Without it the check decides nothing, and the log names the transaction."""
    shop = fresh(ORDERS)
    barrier = Barrier(DbApi(lambda: psycopg.connect(shop), "postgresql"))
    barrier.create_table()
    app = Starlette()
    app.add_route("/check", CheckEndpoint(barrier, group="shop", secrets=SECRET).asgi())
    async with asgi_server(app) as checks, asgi_server(app_of(client)) as url:
        await register_group(db, "shop", check_urls=[f"{checks}/check"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sdk")))}
        command = [sys.executable, "-m", "tests.sdk.dying_shop", form, url, shop]
        ended = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        with psycopg.connect(shop) as connection:
            assert connection.execute("select number from orders").fetchall() == [(1030,)]
        transaction_id = await db.fetchval("select transaction_id from half")
        assert (await client.post(f"/transactions/{transaction_id}/check")).status_code == 202
        assert await turn(runtime, CheckBack()) == 1
    assert await verdict(db, transaction_id) == decided
    assert (f"transaction {transaction_id} has no row in the barrier" in caplog.text) == (decided is None)
