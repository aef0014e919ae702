"""Consumers that claim: acknowledge after the work, give back what failed, hold for longer, and stop cleanly."""

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from halfnote import Consumer, Outgoing, Refused, SyncConsumer, TransactionProducer
from halfnote.databases.asyncpg import Asyncpg
from halfnote.errors import StillRunning
from halfnote.inbox import AsyncInbox, Reject
from halfnote.message import Message
from halfnote.testing import Coordinator

from app.database.connection import Connection
from app.field_rules import REASON_MAX
from app.pull.wake import wake_consumers
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, settings_of
from tests.sdk.coordinators import answer, problem
from tests.sdk.crashes import Connections, Crash
from tests.sdk.in_process import FromThreads, service
from tests.sdk.pulled import ACK, CLAIM, EXTEND, NACK, URL, claimed, outcomes, scripted
from tests.support.consumers import lapse, put_pulled
from tests.support.relay_stepping import order, publish


@pytest.fixture
async def worker(client: httpx.AsyncClient, group: str) -> str:
    """The subscription `worker`, whose messages are claimed in the order of keys, and again after a second."""
    await put_pulled(client, ordered="key", retry=[1.0] * 16)
    return "worker"


async def until(condition: Callable[[], Any], runtime: Runtime | None = None) -> None:
    async with asyncio.timeout(60):
        while not condition():
            if runtime is not None:
                await wake_consumers(runtime, runtime.clock.now())
            await asyncio.sleep(0.01)


async def taken(consumer: Consumer, count: int, *, fails: Callable[[Message], bool] = lambda _: False) -> list[Any]:
    """Return the bodies of so many messages; the body of the loop raises for those that fail."""
    found: list[Any] = []
    async for message in consumer.messages():
        if fails(message):
            raise ValueError("no paper")
        found.append(message.json())
        if len(found) == count:
            consumer.stop()
    return found


async def test_a_loop_acknowledges_each_message_after_its_body(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    await publish(client, *(order(n) for n in range(5)))
    receipts: list[int] = []
    async with Consumer(URL, worker, at_most=2, transport=service(runtime)) as consumer:
        async for message in consumer.messages():
            receipts.append(await db.fetchval("select count(*) from receipt"))
            assert (message.topic, message.group, message.subscription, message.attempt) == (
                "order",
                "shop",
                "worker",
                1,
            )
            if len(receipts) == 5:
                consumer.stop()
    # Each claim of two follows the receipts of the one before; within it a receipt may come with the next body.
    assert receipts[::2] == [0, 2, 4]
    assert receipts[1] in (0, 1)
    assert receipts[3] in (2, 3)
    assert await db.fetchval("select count(*) from receipt where outcome = 'delivered'") == 5
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_an_exception_of_the_body_gives_its_message_back_and_what_was_claimed_with_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    await publish(client, *(order(n) for n in range(3)))
    with pytest.raises(ValueError, match="no paper"):
        async with Consumer(URL, worker, transport=service(runtime)) as consumer:
            await taken(consumer, 3, fails=lambda message: message.json() == {"order": 1})
    rows = await db.fetch('select "offset", attempts, last_error, leased_until from delivery_retry order by "offset"')
    # The first one may be acknowledged. Of what is given back, the work on the second one alone was begun.
    assert [(row["attempts"], row["leased_until"]) for row in rows] == [(1, None), (0, None)]
    assert {row["last_error"] for row in rows} == {"ValueError: no paper"}
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    async with Consumer(URL, worker, transport=service(runtime)) as consumer:
        assert len(await taken(consumer, len(rows))) == len(rows)
    assert await db.fetchval("select count(*) from receipt") == 3


async def test_a_message_that_comes_twice_has_its_effect_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, worker: str
) -> None:
    connections = Connections(dsn)
    inbox = AsyncInbox(Asyncpg(connections), "points")
    await inbox.create_table()
    await db.execute("create table points (n int)")
    await publish(client, *(order(n) for n in range(4)))
    lapsed = asyncio.Event()

    async def give_points(message: Message, connection: Any) -> None:
        await connection.execute("insert into points values ($1)", message.offset)

    class Lapsing(AsyncInbox):
        """After the work on the first message, its time is over."""

        async def receive(self, message: Message, handler: Any) -> Any:
            found = await super().receive(message, handler)
            if not lapsed.is_set():
                lapsed.set()
                async with runtime.database.connection() as other:
                    await lapse(other, runtime)
            return found

    async with Consumer(URL, worker, transport=service(runtime), at_most=1) as consumer:
        work = asyncio.create_task(consumer.run(give_points, inbox=Lapsing(Asyncpg(connections), "points")))
        async with asyncio.timeout(60):
            while await db.fetchval("select count(*) from receipt") < 4:
                await wake_consumers(runtime, runtime.clock.now())
                await asyncio.sleep(0.01)
        consumer.stop()
        await work
    assert await db.fetchval('select array_agg(attempts order by "offset") from receipt') == [2, 1, 1, 1]
    points = await db.fetchval("select array_agg(n order by n) from points")
    assert points == await db.fetchval('select array_agg("offset" order by "offset") from receipt')
    await connections.close()


