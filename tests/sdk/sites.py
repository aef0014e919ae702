"""Producers' databases, one for each driver, with one interface: local work in steps, and the answer to a check.

Steps of plain drivers run on a thread of their own, one for each database transaction, as they do in services.
"""

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import psycopg
import pymysql
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.databases.psycopg import AsyncPsycopg
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.sdk.servers import configure
from tests.sdk.shop import fresh, with_driver

ORDERS = "create table orders (number int primary key)"
INSERT = "insert into orders values ({})"


class Local(Protocol):
    """Local work that is under way in an open database transaction."""

    async def enter(self, transaction: Any) -> None: ...

    async def order(self, number: int) -> None: ...


@dataclass
class Site:
    """A producer's database with one driver. `local()` commits at its end and rolls back on an exception."""

    name: str
    local: Callable[[], AbstractAsyncContextManager[Local]]
    call: Callable[..., Any]
    orders: Callable[[], list[int]]
    barrier: Any

    async def settle(self, transaction_id: UUID) -> Any:
        return await self.call(self.barrier.settle, transaction_id)


@dataclass
class AsyncLocal:
    barrier: AsyncBarrier
    connection: Any
    execute: Callable[[str], Any]

    async def enter(self, transaction: Any) -> None:
        await self.barrier.enter(self.connection, transaction)

    async def order(self, number: int) -> None:
        await self.execute(INSERT.format(number))


@dataclass
class PlainLocal:
    barrier: Barrier
    connection: Any
    execute: Callable[[Any, str], Any]
    thread: ThreadPoolExecutor

    async def enter(self, transaction: Any) -> None:
        await self._run(self.barrier.enter, self.connection, transaction)

    async def order(self, number: int) -> None:
        await self._run(self.execute, self.connection, INSERT.format(number))

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)


def plain_local(
    barrier: Barrier,
    begin: Callable[[], AbstractContextManager[Any]],
    execute: Callable[[Any, str], Any],
    after: Callable[[], None] = lambda: None,
) -> Callable[[], AbstractAsyncContextManager[Local]]:
    """Return a function that opens a database transaction on a separate thread."""

    @asynccontextmanager
    async def local() -> AsyncIterator[Local]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            opened = begin()
            connection = await loop.run_in_executor(thread, opened.__enter__)
            failure: tuple[Any, Any, Any] = (None, None, None)
            try:
                yield PlainLocal(barrier, connection, execute, thread)
            except Exception as error:
                failure = (type(error), error, error.__traceback__)
                raise
            finally:
                try:
                    await loop.run_in_executor(thread, opened.__exit__, *failure)
                finally:
                    await loop.run_in_executor(thread, after)

    return local


def execute_on_cursor(connection: Any, sql: str) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql)


@contextmanager
def dbapi_transaction(connect: Callable[[], Any], release: Callable[[Any], Any]) -> Any:
    """Commit or roll back a separate connection."""
    connection = connect()
    try:
        yield connection
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    finally:
        release(connection)


def listed(
    connect: Callable[[], Any], release: Callable[[Any], Any] = lambda connection: connection.close()
) -> Callable[[], list[int]]:
    def orders() -> list[int]:
        with dbapi_transaction(connect, release) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("select number from orders order by number")
            return [row[0] for row in cursor.fetchall()]

    return orders


