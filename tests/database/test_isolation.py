"""The isolation level of Halfnote's connections, whatever the database's settings say."""

import asyncio

import httpx
import pytest

from app.config import Settings
from app.database.connection import Connection, Database, connect
from app.store.coordinator.ops import End, record_ends
from app.verdicts import Verdict
from spark.postgres.connections import connect as connect_of_the_proof
from tests.conftest import assembled, client_of
from tests.coordinator.test_races import end_of, now, store_halves, until_waiting

SHOW = "show default_transaction_isolation"


@pytest.fixture(params=["repeatable read", "serializable"])
async def stricter(request: pytest.FixtureRequest, db: Connection) -> str:
    """Give new sessions of the test's database a level at which statements fail beside others' changes."""
    name = await db.fetchval("select current_database()")
    await db.execute(f"alter database {name} set default_transaction_isolation = '{request.param}'")
    return str(request.param)


async def test_every_connection_reads_what_others_committed(stricter: str, dsn: str) -> None:
    database = Database(dsn, pool_size=1)
    async with database.connection() as pooled, database.keyed() as kept:
        single = await connect(dsn)
        for connection in (pooled, kept, single):
            assert await connection.fetchval(SHOW) == "read committed"
        await single.close()
    await database.close()
    with connect_of_the_proof(dsn) as proof:
        row = proof.execute(SHOW).fetchone()
        assert row == {"default_transaction_isolation": "read committed"}


async def test_an_end_beside_another_is_answered_as_usual(
    stricter: str, settings: Settings, dsn: str, db: Connection, group: str
) -> None:
    (one,) = await store_halves(db, 1)
    async with assembled(settings, dsn) as runtime, client_of(runtime) as client:
        winner = await connect(dsn)
        async with winner.transaction():
            await record_ends(winner, [End(one, "shop", Verdict.COMMIT)], now())
            asked: asyncio.Task[httpx.Response] = asyncio.create_task(client.post("/end", json=end_of(one, "rollback")))
            await until_waiting(db)
        await winner.close()
        answer = await asked
    assert (answer.status_code, answer.json()["recorded"]["verdict"]) == (409, "commit")
