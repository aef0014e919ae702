"""A plain block, or `execute_local`, that enters the barrier by the id, and then fails or drops its messages."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from halfnote import COMMIT, ROLLBACK, UNKNOWN, Outgoing, SyncTransactionProducer, TransactionProducer, Verdict
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.databases.dbapi import DbApi
from halfnote.ids import new_id

from tests.sdk.coordinators import Scripted, answer
from tests.sdk.shop import fresh
from tests.sdk.sites import ORDERS

ORDER = Outgoing("order", {"order": 1030})
INSERT = "insert into orders values (1030)"


class OutOfStock(Exception):
    """The local work fails."""


class Shop:
    """Local work by psycopg in the steps that a test names, in `execute_local` and in a block."""

    def __init__(self, url: str, steps: str) -> None:
        self.url, self.steps = url, steps.split()
        self.barrier = Barrier(DbApi(self.connect, "postgresql"), wait_s=0.1)
        self.barrier.create_table()

    def connect(self) -> Any:
        return psycopg.connect(self.url)

    def work(self, transaction_id: UUID, drop: Callable[[str], None] = lambda reason: None) -> None:
        with self.connect() as connection:
            for step in self.steps:
                if step == "enter":
                    self.barrier.enter(connection, transaction_id)
                    connection.execute(INSERT)
                elif step == "lose":
                    connection.execute("alter table halfnote_barrier rename to lost")
                elif step == "drop":
                    drop("no teapots left")
                else:
                    getattr(connection, step)()
        if "drop" not in self.steps:
            raise OutOfStock

    def execute_local(self, transaction: Any, arg: Any) -> Any:
        self.work(transaction.transaction_id)
        return COMMIT

    check_local = None

    def block(self, halfnote: Scripted, chosen: UUID | None) -> None:
        options: Any = {"group": "shop", "barrier": self.barrier, "transport": halfnote.transport()}
        with SyncTransactionProducer("http://halfnote", **options) as producer:
            with suppress(OutOfStock), producer.transaction(ORDER, transaction_id=chosen) as tx:
                self.work(tx.transaction_id, tx.rollback)

    def send(self, halfnote: Scripted, chosen: UUID | None) -> None:
        options: Any = {"group": "shop", "barrier": self.barrier, "transport": halfnote.transport(), "listener": self}
        with SyncTransactionProducer("http://halfnote", **options) as producer:
            result = producer.send(ORDER, transaction_id=chosen)
            assert isinstance(result.error, OutOfStock)

    def async_block(self, halfnote: Scripted, chosen: UUID | None) -> None:
        asyncio.run(self._async_block(halfnote, chosen))

    async def _async_block(self, halfnote: Scripted, chosen: UUID | None) -> None:
        async with asyncpg.create_pool(self.url, min_size=0) as pool:
            barrier = AsyncBarrier(Asyncpg(pool), wait_s=0.1)
            options: Any = {"group": "shop", "barrier": barrier, "transport": halfnote.transport()}
            async with TransactionProducer("http://halfnote", **options) as producer:
                with suppress(OutOfStock):
                    async with producer.transaction(ORDER, transaction_id=chosen) as tx:
                        self.work(tx.transaction_id, tx.rollback)


def played(steps: str, by: str, chosen: UUID | None = None) -> tuple[Shop, UUID, Verdict]:
    """Play one transaction; return its shop, its id and the verdict of its end."""
    shop, halfnote = Shop(fresh(ORDERS), steps), Scripted()
    getattr(shop, by)(halfnote, chosen)
    [half], [end] = (halfnote.asked(path) for path in ("/half", "/end"))
    return shop, UUID(half["transaction_id"]), Verdict(end["verdict"])


BLOCKS = ["block", "async_block"]


@pytest.mark.parametrize("by", [*BLOCKS, "send"])
@pytest.mark.parametrize(
    ("steps", "verdict"),
    [("enter commit", COMMIT), ("enter rollback", ROLLBACK), ("", ROLLBACK)],
    ids=["committed", "rolled back", "never entered"],
)
def test_the_barrier_has_the_outcome_of_work_that_failed(by: str, steps: str, verdict: Verdict) -> None:
    shop, transaction_id, ended = played(steps, by)
    assert ended is verdict
    # So a check gives the same answer if the end is lost, and later local work is refused.
    assert shop.barrier.read(transaction_id) is verdict


@pytest.mark.parametrize("by", [*BLOCKS, "send"])
@pytest.mark.parametrize("steps", ["enter commit lose commit", "lose commit"])
def test_without_an_answer_of_the_barrier_nothing_is_called_rolled_back(by: str, steps: str) -> None:
    assert played(steps, by)[2] is UNKNOWN


@pytest.mark.parametrize("by", BLOCKS)
def test_messages_that_are_dropped_are_dropped_by_checks_too(by: str) -> None:
    shop, transaction_id, ended = played("enter commit drop", by)
    assert ended is ROLLBACK
    assert shop.barrier.read(transaction_id) is ROLLBACK


@pytest.mark.parametrize("by", BLOCKS)
def test_a_second_run_that_drops_its_messages_announces_what_the_first_has_committed(by: str) -> None:
    """The end of the first may be lost, so a rollback would lose the message of a stored order."""
    chosen = new_id()
    shop, _, ended = played("enter commit", by, chosen)
    assert ended is COMMIT
    shop.steps, halfnote = ["drop"], Scripted({"/half": [answer(200, {"replayed": True})]})
    getattr(shop, by)(halfnote, chosen)
    assert [end["verdict"] for end in halfnote.asked("/end")] == ["commit"]
    assert shop.barrier.read(chosen) is COMMIT
