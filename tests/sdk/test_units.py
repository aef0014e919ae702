"""Blocks that are a message's and a database transaction's at once: psycopg, asyncpg and Django, on Postgres."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import psycopg
import pytest
from halfnote import COMMIT, UNKNOWN, Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote.units import in_async_psycopg, in_asyncpg, in_dbapi, in_django, in_psycopg
from psycopg.pq import TransactionStatus

from tests.sdk.coordinators import Scripted
from tests.sdk.shop import NOBODY, orders, shop
from tests.sdk.sites import django_alias

__all__ = ["shop"]

ORDER = Outgoing("order", {"order": 1030})
INSERT = "insert into orders values ({}, {})"

# Runs a function on a connection: (producer, connection, block, outer, insert).
Play = Callable[..., Any]


class LookedFor(Exception):
    """The tests raise this."""


def script(begin: Any, outer: Any, insert: Any, customer: int, *, nested: bool, fails: str) -> Any:
    """Play one block on a plain driver; return its transaction."""
    with outer() if nested else nullcontext():
        with begin() as tx:
            insert(INSERT.format(1, customer))
            if fails == "hidden":
                with suppress(Exception):
                    insert(INSERT.format(1, customer))
            if fails == "inside":
                raise LookedFor
        if fails == "outside":
            raise LookedFor
    return tx


async def async_script(begin: Any, outer: Any, insert: Any, customer: int, *, nested: bool, fails: str) -> Any:
    """Play one block on a driver that is awaited; return its transaction."""

    @asynccontextmanager
    async def nothing() -> AsyncIterator[None]:
        yield

    async with outer() if nested else nothing():
        async with begin() as tx:
            await insert(INSERT.format(1, customer))
            if fails == "hidden":
                with suppress(Exception):
                    await insert(INSERT.format(1, customer))
            if fails == "inside":
                raise LookedFor
        if fails == "outside":
            raise LookedFor
    return tx


@asynccontextmanager
async def by_asyncpg(url: str, halfnote: Scripted) -> AsyncIterator[Play]:
    connection = await asyncpg.connect(url)
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:

        async def play(customer: int = 1, *, nested: bool = False, fails: str = "") -> Any:
            begin = lambda: in_asyncpg(producer, connection, ORDER)  # noqa: E731
            return await async_script(
                begin, connection.transaction, connection.execute, customer, nested=nested, fails=fails
            )

        yield play
        await producer.close(60)
    await connection.close()


@asynccontextmanager
async def by_async_psycopg(url: str, halfnote: Scripted) -> AsyncIterator[Play]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:

            async def play(customer: int = 1, *, nested: bool = False, fails: str = "") -> Any:
                begin = lambda: in_async_psycopg(producer, connection, ORDER)  # noqa: E731
                return await async_script(
                    begin, connection.transaction, connection.execute, customer, nested=nested, fails=fails
                )

            yield play
            await producer.close(60)


@contextmanager
def plain(halfnote: Scripted) -> Iterator[SyncTransactionProducer]:
    with SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        yield producer
        producer.close(60)


@asynccontextmanager
async def by_psycopg(url: str, halfnote: Scripted) -> AsyncIterator[Play]:
    with psycopg.connect(url) as connection, plain(halfnote) as producer:

        async def play(customer: int = 1, *, nested: bool = False, fails: str = "") -> Any:
            begin = lambda: in_psycopg(producer, connection, ORDER)  # noqa: E731
            return await asyncio.to_thread(
                script, begin, connection.transaction, connection.execute, customer, nested=nested, fails=fails
            )

        yield play


@asynccontextmanager
async def by_django(url: str, halfnote: Scripted) -> AsyncIterator[Play]:
    from django.db import connections, transaction

    alias = django_alias(url)
    with plain(halfnote) as producer:

        def inside(customer: int, *, nested: bool, fails: str) -> Any:
            def insert(sql: str) -> None:
                with connections[alias].cursor() as cursor:
                    cursor.execute(sql)

            begin = lambda: in_django(producer, ORDER, using=alias)  # noqa: E731
            try:
                outer = lambda: transaction.atomic(using=alias)  # noqa: E731
                return script(begin, outer, insert, customer, nested=nested, fails=fails)
            finally:
                connections.close_all()

        async def play(customer: int = 1, *, nested: bool = False, fails: str = "") -> Any:
            return await asyncio.to_thread(inside, customer, nested=nested, fails=fails)

        yield play


BY: dict[str, Callable[[str, Scripted], AbstractAsyncContextManager[Play]]] = {
    "asyncpg": by_asyncpg,
    "psycopg-async": by_async_psycopg,
    "psycopg": by_psycopg,
    "django": by_django,
}


def verdicts(halfnote: Scripted) -> list[str]:
    return [end["verdict"] for end in halfnote.asked("/end")]


@pytest.mark.parametrize("by", BY)
async def test_both_commit_and_both_roll_back(by: str, shop: str) -> None:
    halfnote = Scripted()
    async with BY[by](shop, halfnote) as play:
        with pytest.raises(LookedFor):
            await play(fails="inside")
        assert orders(shop) == []
        tx = await play()
        assert tx.result.local_verdict is COMMIT
        assert orders(shop) == [1]
    assert verdicts(halfnote) == ["rollback", "commit"]


@pytest.mark.parametrize("by", BY)
async def test_a_commit_that_fails_is_left_to_check_back(by: str, shop: str) -> None:
    halfnote = Scripted()
    async with BY[by](shop, halfnote) as play:
        with pytest.raises(Exception, match="foreign key"):
            await play(NOBODY)
    assert orders(shop) == []
    assert verdicts(halfnote) == ["unknown"]
    assert halfnote.came[-1][0].endswith("/check")


@pytest.mark.parametrize("by", BY)
async def test_inside_an_open_database_transaction(by: str, shop: str, caplog: pytest.LogCaptureFixture) -> None:
    """Only Django reports that the outer transaction committed. No library reports that it was rolled back."""
    halfnote = Scripted()
    async with BY[by](shop, halfnote) as play:
        with pytest.raises(LookedFor):
            await play(nested=True, fails="outside")
        assert orders(shop) == []
        assert verdicts(halfnote) == ["unknown"]
        assert "still open" in caplog.text
        tx = await play(nested=True)
        assert (tx.result.local_verdict, tx.result.end) == (UNKNOWN, "left_to_check")
        assert orders(shop) == [1]
    assert verdicts(halfnote) == ["unknown", "unknown"] + ["commit"] * (by == "django")


@pytest.mark.parametrize("by", BY)
async def test_a_savepoint_that_is_rolled_back_takes_its_message_along(by: str, shop: str) -> None:
    halfnote = Scripted()
    async with BY[by](shop, halfnote) as play:
        with pytest.raises(LookedFor):
            await play(nested=True, fails="inside")
    assert verdicts(halfnote) == ["rollback"]


@pytest.mark.parametrize("by", BY)
async def test_a_failure_that_was_hidden_is_not_taken_for_a_commit(by: str, shop: str) -> None:
    """PostgreSQL answers a COMMIT after a failed statement by a rollback that is no error."""
    halfnote = Scripted()
    async with BY[by](shop, halfnote) as play:
        with pytest.raises(Exception, match="current transaction is aborted"):
            await play(fails="hidden")
    assert orders(shop) == []
    assert verdicts(halfnote) == ["rollback"]


class OtherDriver:
    """A connection of psycopg as one of a driver that the SDK does not know; in autocommit mode `commit` does nothing.

    psycopg2, and sqlite3 with `autocommit=True`, are such drivers.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.autocommit, self.info, self.cursor = connection.autocommit, connection.info, connection.cursor

    def commit(self) -> None:
        if not self.autocommit:
            self._connection.commit()

    def rollback(self) -> None:
        if not self.autocommit:
            self._connection.rollback()


