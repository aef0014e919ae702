"""Checks that a producer answers without an endpoint: claimed, answered by the barrier or a listener, and stopped."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    CheckedTransaction,
    Outgoing,
    Refused,
    SyncTransactionProducer,
    TransactionProducer,
    Unconfirmed,
    Verdict,
)
from halfnote.barrier import AsyncBarrier
from halfnote.check import EACH_WITHIN_S
from halfnote.check_answering import SYNC_WAIT_S
from halfnote.claiming import LONGEST_OBEYED_S, LONGEST_PAUSE_S, paused_s
from halfnote.databases.asyncpg import Asyncpg

from app.checkback.claim_loops import wake_claims
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.sdk.coordinators import Scripted, answer, problem
from tests.sdk.crashes import Connections
from tests.sdk.in_process import FromThreads, service
from tests.support.check_stepping import attempts, in_doubt, verdict

URL = "http://localhost"
CLAIM, ANSWERS = "/producer-groups/shop/checks/claim", "/producer-groups/shop/checks/answers"
CHECK = {
    "type": "halfnote.check",
    "transaction_id": "019a9f1c-1030-7b1e-8f00-1030a1030a10",
    "producer_group": "shop",
    "check": 2,
    "max_checks": 15,
    "born_at": "2026-11-21T08:00:00Z",
    "context": {"order": 1030},
    "messages": [{"message_id": "019a9f1c-1030-7b1e-8f00-1030a1030a10-0", "topic": "order", "key": None}],
    "handle": "2-7",
}
TAKEN = answer(200, {"answer_by": "2026-11-21T08:01:00Z", "checks": [CHECK]})
NOTHING = answer(200, {"answer_by": "2026-11-21T08:01:00Z", "checks": []})


class Says:
    """A listener that answers as the test says; `asked` are the transactions that it was asked about."""

    def __init__(self, said: Callable[[CheckedTransaction], Any] = lambda _: COMMIT) -> None:
        self.said, self.asked = said, list[CheckedTransaction]()

    def check_local(self, transaction: CheckedTransaction) -> Any:
        self.asked.append(transaction)
        return self.said(transaction)


class AsyncSays(Says):
    """The same for an event loop."""

    async def check_local(self, transaction: CheckedTransaction) -> Any:
        await asyncio.sleep(0)
        return super().check_local(transaction)


@pytest.fixture
async def shop(client: httpx.AsyncClient) -> str:
    """The group `shop`, whose checks are claimed."""
    made = await client.put("/producer-groups/shop", json={"check_urls": [], "checks": "claim"})
    assert made.status_code == 201
    return "shop"


async def until(condition: Callable[[], bool], runtime: Runtime | None = None) -> None:
    """Wait for a condition, and wake the claims that wait meanwhile."""
    async with asyncio.timeout(60):
        while not condition():
            if runtime is not None:
                await wake_claims(runtime, runtime.clock.now())
            await asyncio.sleep(0.01)


async def test_the_barrier_answers_in_one_line(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    connections = Connections(dsn)
    barrier = AsyncBarrier(Asyncpg(connections))
    await barrier.create_table()
    await db.execute("create table orders (number int primary key)")
    producer = TransactionProducer(URL, group="shop", barrier=barrier, transport=service(runtime))
    registered = await producer.register([], checks="claim")
    assert registered.group["checks"] == "claim"
    producer.answer_checks(barrier)
    ids: list[UUID] = []
    async with connections.acquire() as connection:
        for number in range(3):
            half = producer._conversation.half(Outgoing("order", number), enters=True)
            transaction = await producer._driver.run(half)
            ids.append(transaction.transaction_id)
            if number < 2:
                async with connection.transaction():
                    await connection.execute(
                        "insert into halfnote_barrier (transaction_id, reason) values ($1, 'local')", ids[-1]
                    )
                    await connection.execute("insert into orders values ($1)", number)
    # No end was posted: each half is left to its check.
    for one in ids:
        assert (await client.post(f"/transactions/{one}/check")).status_code == 202
    found: list[Any] = []

    async def decided() -> bool:
        found[:] = [await verdict(db, one) for one in ids]
        return None not in found

    async with asyncio.timeout(60):
        while not await decided():
            await wake_claims(runtime, runtime.clock.now())
            await asyncio.sleep(0.01)
    assert found == [(1, 1), (1, 1), (2, 1)]
    await producer.close()
    assert runtime.waiting_claims.limits == {}
    await connections.close()


async def test_due_checks_are_answered_once_and_counted(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    ids = [await in_doubt(client, runtime, context={"n": n}) for n in range(4)]
    words = {0: COMMIT, 1: ROLLBACK, 2: UNKNOWN}

    def said(transaction: CheckedTransaction) -> Verdict:
        return words[transaction.context["n"]]

    listener = AsyncSays(said)
    async with TransactionProducer(URL, group="shop", transport=service(runtime)) as producer:
        # The listener fails for the fourth, which is left.
        assert await producer.answer_due_checks(listener) == 3
        assert await producer.answer_due_checks(listener) == 0
    assert [await verdict(db, one) for one in ids] == [(1, 1), (2, 1), None, None]
    assert [one["outcome"] for one in await attempts(db, ids[2])] == ["unknown"]
    assert await attempts(db, ids[3]) == []
    assert [one.transaction_id for one in listener.asked] == ids
    assert listener.asked[0].messages[0].key == "order-1030"


async def test_a_thread_answers_until_the_producer_is_closed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    transaction_id, listener = await in_doubt(client, runtime), Says()
    producer = SyncTransactionProducer(URL, group="shop", transport=FromThreads(service(runtime)))
    answering = producer.answer_checks(listener)
    await until(lambda: bool(listener.asked), runtime)
    # The claim of the thread that waits ends by itself.
    await asyncio.to_thread(producer.close, 60)
    assert not answering.running
    assert await verdict(db, transaction_id) == (1, 1)


async def test_it_goes_on_after_failures_and_says_once_that_it_started() -> None:
    halfnote = Scripted({CLAIM: [httpx.ReadError("reset by peer"), problem(503, "not-ready"), TAKEN, NOTHING]})
    listener = Says()
    async with TransactionProducer(URL, group="shop", transport=halfnote.transport()) as producer:
        answering = producer.answer_checks(listener)
        await until(lambda: len(halfnote.asked(CLAIM)) > 4)
        assert answering.running
    assert not answering.running
    assert [one["started"] for one in halfnote.asked(CLAIM)[:4]] == [True, True, True, False]
    [answers] = halfnote.asked(ANSWERS)
    assert answers == {"answers": [{"transaction_id": CHECK["transaction_id"], "handle": "2-7", "verdict": "commit"}]}


async def test_a_stop_gives_up_the_claim_that_waits() -> None:
    entered = asyncio.Event()

    class Waits(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    producer = TransactionProducer(URL, group="shop", transport=Waits())
    answering = producer.answer_checks(Says())
    await entered.wait()
    async with asyncio.timeout(60):
        await answering.stop(grace_s=60)
        await producer.close()
    assert not answering.running


async def test_a_stop_waits_for_the_answers_under_way() -> None:
    halfnote = Scripted({CLAIM: [TAKEN, NOTHING]})
    going = asyncio.Event()

    class Slow:
        async def check_local(self, transaction: CheckedTransaction) -> Verdict:
            await going.wait()
            return ROLLBACK

    producer = TransactionProducer(URL, group="shop", transport=halfnote.transport())
    answering = producer.answer_checks(Slow())
    await until(lambda: bool(halfnote.asked(CLAIM)))
    stopping = asyncio.create_task(answering.stop(grace_s=60))
    await asyncio.sleep(0)
    going.set()
    await stopping
    assert [one["answers"][0]["verdict"] for one in halfnote.asked(ANSWERS)] == ["rollback"]
    assert len(halfnote.asked(CLAIM)) == 1
    await producer.close()


async def test_a_plain_listener_that_waits_leaves_the_event_loop_free() -> None:
    """The local work that a barrier waits for may be a task of the same loop."""
    halfnote, over = Scripted({CLAIM: [TAKEN, NOTHING]}), threading.Event()
    listener = Says(lambda _: COMMIT if over.wait(10) else UNKNOWN)
    async with TransactionProducer(URL, group="shop", transport=halfnote.transport()) as producer:
        producer.answer_checks(listener)
        await until(lambda: bool(listener.asked))
        over.set()
        await until(lambda: bool(halfnote.asked(ANSWERS)))
    assert [one["verdict"] for one in halfnote.asked(ANSWERS)[0]["answers"]] == ["commit"]


async def test_a_claim_that_is_answered_while_it_stops_is_answered() -> None:
    stopped: list[asyncio.Task[None]] = []

    def answers(_: httpx.Request) -> httpx.Response:
        stopped.append(asyncio.create_task(answering.stop(grace_s=60)))
        answering._stopping.set()
        return TAKEN

    halfnote = Scripted({CLAIM: [answers]})
    producer = TransactionProducer(URL, group="shop", transport=halfnote.transport())
    answering = producer.answer_checks(AsyncSays())
    await until(lambda: bool(stopped))
    await stopped[0]
    # Otherwise the transaction would wait until the claim lapses.
    assert [one["answers"][0]["verdict"] for one in halfnote.asked(ANSWERS)] == ["commit"]
    assert len(halfnote.asked(CLAIM)) == 1
    await producer.close()


async def test_checks_whose_claim_is_recorded_before_a_stop_are_answered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, shop: str
) -> None:
    """The answer to the claim comes after the stop."""
    transaction_id = await in_doubt(client, runtime)
    recorded, goes_on = asyncio.Event(), asyncio.Event()
    inner = service(runtime)

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            came = await inner.handle_async_request(request)
            if request.url.path == CLAIM:
                recorded.set()
                await goes_on.wait()
            return came

    async with TransactionProducer(URL, group="shop", transport=Slow()) as producer:
        answering = producer.answer_checks(AsyncSays())
        await recorded.wait()
        stopping = asyncio.create_task(answering.stop(grace_s=60))
        await asyncio.sleep(0.1)
        goes_on.set()
        await stopping
    assert await verdict(db, transaction_id) == (1, 1)


@pytest.mark.parametrize("wrong", ["commit", None, ValueError("no")])
async def test_a_listener_that_breaks_its_contract_leaves_the_check(wrong: Any) -> None:
    scripted = Scripted({CLAIM: [TAKEN, NOTHING]})

    def said(_: CheckedTransaction) -> Any:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    async with TransactionProducer(URL, group="shop", transport=scripted.transport()) as producer:
        assert await producer.answer_due_checks(Says(said)) == 0
    assert scripted.asked(ANSWERS) == []


@pytest.mark.parametrize("count", [1, 2])
async def test_one_of_many_checks_waits_a_short_time_only(count: int) -> None:
    taken = answer(200, {"answer_by": "2026-11-21T08:01:00Z", "checks": [CHECK] * count})
    scripted, listener = Scripted({CLAIM: [taken, NOTHING], ANSWERS: [answer(200, {"outcomes": []})]}), Says()
    async with TransactionProducer(URL, group="shop", transport=scripted.transport()) as producer:
        assert await producer.answer_due_checks(listener) == count
    assert [one.within_s for one in listener.asked] == ([None] if count == 1 else [EACH_WITHIN_S] * count)


async def test_refusals_are_raised_where_a_caller_waits() -> None:
    for answers, error in ((problem(409, "checks-not-claimed"), Refused), (problem(503, "not-ready"), Unconfirmed)):
        halfnote = Scripted({CLAIM: [answers]})
        async with TransactionProducer(URL, group="shop", transport=halfnote.transport()) as producer:
            with pytest.raises(error):
                await producer.answer_due_checks(Says())


def test_it_needs_a_listener_of_its_kind() -> None:
    # Other tests may have left some.
    before = {*threading.enumerate()}
    producer = SyncTransactionProducer(URL, group="shop")
    with pytest.raises(ValueError, match="needs a barrier or a listener"):
        producer.answer_checks()
    with pytest.raises(TypeError, match="cannot await"):
        producer.answer_checks(AsyncSays())
    with pytest.raises(TypeError, match="check_local"):
        producer.answer_checks(object())  # type: ignore[arg-type]
    producer.close()
    assert [one for one in {*threading.enumerate()} - before if one.name == "halfnote-checks"] == []


@pytest.mark.parametrize("kind", [TransactionProducer, SyncTransactionProducer])
async def test_a_claim_is_tried_again_after_the_pause_that_was_asked_for(
    kind: type[TransactionProducer | SyncTransactionProducer], caplog: pytest.LogCaptureFixture
) -> None:
    halfnote = Scripted({CLAIM: [answer(429, retry_after="7")]})
    producer: Any = kind(URL, group="shop", transport=halfnote.transport())
    producer.answer_checks(AsyncSays() if kind is TransactionProducer else Says())
    try:
        await until(lambda: "checks could not be answered, which is tried again in 7 s" in caplog.text)
    finally:
        await (producer.close() if kind is TransactionProducer else asyncio.to_thread(producer.close))
    assert len(halfnote.asked(CLAIM)) == 1


def test_pauses_after_failures_grow_to_a_limit() -> None:
    error = ValueError("no answer")
    assert [paused_s(failed, error) for failed in (1, 2, 3)] == [1, 2, 4]
    assert paused_s(50, error) == LONGEST_PAUSE_S
    waits = {after_s: Unconfirmed("it", "busy", perhaps_done=False, after_s=after_s) for after_s in (0.0, 7.0, 1e9)}
    assert [paused_s(2, waits[after_s]) for after_s in waits] == [2, 7, LONGEST_OBEYED_S]
    # A close waits longer than a thread's claim.
    assert SYNC_WAIT_S < 5
