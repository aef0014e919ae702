"""A second run with a chosen id, after a first one that did not commit: it never stores an order without its message.

Against the real service, over barriers in SQLite and Postgres.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    BarrierRefused,
    Half,
    HalfFailed,
    SyncTransactionProducer,
    Transaction,
    TransactionProducer,
    Verdict,
)
from halfnote.barrier import AsyncBarrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.ids import new_id

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.sdk.in_process import FromThreads, service
from tests.sdk.shop import fresh
from tests.sdk.sites import ORDERS
from tests.sdk.test_second_runs import INSERT, ORDER, Down, OutOfStock, Shop, store

__all__ = ["store"]


# Runs a function of a synchronous producer on a thread; its options are the producer's.
Run = Callable[..., Any]


@pytest.fixture
async def run(runtime: Runtime, group: str) -> Run:
    transport = FromThreads(service(runtime))

    async def run(work: Callable[[SyncTransactionProducer], Any], **options: Any) -> Any:
        def inside() -> Any:
            with SyncTransactionProducer("http://localhost", group=group, transport=transport, **options) as producer:
                return work(producer)

        return await asyncio.to_thread(inside)

    return run


async def verdicts(db: Connection) -> list[Verdict]:
    return [{1: COMMIT, 2: ROLLBACK}[row[0]] for row in await db.fetch("select verdict from op")]


async def test_a_second_run_after_one_that_got_no_connection(run: Run, store: Shop, db: Connection) -> None:
    """The barrier refuses it, because the first run has written there that it was rolled back."""
    one = new_id()

    def play(producer: SyncTransactionProducer) -> None:
        store.failing = 1
        with pytest.raises(Down):
            store.order(producer, one)
        assert store.barrier.read(one) is ROLLBACK
        with pytest.raises(BarrierRefused, match="needs a new id") as refused:
            store.order(producer, one)
        assert refused.value.recorded is ROLLBACK

    await run(play, barrier=store.barrier)
    assert store.rows() == (0, ["rollback"])
    assert await verdicts(db) == [ROLLBACK]


async def test_a_second_run_after_one_whose_barrier_was_down_too(run: Run, store: Shop, db: Connection) -> None:
    """The first one is left to a check, so the second one may still commit."""
    one = new_id()

    def play(producer: SyncTransactionProducer) -> Any:
        store.failing = 2
        with pytest.raises(Down):
            store.order(producer, one)
        return store.order(producer, one)

    result = await run(play, barrier=store.barrier)
    assert (result.local_verdict, result.end) == (COMMIT, "recorded")
    assert store.rows() == (1, ["local"])
    assert await verdicts(db) == [COMMIT]


async def test_an_asynchronous_second_run(runtime: Runtime, group: str, db: Connection) -> None:
    url, one = fresh(ORDERS), new_id()
    async with asyncpg.create_pool(url, min_size=0) as pool:
        left = [0]

        @asynccontextmanager
        async def acquire() -> AsyncIterator[Any]:
            if left[0]:
                left[0] -= 1
                raise Down
            async with pool.acquire() as connection:
                yield connection

        class Failing:
            """A pool that may give no connection."""

        failing: Any = Failing()
        failing.acquire = acquire
        barrier = AsyncBarrier(Asyncpg(failing))
        await barrier.create_table()
        async with TransactionProducer(
            "http://localhost", group=group, barrier=barrier, transport=service(runtime)
        ) as producer:

            async def place(chosen: UUID) -> Any:
                async with producer.begin(ORDER, transaction_id=chosen) as tx:
                    await tx.connection.execute(INSERT)
                return tx.result

            left[0] = 1
            with pytest.raises(Down):
                await place(one)
            with pytest.raises(BarrierRefused) as refused:
                await place(one)
            assert refused.value.recorded is ROLLBACK
            left[0] = 2
            two = new_id()
            with pytest.raises(Down):
                await place(two)
            assert (await place(two)).end == "recorded"
        assert await pool.fetchval("select count(*) from orders") == 1
        reasons = await pool.fetch("select reason from halfnote_barrier order by transaction_id")
    assert [row[0] for row in reasons] == ["rollback", "local"]
    assert await verdicts(db) == [ROLLBACK, COMMIT]


async def test_a_run_that_began_before_the_rollback_is_refused_by_the_barrier(
    run: Run, store: Shop, db: Connection
) -> None:
    """Its half was answered while the transaction had no verdict."""
    one = new_id()

    def play(producer: SyncTransactionProducer) -> None:
        def first_run() -> None:
            store.failing = 1
            with pytest.raises(Down):
                store.order(producer, one)

        store.before = first_run
        with pytest.raises(BarrierRefused) as refused:
            store.order(producer, one)
        assert refused.value.recorded is ROLLBACK

    await run(play, barrier=store.barrier)
    assert store.rows() == (0, ["rollback"])
    assert await verdicts(db) == [ROLLBACK]


async def test_a_second_run_without_a_barrier(run: Run, db: Connection) -> None:
    one, ran = new_id(), []

    def play(producer: SyncTransactionProducer) -> None:
        with pytest.raises(OutOfStock), producer.transaction(ORDER, transaction_id=one):
            raise OutOfStock
        with pytest.raises(HalfFailed, match="its rollback is recorded") as failed:
            with producer.transaction(ORDER, transaction_id=one):
                ran.append(1)
        assert (failed.value.recorded, failed.value.__cause__) == (ROLLBACK, None)

    await run(play)
    assert ran == []
    assert await verdicts(db) == [ROLLBACK]


class Listener:
    """Local work that returns these verdicts, one a run."""

    def __init__(self, *answers: Verdict) -> None:
        self.answers = list(answers)

    def execute_local(self, transaction: Transaction, arg: Any) -> Verdict:
        return self.answers.pop(0)

    def check_local(self, transaction: Any) -> Verdict:
        return UNKNOWN


@pytest.mark.parametrize("guarded", [False, True], ids=["without a barrier", "with one"])
async def test_a_second_run_after_a_listener_that_rolled_back(run: Run, store: Shop, guarded: bool) -> None:
    one, listener = new_id(), Listener(ROLLBACK, COMMIT)

    def play(producer: SyncTransactionProducer) -> None:
        assert producer.send(ORDER, transaction_id=one).end == "recorded"
        with pytest.raises(BarrierRefused if guarded else HalfFailed) as failed:
            producer.send(ORDER, transaction_id=one)
        assert failed.value.recorded is ROLLBACK

    await run(play, listener=listener, barrier=store.barrier if guarded else None)
    assert listener.answers == [COMMIT]
    # A run that had posted its half before is refused by the row.
    assert store.rows() == (0, ["rollback"] if guarded else [])


async def test_a_second_run_after_a_rollback_of_many(run: Run, store: Shop) -> None:
    one = new_id()

    def play(producer: SyncTransactionProducer) -> None:
        [begun] = producer.post_halves([Half(ORDER, transaction_id=one)])
        assert isinstance(begun, Transaction)
        producer.post_ends([(begun, ROLLBACK)])
        [failed] = producer.post_halves([Half(ORDER, transaction_id=one)])
        assert isinstance(failed, HalfFailed)
        assert failed.recorded is ROLLBACK
        with pytest.raises(BarrierRefused) as refused:
            store.plain_order(producer, one)
        assert refused.value.recorded is ROLLBACK

    await run(play, barrier=store.barrier)
    assert store.rows() == (0, ["rollback"])


async def decide(client: httpx.AsyncClient, transaction_id: UUID, verdict: str) -> None:
    asked = await client.post(f"/transactions/{transaction_id}/check")
    assert asked.status_code == 202
    said = {"verdict": verdict, "reason": "the bank says so", "actor": "dana"}
    answered = await client.post(f"/transactions/{transaction_id}/verdict", json=said)
    assert answered.status_code == 200


@pytest.mark.parametrize("committed", [False, True], ids=["never ran", "committed"])
async def test_a_second_run_after_a_persons_rollback(
    run: Run, store: Shop, client: httpx.AsyncClient, committed: bool
) -> None:
    """A second order by another id must not follow one that was committed: only the barrier knows."""
    one = new_id()
    await run(lambda producer: producer.post_halves([Half(ORDER, transaction_id=one)]))
    if committed:
        with closing(store.connect()) as connection:
            connection.execute("begin")
            store.barrier.enter(connection, one)
            connection.execute(INSERT)
            connection.commit()
    await decide(client, one, "rollback")

    def play(producer: SyncTransactionProducer) -> None:
        with pytest.raises(BarrierRefused) as refused:
            store.plain_order(producer, one)
        assert refused.value.recorded is (COMMIT if committed else ROLLBACK)

    await run(play, barrier=store.barrier)
    assert store.rows() == (1, ["local"]) if committed else (0, ["rollback"])


async def test_a_second_run_after_a_rollback_while_the_barrier_is_down(run: Run, store: Shop) -> None:
    """It comes later: another id could store the order of an earlier run twice."""
    one = new_id()

    def play(producer: SyncTransactionProducer) -> None:
        [begun] = producer.post_halves([Half(ORDER, transaction_id=one)])
        assert isinstance(begun, Transaction)
        producer.post_ends([(begun, ROLLBACK)])
        store.failing = 1
        with pytest.raises(BarrierRefused) as refused:
            store.plain_order(producer, one)
        assert refused.value.recorded is None

    await run(play, barrier=store.barrier)
    assert store.rows() == (0, [])


async def test_a_second_run_after_a_commit(run: Run, store: Shop, db: Connection) -> None:
    """The barrier refuses it; without one the block sees what is recorded."""
    one = new_id()

    def play(producer: SyncTransactionProducer) -> None:
        store.order(producer, one)
        with pytest.raises(BarrierRefused, match="nothing is left to do"):
            store.order(producer, one)

    def look(producer: SyncTransactionProducer) -> Any:
        with producer.transaction(ORDER, transaction_id=one, context={"halfnote_barrier": True}) as tx:
            assert tx.recorded is COMMIT
        return tx.result

    await run(play, barrier=store.barrier)
    assert store.rows() == (1, ["local"])
    assert (await run(look)).end == "recorded"
    assert await verdicts(db) == [COMMIT]
