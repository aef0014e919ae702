"""What a relay asks the database at a low load: one read for what was published, one settle for several receipts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import assemble
from app.relay import loop, outcomes
from app.relay.loop import LOOK_EVERY, Relay
from app.relay.stream import Stream
from app.runtime.state import Runtime
from app.store.relay import log
from app.store.relay.log import NEWEST, Reader, window
from app.store.relay.retries import MANY_DUE
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from tests.support.check_responder import Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

NEVER_S = 3600.0


@pytest.fixture
async def other(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements of the relay's turns, by the names of their functions."""
    names: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            names.append(name)
            return await function(*arguments)

        return call

    for name in ("log_head", "window", "settle", "claim_retries"):
        monkeypatch.setattr(loop, name, noted(name, getattr(loop, name)))
    return names


async def opened(
    client: httpx.AsyncClient, runtime: Runtime, receiver: Responder, now: datetime
) -> tuple[Relay, Stream]:
    """Return a relay whose one stream has read the whole log, and which gets no messages but from the log."""
    await subscribe(client, receiver)
    relay = Relay(runtime)
    runtime.publications.relay = None
    for _ in range(3):
        await relay.step(runtime, now)
    [stream] = relay.streams.values()
    return relay, stream


async def finished(stream: Stream, messages: int) -> None:
    """Wait until the outcomes of messages wait for their settle."""
    async with asyncio.timeout(10):
        while len(stream.outcomes.buffer.finished) < messages:
            await asyncio.sleep(0.001)


async def test_one_statement_reads_what_was_published_and_one_settles_several_receipts(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    group: str,
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcomes, "RECEIPT_WITHIN_S", NEVER_S)
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        asked.clear()
        for number in range(1, 4):
            await publish(client, order(number))
            await relay.step(runtime, now)
            await finished(stream, number)
        assert asked == ["window"] * 3
        asked.clear()
        # The outcomes ask for a turn of their own, which does not read the log.
        stream.outcomes.buffer.request_turn()
        result = await relay.step(runtime, now)
        assert (asked, result.more) == (["settle"], False)
        assert await db.fetchval("select count(*) from receipt") == 3
        assert offsets(receiver) == [1, 2, 3]
        await relay.drain(runtime)


async def test_a_drain_settles_the_receipts_that_wait(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "RECEIPT_WITHIN_S", NEVER_S)
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        await publish(client, order(1))
        await relay.step(runtime, now)
        await finished(stream, 1)
        await relay.drain(runtime)
    assert await db.fetchval("select count(*) from receipt") == 1


async def test_receipts_are_settled_though_nothing_follows(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        await publish(client, order(1))
        await relay.step(runtime, now)
        await finished(stream, 1)
        runtime.wake_ups.relay.clear()
        async with asyncio.timeout(10):
            await runtime.wake_ups.relay.wait()
        await relay.step(runtime, now)
        assert await db.fetchval("select count(*) from receipt") == 1
        await relay.drain(runtime)


async def test_a_turn_that_outcomes_asked_for_looks_if_the_last_look_was_long_ago(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, group: str, asked: list[str]
) -> None:
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, other, receiver, now)
        # The other process published, and its NOTIFY is missed.
        await publish(client, order(1))
        asked.clear()
        stream.outcomes.buffer.request_turn()
        await relay.step(other, now)
        assert asked == []
        stream.outcomes.buffer.request_turn()
        await relay.step(other, now + LOOK_EVERY)
        assert asked == ["log_head", "window"]
        await relay.drain(other)


async def test_what_a_full_stream_could_not_read_is_read_when_it_has_room(
    client: httpx.AsyncClient, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        with monkeypatch.context() as full:
            full.setattr(type(stream.window), "has_room", lambda *_: False)
            await publish(client, order(1))
            await relay.step(runtime, now)
        assert offsets(receiver) == []
        stream.outcomes.buffer.request_turn()
        await relay.step(runtime, now)
        await finished(stream, 1)
        await relay.drain(runtime)


async def test_a_read_without_the_head_goes_on_until_all_is_read(
    client: httpx.AsyncClient, runtime: Runtime, group: str, asked: list[str]
) -> None:
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        capacity, stream.window.capacity = stream.window.capacity, 2
        await publish(client, *(order(number) for number in range(1, 6)))
        asked.clear()
        while (await relay.step(runtime, now)).more:
            pass
        assert asked.count("window") == 3
        assert "log_head" not in asked
        stream.window.capacity = capacity
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 5)
        await relay.drain(runtime)


