"""The client over DB-API drivers that it has no code for: psycopg2, and MySQL Connector/Python."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import mysql.connector
import psycopg2
import psycopg2.errors
import pytest
from halfnote import SyncTransactionProducer
from halfnote.barrier import Barrier
from halfnote.databases.dbapi import DbApi
from halfnote.inbox import Inbox, Received

from tests.sdk.coordinators import Scripted
from tests.sdk.sites import execute_on_cursor, mariadb_database, postgres
from tests.sdk.test_inbox import arrived
from tests.sdk.test_units import ORDER, verdicts

DRIVERS = ["psycopg2", pytest.param("mysql.connector", marks=pytest.mark.slow)]
INSERT = "insert into orders (number) values (1)"


@asynccontextmanager
async def connecting(driver: str) -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """Yield the dialect of a database with an empty table of orders, and what connects to it."""
    if driver == "psycopg2":
        async with postgres() as url:
            with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
                cursor.execute("drop table if exists orders")
                cursor.execute("create table orders (number int unique)")
            yield "postgresql", lambda: psycopg2.connect(url)
        return
    with mariadb_database() as connect, closing(connect()) as place:
        server = {"host": place.host, "port": place.port, "user": "root", "database": place.db.decode()}
        yield "mysql", lambda: mysql.connector.connect(**server)


def saved(connect: Callable[[], Any]) -> list[Any]:
    """Return the numbers of the orders."""
    with closing(connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("select number from orders")
        return [number for (number,) in cursor.fetchall()]


@asynccontextmanager
async def play(
    driver: str, halfnote: Scripted, *, autocommit: bool
) -> AsyncIterator[tuple[SyncTransactionProducer, Any, Callable[[], Any]]]:
    """Yield a producer with a barrier, a connection, and what connects to the database."""
    async with connecting(driver) as (dialect, connect):
        barrier = Barrier(DbApi(connect, dialect))
        barrier.create_table()
        producer = SyncTransactionProducer(
            "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
        )
        with producer, closing(connect()) as connection:
            connection.autocommit = autocommit
            yield producer, connection, connect


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_block_commits_or_rolls_back_with_its_message(driver: str, autocommit: bool) -> None:
    halfnote = Scripted()
    async with play(driver, halfnote, autocommit=autocommit) as (producer, connection, connect):
        with pytest.raises(LookupError), producer.begin(ORDER, connection):
            connection.cursor().execute(INSERT)
            raise LookupError
        assert saved(connect) == []
        with producer.begin(ORDER, connection):
            connection.cursor().execute(INSERT)
        assert saved(connect) == [1]
        with producer.begin(ORDER, connection) as transaction:
            connection.cursor().execute("delete from orders")
            transaction.rollback("there is nothing to say")
        assert saved(connect) == []
    assert verdicts(halfnote) == ["rollback", "commit", "rollback"]


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_statement_whose_failure_is_hidden(driver: str, autocommit: bool) -> None:
    """Postgres has rolled back then; MariaDB undoes the statement alone."""
    halfnote = Scripted()
    async with play(driver, halfnote, autocommit=autocommit) as (producer, connection, connect):

        def work() -> None:
            with producer.begin(ORDER, connection):
                connection.cursor().execute(INSERT)
                with suppress(psycopg2.Error, mysql.connector.Error):
                    connection.cursor().execute(INSERT)

        if driver == "psycopg2":
            with pytest.raises(psycopg2.errors.InFailedSqlTransaction):
                work()
        else:
            work()
        there = saved(connect)
    assert (there, verdicts(halfnote)) == (([], ["rollback"]) if driver == "psycopg2" else ([1], ["commit"]))


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_rows_that_were_not_read(driver: str, autocommit: bool) -> None:
    """MySQL Connector/Python runs no statement until they are, not even a commit."""
    halfnote = Scripted()
    async with play(driver, halfnote, autocommit=autocommit) as (producer, connection, connect):

        def work() -> None:
            with producer.begin(ORDER, connection):
                connection.cursor().execute(INSERT)
                connection.cursor().execute("select 1 union select 2")

        if driver == "psycopg2":
            work()
        else:
            with pytest.raises(mysql.connector.errors.InternalError, match="Unread result"):
                work()
        there = saved(connect)
    assert (there, verdicts(halfnote)) == (([1], ["commit"]) if driver == "psycopg2" else ([], ["rollback"]))


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_inbox_takes_each_message_once(driver: str) -> None:
    async with connecting(driver) as (dialect, connect):
        inbox, one = Inbox(DbApi(connect, dialect), "points"), arrived(1)
        inbox.create_table()
        for found in (Received.DONE, Received.DUPLICATE):
            assert inbox.receive(one, lambda _, connection: execute_on_cursor(connection, INSERT)) is found
        assert saved(connect) == [1]
