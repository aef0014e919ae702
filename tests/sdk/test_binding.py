"""Ends that follow an SQLAlchemy session's own commit, on Postgres: both nestings, failing commits, savepoints."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress

import httpx
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    BarrierRefused,
    Outgoing,
    ProducerClosed,
    SyncTransactionProducer,
    TransactionProducer,
)
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from halfnote.ids import new_id
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.sdk.coordinators import Scripted, answer, problem
from tests.sdk.deadlocks import deadlocked
from tests.sdk.shop import NOBODY, orders, shop, with_driver
from tests.sdk.sites import execute_on_cursor, mariadb_database

__all__ = ["shop"]

ORDER = Outgoing("order", {"order": 1030})
INSERT = text("insert into orders values (:number, :customer)")


class Base(DeclarativeBase):
    """The shop's models."""


class Customer(Base):
    __tablename__ = "customer"
    number: Mapped[int] = mapped_column(primary_key=True)


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]


@pytest.fixture
async def engine(shop: str) -> AsyncIterator[AsyncEngine]:
    """The shop's database, asynchronously."""
    engine = create_async_engine(with_driver(shop, "asyncpg"))
    yield engine
    await engine.dispose()


@pytest.fixture
def sync_engine(shop: str) -> Iterator[Engine]:
    """The shop's database, synchronously."""
    engine = create_engine(with_driver(shop, "psycopg"))
    yield engine
    engine.dispose()


@pytest.fixture
async def producer(halfnote: Scripted) -> AsyncIterator[TransactionProducer]:
    """A producer without a listener."""
    async with TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        yield producer


@pytest.fixture
def sync_producer(halfnote: Scripted) -> Iterator[SyncTransactionProducer]:
    """A producer without a listener."""
    with SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport()) as producer:
        yield producer


@pytest.fixture
def halfnote() -> Scripted:
    """A coordinator to which everything is well."""
    return Scripted()


def verdicts(halfnote: Scripted) -> list[str]:
    return [end["verdict"] for end in halfnote.ends()]


async def place(session: AsyncSession, number: int, customer: int = 1) -> None:
    await session.execute(INSERT, {"number": number, "customer": customer})


async def settled(producer: TransactionProducer) -> None:
    """Let background work end."""
    await producer.close(grace_s=60)


async def test_the_database_inside_the_message(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    async with AsyncSession(engine) as session:
        async with producer.bind(session).transaction(ORDER) as tx:
            async with session.begin():
                await place(session, 1)
            assert verdicts(halfnote) == []
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end) == (COMMIT, "recorded")
    assert verdicts(halfnote) == ["commit"]
    assert orders(shop) == [1]