async def awaited(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return await function(*arguments, **named)


@asynccontextmanager
async def postgres() -> AsyncIterator[str]:
    """A database with the table of orders."""
    yield fresh(ORDERS)


@asynccontextmanager
async def with_asyncpg() -> AsyncIterator[Site]:
    async with postgres() as url, asyncpg.create_pool(url, min_size=0, max_size=20) as pool:
        barrier = AsyncBarrier(Asyncpg(pool))

        @asynccontextmanager
        async def local() -> AsyncIterator[Local]:
            async with pool.acquire() as connection, connection.transaction():
                yield AsyncLocal(barrier, connection, connection.execute)

        yield Site("asyncpg", local, awaited, listed(lambda: psycopg.connect(url)), barrier)


@asynccontextmanager
async def with_async_psycopg() -> AsyncIterator[Site]:
    async with postgres() as url:

        @asynccontextmanager
        async def connection() -> AsyncIterator[Any]:
            async with await psycopg.AsyncConnection.connect(url) as connection:
                yield connection

        barrier = AsyncBarrier(AsyncPsycopg(connection))

        @asynccontextmanager
        async def local() -> AsyncIterator[Local]:
            async with connection() as one:
                yield AsyncLocal(barrier, one, one.execute)

        yield Site("psycopg-async", local, awaited, listed(lambda: psycopg.connect(url)), barrier)


@asynccontextmanager
async def with_async_sqlalchemy() -> AsyncIterator[Site]:
    async with postgres() as url:
        engine = create_async_engine(with_driver(url, "asyncpg"), pool_size=20, isolation_level="REPEATABLE READ")
        barrier = AsyncBarrier(AsyncSqlAlchemy(engine))

        @asynccontextmanager
        async def local() -> AsyncIterator[Local]:
            async with engine.begin() as connection:
                yield AsyncLocal(barrier, connection, lambda sql: connection.execute(text(sql)))

        yield Site("sqlalchemy-async", local, awaited, listed(lambda: psycopg.connect(url)), barrier)
        await engine.dispose()


@asynccontextmanager
async def with_psycopg() -> AsyncIterator[Site]:
    async with postgres() as url:
        yield dbapi_site("psycopg", lambda: psycopg.connect(url), "postgresql")


@asynccontextmanager
async def with_sqlalchemy() -> AsyncIterator[Site]:
    async with postgres() as url:
        yield sqlalchemy_site("sqlalchemy", with_driver(url, "psycopg"), lambda: psycopg.connect(url))


@asynccontextmanager
async def with_sqlite(directory: Path) -> AsyncIterator[Site]:
    def connect() -> Any:
        return sqlite3.connect(directory / "shop.db", timeout=0.5)

    with closing(connect()) as connection:
        connection.execute(ORDERS)
    yield dbapi_site("sqlite", connect, "sqlite")


@asynccontextmanager
async def with_sqlalchemy_sqlite(directory: Path) -> AsyncIterator[Site]:
    with closing(sqlite3.connect(directory / "shop.db")) as connection:
        connection.execute(ORDERS)
    url = f"sqlite:///{directory / 'shop.db'}?timeout=0.5"
    yield sqlalchemy_site("sqlalchemy-sqlite", url, lambda: sqlite3.connect(directory / "shop.db"))


def django_alias(url: str) -> str:
    """Give Django a Postgres database, under a name of its own; return that."""
    parts = urlsplit(url)
    place = {"NAME": parts.path[1:], "USER": parts.username, "PASSWORD": parts.password}
    return named_by_django(ENGINE="django.db.backends.postgresql", HOST=parts.hostname, PORT=parts.port, **place)


def named_by_django(**place: Any) -> str:
    """Give Django a database, under a name of its own; return that."""
    from django.db import connections

    configure()
    alias = f"shop_{secrets.token_hex(4)}"
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: place})[alias]
    return alias


@asynccontextmanager
async def with_django() -> AsyncIterator[Site]:
    async with postgres() as url:
        yield django_site("django", django_alias(url), lambda: psycopg.connect(url))


@asynccontextmanager
async def with_django_sqlite(directory: Path) -> AsyncIterator[Site]:
    file = directory / "shop.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(ORDERS)
    alias = named_by_django(ENGINE="django.db.backends.sqlite3", NAME=str(file), OPTIONS={"timeout": 0.5})
    yield django_site("django-sqlite", alias, lambda: sqlite3.connect(file))


