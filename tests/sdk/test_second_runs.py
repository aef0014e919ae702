"""A second run with a chosen id against a service that does not name the verdict of a repeated half: by the barrier."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    BarrierRefused,
    Outgoing,
    SyncTransactionProducer,
    Transaction,
    TransactionProducer,
    Verdict,
)
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.databases.sqlalchemy import SqlAlchemy
from halfnote.ids import new_id
from halfnote.units import in_psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from tests.sdk.coordinators import Scripted, answer
from tests.sdk.shop import fresh
from tests.sdk.sites import ORDERS

ORDER = Outgoing("order", {"order": 1030})
INSERT = "insert into orders values (1030)"


class OutOfStock(Exception):
    """The local work fails."""


class Down(Exception):
    """The database gives no connection."""


class Shop:
    """A shop in SQLite. `failing`: how many of the next connections fail. `before`: what comes before the next one."""

    def __init__(self, directory: Path) -> None:
        self._file, self.failing = directory / "shop.db", 0
        self.before: Callable[[], None] | None = None
        self.barrier = Barrier(DbApi(self.connect, "sqlite"), wait_s=0.1)
        self.barrier.create_table()
        with closing(sqlite3.connect(self._file)) as connection:
            connection.execute("create table orders (number int)")

    def connect(self) -> sqlite3.Connection:
        before, self.before = self.before, None
        if before is not None:
            before()
        if self.failing:
            self.failing -= 1
            raise Down
        return sqlite3.connect(self._file, timeout=0.1)

    def plain_order(self, producer: SyncTransactionProducer, chosen: UUID) -> None:
        with producer.transaction(ORDER, transaction_id=chosen) as tx, closing(self.connect()) as connection:
            connection.execute("begin")
            self.barrier.enter(connection, tx)
            connection.execute(INSERT)
            connection.commit()

    @contextmanager
    def another_run(self, chosen: UUID) -> Iterator[None]:
        """Enter and store an order within the block, by another process; commit at its end."""
        with closing(sqlite3.connect(self._file)) as connection:
            connection.execute("begin")
            self.barrier.enter(connection, chosen)
            connection.execute(INSERT)
            yield
            connection.commit()

    def order(self, producer: SyncTransactionProducer, chosen: UUID) -> Any:
        with producer.begin(ORDER, transaction_id=chosen) as tx:
            tx.connection.execute(INSERT)
        return tx.result

    def rows(self) -> tuple[int, list[str]]:
        """Return the count of orders, and the reasons in the barrier."""
        with closing(sqlite3.connect(self._file)) as connection:
            [[count]] = connection.execute("select count(*) from orders").fetchall()
            return count, [row[0] for row in connection.execute("select reason from halfnote_barrier")]


@pytest.fixture
def store(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def older() -> Scripted:
    return Scripted({"/half": [answer(201, {"replayed": False}), answer(200, {"replayed": True})]})


@pytest.fixture
def url() -> str:
    return fresh(ORDERS)


def barrier_of(url: str) -> Barrier:
    barrier = Barrier(DbApi(lambda: psycopg.connect(url), "postgresql"), wait_s=0.1)
    barrier.create_table()
    return barrier


def test_a_second_run_after_a_savepoint_that_was_rolled_back(url: str) -> None:
    """The savepoint took the barrier's row along, and the work around it goes on."""
    one, halfnote, barrier = new_id(), older(), barrier_of(url)
    with SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
    ) as producer:
        with psycopg.connect(url) as connection:
            connection.execute("select 1")
            with suppress(OutOfStock), in_psycopg(producer, connection, ORDER, transaction_id=one):
                connection.execute(INSERT)
                raise OutOfStock
        with psycopg.connect(url) as connection, pytest.raises(BarrierRefused) as refused:
            with in_psycopg(producer, connection, ORDER, transaction_id=one):
                connection.execute(INSERT)
    assert refused.value.recorded is ROLLBACK
    assert [end["verdict"] for end in halfnote.ends()] == ["rollback", "rollback"]
    with psycopg.connect(url) as connection:
        assert connection.execute("select count(*) from orders").fetchone() == (0,)


@pytest.mark.parametrize("state", ["none", "open", "rolled_back"])
def test_a_second_run_after_a_bound_block_that_dropped_its_messages(url: str, state: str) -> None:
    one, halfnote = new_id(), older()
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    barrier = Barrier(SqlAlchemy(engine), wait_s=0.1)
    barrier.create_table()
    with SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
    ) as producer:
        with Session(engine) as session:
            with producer.bind(session).transaction(ORDER, transaction_id=one) as tx:
                if state != "none":
                    session.execute(text(INSERT))
                if state == "rolled_back":
                    session.rollback()
                tx.rollback("no teapots left")
            session.rollback()
        assert tx.result is not None
        assert tx.result.end == ("left_to_check" if state == "open" else "recorded")
    # Closed, so that the end in the background is over.
    assert barrier.read(one) is ROLLBACK
    assert halfnote.ends()[-1]["verdict"] == "rollback"
    with SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
    ) as producer:
        with pytest.raises(BarrierRefused), producer.begin(ORDER, transaction_id=one) as tx:
            tx.connection.execute(text(INSERT))
    engine.dispose()


