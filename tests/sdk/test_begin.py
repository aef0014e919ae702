"""`producer.begin`: one block for the message, the database transaction and the barrier, with each driver."""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    BarrierRefused,
    CheckEndpoint,
    NotCommitted,
    NotEntered,
    Outgoing,
    SyncTransactionProducer,
    TransactionProducer,
)
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.barrier_mark import marked, unmarked
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.databases.django import Django
from halfnote.databases.psycopg import AsyncPsycopg
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from halfnote.ids import new_id
from halfnote.testing import SECRET, Coordinator
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.sdk.coordinators import Scripted, answer
from tests.sdk.shop import fresh, with_driver
from tests.sdk.sites import ORDERS, django_alias
from tests.sdk.test_barrier import asked

ORDER = Outgoing("order", {"order": 1030})
INSERT = "insert into orders values ({})"


class OutOfStock(Exception):
    """The local work fails."""


# Runs one block that writes an order: play(number, fails=…, transaction_id=…); returns its transaction.
Play = Callable[..., Any]


async def async_block(begun: Any, execute: Any, number: int, *, fails: bool, drops: bool) -> Any:
    async with begun as tx:
        await execute(INSERT.format(number))
        if drops:
            tx.rollback("no teapots left")
        if fails:
            raise OutOfStock
    return tx


def sync_block(begun: Any, execute: Any, number: int, *, fails: bool, drops: bool) -> Any:
    with begun as tx:
        execute(INSERT.format(number))
        if drops:
            tx.rollback("no teapots left")
        if fails:
            raise OutOfStock
    return tx


@asynccontextmanager
async def by_async(
    barrier: AsyncBarrier, halfnote: Any, connect: Callable[[], AbstractAsyncContextManager[Any]], execute: Any
) -> AsyncIterator[Play]:
    await barrier.create_table()
    transport = halfnote.transport()
    async with TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:

        async def play(number: int, *, fails: bool = False, drops: bool = False, **half: Any) -> Any:
            async with connect() as connection:
                block = producer.begin(ORDER, connection, **half)
                return await async_block(block, lambda sql: execute(connection, sql), number, fails=fails, drops=drops)

        yield play


@asynccontextmanager
async def by_sync(barrier: Barrier, halfnote: Any, connect: Any, execute: Any) -> AsyncIterator[Play]:

    def create_table() -> None:
        with connect():
            barrier.create_table()

    # Django's connections belong to threads without an event loop.
    await asyncio.to_thread(create_table)
    transport = halfnote.transport()
    with SyncTransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:

        def inside(number: int, fails: bool, drops: bool, half: dict[str, Any]) -> Any:
            with connect() as connection:
                block = producer.begin(ORDER, connection, **half)
                return sync_block(block, lambda sql: execute(connection, sql), number, fails=fails, drops=drops)

        async def play(number: int, *, fails: bool = False, drops: bool = False, **half: Any) -> Any:
            return await asyncio.to_thread(inside, number, fails, drops, half)

        yield play


@asynccontextmanager
async def by_asyncpg(url: str, halfnote: Any) -> AsyncIterator[Play]:
    async with asyncpg.create_pool(url, min_size=0) as pool:
        execute = lambda connection, sql: connection.execute(sql)  # noqa: E731
        async with by_async(AsyncBarrier(Asyncpg(pool)), halfnote, pool.acquire, execute) as play:
            yield play


@asynccontextmanager
async def by_async_psycopg(url: str, halfnote: Any) -> AsyncIterator[Play]:
    @asynccontextmanager
    async def connection() -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(url) as made:
            yield made

    execute = lambda connection, sql: connection.execute(sql)  # noqa: E731
    async with by_async(AsyncBarrier(AsyncPsycopg(connection)), halfnote, connection, execute) as play:
        yield play


@asynccontextmanager
async def by_psycopg(url: str, halfnote: Any) -> AsyncIterator[Play]:
    barrier = Barrier(DbApi(lambda: psycopg.connect(url), "postgresql"))
    execute = lambda connection, sql: connection.execute(sql)  # noqa: E731
    async with by_sync(barrier, halfnote, lambda: psycopg.connect(url), execute) as play:
        yield play