async def test_a_window_of_an_empty_log_reaches_nothing(db: Connection) -> None:
    reader = Reader(1, 0, Route(TopicPatterns(["order"]), None, None), 1, 0, 0)
    for until in (NEWEST, 7):
        reader = Reader(1, 0, reader.route, 1, 0, 0, until)
        found = await window(db, reader, 0, 10)
        assert (found.messages, found.reached, found.more) == ([], None, False)


async def test_a_window_says_whether_the_log_may_go_on(
    client: httpx.AsyncClient, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(client, *(order(number) for number in range(1, 4)))
    reader = Reader(1, 0, Route(TopicPatterns(["order"]), None, None), 1, 0, 0)
    assert [(await window(db, reader, after, 2)).more for after in (0, 1, 2, 3)] == [True, True, False, False]
    short = log.WINDOW.replace(f"limit {log.SPAN}", "limit 3").replace(f">= {log.SPAN}", ">= 3")
    assert short != log.WINDOW
    monkeypatch.setattr(log, "WINDOW", short)
    assert [(await window(db, reader, after, 10)).more for after in (0, 1)] == [True, False]


async def test_only_what_other_processes_may_take_is_notified(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, group: str
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        # No relay has told what this process holds.
        runtime.wake_ups.published(["order"])
        assert await runtime.wake_ups.notify()
        mine = Relay(runtime)
        await step(mine, runtime)
        runtime.wake_ups.published(["order"])
        runtime.wake_ups.published()
        assert not await runtime.wake_ups.notify()
        theirs = Relay(other)
        await step(theirs, other)
        await subscribe(client, receiver, "biller", topics=["bill"])
        runtime.clock.offset_s += 4
        other.clock.offset_s += 4
        await step(theirs, other)
        await step(mine, runtime)
        assert [stream.subscription.name for stream in theirs.streams.values()] == ["biller"]
        for topics, notified in ((["order"], False), (["bill"], True), (None, True)):
            runtime.wake_ups.published(topics)
            assert await runtime.wake_ups.notify() is notified, topics
        await theirs.drain(other)
        await mine.drain(runtime)
        # From now on any process may take what this one held.
        runtime.wake_ups.published(["order"])
        assert await runtime.wake_ups.notify()


async def test_a_stream_that_waits_for_a_stored_message_asks_for_no_turn_after_turn(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        # As after a settle that leaves the next message of a key in delivery_retry.
        stream.outcomes.reclaim = True
        stream.outcomes.buffer.request_turn()
        assert not (await relay.step(runtime, now)).more
        await relay.drain(runtime)


async def test_a_turn_without_work_looks_once_and_touches_no_stream(
    client: httpx.AsyncClient, runtime: Runtime, group: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = runtime.clock.now()
    async with Responder() as receiver:
        relay, stream = await opened(client, runtime, receiver, now)
        await relay.step(runtime, now)
        asked.clear()
        with monkeypatch.context() as untouched:
            untouched.delattr(Stream, "wants_messages")
            await relay.step(runtime, now)
            assert asked == ["log_head"]
        # Nothing woke the relay, and it finds what was published.
        runtime.wake_ups.interest = TopicPatterns(["none"])
        await publish(client, order(1))
        await relay.step(runtime, now)
        await finished(stream, 1)
        # The receipt that waits is work.
        assert not stream.rests(relay._head)
        await relay.drain(runtime)


async def test_a_relay_at_rest_takes_new_streams_and_retries(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        relay, _ = await opened(client, runtime, receiver, runtime.clock.now())
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        for _ in range(3):
            await relay.step(runtime, runtime.clock.now())
        receiver.status = 200
        runtime.clock.offset_s += 3600
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        for _ in range(3):
            await relay.step(runtime, runtime.clock.now())
        await subscribe(client, receiver, "biller", topics=["bill"])
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: len(relay.streams) == 2)
        await publish(client, {"topic": "bill", "body": 1})
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from receipt"))
        await relay.drain(runtime)


@pytest.fixture
def slow_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim takes 0.1 s by the clock that measures it."""
    spent_s = [0.0]

    def after_each_claim() -> float:
        # The time of the next reading, as if the claim between two of them took 0.1 s.
        spent_s[0] += 0.1
        return spent_s[0]

    monkeypatch.setattr(loop, "monotonic", after_each_claim)


async def held_back(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, receiver: Responder, count: int
) -> tuple[Relay, Stream]:
    """Return a relay whose one stream has a message that failed and will be tried again in 1,000 s.

    `count` later ones of its key are due, and wait for it.
    """
    await subscribe(client, receiver, ordered="key", retry=[1000])
    relay = Relay(runtime)
    await publish(client, *(order(number, key="k") for number in range(1 + count)))
    waiting = "select count(*) = $1 from delivery_retry"
    await turn_until(relay, runtime, lambda: db.fetchval(waiting, 1 + count))
    [stream] = relay.streams.values()
    return relay, stream


async def test_claims_that_pass_many_rows_in_vain_are_made_less_often(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection, slow_claims: None, asked: list[str]
) -> None:
    """A message that waits for its retry keeps those of its key back, which each claim passes."""
    async with Responder(status=500) as receiver:
        relay, stream = await held_back(client, runtime, db, receiver, 1)
        later = runtime.clock.now() + timedelta(seconds=10)
        claimed = []
        for seconds in (2, 2.6, 3.2, 4.1, 4.7):
            asked.clear()
            await relay.step(runtime, later + timedelta(seconds=seconds))
            claimed.append("claim_retries" in asked)
        assert claimed == [True, False, False, True, False]
        # What is due soon after an outcome does not wait.
        stream.outcomes.reclaim = True
        asked.clear()
        await relay.step(runtime, later + timedelta(seconds=5))
        assert "claim_retries" in asked
        await relay.drain(runtime)


@pytest.mark.parametrize("waiting", [0, 1], ids=["alone", "with-a-held-key"])
async def test_claims_in_vain_of_one_subscription_delay_no_retry_of_another(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection, slow_claims: None, waiting: int
) -> None:
    """The other one has no due rows, or few of them, which its claims pass as well."""
    async with Responder(status=500) as receiver, Responder(status=500) as failing:
        relay, _ = await held_back(client, runtime, db, receiver, MANY_DUE)
        await subscribe(client, failing, "biller", topics=["bill"], ordered="key", retry=[10, 10])
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: len(relay.streams) == 2)
        await publish(client, *({"topic": "bill", "key": "b", "body": number} for number in range(1 + waiting)))
        in_retry = "select count(*) = $1 from delivery_retry where topic = 'bill'"
        await turn_until(relay, runtime, lambda: db.fetchval(in_retry, 1 + waiting))
        due_at = await db.fetchval("select max(due_at) from delivery_retry where topic = 'bill'")
        claimed = "select leased_until is not null from delivery_retry where topic = 'bill' order by \"offset\" limit 1"
        # The rest after the last claim is over, and this claim is in vain.
        await relay.step(runtime, due_at - timedelta(seconds=0.3))
        assert not await db.fetchval(claimed)
        await relay.step(runtime, due_at + timedelta(seconds=0.3))
        assert await db.fetchval(claimed)
        await relay.drain(runtime)


async def test_a_claim_that_finds_messages_ends_the_rest_of_its_stream(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    """A claim that does not wait for the rest, as after a key was freed, may find more than there is room for."""
    now = runtime.clock.now()
    async with Responder() as receiver:
        _, stream = await opened(client, runtime, receiver, now)
        stream.rest_claims(timedelta(seconds=5), now)
        assert stream.claimant(0, now) is None
        stream.retry([], now + timedelta(minutes=1), now)
        assert stream.claimant(0, now) is not None