def test_an_id_of_the_producers_own_costs_no_read_of_the_barrier(tmp_path: Path) -> None:
    """No second run can have it."""
    store, halfnote = Shop(tmp_path), Scripted()
    with SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=store.barrier, transport=halfnote.transport()
    ) as producer:
        store.failing = 1
        with pytest.raises(Down), producer.begin(ORDER):
            pass
    assert [end["verdict"] for end in halfnote.ends()] == ["rollback"]
    assert store.rows() == (0, [])


class Refusing:
    """A listener that stores nothing and returns ROLLBACK, also after the barrier has refused it."""

    def __init__(self, store: Shop) -> None:
        self._store = store

    def execute_local(self, transaction: Transaction, arg: Any) -> Verdict:
        if arg == "enters":
            with suppress(BarrierRefused, sqlite3.OperationalError), closing(self._store.connect()) as connection:
                connection.execute("begin")
                self._store.barrier.enter(connection, transaction)
        return ROLLBACK

    def check_local(self, transaction: Any) -> Verdict:
        return UNKNOWN


def give_up(store: Shop, producer: SyncTransactionProducer, chosen: UUID, how: str) -> Any:
    """Play a run that wants a rollback and has stored nothing."""
    if how.startswith("listener"):
        return producer.send(ORDER, "enters" if how == "listener, refused" else None, transaction_id=chosen)
    with suppress(OutOfStock), producer.transaction(ORDER, transaction_id=chosen) as tx:
        if how == "plain, refused":
            with suppress(BarrierRefused, sqlite3.OperationalError), closing(store.connect()) as connection:
                connection.execute("begin")
                store.barrier.enter(connection, tx)
        tx.rollback("no teapots left")
        if how == "plain, fails":
            raise OutOfStock
    return tx.result


WAYS = ["listener", "listener, refused", "plain", "plain, refused"]


@pytest.mark.parametrize(
    ("how", "repeated"), [*((how, repeated) for how in WAYS for repeated in (False, True)), ("plain, fails", False)]
)
@pytest.mark.parametrize("state", ["open", "committed", "none"])
def test_a_run_that_gives_up_beside_another_one(tmp_path: Path, state: str, repeated: bool, how: str) -> None:
    """The order that the other one stores is announced, although its own end may be lost."""
    store, one = Shop(tmp_path), new_id()
    halfnote = Scripted({"/half": [answer(200 if repeated else 201, {"replayed": repeated})]})
    with SyncTransactionProducer(
        "http://halfnote",
        group="shop",
        barrier=store.barrier,
        listener=Refusing(store),
        transport=halfnote.transport(),
    ) as producer:
        if state == "open":
            with store.another_run(one):
                result = give_up(store, producer, one, how)
        else:
            if state == "committed":
                with store.another_run(one):
                    pass
            result = give_up(store, producer, one, how)
    verdict = {"open": UNKNOWN, "committed": COMMIT, "none": ROLLBACK}[state]
    assert (result.local_verdict, result.end) == (verdict, "left_to_check" if state == "open" else "recorded")
    assert [end["verdict"] for end in halfnote.ends()] == [verdict.value]
    assert len(halfnote.asked(f"/transactions/{one}/check")) == (state == "open")
    assert store.rows() == ((0, ["rollback"]) if state == "none" else (1, ["local"]))


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("state", ["open", "committed"])
async def test_an_asynchronous_run_that_gives_up_beside_another_one(url: str, state: str, repeated: bool) -> None:
    one = new_id()
    halfnote = Scripted({"/half": [answer(200 if repeated else 201, {"replayed": repeated})]})

    async with asyncpg.create_pool(url, min_size=0) as pool:
        barrier = AsyncBarrier(Asyncpg(pool), wait_s=0.1)
        await barrier.create_table()
        async with (
            TransactionProducer(
                "http://halfnote", group="shop", barrier=barrier, transport=halfnote.transport()
            ) as producer,
            pool.acquire() as connection,
        ):
            async with connection.transaction():
                await barrier.enter(connection, one)
                await connection.execute(INSERT)
                if state == "open":
                    async with producer.transaction(ORDER, transaction_id=one) as tx:
                        tx.rollback("no teapots left")
            if state == "committed":
                async with producer.transaction(ORDER, transaction_id=one) as tx:
                    tx.rollback("no teapots left")
        rows = await pool.fetch("select reason from halfnote_barrier")
    assert [row[0] for row in rows] == ["local"]
    assert [end["verdict"] for end in halfnote.ends()] == ["unknown" if state == "open" else "commit"]


def test_a_run_that_drops_the_messages_of_its_own_commit(tmp_path: Path) -> None:
    """It has entered, so the row is its own."""
    store, one, halfnote = Shop(tmp_path), new_id(), Scripted()
    with SyncTransactionProducer(
        "http://halfnote", group="shop", barrier=store.barrier, transport=halfnote.transport()
    ) as producer:
        with producer.transaction(ORDER, transaction_id=one) as tx, closing(store.connect()) as connection:
            connection.execute("begin")
            store.barrier.enter(connection, tx)
            connection.execute(INSERT)
            connection.commit()
            tx.rollback("no teapots left")
    assert [end["verdict"] for end in halfnote.ends()] == ["rollback"]
    assert store.rows() == (1, ["rollback"])