@asynccontextmanager
async def by_async_sqlalchemy(url: str, halfnote: Any, kind: str) -> AsyncIterator[Play]:
    engine = create_async_engine(with_driver(url, "asyncpg"))
    connect: Any = engine.connect if kind == "connection" else lambda: AsyncSession(engine)
    execute = lambda connection, sql: connection.execute(text(sql))  # noqa: E731
    async with by_async(AsyncBarrier(AsyncSqlAlchemy(engine)), halfnote, connect, execute) as play:
        yield play
    await engine.dispose()


@asynccontextmanager
async def by_sqlalchemy(url: str, halfnote: Any, kind: str) -> AsyncIterator[Play]:
    engine = create_engine(with_driver(url, "psycopg"))
    connect: Any = engine.connect if kind == "connection" else lambda: Session(engine)
    execute = lambda connection, sql: connection.execute(text(sql))  # noqa: E731
    async with by_sync(Barrier(SqlAlchemy(engine)), halfnote, connect, execute) as play:
        yield play
    engine.dispose()


@asynccontextmanager
async def by_django(url: str, halfnote: Any) -> AsyncIterator[Play]:
    from django.db import connections

    alias = django_alias(url)

    class Thread:
        """Django's connection belongs to the thread, and a block takes None in its place."""

        def __enter__(self) -> None:
            """Do nothing."""

        def __exit__(self, *failure: Any) -> None:
            connections.close_all()

    def execute(_: Any, sql: str) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)

    async with by_sync(Barrier(Django(alias)), halfnote, Thread, execute) as play:
        yield play


BY: dict[str, Callable[[str, Any], AbstractAsyncContextManager[Play]]] = {
    "asyncpg": by_asyncpg,
    "psycopg-async": by_async_psycopg,
    "psycopg": by_psycopg,
    "sqlalchemy-async-session": lambda url, halfnote: by_async_sqlalchemy(url, halfnote, "session"),
    "sqlalchemy-async-connection": lambda url, halfnote: by_async_sqlalchemy(url, halfnote, "connection"),
    "sqlalchemy-session": lambda url, halfnote: by_sqlalchemy(url, halfnote, "session"),
    "sqlalchemy-connection": lambda url, halfnote: by_sqlalchemy(url, halfnote, "connection"),
    "django": by_django,
}


def rows(url: str) -> tuple[list[int], dict[str, str]]:
    """Return the orders, and the reasons of the barrier by transaction."""
    with psycopg.connect(url) as connection:
        orders = [row[0] for row in connection.execute("select number from orders order by number")]
        reasons = connection.execute("select transaction_id::text, reason from halfnote_barrier").fetchall()
    return orders, dict(reasons)


@pytest.mark.parametrize("by", BY)
async def test_one_block_commits_and_enters_and_ends(by: str) -> None:
    url, halfnote = fresh(ORDERS), Scripted()
    async with BY[by](url, halfnote) as play:
        tx = await play(1, context={"order": 1030})
        with pytest.raises(OutOfStock):
            await play(2, fails=True)
    assert (tx.result.local_verdict, tx.result.end, tx.context) == (COMMIT, "recorded", {"order": 1030})
    failed = halfnote.asked("/half")[1]["transaction_id"]
    assert rows(url) == ([1], {str(tx.transaction_id): "local", failed: "rollback"})
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback"]
    assert [unmarked(half.get("context")) for half in halfnote.asked("/half")] == [
        (True, {"order": 1030}),
        (True, None),
    ]


@pytest.mark.parametrize("by", BY)
async def test_messages_that_a_block_drops_are_dropped_by_checks_too(by: str) -> None:
    """The process may end between the commit of the database and the end."""
    url, halfnote = fresh(ORDERS), Scripted()
    async with BY[by](url, halfnote) as play:
        tx = await play(1, drops=True)
    assert tx.result.local_verdict is ROLLBACK
    assert rows(url) == ([1], {str(tx.transaction_id): "rollback"})
    assert [(end["verdict"], end["reason"]) for end in halfnote.asked("/end")] == [("rollback", "no teapots left")]


