"""A second run with a chosen id against a service that does not name the verdict of a repeated half: by the barrier."""

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from halfnote import (
    ROLLBACK,
    BarrierRefused,
    Outgoing,
    SyncTransactionProducer,
)
from halfnote.barrier import Barrier
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