async def test_the_message_inside_the_database(
    engine: AsyncEngine,
    producer: TransactionProducer,
    halfnote: Scripted,
    shop: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncSession(engine) as session, session.begin():
        async with producer.bind(session).transaction(ORDER) as tx:
            await place(session, 1)
        assert tx.result is not None
        assert (tx.result.local_verdict, tx.result.end) == (UNKNOWN, "left_to_check")
        assert [path for path, _ in halfnote.came] == ["/half", "/end", f"/transactions/{tx.transaction_id}/check"]
        assert "closed while the bound database transaction is still open" in caplog.text
        assert verdicts(halfnote) == ["unknown"]
        assert orders(shop) == []
    await settled(producer)
    assert verdicts(halfnote) == ["unknown", "commit"]
    assert orders(shop) == [1]


async def test_the_message_inside_a_database_transaction_that_is_rolled_back(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(LookupError):
            async with session.begin():
                async with producer.bind(session).transaction(ORDER):
                    await place(session, 1)
                raise LookupError("no teapots left")
    await settled(producer)
    assert verdicts(halfnote) == ["unknown", "rollback"]
    assert orders(shop) == []


async def test_a_commit_that_fails_is_not_announced(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    """A refused commit looks like one whose answer was lost, so Halfnote must check."""
    async with AsyncSession(engine) as session:
        with pytest.raises(IntegrityError):
            async with producer.bind(session).transaction(ORDER) as tx, session.begin():
                await place(session, 1, NOBODY)
    assert verdicts(halfnote) == ["unknown"]
    assert halfnote.came[-1][0] == f"/transactions/{tx.transaction_id}/check"
    assert orders(shop) == []


async def test_a_commit_that_fails_after_the_block(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted
) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(IntegrityError):
            async with session.begin(), producer.bind(session).transaction(ORDER):
                await place(session, 1, NOBODY)
    await settled(producer)
    assert verdicts(halfnote) == ["unknown", "unknown"]


async def test_a_database_transaction_that_is_rolled_back(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted
) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(LookupError):
            async with producer.bind(session).transaction(ORDER), session.begin():
                await place(session, 1)
                raise LookupError("no teapots left")
        # Also where the block itself ends well.
        async with producer.bind(session).transaction(ORDER) as tx:
            await place(session, 1)
            await session.rollback()
    assert tx.result is not None
    assert tx.result.local_verdict is ROLLBACK
    ends = [(end["verdict"], end["reason"]) for end in halfnote.ends()]
    assert ends == [
        ("rollback", "LookupError: no teapots left"),
        ("rollback", "the database transaction was rolled back"),
    ]


async def test_what_raises_after_the_commit_does_not_undo_it(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(LookupError):
            async with producer.bind(session).transaction(ORDER):
                await place(session, 1)
                await session.commit()
                raise LookupError("the printer is out of paper")
    assert verdicts(halfnote) == ["commit"]
    assert orders(shop) == [1]


async def test_a_second_try_counts_and_what_is_read_after_the_commit_does_not(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    async with AsyncSession(engine) as session:
        async with producer.bind(session).transaction(ORDER):
            await place(session, 1)
            await session.rollback()
            await place(session, 1)
            await session.commit()
            await session.execute(text("select 1"))
        assert verdicts(halfnote) == ["commit"]
    assert orders(shop) == [1]


async def test_savepoints_do_not_count(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(LookupError):
            async with producer.bind(session).transaction(ORDER), session.begin():
                async with session.begin_nested():
                    await place(session, 1)
                raise LookupError("no teapots left")
        async with producer.bind(session).transaction(ORDER), session.begin():
            await place(session, 2)
            with pytest.raises(IntegrityError):
                async with session.begin_nested():
                    await place(session, 2)
    assert verdicts(halfnote) == ["rollback", "commit"]
    assert orders(shop) == [2]


async def test_a_session_that_joined_an_open_transaction_has_not_committed(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    async with engine.connect() as connection, connection.begin() as outer:
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            async with producer.bind(session).transaction(ORDER):
                await place(session, 1)
                await session.commit()
        await outer.rollback()
    assert verdicts(halfnote) == ["unknown"]
    assert orders(shop) == []


async def test_a_block_in_which_the_database_was_not_used_decides_nothing(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncSession(engine) as session, producer.bind(session).transaction(ORDER):
        pass
    assert verdicts(halfnote) == ["unknown"]
    assert "no database transaction was committed in its block" in caplog.text


async def test_a_cancelled_block_follows_its_database_transaction(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted, shop: str
) -> None:
    began = asyncio.Event()

    async def place_and_wait() -> None:
        async with AsyncSession(engine) as session, producer.bind(session).transaction(ORDER):
            await place(session, 1)
            await session.commit()
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(place_and_wait())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(producer)
    assert verdicts(halfnote) == ["commit"]
    assert orders(shop) == [1]


async def test_many_blocks_of_one_session_leave_nothing_behind(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted
) -> None:
    async with AsyncSession(engine) as session:
        for number in range(5):
            async with producer.bind(session).transaction(ORDER):
                await place(session, number)
                await session.commit()
            async with session.begin(), producer.bind(session).transaction(ORDER):
                pass
        assert session.info["halfnote_bindings"] == []
    await settled(producer)
    assert sorted(verdicts(halfnote)) == ["commit"] * 10 + ["unknown"] * 5


def test_both_nestings_of_a_sync_session(
    sync_engine: Engine, sync_producer: SyncTransactionProducer, halfnote: Scripted, shop: str
) -> None:
    bound = sync_producer.bind
    with Session(sync_engine) as session:
        with bound(session).transaction(ORDER):
            with session.begin():
                session.execute(INSERT, {"number": 1, "customer": 1})
            assert verdicts(halfnote) == []
        assert verdicts(halfnote) == ["commit"]
        with session.begin(), bound(session).transaction(ORDER):
            session.execute(INSERT, {"number": 2, "customer": 1})
        with pytest.raises(IntegrityError), session.begin(), bound(session).transaction(ORDER):
            session.execute(INSERT, {"number": 3, "customer": NOBODY})
        with pytest.raises(LookupError), session.begin(), bound(session).transaction(ORDER):
            raise LookupError("no teapots left")
    sync_producer.close(grace_s=60)
    ends: dict[str, list[str]] = {}
    for end in halfnote.ends():
        ends.setdefault(end["transaction_id"], []).append(end["verdict"])
    assert list(ends.values()) == [
        ["commit"],
        ["unknown", "commit"],
        ["unknown", "unknown"],
        ["unknown", "rollback"],
    ]
    assert orders(shop) == [1, 2]


async def test_a_failure_that_was_hidden_is_not_taken_for_a_commit(
    engine: AsyncEngine,
    sync_engine: Engine,
    producer: TransactionProducer,
    sync_producer: SyncTransactionProducer,
    halfnote: Scripted,
    shop: str,
) -> None:
    """PostgreSQL answers a COMMIT after a failed statement by a rollback that is no error."""
    async with AsyncSession(engine) as session:
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            async with producer.bind(session).transaction(ORDER), session.begin():
                await place(session, 1)
                with pytest.raises(IntegrityError):
                    await place(session, 1)
    with Session(sync_engine) as plain, pytest.raises(DBAPIError, match="current transaction is aborted"):
        with sync_producer.bind(plain).transaction(ORDER), plain.begin():
            plain.execute(INSERT, {"number": 1, "customer": 1})
            with pytest.raises(IntegrityError):
                plain.execute(INSERT, {"number": 1, "customer": 1})
    assert verdicts(halfnote) == ["rollback", "rollback"]
    assert orders(shop) == []


async def test_a_commit_in_doubt_stays_so_when_another_try_is_rolled_back(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted
) -> None:
    async with AsyncSession(engine) as session:
        async with producer.bind(session).transaction(ORDER):
            await place(session, 1, NOBODY)
            with pytest.raises(IntegrityError):
                await session.commit()
            await session.rollback()
            await place(session, 1)
            await session.rollback()
    assert verdicts(halfnote) == ["unknown"]


async def test_what_was_run_before_is_not_rolled_back_by_a_second_run(
    engine: AsyncEngine, producer: TransactionProducer, shop: str, halfnote: Scripted
) -> None:
    """A service that crashed between its commit and the end sends the same transaction again."""
    halfnote.answers = {"/half": [answer(200, {"replayed": True})]}
    barrier, one = AsyncBarrier(AsyncSqlAlchemy(engine)), new_id()
    await barrier.create_table()
    async with AsyncSession(engine) as session, session.begin():
        await barrier.enter(session, one)
        await place(session, 1)
    async with AsyncSession(engine) as session:
        with pytest.raises(BarrierRefused):
            async with producer.bind(session).transaction(ORDER, transaction_id=one) as tx, session.begin():
                await barrier.enter(session, tx)
        with pytest.raises(IntegrityError):
            async with producer.bind(session).transaction(ORDER, transaction_id=one) as tx, session.begin():
                await place(session, 1)
                await barrier.enter(session, tx)
    assert verdicts(halfnote) == ["commit", "unknown"]


async def test_a_bound_block_may_have_its_messages_dropped(
    engine: AsyncEngine, producer: TransactionProducer, halfnote: Scripted
) -> None:
    async with AsyncSession(engine) as session:
        async with producer.bind(session).transaction(ORDER) as tx:
            await session.execute(text("select 1"))
            await session.commit()
            tx.rollback("no teapots left")
    assert [(end["verdict"], end["reason"]) for end in halfnote.ends()] == [("rollback", "no teapots left")]


def test_a_savepoint_around_a_block_that_is_rolled_back_takes_its_message_along(
    sync_engine: Engine, sync_producer: SyncTransactionProducer, halfnote: Scripted, shop: str
) -> None:
    """Without a barrier as well."""
    with Session(sync_engine) as session, session.begin():
        for number in (1, 2, 1, 3):
            # The third one exists already, and its error leaves the block.
            with suppress(IntegrityError, KeyError), session.begin_nested():
                with sync_producer.bind(session).transaction(ORDER):
                    session.add(Order(number=number, customer=1))
                    session.flush()
                if number == 2:
                    raise KeyError
    sync_producer.close(60)
    last = {end["transaction_id"]: end["verdict"] for end in halfnote.ends()}
    assert [last[half["transaction_id"]] for half in halfnote.asked("/half")] == [
        "commit",
        "rollback",
        "rollback",
        "commit",
    ]
    assert orders(shop) == [1, 3]


# SQLAlchemy rolls back its commit if the other commit fails, and warns.
@pytest.mark.filterwarnings("ignore:transaction already deassociated from connection")
def test_engines_that_mappers_have_of_their_own(
    sync_engine: Engine, sync_producer: SyncTransactionProducer, halfnote: Scripted, shop: str
) -> None:
    """The session has no engine itself; its database transaction goes by several connections."""
    other = create_engine(with_driver(shop, "psycopg"))
    with Session(binds={Order: sync_engine, Customer: other}) as session:
        with sync_producer.bind(session).transaction(ORDER):
            session.add_all([Order(number=1, customer=1), Customer(number=2)])
            session.commit()
        assert verdicts(halfnote) == ["commit"]
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            with sync_producer.bind(session).transaction(ORDER), session.begin():
                session.add(Customer(number=3))
                session.flush()
                session.execute(insert(Order).values(number=2, customer=1))
                with pytest.raises(IntegrityError):
                    session.execute(insert(Order).values(number=1, customer=1))
        session.rollback()
        with pytest.raises(IntegrityError):
            with sync_producer.bind(session).transaction(ORDER), session.begin():
                session.add_all([Order(number=3, customer=NOBODY), Customer(number=4)])
    other.dispose()
    # Of two commits one may have succeeded: Halfnote asks.
    assert verdicts(halfnote) == ["commit", "rollback", "unknown"]
    assert orders(shop) == [1]


def test_connections_of_mappers_whose_transactions_are_open(
    sync_engine: Engine, sync_producer: SyncTransactionProducer, halfnote: Scripted, shop: str
) -> None:
    with sync_engine.connect() as connection, connection.begin() as outer:
        binds = {Order: connection}
        with Session(binds=binds, join_transaction_mode="create_savepoint") as session:
            with sync_producer.bind(session).transaction(ORDER):
                session.add(Order(number=1, customer=1))
                session.commit()
        outer.rollback()
    assert verdicts(halfnote) == ["unknown"]
    assert orders(shop) == []


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [True, False])
def test_a_deadlock_that_was_hidden_is_not_taken_for_a_commit(
    sync_producer: SyncTransactionProducer, halfnote: Scripted, hidden: bool
) -> None:
    """MySQL and MariaDB roll all of it back, and the next statement starts a new database transaction."""
    with mariadb_database() as connect:
        with closing(connect()) as other:
            url = f"mysql+pymysql://root@{other.host}:{other.port}/{other.db.decode()}"
            execute_on_cursor(other, "insert into orders values (1), (2), (3), (4), (5), (6)")
            other.commit()
            engine = create_engine(url)
            barrier = Barrier(SqlAlchemy(engine))
            barrier.create_table()
            with Session(engine) as session, sync_producer.bind(session).transaction(ORDER) as tx:
                barrier.enter(session, tx)
                if hidden:
                    deadlocked(lambda sql: session.execute(text(sql)), connect, other, (OperationalError, "1213"))
                session.execute(text("insert into orders values (1030)"))
                session.commit()
            engine.dispose()
    assert verdicts(halfnote) == (["rollback"] if hidden else ["commit"])
    assert tx.result is not None
    assert tx.result.local_verdict is (ROLLBACK if hidden else COMMIT)


@pytest.mark.parametrize("commits", [True, False])
def test_the_end_that_follows_the_close_is_posted_once(
    sync_engine: Engine, halfnote: Scripted, commits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    producer = SyncTransactionProducer("http://halfnote", group="shop", transport=halfnote.transport())
    with Session(sync_engine) as session:
        with producer:
            session.execute(text("select 1"))
            with producer.bind(session).transaction(ORDER):
                session.execute(INSERT, {"number": 1, "customer": 1})
        if commits:
            session.commit()
        else:
            session.rollback()
    assert verdicts(halfnote) == ["unknown", "commit" if commits else "rollback"]
    assert "posts no end" not in caplog.text


@pytest.mark.parametrize("commits", [True, False])
async def test_the_end_that_follows_the_close_is_posted_once_async(
    engine: AsyncEngine, halfnote: Scripted, commits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit of the session has waited for it, so a loop that ends then loses nothing."""
    producer = TransactionProducer("http://halfnote", group="shop", transport=halfnote.transport())
    async with AsyncSession(engine) as session:
        async with producer:
            await session.execute(text("select 1"))
            async with producer.bind(session).transaction(ORDER):
                await session.execute(INSERT, {"number": 1, "customer": 1})
        if commits:
            await session.commit()
        else:
            await session.rollback()
        assert verdicts(halfnote) == ["unknown", "commit" if commits else "rollback"]
    assert "posts no end" not in caplog.text
    assert len(halfnote.ends()) == 2


class Stopped(BaseException):
    """What a canceled block raises: its end follows the database transaction, without another one before."""


FAILING = problem(503, "not-ready")
CLOSED_WAITS_S = 50.0


@pytest.mark.parametrize("wait_for_end", [True, False])
def test_an_end_that_follows_is_repeated_while_a_close_waits(
    sync_engine: Engine, wait_for_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    halfnote = Scripted({"/end": [FAILING, FAILING, answer(200, {"verdict": "commit"})]})
    asked, answers = threading.Event(), threading.Event()

    def held(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/end":
            asked.set()
            assert answers.wait(CLOSED_WAITS_S)
        return halfnote.transport().handle_request(request)

    producer = SyncTransactionProducer(
        "http://halfnote", group="shop", transport=httpx.MockTransport(held), wait_for_end=wait_for_end
    )
    with Session(sync_engine) as session:
        session.execute(text("select 1"))
        with pytest.raises(Stopped), producer.bind(session).transaction(ORDER):
            raise Stopped
        session.commit()
    assert asked.wait(CLOSED_WAITS_S)
    close = threading.Thread(target=producer.close, args=(CLOSED_WAITS_S,))
    close.start()
    while not producer._driver.is_closed():
        time.sleep(0.01)
    answers.set()
    close.join()
    assert verdicts(halfnote) == ["commit"] * 3
    assert "so Halfnote asks about them" not in caplog.text


@pytest.mark.parametrize("wait_for_end", [True, False])
async def test_an_end_that_follows_is_repeated_while_a_close_waits_async(
    engine: AsyncEngine, wait_for_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    halfnote = Scripted({"/end": [FAILING, FAILING, answer(200, {"verdict": "commit"})]})
    held = Held(halfnote)
    producer = TransactionProducer("http://halfnote", group="shop", transport=held, wait_for_end=wait_for_end)
    async with AsyncSession(engine) as session:
        await session.execute(text("select 1"))
        with pytest.raises(Stopped):
            async with producer.bind(session).transaction(ORDER):
                raise Stopped
        await session.commit()
    await held.asked.wait()
    close = asyncio.create_task(producer.close(CLOSED_WAITS_S))
    await asyncio.sleep(0.01)
    with pytest.raises(ProducerClosed):
        await producer.send_plain(ORDER)
    held.answers.set()
    await close
    assert verdicts(halfnote) == ["commit"] * 3
    assert "so Halfnote asks about them" not in caplog.text
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Held(httpx.AsyncBaseTransport):
    """A coordinator that answers ends only once `answers`."""

    def __init__(self, halfnote: Scripted) -> None:
        self._next = halfnote.transport()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in ("/end", "/ends"):
            self.asked.set()
            await self.answers.wait()
        return await self._next.handle_async_request(request)


@pytest.mark.parametrize("way", ["commit", "savepoint"])
async def test_a_commit_that_is_canceled_after_the_close_posts_the_ends_of_all_blocks(
    engine: AsyncEngine, halfnote: Scripted, way: str
) -> None:
    held = Held(halfnote)
    producer = TransactionProducer("http://halfnote", group="shop", transport=held)
    held.answers.set()
    async with AsyncSession(engine) as session:
        await session.execute(text("select 1"))
        savepoint = await session.begin_nested() if way == "savepoint" else None
        for _ in range(3):
            async with producer.bind(session).transaction(ORDER):
                pass
        await producer.close()
        held.asked.clear()
        held.answers.clear()
        ending = asyncio.create_task(session.commit() if savepoint is None else savepoint.rollback())
        await held.asked.wait()
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await ending
        held.answers.set()
        # The ends go on in tasks of their own.
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=50)
    decided = [end for end in halfnote.ends() if end["verdict"] != "unknown"]
    assert len({end["transaction_id"] for end in decided}) == len(decided) == 3
    assert {end["verdict"] for end in decided} == {"commit" if savepoint is None else "rollback"}
