"""The barrier in every database and driver: each order of local work and check, and both at once."""

import asyncio
import random
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing, nullcontext, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import psycopg2
import pytest
from django.db import DatabaseError
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    BarrierRefused,
    CheckedTransaction,
    Outgoing,
    Transaction,
    TransactionProducer,
)
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.block import OpenTransaction
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.base import NotInTransaction, dialect_of
from halfnote.databases.dbapi import DbApi
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from halfnote.ids import new_id
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.sdk.coordinators import Scripted
from tests.sdk.shop import with_driver
from tests.sdk.sites import SITES, Site, mariadb_database, postgres

ORDER = Outgoing("order", {"order": 1030})
# Of the database itself: under REPEATABLE READ what comes after the check, and with SQLite what waited for too long.
REFUSED = (DBAPIError, DatabaseError, sqlite3.OperationalError)


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * name.endswith("mariadb")) for name in SITES])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """A producer's database with each driver, with the barrier's table."""
    async with SITES[request.param](tmp_path) as site:
        await site.call(site.barrier.create_table)
        yield site


def asked(transaction_id: UUID, age_s: float = 10.0) -> CheckedTransaction:
    """Return a check's question."""
    born_at = datetime.now(timezone.utc)
    return CheckedTransaction(transaction_id, "shop", 1, 15, born_at, age_s, None, [], barrier=True)


async def check(site: Site, transaction_id: UUID, age_s: float = 10.0) -> Any:
    return await site.call(site.barrier.check_local, asked(transaction_id, age_s))


async def test_one_after_the_other(site: Site) -> None:
    done, undone, late = new_id(), new_id(), new_id()
    async with site.local() as local:
        await local.enter(done)
        await local.order(1)
    with pytest.raises(LookupError):
        async with site.local() as local:
            await local.enter(undone)
            await local.order(2)
            raise LookupError("no teapots left")
    for _ in range(2):
        assert await check(site, done) is COMMIT
        assert await check(site, undone) is ROLLBACK
    # A check before the local work prevents it.
    assert await check(site, late) is ROLLBACK
    with pytest.raises(BarrierRefused, match=str(late)) as refused:
        async with site.local() as local:
            await local.order(3)
            await local.enter(late)
    assert refused.value.recorded is ROLLBACK
    # Nor is the same work done twice.
    with pytest.raises(BarrierRefused, match=str(done)) as refused:
        async with site.local() as local:
            await local.enter(done)
            await local.order(4)
    assert refused.value.recorded is COMMIT
    assert await check(site, late) is ROLLBACK
    assert await check(site, done) is COMMIT
    assert site.orders() == [1]


async def test_a_check_during_the_local_work_waits_for_it(site: Site) -> None:
    for number, commits in ((1, True), (2, False)):
        one = new_id()
        with nullcontext() if commits else pytest.raises(LookupError):
            async with site.local() as local:
                await local.enter(one)
                checking = asyncio.create_task(check(site, one))
                await asyncio.sleep(0.05)
                # SQLite's writers do not wait long here, and then nothing is known yet.
                assert not checking.done() or checking.result() is UNKNOWN
                await local.order(number)
                if not commits:
                    raise LookupError("no teapots left")
        truth = COMMIT if commits else ROLLBACK
        # On a machine that is held up it may have given up waiting.
        assert await checking in (truth, UNKNOWN)
        assert await check(site, one) is truth
    assert site.orders() == [1]


async def test_local_work_that_stays_open_is_unknown_and_may_still_commit(site: Site) -> None:
    one = new_id()
    impatient = type(site.barrier)(site.barrier.database, wait_s=0.2)
    async with site.local() as local:
        await local.enter(one)
        assert await site.call(impatient.check_local, asked(one)) is UNKNOWN
        await local.order(1)
    assert await check(site, one) is COMMIT


async def test_a_plain_barrier_leaves_the_event_loop_free_while_it_waits(tmp_path: Path) -> None:
    """The local transaction that it waits for may be a task of the same loop."""
    halfnote, entered = Scripted(), asyncio.Event()
    async with SITES["psycopg"](tmp_path) as site:
        await site.call(site.barrier.create_table)

        async def work(tx: Transaction) -> None:
            async with site.local() as local:
                await local.enter(tx)
                entered.set()
                await asyncio.sleep(0.1)
                await local.order(1030)

        async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
            with pytest.raises(LookupError):
                async with producer.transaction(ORDER) as tx:
                    working = asyncio.create_task(work(tx))
                    await entered.wait()
                    raise LookupError("no teapots left")
            await working
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end) == (COMMIT, "recorded")
        assert site.orders() == [1030]