@pytest.mark.parametrize("by", BY)
async def test_a_second_run_with_the_same_id_is_refused(by: str) -> None:
    url, one = fresh(ORDERS), new_id()
    async with BY[by](url, Coordinator("shop")) as play:
        await play(1, transaction_id=one)
        with pytest.raises(BarrierRefused, match="nothing is left to do") as refused:
            await play(2, transaction_id=one)
    assert refused.value.recorded is COMMIT
    assert rows(url) == ([1], {str(one): "local"})


@pytest.mark.parametrize("by", BY)
async def test_a_second_run_after_a_first_that_failed_needs_a_new_id(by: str) -> None:
    """Halfnote has the rollback of the first run, so an order of the second would have no message."""
    url, one, coordinator = fresh(ORDERS), new_id(), Coordinator("shop")
    async with BY[by](url, coordinator) as play:
        with pytest.raises(OutOfStock):
            await play(1, transaction_id=one, fails=True)
        with pytest.raises(BarrierRefused, match="needs a new id") as refused:
            await play(1, transaction_id=one)
    assert refused.value.recorded is ROLLBACK
    assert rows(url) == ([], {str(one): "rollback"})


async def test_a_block_takes_a_connection_of_its_own_only_when_the_half_is_stored(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    """An exception rolls back; a failure that was hidden is not taken for a commit."""
    halfnote, taken = Scripted(), list[int]()
    halfnote.answers = {"/half": [lambda request: taken.append(engine.pool.checkedout()) or answer(201)]}
    async with producer_of(barrier, halfnote) as producer:
        async with producer.begin(ORDER) as tx:
            await tx.connection.execute(text(INSERT.format(1)))
        with pytest.raises(OutOfStock):
            async with producer.begin(ORDER) as failing:
                await failing.connection.execute(text(INSERT.format(2)))
                raise OutOfStock
        with pytest.raises(DBAPIError, match="aborted"):
            async with producer.begin(ORDER) as hiding:
                with contextlib.suppress(DBAPIError):
                    await hiding.connection.execute(text(INSERT.format(1)))
    assert taken == [0, 0, 0]
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback", "rollback"]
    assert await numbers(engine) == [1]


async def test_a_block_of_a_plain_driver_takes_a_connection_of_its_own() -> None:
    url, halfnote = fresh(ORDERS), Scripted()
    barrier = Barrier(DbApi(lambda: psycopg.connect(url), "postgresql"))
    barrier.create_table()
    producer = SyncTransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport())
    with producer:
        with producer.begin(ORDER) as tx:
            tx.connection.execute(INSERT.format(1))
        with pytest.raises(OutOfStock), producer.begin(ORDER) as tx:
            tx.connection.execute(INSERT.format(2))
            raise OutOfStock
    assert rows(url)[0] == [1]
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback"]


@asynccontextmanager
async def sqlite_shop(directory: Path) -> AsyncIterator[tuple[Barrier, Callable[[], sqlite3.Connection]]]:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(directory / "shop.db", timeout=0.5)

    with closing(connect()) as connection:
        connection.execute(ORDERS)
    barrier = Barrier(DbApi(connect, "sqlite"))
    barrier.create_table()
    yield barrier, connect


@pytest.mark.parametrize("isolation_level", ["", None])
async def test_a_block_with_another_driver(tmp_path: Path, isolation_level: str | None) -> None:
    halfnote = Scripted()
    async with sqlite_shop(tmp_path) as (barrier, connect):
        producer = SyncTransactionProducer(
            "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
        )
        with producer, closing(connect()) as connection:
            connection.isolation_level = isolation_level
            with producer.begin(ORDER, connection) as tx:
                connection.execute(INSERT.format(1))
            with pytest.raises(OutOfStock), producer.begin(ORDER, connection):
                connection.execute(INSERT.format(2))
                raise OutOfStock
        with closing(connect()) as connection:
            assert connection.execute("select number from orders").fetchall() == [(1,)]
        assert barrier.check_local(asked(tx.transaction_id)) is COMMIT
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback"]


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    """A shop's database, asynchronously."""
    made = create_async_engine(with_driver(fresh(ORDERS), "asyncpg"))
    yield made
    await made.dispose()