async def test_a_handler_that_fails_gives_the_later_ones_of_its_key_back(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    keys = "aabab"
    sent = await publish(client, *({**order(n), "key": key} for n, key in enumerate(keys)))
    handled: list[tuple[int | None, int]] = []

    async def handler(message: Message) -> None:
        handled.append((message.offset, message.attempt))
        if message.offset == sent[1] and message.attempt == 1:
            raise ValueError("no paper")
        if message.offset == sent[2]:
            raise Reject("no address")

    async with Consumer(URL, worker, transport=service(runtime)) as consumer:
        work = asyncio.create_task(consumer.run(handler, at_once=3))
        async with asyncio.timeout(60):
            while await db.fetchval("select count(*) from receipt") < 4:
                await db.execute("update delivery_retry set due_at = now() - interval '1 s' where leased_until is null")
                await wake_consumers(runtime, runtime.clock.now())
                await asyncio.sleep(0.01)
        consumer.stop()
        await work
    assert [(offset, n) for offset, n in handled if offset in (sent[0], sent[1], sent[3])] == [
        (sent[0], 1),
        (sent[1], 1),
        (sent[1], 2),
        (sent[3], 1),
    ]
    assert await db.fetchval("select reason from dead_letter") == "no address"


async def test_a_reason_and_an_error_are_kept_as_long_as_the_service_takes_them(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    await publish(client, order(0), order(1))
    text = "é" * 2 * REASON_MAX

    async def handler(message: Message) -> None:
        if message.json() == {"order": 0}:
            raise Reject(text)
        consumer.stop()
        raise ValueError(text)

    async with Consumer(URL, worker, at_most=1, transport=service(runtime)) as consumer:
        await consumer.run(handler)
    assert await db.fetchval("select reason from dead_letter") == text[:REASON_MAX]
    assert await db.fetchval("select last_error from delivery_retry") == f"ValueError: {text}"[:REASON_MAX]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_later_messages_of_a_key_keep_their_tries_while_the_first_one_fails(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, asynchronous: bool
) -> None:
    await put_pulled(client, ordered="key", retry=[1.0, 1.0])
    await publish(client, *({**order(n), "key": "a"} for n in range(3)))
    handled: list[tuple[Any, int]] = []

    def handle(message: Message) -> None:
        handled.append((message.json()["order"], message.attempt))
        if message.json() == {"order": 0}:
            raise ValueError("no paper")

    async def handle_async(message: Message) -> None:
        handle(message)

    transport = service(runtime)
    if asynchronous:
        consumer: Any = Consumer(URL, "worker", transport=transport)
        work = asyncio.create_task(consumer.run(handle_async))
    else:
        consumer = SyncConsumer(URL, "worker", transport=FromThreads(transport), wait_s=0.2)
        work = asyncio.create_task(asyncio.to_thread(consumer.run, handle))
    async with asyncio.timeout(60):
        while await db.fetchval("select count(*) from receipt") < 2:
            await db.execute("update delivery_retry set due_at = now() - interval '1 s' where leased_until is null")
            await wake_consumers(runtime, runtime.clock.now())
            await asyncio.sleep(0.01)
    consumer.stop()
    await work
    await (consumer.close() if asynchronous else asyncio.to_thread(consumer.close))
    assert handled == [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1)]
    assert await db.fetchval("select array_agg(attempts) from receipt") == [1, 1]
    assert await db.fetchval("select array_agg(number order by number) from attempt where kind = 'delivery'") == [
        1,
        2,
        3,
    ]


async def test_a_handler_that_awaits_something_canceled_has_failed() -> None:
    coordinator = scripted(claimed(1, 2), claimed())
    worked: list[Any] = []

    async def handler(message: Message) -> None:
        worked.append(message.json())
        if message.json() == 2:
            consumer.stop()
            return
        other = asyncio.create_task(asyncio.sleep(60))
        other.cancel()
        await other

    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer, asyncio.timeout(60):
        await consumer.run(handler)
    assert worked == [1, 2]
    [back] = coordinator.asked(NACK)
    assert (back["handles"], "begun" in back) == (["h1"], False)


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_run_that_is_canceled_or_crashes_leaves_no_handler_behind(crashes: bool) -> None:
    coordinator = scripted(claimed(1, 2), claimed())
    began, left = asyncio.Event(), list[Any]()

    async def handler(message: Message) -> None:
        if message.json() == 1:
            await began.wait()
            if crashes:
                raise Crash
            await asyncio.sleep(60)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.append(message.json())

    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer, asyncio.timeout(60):
        work = asyncio.create_task(consumer.run(handler, at_once=2))
        await began.wait()
        if not crashes:
            work.cancel()
        with pytest.raises(Crash if crashes else asyncio.CancelledError):
            await work
        assert left == [2]
    assert [one["handles"] for one in coordinator.asked(NACK)] == [["h1", "h2"]]


async def test_a_message_that_another_consumer_works_on_keeps_its_tries() -> None:
    coordinator = scripted(claimed(1, 2, key="a"), claimed())

    async def handler(message: Message) -> None:
        consumer.stop()
        raise StillRunning(message.message_id)

    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        await consumer.run(handler)
    [back] = coordinator.asked(NACK)
    assert (back["handles"], back["begun"], back["retry_after_s"]) == (["h1", "h2"], False, 5)


async def test_a_lease_is_extended_while_the_work_goes_on(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    await publish(client, order(1), order(2))
    consumer = Consumer(URL, worker, invisible_s=1.0, transport=service(runtime))
    until_then = []
    async with consumer:
        async for _ in consumer.messages():
            until_then.append(await db.fetchval("select max(leased_until) from delivery_retry"))
            async with asyncio.timeout(60):
                while (now := await db.fetchval("select max(leased_until) from delivery_retry")) == until_then[-1]:
                    await asyncio.sleep(0.01)
            until_then.append(now)
            if len(until_then) == 4:
                consumer.stop()
    assert await db.fetchval("select array_agg(attempts) from receipt") == [1, 1]


async def test_what_is_no_longer_held_is_not_worked_on() -> None:
    lost = answer(200, {"outcomes": [{"status": 200}, {"status": 409}]})
    coordinator = scripted(claimed(1, 2), claimed(3))
    # First an answer of no service of Halfnote.
    coordinator.answers[EXTEND] = [answer(200, {}), lost, outcomes]  # type: ignore[index]
    found: list[Any] = []
    async with Consumer(URL, "worker", invisible_s=1.0, transport=coordinator.transport()) as consumer:
        async for message in consumer.messages():
            found.append(message.json())
            if message.json() == 1:
                await until(lambda: len(consumer._held) == 1)
            else:
                consumer.stop()
    assert found == [1, 3]
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h1"], ["h3"]]


async def test_a_body_is_byte_for_byte_and_one_that_python_does_not_parse_keeps_no_other_back() -> None:
    bodies = [b'{ "n": 1.10 }', b'{"n":1e999}', b"7" * 5000, b"[" * 5000 + b"]" * 5000]
    content = claimed(*range(1, 5)).content
    for number, body in enumerate(bodies, 1):
        content = content.replace(b'"body":%d}' % number, b'"body":' + body + b"}")
    found: list[bytes] = []
    coordinator = scripted(httpx.Response(200, content=content))
    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        async for message in consumer.messages():
            found.append(message.body)
            if len(found) == 4:
                consumer.stop()
    assert found == bodies


async def test_a_stop_gives_back_what_was_not_begun() -> None:
    coordinator = scripted(claimed(1, 2, 3))
    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        assert await taken(consumer, 1) == [1]
        assert await taken(consumer, 1) == []
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h1"]]
    [back] = coordinator.asked(NACK)
    assert (back["handles"], back["begun"]) == (["h2", "h3"], False)


async def test_a_stop_while_a_claim_is_answered_gives_its_messages_back() -> None:
    consumer: Consumer

    def answers(_: httpx.Request) -> httpx.Response:
        consumer.stop()
        return claimed(1, 2)

    coordinator = scripted(answers)
    consumer = Consumer(URL, "worker", transport=coordinator.transport())
    worked: list[Message] = []

    async def handler(message: Message) -> None:
        worked.append(message)

    await consumer.run(handler)
    assert worked == []
    assert [(one["handles"], one["begun"]) for one in coordinator.asked(NACK)] == [(["h1", "h2"], False)]
    assert coordinator.asked(ACK) == []
    await consumer.close()


class Closings:
    """A consumer of either kind that works on message 1 until `goes_on` is set; message 2 waits behind it."""

    def __init__(self, kind: type[Consumer | SyncConsumer]) -> None:
        self.coordinator = scripted(claimed(1, 2), claimed())
        self.consumer: Any = kind(URL, "worker", transport=self.coordinator.transport())
        self.is_sync = kind is SyncConsumer
        self.began, self.goes_on = threading.Event(), threading.Event()

    async def run(self, inside: Callable[[], Any] = lambda: None) -> None:
        """Run a handler that calls `inside` and then waits."""

        def handler(message: Message) -> None:
            self.began.set()
            inside()
            assert self.goes_on.wait(50)

        async def async_handler(message: Message) -> None:
            self.began.set()
            if asyncio.iscoroutine(called := inside()):
                await called
            await until(self.goes_on.is_set)

        if self.is_sync:
            await asyncio.to_thread(self.consumer.run, handler)
        else:
            await self.consumer.run(async_handler)

    async def close(self) -> None:
        await (asyncio.to_thread(self.consumer.close) if self.is_sync else self.consumer.close())

    def settled(self) -> tuple[list[list[str]], list[tuple[list[str], Any]]]:
        acknowledged = [one["handles"] for one in self.coordinator.asked(ACK)]
        return acknowledged, [(one["handles"], one.get("begun")) for one in self.coordinator.asked(NACK)]


@pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
async def test_a_close_beside_a_run_waits_for_its_handlers(kind: type[Consumer | SyncConsumer]) -> None:
    made = Closings(kind)
    work = asyncio.create_task(made.run())
    await until(made.began.is_set)
    close = asyncio.create_task(made.close())
    await until(made.consumer._stopping.is_set)
    assert not close.done()
    made.goes_on.set()
    await asyncio.gather(work, close)
    assert made.settled() == ([["h1"]], [(["h2"], False)])


@pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
async def test_a_close_in_a_handler_is_done_at_the_end_of_the_run(kind: type[Consumer | SyncConsumer]) -> None:
    made = Closings(kind)
    made.goes_on.set()
    await made.run(made.consumer.close)
    assert made.settled() == ([["h1"]], [(["h2"], False)])
    assert made.consumer._keeper is None or not made.consumer._keeper.is_alive()
    await made.close()


@pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
async def test_a_close_beside_one_in_a_handler_waits_until_the_run_has_closed(
    kind: type[Consumer | SyncConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Closings(kind)
    closed: list[bool] = []
    give_back = made.consumer._give_back

    def noting(*given: Any) -> Any:
        closed.append(made.consumer._idle.is_set())
        return give_back(*given)

    work = asyncio.create_task(made.run(made.consumer.close))
    await until(lambda: made.consumer._closes_at_end)
    monkeypatch.setattr(made.consumer, "_give_back", noting)
    close = asyncio.create_task(made.close())
    made.goes_on.set()
    await asyncio.gather(work, close)
    # At the end of the run, as it closes, and as the other one closes what is closed.
    assert closed == [False, False, True]
    assert made.settled() == ([["h1"]], [(["h2"], False)])


async def test_a_close_that_is_canceled_leaves_the_rest_to_the_run() -> None:
    made = Closings(Consumer)
    work = asyncio.create_task(made.run())
    await until(made.began.is_set)
    close = asyncio.create_task(made.close())
    await until(made.consumer._stopping.is_set)
    close.cancel()
    with pytest.raises(asyncio.CancelledError):
        await close
    made.goes_on.set()
    await work
    assert made.settled() == ([["h1"]], [(["h2"], False)])
    assert made.consumer._keeper is None


def test_a_signal_that_closes_a_consumer_of_threads_does_not_wait_for_the_run_that_it_interrupts() -> None:
    made = Closings(SyncConsumer)

    def close(*_: object) -> None:
        made.consumer.close()
        made.goes_on.set()

    def handler(message: Message) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert made.goes_on.wait(50)

    before = signal.signal(signal.SIGUSR1, close)
    try:
        made.consumer.run(handler)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert made.settled() == ([["h1"]], [(["h2"], False)])


async def test_a_stop_ends_a_claim_that_waits(runtime: Runtime, worker: str) -> None:
    async with Consumer(URL, worker, transport=service(runtime)) as consumer:
        work = asyncio.create_task(taken(consumer, 1))
        await until(lambda: runtime.waiting_consumers.any_waiting)
        consumer.stop()
        assert await work == []
    await until(lambda: not runtime.waiting_consumers.any_waiting)


async def test_a_claim_that_is_refused_is_raised_and_others_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfnote.consumer.paused_s", lambda failed, error: 0.01)
    coordinator = scripted(problem(404, "subscription-unknown"))
    consumer = Consumer(URL, "worker", transport=coordinator.transport())
    with pytest.raises(Refused, match="subscription-unknown"):
        await taken(consumer, 1)
    await consumer.close()
    coordinator = scripted(httpx.ConnectError("down"), problem(503, "overloaded"), claimed(1))
    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        assert await taken(consumer, 1) == [1]


@pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
async def test_a_claim_is_tried_again_after_the_pause_that_was_asked_for(
    kind: type[Consumer | SyncConsumer], caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = scripted(answer(429, retry_after="7"))
    consumer: Any = kind(URL, "worker", transport=coordinator.transport())
    works = consumer.run(None) if kind is Consumer else asyncio.to_thread(consumer.run, None)
    work = asyncio.ensure_future(works)
    try:
        await until(lambda: "messages of worker could not be claimed, which is tried again in 7 s" in caplog.text)
    finally:
        consumer.stop()
        await work
        await (consumer.close() if kind is Consumer else asyncio.to_thread(consumer.close))
    assert len(coordinator.asked(CLAIM)) == 1


ODD_CLAIMS = {
    "no JSON": httpx.Response(200, text="<html>"),
    "a list": answer(200, [1]),
    "no messages": answer(200, {"status": "ok"}),
    "null": answer(200, {"messages": None}),
    "a number": answer(200, {"messages": 3}),
    "no message": answer(200, {"messages": [{}]}),
    "no base64": httpx.Response(200, content=claimed(9).content.replace(b'"body":9', b'"body_base64":"9"')),
    "no key": httpx.Response(200, content=claimed(9).content.replace(b'"key":null', b'"key":[]')),
    "no time": httpx.Response(200, content=claimed(9).content.replace(b'"2026-11-21T08:00:00Z"', b'"today"')),
}


@pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("odd", ODD_CLAIMS)
async def test_a_claim_that_is_answered_oddly_is_tried_again(
    kind: type[Consumer | SyncConsumer],
    runs: bool,
    odd: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module in ("consumer", "sync_consumer"):
        monkeypatch.setattr(f"halfnote.{module}.paused_s", lambda failed, error: 0.01)
    coordinator = scripted(ODD_CLAIMS[odd], ODD_CLAIMS[odd], claimed(1), claimed())
    found: list[Any] = []

    def take(message: Message) -> None:
        found.append(message.json())
        consumer.stop()

    async def take_async(message: Message) -> None:
        take(message)

    def on_a_thread() -> None:
        with consumer:
            if runs:
                consumer.run(take)
                return
            for message in consumer.messages():
                take(message)

    consumer: Any = kind(URL, "worker", transport=coordinator.transport())
    if kind is SyncConsumer:
        await asyncio.to_thread(on_a_thread)
    else:
        async with consumer:
            if runs:
                await consumer.run(take_async)
            else:
                async for message in consumer.messages():
                    take(message)
    assert found == [1]
    # Those with a handle are given back, and the next claim has no pause before it.
    with_handle = odd in ("no base64", "no key", "no time")
    failed = caplog.text.count("messages of worker could not be claimed, which is tried again")
    assert failed == (0 if with_handle else 2)
    assert [one["handles"] for one in coordinator.asked(NACK)] == ([["h9"]] * 2 if with_handle else [])
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h1"]]


@pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("key", [None, "a"])
async def test_a_message_that_cannot_be_read_does_not_take_others_with_it(
    kind: type[Consumer | SyncConsumer], runs: bool, key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The later ones of its key come again after it. One that is no object has no handle, so only the log has it."""
    content = claimed(1, 2, 3, key=key).json()
    content["messages"][1]["committed_at"] = "today"
    content["messages"].append(4)
    coordinator = scripted(answer(200, content), claimed(5), claimed())
    found: list[Any] = []

    def take(message: Message) -> None:
        found.append(message.json())
        if found[-1] == 5:
            consumer.stop()

    async def take_async(message: Message) -> None:
        take(message)

    def on_a_thread() -> None:
        with consumer:
            if runs:
                consumer.run(take)
                return
            for message in consumer.messages():
                take(message)

    consumer: Any = kind(URL, "worker", transport=coordinator.transport())
    if kind is SyncConsumer:
        await asyncio.to_thread(on_a_thread)
    else:
        async with consumer:
            if runs:
                await consumer.run(take_async)
            else:
                async for message in consumer.messages():
                    take(message)
    assert found == ([1, 3, 5] if key is None else [1, 5])
    nacks = {tuple(one["handles"]): one for one in coordinator.asked(NACK)}
    assert set(nacks) == ({("h2",)} if key is None else {("h2",), ("h3",)})
    assert "the message cannot be read: ValueError" in nacks["h2",]["error"]
    assert nacks["h2",].get("begun") is not False
    assert key is None or nacks["h3",]["begun"] is False
    assert f"message {content['messages'][1]['message_id']} with the handle h2 of worker cannot be read" in caplog.text
    assert "message None with the handle None of worker cannot be read" in caplog.text
    assert "could not be claimed" not in caplog.text


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("how", ["anext is canceled", "run is canceled", "stopped"])
async def test_what_was_claimed_as_a_claim_is_given_up_is_given_back(turns: int, how: str) -> None:
    """In each turn of the loop after the answer was read."""
    coordinator = scripted(claimed(1, 2), claimed())
    consumer = Consumer(URL, "worker", transport=coordinator.transport())
    answered, asked = asyncio.Event(), consumer._driver.run
    found: list[Any] = []

    async def run(exchange: Any) -> Any:
        came = await asked(exchange)
        answered.set()
        return came

    consumer._driver.run = run  # type: ignore[method-assign]

    async def handler(message: Message) -> None:
        found.append(message.json())

    async def loops() -> None:
        if how == "run is canceled":
            await consumer.run(handler)
        else:
            async for message in consumer.messages():
                found.append(message.json())

    work = asyncio.create_task(loops())
    await answered.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    consumer.stop() if how == "stopped" else work.cancel()
    await asyncio.wait([work])
    await consumer.close()
    settled = [handle for path in (ACK, NACK) for one in coordinator.asked(path) for handle in one["handles"]]
    assert {"h1", "h2"} <= {*settled}
    back = [handle for one in coordinator.asked(NACK) if "begun" not in one for handle in one["handles"]]
    assert len(found) >= len(back)


async def test_what_the_caller_does_not_say_is_lowered_to_what_the_service_allows(
    dsn: str, db: Connection, group: str
) -> None:
    held_s = "select extract(epoch from held_until - claimed_at)::float from pull_claim"
    limited = settings_of(dsn, claim_max=3, claim_held_max_s=20)
    async with assembled(limited, dsn) as runtime, client_of(runtime) as client:
        await put_pulled(client)
        await publish(client, *(order(n) for n in range(4)))
        async with Consumer(URL, "worker", transport=service(runtime)) as consumer:
            async for _ in consumer.messages():
                assert await db.fetchval("select cardinality(transaction_ids) from pull_claim") == 3
                assert await db.fetchval(held_s) == 15
                break
        for given in ({"at_most": 4}, {"invisible_s": 21.0}):
            async with Consumer(URL, "worker", transport=service(runtime), **given) as consumer:
                with pytest.raises(Refused, match="must be at most"):
                    await anext(consumer.messages())


def test_a_time_that_is_refused_is_halved_unless_the_caller_gave_it() -> None:
    refusal = problem(422, "invalid", field="invisible_s")
    coordinator = scripted(refusal, refusal, claimed(1), claimed(2))
    with SyncConsumer(URL, "worker", transport=coordinator.transport()) as consumer:
        for message in consumer.messages():
            if message.json() == 2:
                consumer.stop()
    claims = coordinator.asked(CLAIM)
    assert [one["invisible_s"] for one in claims] == [60, 30, 15, 15]
    assert all("max" not in one for one in claims)
    for given, asked in ({"invisible_s": 60.0}, [60]), ({}, [60, 30, 15, 7.5, 3.75, 1.875, 1]):
        coordinator = scripted(refusal)
        with SyncConsumer(URL, "worker", transport=coordinator.transport(), **given) as consumer:
            with pytest.raises(Refused):
                next(consumer.messages())
        assert [one["invisible_s"] for one in coordinator.asked(CLAIM)] == asked
    coordinator = scripted(problem(422, "invalid", field="max"))
    with SyncConsumer(URL, "worker", transport=coordinator.transport()) as consumer, pytest.raises(Refused):
        next(consumer.messages())
    assert len(coordinator.asked(CLAIM)) == 1


async def test_an_acknowledgement_that_came_too_late_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = scripted(claimed(1))
    coordinator.answers[ACK] = [answer(200, {"outcomes": [{"status": 409}]})]  # type: ignore[index]
    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        assert await taken(consumer, 1) == [1]
    assert "1 messages were not settled (their time was over), and come again" in caplog.text


async def test_acknowledgements_that_wait_for_an_answer_are_one_request() -> None:
    answered = asyncio.Event()
    held: list[list[str]] = []

    async def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path == ACK:
            held.append(httpx.Response(200, content=request.content).json()["handles"])
            await answered.wait()
            return outcomes(request)
        return await coordinator.transport().handle_async_request(request)

    coordinator = scripted(claimed(1, 2, 3, 4))
    async with Consumer(URL, "worker", transport=httpx.MockTransport(answers)) as consumer:
        bodies = []
        async for message in consumer.messages():
            bodies.append(message.json())
            if message.json() == 1:
                continue
            await until(lambda: held)
            if message.json() == 4:
                consumer.stop()
                answered.set()
    assert bodies == [1, 2, 3, 4]
    assert held == [["h1"], ["h2", "h3", "h4"]]
    assert coordinator.asked(NACK) == []


async def test_what_waits_for_its_acknowledgement_is_held_for_longer() -> None:
    goes_on = asyncio.Event()

    async def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path == ACK:
            await goes_on.wait()
            return outcomes(request)
        return await coordinator.transport().handle_async_request(request)

    coordinator = scripted(claimed(1, 2), claimed())
    consumer = Consumer(URL, "worker", invisible_s=1.0, transport=httpx.MockTransport(answers))
    async with consumer:
        work = asyncio.create_task(taken(consumer, 2))
        await until(lambda: coordinator.asked(EXTEND))
        goes_on.set()
        assert await work == [1, 2]
    assert set(coordinator.asked(EXTEND)[0]["handles"]) == {"h1", "h2"}


def test_acknowledgements_of_threads_are_one_request_as_well() -> None:
    answered, began = threading.Event(), threading.Event()
    held: list[list[str]] = []

    def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path == ACK:
            held.append(httpx.Response(200, content=request.content).json()["handles"])
            began.set()
            assert answered.wait(60)
            return outcomes(request)
        return coordinator.transport().handle_request(request)

    coordinator = scripted(claimed(1, 2, 3, 4))
    with SyncConsumer(URL, "worker", transport=httpx.MockTransport(answers)) as consumer:
        bodies = []
        for message in consumer.messages():
            bodies.append(message.json())
            if message.json() > 1:
                assert began.wait(60)
            if message.json() == 4:
                consumer.stop()
                answered.set()
    assert bodies == [1, 2, 3, 4]
    assert [handle for request in held for handle in request] == ["h1", "h2", "h3", "h4"]
    assert held[0] == ["h1"]
    assert len(held) == 2


async def test_a_consumer_of_threads_does_the_same(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    await publish(client, *({**order(n), "key": f"k{n % 3}"} for n in range(9)))
    threads: set[str] = set()
    handled: list[int | None] = []
    transport = FromThreads(service(runtime))
    consumer = SyncConsumer(URL, worker, transport=transport, at_most=4, wait_s=0.2)

    def handler(message: Message) -> None:
        threads.add(threading.current_thread().name)
        handled.append(message.offset)
        if len(handled) == 9:
            consumer.stop()

    await asyncio.to_thread(consumer.run, handler, at_once=2)
    await asyncio.to_thread(consumer.close)
    assert sorted(handled, key=lambda offset: offset or 0) == await db.fetchval(
        'select array_agg("offset" order by "offset") from receipt'
    )
    assert all(name.startswith("halfnote-consumer") for name in threads)

    await publish(client, *(order(n) for n in range(2)))

    def loop() -> list[Any]:
        with SyncConsumer(URL, worker, transport=transport, wait_s=0.2) as second, suppress(ValueError):
            for _ in second.messages():
                raise ValueError("no paper")
        with SyncConsumer(URL, worker, transport=transport, wait_s=0.2, at_most=1) as third:
            found = []
            for message in third.messages():
                found.append(message.attempt)
                if len(found) == 2:
                    third.stop()
            return sorted(found)

    assert await asyncio.to_thread(loop) == [1, 2]


async def test_a_sync_lease_is_extended_and_a_sync_stop_gives_back() -> None:
    coordinator = scripted(claimed(1, 2))
    coordinator.answers[EXTEND] = [answer(200, {}), outcomes]  # type: ignore[index]
    consumer = SyncConsumer(URL, "worker", invisible_s=1.0, transport=coordinator.transport())

    def loop() -> list[Any]:
        found = []
        with consumer:
            for message in consumer.messages():
                found.append(message.json())
                while len(coordinator.asked(EXTEND)) < 2:
                    threading.Event().wait(0.01)
                consumer.stop()
        return found

    assert await asyncio.wait_for(asyncio.to_thread(loop), 60) == [1]
    assert set(coordinator.asked(EXTEND)[0]["handles"]) == {"h1", "h2"}
    assert [(one["handles"], one["begun"]) for one in coordinator.asked(NACK)] == [(["h2"], False)]


class Interrupted(BaseException):
    """Raised by a signal's handler."""


def in_main_thread(file: str, function: str) -> bool:
    """Return whether the main thread is in a function of `concurrent.futures`."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    codes = [one.f_code for one, _ in traceback.walk_stack(frame)]
    return any(code.co_filename.endswith(f"futures/{file}") and code.co_name == function for code in codes)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_signal_ends_a_run_of_threads_after_the_handler_under_way(goes_on: bool) -> None:
    coordinator = scripted(claimed(1, 2, 3, key="a"), claimed(4))
    handled: list[Any] = []

    def interrupt(*_: object) -> None:
        raise Interrupted

    def handler(message: Message) -> None:
        handled.append(message.json())
        if message.json() == 4:
            consumer.stop()
        if message.json() > 1:
            return
        while not in_main_thread("_base.py", "wait"):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        while not in_main_thread("thread.py", "shutdown"):
            time.sleep(0.01)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with SyncConsumer(URL, "worker", transport=coordinator.transport()) as consumer:
            with pytest.raises(Interrupted):
                consumer.run(handler)
            if goes_on:
                consumer.run(handler)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [1, 4][: 1 + goes_on]
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h1"], ["h4"]][: 1 + goes_on]
    assert [(one["handles"], one["begun"]) for one in coordinator.asked(NACK)] == [(["h2", "h3"], False)]


async def test_an_inbox_needs_an_own_handler_and_plain_functions_are_not_awaited() -> None:
    coordinator = scripted(claimed(1))
    with SyncConsumer(URL, "worker", transport=coordinator.transport()) as consumer:

        async def handler(_: Message) -> None:
            raise AssertionError("it is not awaited")

        def work() -> None:
            timer = threading.Timer(0.5, consumer.stop)
            timer.start()
            consumer.run(handler)

        coordinator.answers[CLAIM] = [claimed(1), claimed()]  # type: ignore[index]
        await asyncio.to_thread(work)
    assert "awaitable" in coordinator.asked(NACK)[0]["error"]
    assert coordinator.asked(ACK) == []


@pytest.fixture
async def coordinator() -> Coordinator:
    made = Coordinator("shop")
    async with httpx.AsyncClient(base_url=URL, transport=made.transport()) as client:
        put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
        assert (await client.put("/subscriptions/worker", json=put)).status_code == 201
    return made


async def test_the_coordinator_in_memory_hands_out_messages(coordinator: Coordinator) -> None:
    async with TransactionProducer(URL, group="shop", transport=coordinator.transport()) as producer:
        await producer.send_plain([Outgoing("order", n, key="a") for n in range(3)])
        await producer.send_plain(Outgoing("other", 1))
        await producer.send_plain(Outgoing("order", b"\xff", content_type="text/plain", key="b"))
    pulled = coordinator.subscriptions["worker"]
    attempts: list[tuple[bytes, int]] = []

    async def handler(message: Message) -> None:
        attempts.append((message.body, message.attempt))
        if message.body == b"1" and message.attempt == 1:
            raise ValueError("no paper")
        if message.body == b"\xff":
            raise Reject("no text")
        if message.body == b"2":
            consumer.stop()

    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        await consumer.run(handler)
    assert attempts == [(b"0", 1), (b"1", 1), (b"\xff", 1), (b"1", 2), (b"2", 1)]
    assert [message.json() for message in pulled.acknowledged] == [0, 1, 2]
    assert [message.body for message in pulled.dead] == [b"\xff"]


async def test_the_coordinator_in_memory_lets_a_lease_lapse(coordinator: Coordinator) -> None:
    async with TransactionProducer(URL, group="shop", transport=coordinator.transport()) as producer:
        await producer.send_plain([Outgoing("order", 1, key="a"), Outgoing("order", 2, key="a")])
    async with httpx.AsyncClient(base_url=URL, transport=coordinator.transport()) as client:
        [first] = (await client.post("/subscriptions/worker/claim", json={"max": 1})).json()["messages"]
        assert (await client.post("/subscriptions/worker/claim", json={})).json()["messages"] == []
        coordinator.subscriptions["worker"].lapse()
        settle = {"handles": [first["handle"]]}
        assert (await client.post("/subscriptions/worker/ack", json=settle)).json()["outcomes"][0]["status"] == 409
        again = (await client.post("/subscriptions/worker/claim", json={})).json()["messages"]
        assert [(one["body"], one["attempt"]) for one in again] == [(1, 2), (2, 1)]
        assert (await client.post("/subscriptions/none/claim", json={})).status_code == 404