@pytest.mark.parametrize("autocommit", [False, True])
def test_another_driver_commits_and_notices_a_hidden_failure(shop: str, autocommit: bool) -> None:
    halfnote = Scripted()
    with plain(halfnote) as producer, psycopg.connect(shop, autocommit=autocommit) as connection:
        driver = OtherDriver(connection)
        with in_dbapi(producer, driver, ORDER, hides_rollbacks=False):
            driver.cursor().execute(INSERT.format(1, 1))
        assert connection.info.transaction_status == TransactionStatus.IDLE
        assert orders(shop) == [1]
        if autocommit:
            # The caller has begun one, and what it wrote is committed with the block.
            driver.cursor().execute("begin")
            driver.cursor().execute(INSERT.format(7, 1))
            with in_dbapi(producer, driver, ORDER, hides_rollbacks=False):
                driver.cursor().execute(INSERT.format(8, 1))
            assert connection.info.transaction_status == TransactionStatus.IDLE
        saved = orders(shop)
        assert saved == ([1, 7, 8] if autocommit else [1])
        with (
            pytest.raises(psycopg.errors.InFailedSqlTransaction),
            in_dbapi(producer, driver, ORDER, hides_rollbacks=False),
        ):
            driver.cursor().execute(INSERT.format(2, 1))
            with suppress(psycopg.errors.UniqueViolation):
                driver.cursor().execute(INSERT.format(1, 1))
        assert connection.info.transaction_status == TransactionStatus.IDLE
    assert orders(shop) == saved
    assert verdicts(halfnote) == [*["commit"] * (1 + autocommit), "rollback"]


