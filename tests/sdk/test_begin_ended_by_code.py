"""Blocks of `producer.begin` whose code commits or rolls back by itself, in place of the block."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pymysql
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    BarrierRefused,
    HalfFailed,
    NotCommitted,
    Outgoing,
    SyncTransactionProducer,
    TransactionProducer,
)
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.databases.psycopg import AsyncPsycopg
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from halfnote.units import in_psycopg
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from tests.sdk.coordinators import Scripted, problem
from tests.sdk.deadlocks import deadlocked
from tests.sdk.shop import fresh, with_driver
from tests.sdk.sites import ORDERS, execute_on_cursor, mariadb_database
from tests.sdk.test_barrier import asked

ORDER = Outgoing("order", {"order": 1030})
INSERT = "insert into orders values ({})"


@dataclass
class Shop:
    """A producer's database. `connect`: for `begin(messages, connection)`; None where the block makes its own."""

    barrier: Barrier
    connect: Callable[[], AbstractContextManager[Any]]
    numbers: Callable[[], list[int]]


def execute(connection: Any, sql: str) -> None:
    """Execute a statement on a connection of any kind."""
    if isinstance(connection, (Connection, Session)):
        connection.execute(text(sql))
    else:
        execute_on_cursor(connection, sql)


def listing(connect: Callable[[], Any]) -> Callable[[], list[int]]:
    def numbers() -> list[int]:
        with closing(connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("select number from orders order by number")
            return [row[0] for row in cursor.fetchall()]

    return numbers


@contextmanager
def nothing() -> Iterator[None]:
    yield None


@contextmanager
def on_sqlite(place: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(place / "shop.db", timeout=0.5)

    with closing(connect()) as connection:
        connection.execute(ORDERS)
    yield connect


@contextmanager
def shop_of(name: str, place: Path) -> Iterator[Shop]:
    """Yield a database with one driver, with the table of orders and the barrier's."""
    if name == "mariadb":
        with mariadb_database() as connect:
            shop = Shop(Barrier(DbApi(connect, "mysql")), lambda: closing(connect()), listing(connect))
            shop.barrier.create_table()
            yield shop
    elif name.startswith("sqlite"):
        with on_sqlite(place) as connect:
            shop = Shop(Barrier(DbApi(connect, "sqlite")), lambda: closing(connect()), listing(connect))
            shop.barrier.create_table()
            yield shop
    elif name.startswith("sqlalchemy"):
        with on_sqlite(place) as connect:
            engine = create_engine(f"sqlite:///{place / 'shop.db'}?timeout=0.5")
            connected: Any = engine.connect if name == "sqlalchemy-connection" else nothing
            shop = Shop(Barrier(SqlAlchemy(engine)), connected, listing(connect))
            shop.barrier.create_table()
            yield shop
            engine.dispose()
    else:
        url = fresh(ORDERS)
        driver: Any = psycopg2 if name == "psycopg2" else psycopg
        database = DbApi(lambda: driver.connect(url), "postgresql")
        connected = nothing if name == "psycopg-new" else lambda: closing(driver.connect(url))
        shop = Shop(Barrier(database), connected, listing(lambda: driver.connect(url)))
        shop.barrier.create_table()
        yield shop


@contextmanager
def producer_of(barrier: Barrier, halfnote: Scripted) -> Iterator[SyncTransactionProducer]:
    transport = halfnote.transport()
    with SyncTransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:
        yield producer


def verdicts(halfnote: Scripted) -> list[str]:
    return [end["verdict"] for end in halfnote.asked("/end")]


MARIADB = pytest.param("mariadb", marks=pytest.mark.slow)
# Their connections begin a new database transaction at the next statement.
PLAIN = ["psycopg2", "sqlite", MARIADB]
# Those of SQLAlchemy refuse statements until the block ends.
ALL = [*PLAIN, "sqlalchemy-connection", "sqlalchemy-new"]


@pytest.mark.parametrize("name", ALL)
def test_code_that_rolls_back_and_goes_on_is_not_taken_for_a_commit(name: str, tmp_path: Path) -> None:
    halfnote, begun = Scripted(), []
    with shop_of(name, tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer, shop.connect() as connection:
        with pytest.raises(NotCommitted, match="was rolled back: to drop the messages call"):
            with producer.begin(ORDER, connection) as tx:
                begun.append(tx)
                execute(tx.connection, INSERT.format(1))
                tx.connection.rollback()
        assert shop.barrier.check_local(asked(begun[0].transaction_id)) is ROLLBACK
        assert shop.numbers() == []
    assert verdicts(halfnote) == ["rollback"]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("checked", [False, True])
def test_work_that_is_done_again_after_a_rollback_is_not_stored_without_its_message(
    name: str, checked: bool, tmp_path: Path
) -> None:
    """The barrier's row went with the rollback, so a check may have answered that nothing is stored."""
    halfnote = Scripted()
    with shop_of(name, tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer, shop.connect() as connection:
        with pytest.raises(NotCommitted), producer.begin(ORDER, connection) as tx:
            execute(tx.connection, INSERT.format(1))
            tx.connection.rollback()
            if checked:
                assert shop.barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
            execute(tx.connection, INSERT.format(2))
        assert shop.numbers() == []
    assert verdicts(halfnote) == ["rollback"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_code_has_committed_is_announced(name: str, fails: bool, tmp_path: Path) -> None:
    """Whether or not an exception comes after the commit."""
    halfnote = Scripted()
    with shop_of(name, tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer, shop.connect() as connection:

        def place() -> None:
            with producer.begin(ORDER, connection) as tx:
                execute(tx.connection, INSERT.format(1))
                tx.connection.commit()
                if fails:
                    raise LookupError("no printer")

        if fails:
            with pytest.raises(LookupError):
                place()
        else:
            place()
        assert shop.numbers() == [1]
    assert verdicts(halfnote) == ["commit"]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_barrier_has_the_outcome_of_a_database_transaction_around_the_block(ends: str, tmp_path: Path) -> None:
    """The code ended it before it raised."""
    halfnote = Scripted()
    with shop_of("sqlalchemy-connection", tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer:
        with shop.connect() as connection, pytest.raises(LookupError):
            execute(connection, INSERT.format(1))
            around = connection.get_transaction()
            with producer.begin(ORDER, connection):
                execute(connection, INSERT.format(2))
                getattr(around, ends)()
                raise LookupError("no printer")
        assert shop.numbers() == [1, 2] * (ends == "commit")
    assert verdicts(halfnote) == [ends]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_the_barrier_has_the_outcome_of_an_asynchronous_database_transaction_around_the_block(ends: str) -> None:
    halfnote, url = Scripted(), fresh(ORDERS)
    engine = create_async_engine(with_driver(url, "asyncpg"))
    barrier = AsyncBarrier(AsyncSqlAlchemy(engine))
    await barrier.create_table()
    transport = halfnote.transport()
    async with TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:
        async with engine.connect() as connection:
            await connection.execute(text(INSERT.format(1)))
            around = connection.get_transaction()
            with pytest.raises(LookupError):
                async with producer.begin(ORDER, connection):
                    await connection.execute(text(INSERT.format(2)))
                    await getattr(around, ends)()
                    raise LookupError("no printer")
    await engine.dispose()
    assert listing(lambda: psycopg.connect(url))() == [1, 2] * (ends == "commit")
    assert verdicts(halfnote) == [ends]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_the_barrier_has_the_outcome_of_a_statement_that_ends_the_database_transaction(ends: str) -> None:
    """asyncpg does not refuse it, and fails at the end of the savepoint."""
    halfnote, url = Scripted(), fresh(ORDERS)
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        barrier = AsyncBarrier(Asyncpg(pool))
        await barrier.create_table()
        transport = halfnote.transport()
        async with (
            TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer,
            pool.acquire() as connection,
        ):
            await connection.transaction().start()
            await connection.execute(INSERT.format(1))
            with pytest.raises(asyncpg.NoActiveSQLTransactionError):
                async with producer.begin(ORDER, connection):
                    await connection.execute(INSERT.format(2))
                    await connection.execute(ends)
    assert listing(lambda: psycopg.connect(url))() == [1, 2] * (ends == "commit")
    assert verdicts(halfnote) == [ends]


@pytest.mark.parametrize("works_on", [False, True])
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_barrier_has_the_outcome_of_a_statement_of_psycopg(ends: str, works_on: bool, tmp_path: Path) -> None:
    """The next statement begins another database transaction, which fails at the end of the savepoint."""
    halfnote = Scripted()
    with shop_of("psycopg", tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer:
        with shop.connect() as connection, pytest.raises(LookupError):
            execute(connection, INSERT.format(1))
            with producer.begin(ORDER, connection):
                execute(connection, INSERT.format(2))
                execute(connection, ends)
                if works_on:
                    execute(connection, INSERT.format(3))
                raise LookupError("no printer")
        assert shop.numbers() == [1, 2] * (ends == "commit")
    assert verdicts(halfnote) == [ends]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("name", ["psycopg", "psycopg-new"])
def test_psycopg_refuses_that_the_code_ends_the_database_transaction(name: str, ends: str, tmp_path: Path) -> None:
    halfnote = Scripted()
    with shop_of(name, tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer, shop.connect() as connection:
        with pytest.raises(psycopg.ProgrammingError, match="forbidden within a Transaction"):
            with producer.begin(ORDER, connection) as tx:
                execute(tx.connection, INSERT.format(1))
                getattr(tx.connection, ends)()
        assert shop.numbers() == []
    assert verdicts(halfnote) == ["rollback"]


@pytest.mark.parametrize("ended", ["commit", "rollback"])
@pytest.mark.parametrize("driver", ["sqlite", "psycopg2"])
def test_in_autocommit_mode_the_barrier_has_the_outcome(driver: str, ended: str, tmp_path: Path) -> None:
    """No database transaction is open at the block's end."""
    halfnote = Scripted()
    with shop_of(driver, tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer:
        with shop.connect() as connection:
            if driver == "sqlite":
                connection.isolation_level = None
            else:
                connection.autocommit = True

            def place() -> None:
                with producer.begin(ORDER, connection):
                    execute(connection, INSERT.format(1))
                    execute(connection, ended)

            if ended == "commit":
                place()
            else:
                with pytest.raises(NotCommitted):
                    place()
        assert shop.numbers() == [1] * (ended == "commit")
    assert verdicts(halfnote) == [ended]


async def test_what_the_code_has_committed_in_a_session_of_the_block_is_announced() -> None:
    halfnote, engine = Scripted(), create_async_engine(with_driver(fresh(ORDERS), "asyncpg"))
    barrier = AsyncBarrier(AsyncSqlAlchemy(engine))
    await barrier.create_table()
    transport = halfnote.transport()
    async with TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:
        async with producer.begin(ORDER) as tx:
            await tx.connection.execute(text(INSERT.format(1)))
            await tx.connection.commit()
        with pytest.raises(InvalidRequestError, match="closed transaction"):
            async with producer.begin(ORDER) as tx:
                await tx.connection.execute(text(INSERT.format(2)))
                await tx.connection.commit()
                await tx.connection.execute(text(INSERT.format(3)))
    async with engine.connect() as connection:
        assert (await connection.scalars(text("select number from orders order by number"))).all() == [1, 2]
    await engine.dispose()
    assert verdicts(halfnote) == ["commit", "commit"]


@pytest.mark.slow
def test_a_deadlock_that_was_hidden_is_found_before_the_commit() -> None:
    """MariaDB rolls all of it back, and the next statement starts a new database transaction."""
    halfnote = Scripted()
    with mariadb_database() as connect, closing(connect()) as other, closing(connect()) as connection:
        execute_on_cursor(other, "insert into orders values (1), (2), (3), (4), (5), (6)")
        other.commit()
        barrier = Barrier(DbApi(connect, "mysql"))
        barrier.create_table()
        with producer_of(barrier, halfnote) as producer, pytest.raises(NotCommitted):
            with producer.begin(ORDER, connection) as tx:
                deadlocked(
                    lambda sql: execute_on_cursor(connection, sql),
                    connect,
                    other,
                    (pymysql.err.OperationalError, "1213"),
                )
                execute_on_cursor(connection, INSERT.format(1030))
        assert barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
        assert listing(connect)() == [1, 2, 3, 4, 5, 6]
    assert verdicts(halfnote) == ["rollback"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
def test_a_rollback_of_psycopg_is_not_taken_for_a_commit(barrier: bool, nested: bool) -> None:
    """`psycopg.Rollback` ends the block without an exception."""
    halfnote, url = Scripted(), fresh(ORDERS)
    entered = Barrier(DbApi(lambda: psycopg.connect(url), "postgresql"))
    entered.create_table()
    producer = SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=entered if barrier else None, transport=halfnote.transport()
    )
    with producer, psycopg.connect(url) as connection:
        if nested:
            connection.execute("select 1")
        with producer.begin(ORDER, connection) if barrier else in_psycopg(producer, connection, ORDER) as tx:
            connection.execute(INSERT.format(1))
            raise psycopg.Rollback
        assert tx.result.local_verdict is ROLLBACK
    assert listing(lambda: psycopg.connect(url))() == []
    assert verdicts(halfnote) == ["rollback"]


@asynccontextmanager
async def async_psycopg(url: str) -> AsyncIterator[tuple[AsyncBarrier, Callable[[], Any]]]:
    @asynccontextmanager
    async def connection() -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(url) as made:
            yield made

    barrier = AsyncBarrier(AsyncPsycopg(connection))
    await barrier.create_table()
    yield barrier, connection


@pytest.mark.parametrize("own", [False, True])
async def test_a_rollback_of_asynchronous_psycopg_is_not_taken_for_a_commit(own: bool) -> None:
    halfnote, url = Scripted(), fresh(ORDERS)
    async with async_psycopg(url) as (barrier, connect):
        transport = halfnote.transport()
        async with (
            TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer,
            connect() as connection,
        ):
            async with producer.begin(ORDER, None if own else connection) as tx:
                await tx.connection.execute(INSERT.format(1))
                raise psycopg.Rollback
            assert tx.result.local_verdict is ROLLBACK
            assert await barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
    assert listing(lambda: psycopg.connect(url))() == []
    assert verdicts(halfnote) == ["rollback"]


def test_a_bound_session_that_works_on_after_a_rollback_and_a_check_is_refused(tmp_path: Path) -> None:
    """The check's row is not taken for the session's own."""
    halfnote = Scripted()
    with shop_of("sqlalchemy-new", tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer:
        database: Any = shop.barrier.database
        with Session(database.engine) as session, pytest.raises(BarrierRefused):
            with producer.bind(session).transaction(ORDER) as tx:
                execute(session, INSERT.format(1))
                session.rollback()
                assert shop.barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
                execute(session, INSERT.format(2))
                session.commit()
        assert shop.numbers() == []
    assert verdicts(halfnote)[-1] == "rollback"


def test_a_half_that_failed_leaves_no_database_transaction_open_on_the_connection(tmp_path: Path) -> None:
    """The next block would be a savepoint in it, and nothing would be committed."""
    halfnote = Scripted({"/half": [problem(422, "group-unregistered"), problem(422, "group-unregistered")]})
    with shop_of("sqlalchemy-connection", tmp_path) as shop, producer_of(shop.barrier, halfnote) as producer:
        with shop.connect() as connection:
            with pytest.raises(HalfFailed), producer.begin(ORDER, connection):
                pass
            assert not connection.in_transaction()
            halfnote.answers = {}
            with producer.begin(ORDER, connection) as tx:
                execute(connection, INSERT.format(1))
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end) == (COMMIT, "recorded")
        assert shop.numbers() == [1]