def django_site(name: str, alias: str, connect: Callable[[], Any]) -> Site:
    from django.db import connections, transaction
    from halfnote.databases.django import Django

    def insert(_: Any, sql: str) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)

    def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        finally:
            connections.close_all()

    async def on_a_thread(*arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(call, *arguments, **named)

    barrier = Barrier(Django(alias))
    local = plain_local(barrier, lambda: transaction.atomic(alias), insert, connections.close_all)
    return Site(name, local, on_a_thread, listed(connect), barrier)


@asynccontextmanager
async def with_mariadb() -> AsyncIterator[Site]:
    with mariadb_database() as connect:
        # PyMySQL takes longer to connect than all else here takes together.
        with pooled(connect) as (taken, given_back):
            yield dbapi_site("mariadb", taken, "mysql", release=given_back)


@asynccontextmanager
async def with_sqlalchemy_mariadb() -> AsyncIterator[Site]:
    with mariadb_database() as connect:
        with closing(connect()) as connection:
            url = f"mysql+pymysql://root@{connection.host}:{connection.port}/{connection.db.decode()}"
        yield sqlalchemy_site("sqlalchemy-mariadb", url, connect)


@contextmanager
def mariadb_database() -> Any:
    """A MariaDB database with the table of orders; yields a function that connects to it."""
    # Only here, because the client's tests also run where the service's do not.
    from tests.support import brokers

    server = brokers.mariadb()
    name = f"shop_{secrets.token_hex(4)}"
    place: dict[str, Any] = {"host": server.host, "port": server.port, "user": "root"}
    with closing(pymysql.connect(**place)) as connection:
        execute_on_cursor(connection, f"create database {name}")

    def connect() -> Any:
        return pymysql.connect(**place, database=name)

    with closing(connect()) as connection:
        execute_on_cursor(connection, ORDERS + " engine = InnoDB")
    yield connect
    with closing(pymysql.connect(**place)) as connection:
        execute_on_cursor(connection, f"drop database {name}")


def dbapi_site(
    name: str, connect: Callable[[], Any], dialect: str, release: Callable[[Any], Any] | None = None
) -> Site:
    release = release or (lambda connection: connection.close())
    barrier = Barrier(DbApi(connect, dialect, release=release))
    local = plain_local(barrier, lambda: dbapi_transaction(connect, release), execute_on_cursor)
    return Site(name, local, asyncio.to_thread, listed(connect, release), barrier)


@contextmanager
def pooled(connect: Callable[[], Any]) -> Any:
    """A pool: yields the functions that take a connection and give it back."""
    idle: list[Any] = []

    def taken() -> Any:
        try:
            return idle.pop()
        except IndexError:
            return connect()

    yield taken, idle.append
    for connection in idle:
        connection.close()


def sqlalchemy_site(name: str, url: str, connect: Callable[[], Any]) -> Site:
    engine = create_engine(url, poolclass=NullPool)
    barrier = Barrier(SqlAlchemy(engine))
    local = plain_local(barrier, engine.begin, lambda connection, sql: connection.execute(text(sql)))
    return Site(name, local, asyncio.to_thread, listed(connect), barrier)


SITES: dict[str, Callable[[Path], AbstractAsyncContextManager[Site]]] = {
    "asyncpg": lambda _: with_asyncpg(),
    "psycopg-async": lambda _: with_async_psycopg(),
    "sqlalchemy-async": lambda _: with_async_sqlalchemy(),
    "psycopg": lambda _: with_psycopg(),
    "sqlalchemy": lambda _: with_sqlalchemy(),
    "django": lambda _: with_django(),
    "django-sqlite": with_django_sqlite,
    "sqlite": with_sqlite,
    "sqlalchemy-sqlite": with_sqlalchemy_sqlite,
    "mariadb": lambda _: with_mariadb(),
    "sqlalchemy-mariadb": lambda _: with_sqlalchemy_mariadb(),
}
