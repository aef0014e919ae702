"""Messages that go from the commit to the relay of the same machine without being read from the log."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from app.config import Settings
from app.coordinator.commit_lanes import LaneFlushes
from app.database.connection import Connection, connect
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.relay import loop, outcomes
from app.relay.assignments import LEASE
from app.relay.handed_messages import KEPT_FOR, KEPT_MOST, HandedMessages
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.coordinator.halves import Half
from app.store.relay.log import Logged, Outgoing, Reader, window
from app.store.subscriptions.subscriptions import Route
from app.topic_patterns import TopicPatterns
from tests.coordinator.test_races import half_with
from tests.support.check_responder import Responder
from tests.support.examples import examples
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def receipts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No receipt asks for a turn of its own."""
    monkeypatch.setattr(outcomes, "RECEIPT_WITHIN_S", NEVER_S)


@pytest.fixture
async def other(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets after which windows of the log were read."""
    after: list[int] = []

    async def noted(connection: Connection, reader: Reader, position: int, at_most: int) -> Any:
        after.append(position)
        return await window(connection, reader, position, at_most)

    monkeypatch.setattr(loop, "window", noted)
    return after


async def opened(runtime: Runtime, streams: int = 1) -> Relay:
    """Return a relay whose streams have read the whole log."""
    relay = Relay(runtime)
    await turn_until(relay, runtime, lambda: len(relay.streams) == streams)
    await step(relay, runtime)
    return relay


async def received(receiver: Responder, messages: int) -> list[int]:
    """Wait for calls without a turn of the relay; return their offsets."""
    async with asyncio.timeout(10):
        while len(receiver.calls) < messages:
            await asyncio.sleep(0.001)
    return offsets(receiver)


async def transact(client: httpx.AsyncClient, *messages: dict[str, Any], verdict: str = "commit") -> str:
    """Post a half and its end; return the transaction's id."""
    half = await client.post("/half", json={"producer_group": "shop", "messages": messages})
    assert half.status_code == 201, half.text
    transaction_id: str = half.json()["transaction_id"]
    await end(client, transaction_id, verdict)
    return transaction_id


async def end(client: httpx.AsyncClient, transaction_id: str, verdict: str = "commit") -> None:
    body = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": verdict}
    answer = await client.post("/end", json=body)
    assert answer.status_code == 200, answer.text


async def test_committed_messages_are_sent_without_a_read_or_a_turn(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection, windows: list[int]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        windows.clear()
        runtime.wake_ups.relay.clear()
        await publish(client, order(1))
        await transact(client, order(2), order(3))
        await transact(client, order(4), verdict="rollback")
        await transact(client, order(5))
        assert sorted(await received(receiver, 4)) == [1, 2, 3, 4]
        assert [msgspec.json.decode(call.body)["order"] for call in sorted_calls(receiver)] == [1, 2, 3, 5]
        assert not runtime.wake_ups.relay.is_set()
        await relay.drain(runtime)
    assert windows == []
    assert await db.fetchval("select count(*) from receipt where digest = sha256(convert_to('x', 'utf8'))") == 0
    matching = """select count(*) from receipt r join half h using (transaction_id, position)
        where r.digest = h.body_digest"""
    assert await db.fetchval(matching) == 4
    assert await db.fetchval('select min("offset") from checkpoint') == 4


def sorted_calls(receiver: Responder) -> list[Any]:
    return sorted(receiver.calls, key=lambda call: int(call.headers["halfnote-offset"]))


async def test_messages_of_another_process_in_between_are_read_first(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, group: str, windows: list[int]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_in_flight=1)
        relay = await opened(runtime)
        await publish(client, order(1))
        await received(receiver, 1)
        # As the message of a person's verdict, or of another machine.
        handing, runtime.publications.relay = runtime.publications.relay, None
        await publish(client, order(2))
        runtime.publications.relay = handing
        windows.clear()
        runtime.wake_ups.relay.clear()
        await publish(client, order(3))
        assert runtime.wake_ups.relay.is_set()
        await asyncio.sleep(0.05)
        assert offsets(receiver) == [1]
        await step(relay, runtime)
        assert windows == [1]
        assert await received(receiver, 3) == [1, 2, 3]
        # From here on nothing is missing.
        await publish(client, order(4))
        assert await received(receiver, 4) == [1, 2, 3, 4]
        assert windows == [1]
        await relay.drain(runtime)


async def test_what_is_handed_over_while_a_window_is_read_is_sent_once(
    client: httpx.AsyncClient, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read began before, and its snapshot has the first of three messages or all of them."""
    for snapshot_has in (1, 3):
        async with Responder() as receiver:
            name = f"mailer-{snapshot_has}"
            await subscribe(client, receiver, name)
            relay = await opened(runtime)
            before = await publish(client, {"topic": "elsewhere", "body": 1})
            reading, go_on = asyncio.Event(), asyncio.Event()

            async def slow(
                *arguments: Any, early: bool = snapshot_has == 1, began: Any = reading, released: Any = go_on
            ) -> Any:
                found = await window(*arguments) if early else None
                began.set()
                await released.wait()
                return found or await window(*arguments)

            runtime.publications.relay, handing = None, runtime.publications.relay
            first = await publish(client, order(1))
            runtime.publications.relay = handing
            runtime.wake_ups.wake()
            with monkeypatch.context() as patched:
                patched.setattr(loop, "window", slow)
                turn = asyncio.create_task(relay.step(runtime, runtime.clock.now()))
                await asyncio.wait_for(reading.wait(), 10)
                rest = await publish(client, order(2)) + await publish(client, order(3))
                go_on.set()
                await turn
            await turn_until(relay, runtime, lambda: len(receiver.calls) >= 3)
            await step(relay, runtime)
            assert sorted(offsets(receiver)) == first + rest, before
            await relay.drain(runtime)
        await client.delete(f"/subscriptions/{name}")


async def test_a_stream_takes_its_topics_and_tags_and_passes_the_others(
    client: httpx.AsyncClient, runtime: Runtime, group: str, windows: list[int]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, filters={"tags": ["paid"]})
        relay = await opened(runtime)
        windows.clear()
        for message in (order(1, tag="new"), {"topic": "parcel", "body": 1, "tag": "paid"}, order(2, tag="paid")):
            await publish(client, message)
        assert await received(receiver, 1) == [3]
        [stream] = relay.streams.values()
        assert stream.position == 3
        await relay.drain(runtime)
    assert windows == []


async def test_streams_whose_messages_only_the_database_can_choose_read_them(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    async with Responder() as plain, Responder() as headed, Responder() as sharded:
        await subscribe(client, plain)
        await subscribe(client, headed, "headed", filters={"headers": {"country": "NZ"}})
        await subscribe(client, sharded, "sharded", shards=2)
        relay = await opened(runtime, streams=4)
        runtime.wake_ups.relay.clear()
        await publish(client, order(1, headers={"country": "NZ"}), order(2))
        assert sorted(await received(plain, 2)) == [1, 2]
        assert runtime.wake_ups.relay.is_set()
        await turn_until(relay, runtime, lambda: len(headed.calls) == 1 and len(sharded.calls) == 2)
        await relay.drain(runtime)
        assert (offsets(headed), sorted(offsets(sharded)), sorted(offsets(plain))) == ([1], [1, 2], [1, 2])


async def test_a_delayed_message_comes_from_the_log_at_its_time(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        runtime.wake_ups.relay.clear()
        await transact(client, order(1), order(2, deliver_after_s=60), order(3))
        assert runtime.wake_ups.relay.is_set()
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        assert sorted(offsets(receiver)) == [1, 3]
        for _ in range(3):
            await step(relay, runtime)
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 3)
        assert offsets(receiver)[2] == 2
        await relay.drain(runtime)


async def test_a_half_that_was_forgotten_is_read(
    client: httpx.AsyncClient, runtime: Runtime, group: str, windows: list[int]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        half = await client.post("/half", json={"producer_group": "shop", "messages": [order(1)]})
        recent = flushes_of(runtime)._recent
        assert recent is not None
        assert len(recent) == 1
        recent._limit = 1
        await client.post("/half", json={"producer_group": "shop", "messages": [order(2)]})
        recent._halves.clear()
        windows.clear()
        await end(client, half.json()["transaction_id"])
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        assert windows == [0]
        await relay.drain(runtime)


def flushes_of(runtime: Runtime) -> Any:
    return runtime.lanes.end._flush.__self__  # type: ignore[attr-defined]


async def test_a_verdict_frees_the_half(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    recent = flushes_of(runtime)._recent
    await transact(client, order(1))
    await transact(client, order(2), verdict="rollback")
    await publish(client, order(3))
    assert len(recent) == 0


async def test_what_does_not_fit_is_read_when_there_is_room(
    client: httpx.AsyncClient, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch, windows: list[int]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        [stream] = relay.streams.values()
        runtime.wake_ups.relay.clear()
        windows.clear()
        with monkeypatch.context() as full:
            full.setattr(type(stream.window), "has_room", lambda *_: False)
            await publish(client, order(1), order(2))
            # A turn could not read it either.
            assert not runtime.wake_ups.relay.is_set()
            await relay.step(runtime, runtime.clock.now())
        assert offsets(receiver) == []
        await relay.step(runtime, runtime.clock.now())
        assert sorted(await received(receiver, 2)) == [1, 2]
        capacity, stream.window.capacity = stream.window.capacity, 2
        await transact(client, *(order(number) for number in range(3, 8)))
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 7)
        assert sorted(offsets(receiver)) == [*range(1, 8)]
        stream.window.capacity = capacity
        await relay.drain(runtime)


async def test_a_stream_that_ends_takes_nothing(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        [stream] = relay.streams.values()
        stream.close()
        await publish(client, order(1))
        assert stream.position == 0
        await asyncio.sleep(0.05)
        assert offsets(receiver) == []
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        await relay.drain(runtime)
        await publish(client, order(2))
        await asyncio.sleep(0.05)
        assert offsets(receiver) == [1]


async def test_messages_of_a_key_keep_their_order(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[30])
        relay = await opened(runtime)
        await publish(client, order(1, key="k"), order(2, key="k"), order(3))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from delivery_retry"))
        receiver.status = 200
        await publish(client, order(4, key="k"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from delivery_retry"))
        receiver.calls.clear()
        runtime.clock.offset_s += 31
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 4)
        assert [offset for offset in offsets(receiver) if offset != 3] == [1, 2, 4]
        await relay.drain(runtime)


async def test_a_relay_at_rest_delivers_and_settles_what_is_handed_over(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "RECEIPT_WITHIN_S", 0.01)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        for _ in range(4):
            await relay.step(runtime, runtime.clock.now())
        assert relay._resting
        await publish(client, order(1))
        await received(receiver, 1)
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        await turn_until(relay, runtime, lambda: db.fetchval('select min("offset") = 1 from checkpoint'))
        await relay.drain(runtime)


async def test_a_defect_of_the_hand_over_changes_no_answer_and_loses_no_message(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    def broken(messages: Any, now: datetime) -> bool:
        raise ZeroDivisionError

    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        runtime.publications.relay = broken
        with capture_logs() as logs:
            await publish(client, order(1))
            await transact(client, order(2))
        assert [one["event"] for one in logs if one["log_level"] == "error"] == ["defect"] * 2
        runtime.clock.offset_s += 1
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        await relay.drain(runtime)


# The messages that are kept for a moment


def outgoing(offset: int, committed_at: datetime, **fields: Any) -> Outgoing:
    one = Outgoing(offset, None, 0, "order", None, None, None, committed_at, "shop", None, "", b"")  # type: ignore[arg-type]
    return replace(one, **fields)


AT = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_gap_begins_a_new_run() -> None:
    handed = HandedMessages()
    handed.add([outgoing(offset, AT) for offset in (3, 4, 6, 7, 9)], AT)
    assert [[m.offset for m in run] for run in handed.runs(AT)] == [[3, 4], [6, 7], [9]]
    handed.taken(handed.runs(AT)[1])
    assert [[m.offset for m in run] for run in handed.runs(AT)] == [[3, 4], [9]]
    assert len(handed) == 3
    assert handed.runs(AT + KEPT_FOR + timedelta(milliseconds=1)) == ()
    assert len(handed) == 0


def test_old_messages_and_too_many_are_forgotten() -> None:
    handed = HandedMessages()
    handed.add([outgoing(1, AT - KEPT_FOR * 2)], AT)
    assert handed.runs(AT) == ()
    for first in range(0, 2 * KEPT_MOST, 100):
        handed.add([outgoing(first + number, AT) for number in range(100)], AT)
    assert len(handed) == KEPT_MOST
    assert handed.runs(AT)[0][0].offset == KEPT_MOST


# What is handed over is what the log has

texts = st.none() | st.sampled_from(["x", "ä 'b'", "k" * 40])
bodies = st.sampled_from([{"body": {"n": [1, "ä"]}}, {"body": "text"}, {"body_base64": "AAH/"}, {"body_base64": ""}])
wanted = st.builds(
    lambda body, key, tag, headers, kind: (
        {"topic": "order"} | body | {"key": key, "tag": tag, "headers": headers, "content_type": kind}
    ),
    bodies,
    texts,
    texts,
    st.none() | st.dictionaries(st.sampled_from(["b", "aa", "country"]), st.sampled_from(["", "1", "é"]), min_size=1),
    st.none() | st.just("application/merge-patch+json"),
)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=examples(30), suppress_health_check=FIXTURES)
@given(st.lists(st.lists(wanted, min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
async def test_handed_messages_equal_those_of_the_log(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection, transactions: Any, plain: bool
) -> None:
    handed: list[Outgoing] = []

    def take(messages: Any, now: datetime) -> bool:
        handed.extend(messages)
        return True

    runtime.publications.relay = take
    head = await db.fetchval('select coalesce(max("offset"), 0) from outbox')
    for messages in transactions:
        given_messages = [{name: value for name, value in one.items() if value is not None} for one in messages]
        if plain:
            answer = await client.post("/messages", json={"producer_group": "shop", "messages": given_messages})
            assert answer.status_code == 201, answer.text
        else:
            await transact(client, *given_messages)
    reader = Reader(1, 0, Route(TopicPatterns(["*"]), None, None), 1, 0, 0)
    found = await window(db, reader, head, 1000)
    assert handed
    assert [_by_value(one) for one in handed] == [_by_value(one) for one in found.messages]


def _by_value(message: Outgoing) -> Outgoing:
    headers = msgspec.json.decode(message.headers) if message.headers else None
    return replace(message, headers=headers)


async def test_a_plain_message_of_a_former_primary_is_not_handed_over(
    runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of timelines closes the connection in the turn of the event loop in which the commit is answered."""
    published: list[tuple[set[str], int, bool]] = []

    def note(topics: Collection[str], messages: Sequence[Logged], complete: bool) -> None:
        published.append((set(topics), len(messages), complete))

    flushes = LaneFlushes(runtime.clock, runtime.metrics, note, recent_halves_bytes=10_000)
    connection = await connect(runtime.database.dsn)
    count_halves = flushes._count_halves

    def closed_before(fresh: Sequence[Half]) -> None:
        count_halves(fresh)
        connection.terminate()

    try:
        await flushes.plains(connection, [half_with(uuid7(runtime.clock.now()), b"1")])
        monkeypatch.setattr(flushes, "_count_halves", closed_before)
        await flushes.plains(connection, [half_with(uuid7(runtime.clock.now()), b"2")])
    finally:
        connection.terminate()
    assert published == [({"order"}, 1, True), ({"order"}, 0, False)]


async def test_a_closed_stream_sends_nothing_that_it_took_before_its_process_was_suspended(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Its subscription may be paused, or have another destination by now."""
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = await opened(runtime)
        [stream] = relay.streams.values()
        runtime.publications.relay = lambda messages, now: False
        await publish(client, order(1))
        found = await window(db, stream.window.reader, stream.position, 10)
        assert relay.hand_over(found.messages, runtime.clock.now())
        # It is taken for a request, whose task has not begun.
        assert stream.sender.in_flight == 1
        relay._assignments.close(stream)
        runtime.clock.offset_s += LEASE.total_seconds()
        await stream.sender.wait_idle()
        # No other worker took the lease meanwhile.
        stream.renewed(runtime.clock.now() + LEASE)
        await stream.sender.wait_idle()
        assert receiver.calls == []
        # The next stream of the shard sends it.
        await turn_until(relay, runtime, lambda: receiver.calls)
        assert [*relay.streams.values()] != [stream]
        await relay.drain(runtime)
    assert await db.fetchval("select count(*) from receipt") == 1