async def test_what_may_have_been_purged_is_not_called_rolled_back(site: Site) -> None:
    old_s, held_s = timedelta(days=48).total_seconds(), timedelta(days=46).total_seconds()
    one, two, held = new_id(time.time() - old_s), new_id(), new_id(time.time() - held_s)
    for transaction_id in (one, two, held):
        async with site.local() as local:
            await local.enter(transaction_id)
    # Making the table again harms nothing.
    await site.call(site.barrier.create_table)
    assert site.barrier.sql().startswith("create table if not exists halfnote_barrier (")
    assert await site.call(site.barrier.purge) == 1
    assert await site.call(site.barrier.purge) == 0
    assert await check(site, one, age_s=old_s) is UNKNOWN
    assert await check(site, two) is COMMIT
    # Halfnote removes a day 45 days after its end, so a transaction from its beginning is a day older.
    assert await check(site, held, age_s=held_s) is COMMIT
    with pytest.raises(ValueError, match="rows must be kept for 47 days"):
        await site.call(site.barrier.purge, timedelta(days=1))


async def race(site: Site, number: int, hazard: random.Random) -> tuple[int, bool, Any]:
    """Run one transaction while it is asked about: before, during or after its local work, as chance has it."""
    one = new_id()
    early, late, commits = hazard.random() * 0.004, hazard.random() * 0.004, hazard.random() < 0.7
    first, second = hazard.random() < 0.5, hazard.random() < 0.5

    async def local_work() -> bool:
        await asyncio.sleep(early if first else 0)
        try:
            async with site.local() as local:
                await local.enter(one)
                await asyncio.sleep(early if second else 0)
                await local.order(number)
                if not commits:
                    raise LookupError("no teapots left")
        except (BarrierRefused, LookupError, *REFUSED):
            return False
        return True

    async def checked() -> Any:
        await asyncio.sleep(late)
        return await check(site, one)

    local, reported = await asyncio.gather(local_work(), checked())
    while reported is UNKNOWN:
        reported = await check(site, one)
    return number, local, reported


async def race_many(site: Site, count: int, at_once: int) -> None:
    """Race many transactions against checks; compare each answer with the database."""
    hazard = random.Random(1030)
    turns = asyncio.Semaphore(at_once)

    async def one(number: int) -> tuple[int, bool, Any]:
        async with turns:
            return await race(site, number, hazard)

    outcomes = await asyncio.gather(*(one(number) for number in range(count)))
    committed = {number for number, local, _ in outcomes if local}
    assert {number for number, _, reported in outcomes if reported is COMMIT} == committed
    assert {number for number, _, reported in outcomes if reported is ROLLBACK} == set(range(count)) - committed
    assert site.orders() == sorted(committed)
    # Chance saw to it that each side won some races.
    assert 0 < len(committed) < count


async def test_checks_race_with_local_work(site: Site) -> None:
    # SQLite has one writer; the others wait for it, and more of them would wait too long.
    await race_many(site, 24, at_once=2 if "sqlite" in site.name else 8)


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.parametrize("name", ["asyncpg", "psycopg", "mariadb"])
async def test_5000_checks_race_with_local_work(name: str, tmp_path: Path) -> None:
    async with SITES[name](tmp_path) as site:
        await site.call(site.barrier.create_table)
        await race_many(site, 5000, at_once=16)


@pytest.mark.parametrize("name", ["asyncpg", "sqlalchemy-async"])
async def test_a_commit_whose_answer_is_lost_is_still_announced(name: str, tmp_path: Path) -> None:
    """Without the barrier the exception would be taken for a rollback."""
    halfnote = Scripted()
    async with SITES[name](tmp_path) as site:
        await site.barrier.create_table()

        class Shop:
            async def execute_local(self, transaction: Transaction, number: int) -> Any:
                async with site.local() as local:
                    await local.enter(transaction)
                    await local.order(number)
                raise ConnectionResetError("while the commit was on its way")

            check_local = site.barrier.check_local

        async with TransactionProducer(
            "http://halfnote", group="shop", listener=Shop(), transport=halfnote.transport()
        ) as producer:
            result = await producer.send(ORDER, 1)
            assert (result.local_verdict, result.end) == (COMMIT, "recorded")
            assert isinstance(result.error, ConnectionResetError)
            # Transactions that never got that far stay rolled back.
            again = await producer.send(ORDER, 1)
            assert again.local_verdict is ROLLBACK
            # A second run by mistake changes nothing.
            repeated = await producer.send(ORDER, 2, transaction_id=result.transaction_id)
            assert isinstance(repeated.error, BarrierRefused)
            assert repeated.local_verdict is COMMIT
        assert site.orders() == [1]
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback", "commit"]


async def test_a_database_that_is_away_makes_no_verdict_up() -> None:
    def connect() -> Any:
        raise psycopg.OperationalError("connection refused")

    with pytest.raises(psycopg.OperationalError):
        Barrier(DbApi(connect, "postgresql")).check_local(asked(new_id()))


