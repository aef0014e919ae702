"""A long backlog of one key: its messages wait without their bodies, other keys are delivered, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Collection
from datetime import timedelta
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.relay import key_order, window
from app.relay.loop import Relay
from app.relay.stream import Stream
from app.runtime.state import Runtime
from app.store.relay.log import Outgoing, read_bodies
from app.store.relay.results import settle
from tests.relay.test_ordering import by_key, keyed, receipts
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import publish, step, subscribe, turn_until

HOT, OTHERS = 200, 10
MEMORY = 128


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream with four requests at once reads 16 messages at a time and keeps 128, 64 of them behind their keys."""
    monkeypatch.setattr(window, "WINDOW_LEAST", MEMORY // window.MEMORY_TIMES)


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


class Held:
    """Answers messages of the key `hot` once it may: the first one with `first`, the others with 200."""

    def __init__(self, first: int = 200) -> None:
        self.may_answer, self._first = asyncio.Event(), first

    async def __call__(self, call: Call) -> web.Response:
        if call.headers["ce-subject"] != "hot":
            return web.Response()
        await self.may_answer.wait()
        status, self._first = self._first, 200
        return web.Response(status=status)


async def fill(client: httpx.AsyncClient, keys: Collection[str], first: int = 0) -> list[int]:
    return await publish(
        client, *(keyed(key, number, headers={"number": str(number)}) for number, key in enumerate(keys, first))
    )


async def deferring(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, receiver: Responder, **fields: Any
) -> tuple[Stream, list[int]]:
    """Publish a backlog of `hot` and one message of each other key behind it; return when the others have arrived."""
    await subscribe(client, receiver, ordered="key", max_in_flight=4, timeout_s=60, **fields)
    sent = await fill(client, ["hot"] * HOT)
    await fill(client, [f"k{number}" for number in range(OTHERS)], HOT)
    await turn_until(relay, runtime, lambda: len(by_key(receiver.calls)) == 1 + OTHERS)
    assert len(by_key(receiver.calls)["hot"]) == 1
    [stream] = relay.streams.values()
    assert stream.queue.deferred >= HOT - MEMORY
    return stream, sent


def assert_each_has_its_own_body(calls: list[Call]) -> None:
    for call in calls:
        number = int(call.headers["halfnote-h-number"])
        assert (int(call.headers["halfnote-offset"]), msgspec.json.decode(call.body)) == (number + 1, {"order": number})


async def test_other_keys_do_not_wait_for_a_long_backlog_of_one(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answer = Held()
    async with Responder(answer) as receiver:
        stream, sent = await deferring(client, runtime, relay, receiver)
        answer.may_answer.set()
        await turn_until(relay, runtime, receipts(db, HOT + OTHERS), within_s=60)
        await turn_until(relay, runtime, lambda: not stream.window.unsettled)
    assert by_key(receiver.calls)["hot"] == sent
    assert_each_has_its_own_body(receiver.calls)
    assert (stream.queue.deferred, stream.queue.deferred_bytes) == (0, 0)


async def test_after_a_failure_what_waits_without_a_body_is_stored_and_sent_in_order(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answer = Held(first=500)
    async with Responder(answer) as receiver:
        stream, sent = await deferring(client, runtime, relay, receiver, retry=[10])
        answer.may_answer.set()
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = $1 from delivery_retry", HOT))
        assert stream.queue.deferred == 0
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, receipts(db, HOT + OTHERS), within_s=60)
    assert by_key(receiver.calls)["hot"] == [sent[0], *sent]
    assert_each_has_its_own_body(receiver.calls)


async def test_the_next_holder_reads_what_waits_without_a_body(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answer = Held()
    async with Responder(answer) as receiver:
        stream, sent = await deferring(client, runtime, relay, receiver)
        changed = {"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, "ordered": "key"}
        assert (await client.put("/subscriptions/mailer", json={**changed, "max_in_flight": 5})).status_code == 200
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: stream.closing)
        answer.may_answer.set()
        await turn_until(relay, runtime, receipts(db, HOT + OTHERS), within_s=60)
    assert by_key(receiver.calls)["hot"] == sent
    assert_each_has_its_own_body(receiver.calls)


async def test_messages_without_bodies_expire(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answer = Held()
    async with Responder(answer) as receiver:
        stream, sent = await deferring(client, runtime, relay, receiver, expire_after_s=600)
        runtime.clock.offset_s += 601
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = $1 from dead_letter", HOT - 1))
        assert (stream.queue.deferred, stream.queue.deferred_bytes) == (0, 0)
        answer.may_answer.set()
        # The database commits by its own clock.
        runtime.clock.offset_s -= 601
        later = await fill(client, ["hot", "hot"], HOT + OTHERS)
        await turn_until(relay, runtime, lambda: len(by_key(receiver.calls)["hot"]) == 3)
    assert by_key(receiver.calls)["hot"] == [sent[0], *later]


async def test_messages_that_expire_during_a_settle_are_found_after_it(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    held, may_answer_late = Held(), asyncio.Event()

    async def answer(call: Call) -> web.Response:
        if call.headers["ce-subject"] == "late":
            await may_answer_late.wait()
        return await held(call)

    async with Responder(answer) as receiver:
        stream, _ = await deferring(client, runtime, relay, receiver, expire_after_s=600)
        await fill(client, ["late"], HOT + OTHERS)
        await turn_until(relay, runtime, lambda: "late" in by_key(receiver.calls))
        await turn_until(relay, runtime, lambda: not len(stream.outcomes.buffer))
        may_answer_late.set()
        async with asyncio.timeout(10):
            while not stream.outcomes.buffer.has_unsettled:
                await asyncio.sleep(0.001)
        now = runtime.clock.now() + timedelta(seconds=601)
        runtime.clock.fixed = now
        batch = stream.batch(now)
        stream.expire_unsent(now)
        async with runtime.database.keyed() as connection:
            assert await settle(connection, runtime.owner, [batch], now) == [True]
        assert not stream.outcomes.buffer.has_unsettled
        stream.recorded(batch.target, now)
        try:
            # The time stands still.
            await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = $1 from dead_letter", HOT - 1))
        finally:
            runtime.clock.fixed = None
            held.may_answer.set()


async def test_a_message_that_expires_while_its_body_is_read_is_not_sent(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_order, "BODIES_OF_KEY", 1)
    answer, next_one = Held(), 0

    async def read_slowly(connection: Connection, messages: list[Outgoing]) -> list[Outgoing]:
        nonlocal next_one
        found = await read_bodies(connection, messages)
        if not next_one and await stops():
            next_one = found[0].offset
            runtime.clock.fixed = at + timedelta(seconds=6)
        return found

    async def stops() -> bool:
        """Wait a moment for the settle of the same turn; return whether the key waits for the body after it."""
        keys = stream.queue.keys
        assert keys is not None
        for _ in range(50):
            if keys._stopped:
                break
            await asyncio.sleep(0.002)
        return bool(keys._stopped)

    async with Responder(answer) as receiver:
        stream, _ = await deferring(client, runtime, relay, receiver, expire_after_s=600)
        at = await db.fetchval("select min(committed_at) + interval '599 s' from outbox where key = 'hot'")
        runtime.clock.fixed = at
        await step(relay, runtime)
        monkeypatch.setattr("app.relay.loop.read_bodies", read_slowly)
        answer.may_answer.set()
        await turn_until(relay, runtime, lambda: next_one)
        await turn_until(
            relay, runtime, lambda: db.fetchval('select count(*) = 1 from dead_letter where "offset" = $1', next_one)
        )
        runtime.clock.fixed = None
    assert next_one - 1 in by_key(receiver.calls)["hot"]
    assert next_one not in by_key(receiver.calls)["hot"]


async def test_a_shard_reads_on_for_a_limited_part_of_the_log(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next holder would read that part again."""
    answer = Held()
    async with Responder(answer) as receiver:
        stream, sent = await deferring(client, runtime, relay, receiver)
        monkeypatch.setattr("app.relay.stream.AHEAD_MOST", stream.position - stream.settled_to - 1)
        [late] = await fill(client, ["late"], HOT + OTHERS)
        assert stream.window.is_behind(late)
        assert not stream.wants_messages(late)
        answer.may_answer.set()
        await turn_until(relay, runtime, receipts(db, HOT + OTHERS + 1), within_s=60)
    assert by_key(receiver.calls)["hot"] == sent
    assert by_key(receiver.calls)["late"] == [late]


async def test_bodies_of_a_day_that_is_being_archived_are_not_read(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """Upkeep owns such a day. The stream ends, and the next holder passes the day by."""
    answer = Held()
    async with Responder(answer) as receiver:
        stream, sent = await deferring(client, runtime, relay, receiver)
        await db.execute("update day set state = 'archiving'")
        answer.may_answer.set()
        await turn_until(relay, runtime, lambda: stream not in relay.streams.values(), within_s=60)
        arrived = len(by_key(receiver.calls)["hot"])
        assert 0 < arrived < HOT
        await turn_until(relay, runtime, lambda: len(relay.streams) == 1)
        [following] = relay.streams.values()
        await turn_until(relay, runtime, lambda: following.position == HOT + OTHERS)
    assert by_key(receiver.calls)["hot"] == sent[:arrived]
    assert_each_has_its_own_body(receiver.calls)