@pytest.fixture
async def barrier(engine: AsyncEngine) -> AsyncBarrier:
    """Its barrier, with the table."""
    made = AsyncBarrier(AsyncSqlAlchemy(engine))
    await made.create_table()
    return made


def producer_of(barrier: AsyncBarrier, halfnote: Any) -> TransactionProducer:
    return TransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport())


async def numbers(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return list((await connection.scalars(text("select number from orders order by number"))).all())


async def test_a_session_that_has_read_before_is_committed_by_the_block(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        await session.execute(text("select 1"))
        async with producer.begin(ORDER, session) as tx:
            await session.execute(text(INSERT.format(1)))
        assert not session.in_transaction()
        await session.execute(text("select 1"))
        with pytest.raises(OutOfStock):
            async with producer.begin(ORDER, session):
                await session.execute(text(INSERT.format(2)))
                raise OutOfStock
        assert await barrier.check_local(asked(tx.transaction_id)) is COMMIT
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "rollback"]
    assert await numbers(engine) == [1]


@pytest.mark.parametrize("commits", [True, False])
async def test_in_a_database_transaction_of_the_caller_the_end_follows(
    engine: AsyncEngine, barrier: AsyncBarrier, commits: bool
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        await session.begin()
        async with producer.begin(ORDER, session) as tx:
            await session.execute(text(INSERT.format(1)))
        assert tx.result is not None
        assert tx.result.end == "left_to_check"
        await (session.commit() if commits else session.rollback())
        await producer.close(60)
        truth = COMMIT if commits else ROLLBACK
        assert await barrier.check_local(asked(tx.transaction_id)) is truth
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["unknown", truth.value]
    assert await numbers(engine) == ([1] if commits else [])


async def test_messages_that_are_dropped_in_a_database_transaction_of_the_caller(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        async with session.begin():
            async with producer.begin(ORDER, session) as tx:
                await session.execute(text(INSERT.format(1)))
                tx.rollback("no teapots left")
        assert await barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["rollback"]
    assert await numbers(engine) == [1]


@pytest.mark.parametrize("kind", ["driver", "sqlalchemy"])
def test_messages_are_dropped_after_the_code_has_rolled_back(tmp_path: Path, kind: str) -> None:
    """No row of the barrier is left to say so, and none is needed."""
    place, halfnote = tmp_path / "shop.db", Scripted()
    engine = create_engine(f"sqlite:///{place}")
    of_driver = Barrier(DbApi(lambda: sqlite3.connect(place), "sqlite"))
    barrier = of_driver if kind == "driver" else Barrier(SqlAlchemy(engine))
    barrier.create_table()
    with SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
    ) as producer:
        with closing(
            sqlite3.connect(place, isolation_level=None) if kind == "driver" else engine.connect()
        ) as connection:
            with producer.begin(ORDER, connection) as tx:
                connection.rollback()
                tx.rollback("busy")
    engine.dispose()
    assert [(end["verdict"], end["reason"]) for end in halfnote.asked("/end")] == [("rollback", "busy")]


@pytest.mark.parametrize("within", [True, False])
async def test_messages_that_are_dropped_before_an_error(
    engine: AsyncEngine, barrier: AsyncBarrier, within: bool
) -> None:
    """The database commits all the same, within the block or after it."""
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        with contextlib.suppress(OutOfStock):
            async with producer.bind(session).transaction(ORDER) as tx:
                await session.execute(text(INSERT.format(1)))
                tx.rollback("no teapots left")
                if within:
                    await session.commit()
                raise OutOfStock
        await session.commit()
        await producer.close(60)
        assert await barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
    assert [end["verdict"] for end in halfnote.asked("/end")][-1] == "rollback"
    assert await numbers(engine) == [1]


async def test_the_barrier_is_entered_by_the_flush_of_a_commit_after_the_block(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        async with session.begin():
            async with producer.bind(session).transaction(ORDER) as tx:
                pass
            # As a commit's flush does: the first statement, and the block is closed.
            await session.execute(text(INSERT.format(1)))
        await producer.close(60)
        assert await barrier.check_local(asked(tx.transaction_id)) is COMMIT
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["unknown", "commit"]


async def test_messages_are_dropped_after_a_flush_that_failed_and_was_hidden(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    """The session is bound to a connection, which later database transactions of the session need."""
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, engine.connect() as connection:
        async with AsyncSession(connection) as session:
            async with producer.bind(session).transaction(ORDER) as tx:
                await session.execute(text(INSERT.format(1)))
                with contextlib.suppress(DBAPIError):
                    await session.run_sync(failed_flush)
                tx.rollback("no teapots left")
            await session.rollback()
            await session.execute(text(INSERT.format(2)))
            await session.commit()
    assert [(end["verdict"], end["reason"]) for end in halfnote.asked("/end")] == [("rollback", "no teapots left")]
    assert await numbers(engine) == [2]


def failed_flush(session: Session) -> None:
    """Flush an order that exists."""

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        number: Mapped[int] = mapped_column(primary_key=True)

    session.add(Order(number=1))
    session.flush()


async def test_a_savepoint_around_a_block_that_is_rolled_back_takes_its_message_along(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    """A loop that goes on after an error: the work of its first round is committed, and no other."""
    halfnote, begun = Scripted(), []
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        async with session.begin():
            for number in range(1, 5):
                with contextlib.suppress(OutOfStock):
                    async with session.begin_nested():
                        async with producer.begin(ORDER, session) as tx:
                            begun.append(tx)
                            await session.execute(text(INSERT.format(number)))
                            if number == 2:
                                raise OutOfStock
                        if number > 2:
                            raise OutOfStock
        await producer.close(60)
        truth = [COMMIT, ROLLBACK, ROLLBACK, ROLLBACK]
        assert [await barrier.check_local(asked(tx.transaction_id)) for tx in begun] == truth
    last = {end["transaction_id"]: end["verdict"] for end in halfnote.asked("/end")}
    assert [last[str(tx.transaction_id)] for tx in begun] == [verdict.value for verdict in truth]
    assert await numbers(engine) == [1]


@pytest.mark.parametrize("again", [True, False])
async def test_a_savepoint_that_is_rolled_back_in_the_block(
    engine: AsyncEngine, barrier: AsyncBarrier, again: bool
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        async with session.begin():
            savepoint = await session.begin_nested()
            async with producer.begin(ORDER, session) as tx:
                await session.execute(text(INSERT.format(1)))
                await savepoint.rollback()
                if again:
                    async with session.begin_nested():
                        await session.execute(text(INSERT.format(2)))
        await producer.close(60)
        truth = COMMIT if again else ROLLBACK
        assert await barrier.check_local(asked(tx.transaction_id)) is truth
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["unknown", truth.value]
    assert await numbers(engine) == ([2] if again else [])


async def test_a_bound_session_enters_by_itself(engine: AsyncEngine, barrier: AsyncBarrier) -> None:
    """Each database transaction until the one that is committed; the later ones have nothing to do with the message."""
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        async with producer.bind(session).transaction(ORDER) as tx:
            await session.execute(text(INSERT.format(1)))
            await session.rollback()
            await session.execute(text(INSERT.format(2)))
            await session.commit()
            await session.execute(text(INSERT.format(3)))
            await session.commit()
        with pytest.raises(ValueError, match="enters the barrier by itself"):
            async with producer.bind(session).transaction(ORDER) as other:
                await barrier.enter(session, other)
        assert await barrier.check_local(asked(tx.transaction_id)) is COMMIT
    assert [end["verdict"] for end in halfnote.asked("/end")][:1] == ["commit"]
    assert await numbers(engine) == [2, 3]


def test_a_bound_session_of_another_database_is_refused_before_its_commit(tmp_path: Path) -> None:
    engines = [create_engine(f"sqlite:///{tmp_path / name}.db") for name in ("shop", "bank")]
    with engines[1].begin() as connection:
        connection.execute(text(ORDERS))
    barrier = Barrier(SqlAlchemy(engines[0]))
    barrier.create_table()
    transport = Scripted().transport()
    with SyncTransactionProducer("http://halfnote", group="shop", barrier=barrier, transport=transport) as producer:
        with Session(engines[1]) as session, pytest.raises(NotEntered):
            with producer.bind(session).transaction(ORDER), session.begin():
                session.execute(text(INSERT.format(1)))
    with engines[1].connect() as connection:
        assert connection.execute(text("select count(*) from orders")).scalar() == 0
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize("wrong", ["forgotten", "not awaited", "not committed", "still open"])
@pytest.mark.filterwarnings("ignore:coroutine 'AsyncBarrier._enter' was never awaited")
async def test_a_plain_block_that_does_it_wrong_raises_at_its_end(
    engine: AsyncEngine, barrier: AsyncBarrier, wrong: str
) -> None:
    halfnote = Scripted()
    quick = AsyncBarrier(AsyncSqlAlchemy(engine), wait_s=0.1)

    async def place(producer: TransactionProducer, session: AsyncSession) -> None:
        async with producer.transaction(ORDER) as tx:
            if wrong == "not awaited":
                quick.enter(session, tx).close()
            elif wrong != "forgotten":
                await quick.enter(session, tx)
            await session.execute(text(INSERT.format(1)))
            if wrong == "not committed":
                await session.rollback()
            elif wrong != "still open":
                await session.commit()

    texts = {
        "forgotten": (NotEntered, "did not call `barrier.enter`"),
        "not awaited": (NotEntered, "called `barrier.enter` without `await`"),
        "not committed": (NotCommitted, "was not committed"),
        "still open": (NotCommitted, "is still open"),
    }
    kind, pattern = texts[wrong]
    async with producer_of(quick, halfnote) as producer, AsyncSession(engine) as session:
        with pytest.raises(kind, match=pattern):
            await place(producer, session)
    ends = {"not committed": ["rollback"], "still open": ["unknown"]}.get(wrong, ["commit"])
    assert [end["verdict"] for end in halfnote.asked("/end")] == ends
    assert await numbers(engine) == ([1] if ends == ["commit"] else [])


async def test_a_plain_block_that_does_it_right(engine: AsyncEngine, barrier: AsyncBarrier) -> None:
    """Also with the id in place of the transaction."""
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        for number in (1, 2):
            async with producer.transaction(ORDER) as tx:
                async with session.begin():
                    await barrier.enter(session, tx if number == 1 else tx.transaction_id)
                    await session.execute(text(INSERT.format(number)))
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit", "commit"]
    assert [half.get("context") for half in halfnote.asked("/half")] == [None, None]


@pytest.mark.parametrize("fails", [False, True])
async def test_messages_that_a_plain_block_drops_are_dropped_by_checks_too(
    engine: AsyncEngine, barrier: AsyncBarrier, fails: bool
) -> None:
    """Its end may be lost, and check-back decides. An exception after the commit changes nothing."""
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        with contextlib.suppress(OutOfStock):
            async with producer.transaction(ORDER) as tx:
                async with session.begin():
                    await barrier.enter(session, tx)
                    await session.execute(text(INSERT.format(1)))
                tx.rollback("no teapots left")
                if fails:
                    raise OutOfStock
        assert await barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
    assert [(end["verdict"], end["reason"]) for end in halfnote.asked("/end")] == [("rollback", "no teapots left")]
    assert await numbers(engine) == [1]


@pytest.mark.parametrize("fails", [False, True])
async def test_messages_that_are_dropped_after_a_commit_in_the_block(
    engine: AsyncEngine, barrier: AsyncBarrier, fails: bool
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        for block in (producer.begin(ORDER, session), producer.begin(ORDER)):
            with contextlib.suppress(OutOfStock):
                async with block as tx:
                    await tx.connection.execute(text(INSERT.format(len(halfnote.asked("/half")))))
                    await tx.connection.commit()
                    tx.rollback("no teapots left")
                    if fails:
                        raise OutOfStock
            assert await barrier.check_local(asked(tx.transaction_id)) is ROLLBACK
    ends = [(end["verdict"], end["reason"]) for end in halfnote.asked("/end")]
    assert ends == [("rollback", "no teapots left")] * 2
    assert await numbers(engine) == [1, 2]


async def test_a_barrier_that_cannot_be_written_keeps_no_messages_from_being_dropped(
    engine: AsyncEngine, barrier: AsyncBarrier, caplog: pytest.LogCaptureFixture
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        async with producer.transaction(ORDER) as tx:
            async with session.begin():
                await barrier.enter(session, tx)
                await session.execute(text("drop table halfnote_barrier"))
            tx.rollback("no teapots left")
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["rollback"]
    assert "could not note that its messages are dropped" in caplog.text


async def test_an_exception_after_an_enter_without_await_does_not_roll_back(
    engine: AsyncEngine, barrier: AsyncBarrier
) -> None:
    halfnote = Scripted()
    async with producer_of(barrier, halfnote) as producer, AsyncSession(engine) as session:
        with pytest.raises(OutOfStock):
            async with producer.transaction(ORDER) as tx:
                barrier.enter(session, tx).close()
                await session.execute(text(INSERT.format(1)))
                await session.commit()
                raise OutOfStock
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["unknown"]


async def test_a_missing_row_rolls_back_only_what_enters_by_itself(
    barrier: AsyncBarrier, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the mark the order may be stored: the check decides nothing, and the local work may still enter."""
    coordinator = Coordinator("shop")
    endpoint = CheckEndpoint(barrier, group="shop", secrets=SECRET)
    ids = [new_id(), new_id()]
    with caplog.at_level(logging.WARNING, "halfnote"):
        async with TransactionProducer("http://halfnote", group="shop", transport=coordinator.transport()) as producer:
            for one, context in zip(ids, (marked({"order": 1}), {"order": 2}), strict=True):
                with pytest.raises(asyncio.CancelledError):
                    async with producer.transaction(ORDER, transaction_id=one, context=context):
                        raise asyncio.CancelledError
        assert list((await coordinator.check(endpoint)).values()) == ["rollback", "unknown"]
    assert f"transaction {ids[1]} has no row in the barrier" in caplog.text
    assert str(ids[0]) not in caplog.text
    assert await barrier.read(ids[0]) is ROLLBACK
    assert await barrier.read(ids[1]) is UNKNOWN


def test_a_block_needs_a_barrier_and_its_connection(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with SyncTransactionProducer("http://halfnote", group="shop") as producer:
        with pytest.raises(ValueError, match="needs a barrier"):
            producer.begin(ORDER)
    barrier = Barrier(SqlAlchemy(engine))
    with SyncTransactionProducer("http://halfnote", group="shop", barrier=barrier) as producer:
        with pytest.raises(TypeError, match="a Session or Connection is expected, not Engine"):
            producer.begin(ORDER, engine)


@pytest.mark.parametrize("context", [None, 0, "text", {"order": 1}, {"context": 1}, marked({"order": 1})])
def test_the_mark_keeps_the_caller_s_context(context: Any) -> None:
    assert unmarked(marked(context)) == (True, context)


@pytest.mark.parametrize("context", [None, 1, {"halfnote_barrier": 1}, {"halfnote_barrier": True, "other": 1}])
def test_another_context_is_not_taken_for_the_mark(context: Any) -> None:
    assert unmarked(context) == (False, context)