async def test_a_row_is_not_written_on_its_own(tmp_path: Path) -> None:
    async with postgres() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            barrier = Barrier(DbApi(lambda: psycopg.connect(url), "postgresql"))
            barrier.create_table()
            with pytest.raises(NotInTransaction, match="autocommit"):
                barrier.enter(connection, new_id())
            with connection.transaction():
                barrier.enter(connection, new_id())
        async with asyncpg.create_pool(url, min_size=0) as pool, pool.acquire() as one:
            with pytest.raises(NotInTransaction, match=r"connection\.transaction"):
                await AsyncBarrier(Asyncpg(pool)).enter(one, new_id())
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        barrier = Barrier(DbApi(lambda: sqlite3.connect(tmp_path / "shop.db"), "sqlite"))
        barrier.create_table()
        with pytest.raises(NotInTransaction):
            barrier.enter(connection, new_id())
        connection.execute("begin")
        barrier.enter(connection, new_id())
    if sys.version_info >= (3, 12):
        with closing(sqlite3.connect(tmp_path / "shop.db", autocommit=True)) as connection:
            with pytest.raises(NotInTransaction):
                barrier.enter(connection, new_id())


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
async def test_a_check_on_connections_in_autocommit_mode_waits_no_longer_than_others(driver: str) -> None:
    """PostgreSQL's limit holds for one database transaction, which is one statement there."""
    async with postgres() as url:

        def connect() -> Any:
            if driver == "psycopg":
                return psycopg.connect(url, autocommit=True)
            connection = psycopg2.connect(url)
            connection.autocommit = True
            return connection

        barrier, one = Barrier(DbApi(connect, "postgresql"), wait_s=0.2), new_id()
        barrier.create_table()
        with psycopg.connect(url) as connection:
            barrier.enter(connection, one)
            checking = asyncio.create_task(asyncio.to_thread(barrier.check_local, asked(one)))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(checking), 30)
            answered = checking.done()
        assert (answered, await checking) == (True, UNKNOWN)
        assert barrier.check_local(asked(one)) is COMMIT


async def test_blocks_that_hold_all_connections_do_not_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfnote.barrier.CONNECTED_IN_S", 0.2)
    halfnote = Scripted()
    async with postgres() as url, asyncpg.create_pool(url, min_size=0, max_size=1) as pool:
        barrier = AsyncBarrier(Asyncpg(pool), wait_s=0.2)
        await barrier.create_table()
        producer = TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport())

        async def place() -> OpenTransaction:
            async with producer, pool.acquire() as connection:
                async with producer.transaction(ORDER) as tx, connection.transaction():
                    await barrier.enter(connection, tx)
            return tx

        tx = await asyncio.wait_for(place(), 60)
    assert tx.result is not None
    assert tx.result.end == "left_to_check"


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["pymysql", "MySQLdb", "mysql.connector"])
def test_nor_on_a_mariadb_connection_that_commits_by_itself(driver: str) -> None:
    module = pytest.importorskip(driver, reason=f"{driver} is one of several drivers, and not installed here")
    with mariadb_database() as connect_to, closing(connect_to()) as place:
        server = {"host": place.host, "port": place.port, "user": "root", "database": place.db.decode()}

        def connect() -> Any:
            return module.connect(**server)

        barrier, one = Barrier(DbApi(connect, "mysql")), new_id()
        barrier.create_table()
        with closing(connect()) as connection:
            connection.cursor().execute("set autocommit = 0")
            connection.rollback()
            barrier.enter(connection, new_id())
            connection.commit()
        with closing(connect()) as connection:
            if driver == "mysql.connector":
                connection.autocommit = True
            else:
                connection.autocommit(True)
            with pytest.raises(NotInTransaction, match="autocommit"):
                barrier.enter(connection, one)
            connection.cursor().execute("start transaction")
            barrier.enter(connection, one)
            connection.rollback()
        assert barrier.check_local(asked(one)) is ROLLBACK


async def test_nor_by_an_engine_that_commits_by_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    plain = create_engine(url)
    Barrier(SqlAlchemy(plain)).create_table()
    optioned = plain.execution_options(isolation_level="AUTOCOMMIT")
    for engine in (create_engine(url, isolation_level="AUTOCOMMIT"), optioned):
        barrier = Barrier(SqlAlchemy(engine))
        with Session(engine) as session, pytest.raises(NotInTransaction, match="AUTOCOMMIT"):
            barrier.enter(session, new_id())
        with engine.connect() as connection, pytest.raises(NotInTransaction, match="AUTOCOMMIT"):
            barrier.enter(connection, new_id())
        engine.dispose()
    async with postgres() as postgresql:
        asynchronous = create_async_engine(with_driver(postgresql, "asyncpg"), isolation_level="AUTOCOMMIT")
        waiting = AsyncBarrier(AsyncSqlAlchemy(asynchronous))
        async with AsyncSession(asynchronous) as one:
            with pytest.raises(NotInTransaction, match="AUTOCOMMIT"):
                await waiting.enter(one, new_id())
        async with asynchronous.connect() as another:
            with pytest.raises(NotInTransaction, match="AUTOCOMMIT"):
                await waiting.enter(another, new_id())
        await asynchronous.dispose()


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with pytest.raises(ValueError, match="is not a table name"):
        Barrier(SqlAlchemy(engine), table="a; drop table orders")
    assert "create table if not exists shop.barrier (" in Barrier(SqlAlchemy(engine), table="shop.barrier").sql()
    with pytest.raises(ValueError, match="not for oracle"):
        dialect_of("oracle")