class UnreadRows:
    """A connection of sqlite3 whose cursors refuse to close while rows are unread, as MySQL Connector/Python's do."""

    class Cursor(sqlite3.Cursor):
        def close(self) -> None:
            if self.description and self.fetchone() is not None:
                raise sqlite3.InternalError("Unread result found")
            super().close()

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.commit, self.rollback = connection.commit, connection.rollback
        self.cursor = partial(connection.cursor, self.Cursor)


@pytest.mark.parametrize("hides_rollbacks", [False, True])
def test_a_driver_that_refuses_to_close_a_cursor_with_unread_rows(tmp_path: Path, hides_rollbacks: bool) -> None:
    halfnote, place = Scripted(), tmp_path / "shop.db"
    with plain(halfnote) as producer, closing(sqlite3.connect(place)) as connection:
        connection.execute("create table orders (number int, customer int)")
        with in_dbapi(producer, UnreadRows(connection), ORDER, hides_rollbacks=hides_rollbacks):
            connection.execute(INSERT.format(1, 1))
        assert not connection.in_transaction
        assert connection.execute("select number from orders").fetchall() == [(1,)]
    assert verdicts(halfnote)[0] == "commit"


def test_an_error_after_which_the_database_has_rolled_back_by_itself_is_the_one_that_is_raised(tmp_path: Path) -> None:
    halfnote = Scripted()
    with (
        plain(halfnote) as producer,
        closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection,
    ):
        connection.execute("create table orders (number int unique, customer int)")
        connection.execute(INSERT.format(1, 1))
        # As since Python 3.12, where sqlite3 has `autocommit=True`: `rollback()` is a statement then, and fails.
        driver = SimpleNamespace(
            autocommit=True, commit=None, rollback=None, cursor=connection.cursor, in_transaction=False
        )
        with (
            pytest.raises(sqlite3.IntegrityError),
            in_dbapi(producer, driver, ORDER, hides_rollbacks=False),
        ):
            driver.cursor().execute("insert or rollback into orders values (1, 1)")
    assert verdicts(halfnote) == ["rollback"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_of_django_that_is_marked_for_rollback(shop: str, nested: bool) -> None:
    from django.db import connections, transaction

    alias, halfnote = django_alias(shop), Scripted()
    with plain(halfnote) as producer, transaction.atomic(using=alias) if nested else nullcontext():
        with in_django(producer, ORDER, using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(INSERT.format(1, 1))
            transaction.set_rollback(True, using=alias)
    connections.close_all()
    assert orders(shop) == []
    assert verdicts(halfnote) == ["rollback"]
