"""Order by key: one message at a time, in offset order, over failures, delays and takeovers; other keys do not wait."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.relay.key_order import HELD_MOST
from app.relay.loop import RETRY_LEASE, Relay
from app.relay.window import WINDOW_MOST
from app.runtime.state import Runtime
from app.store.relay import checkpoints
from app.store.retention import days
from app.store.retention.day_dead_letters import RowPlace, bury_retries
from app.store.subscriptions import subscriptions
from tests.relay.test_kills import FILL
from tests.support.check_responder import Call, Responder
from tests.support.load import until
from tests.support.relay_stepping import order, publish, step, subscribe, turn_until


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


def by_key(calls: list[Call]) -> dict[str, list[int]]:
    """Return the received offsets of each key, in the order of arrival."""
    offsets: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        offsets[call.headers.get("ce-subject", "")].append(int(call.headers["halfnote-offset"]))
    return offsets


def receipts(db: Connection, count: int) -> object:
    return lambda: db.fetchval("select count(*) >= $1 from receipt where outcome = 'delivered'", count)


def keyed(key: str, number: int = 0, **fields: object) -> dict[str, object]:
    return {**order(number), "key": key, **fields}


async def remove_retries(db: Connection, runtime: Runtime) -> None:
    """Make dead letters of all retries, as a removal of their day by force does."""
    day = await days.day_of(db, await db.fetchval("select transaction_id from delivery_retry limit 1"))
    [subscription] = await subscriptions.page(db, "", 10)
    assert day is not None
    await bury_retries(db, day, subscription, RowPlace.before(day, 0), runtime.clock.now())
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def drop_dead_letters(client: httpx.AsyncClient) -> None:
    wanted = {"filter": {"subscription": "mailer"}, "reason": "too old", "dry_run": False}
    assert (await client.request("DELETE", "/dead-letters", json=wanted)).status_code == 200


async def test_one_message_of_a_key_at_a_time_and_keys_in_parallel(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    in_flight: dict[str, int] = defaultdict(int)
    peak: dict[str, int] = defaultdict(int)

    async def slow(call: Call) -> web.Response:
        key = call.headers["ce-subject"]
        in_flight[key] += 1
        peak[key] = max(peak[key], in_flight[key])
        await asyncio.sleep(random.uniform(0, 0.01))
        in_flight[key] -= 1
        return web.Response()

    async with Responder(slow) as receiver:
        await subscribe(client, receiver, ordered="key")
        sent = await publish(client, *(keyed(f"k{number % 5}", number) for number in range(60)))
        await turn_until(relay, runtime, receipts(db, 60))
    received = by_key(receiver.calls)
    assert set(peak.values()) == {1}
    assert receiver.most_open > 1
    for number in range(5):
        assert received[f"k{number}"] == sent[number::5]


async def test_a_failing_key_delays_only_itself(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    down = {"bad"}

    async def answer(call: Call) -> web.Response:
        return web.Response(status=500 if call.headers["ce-subject"] in down else 200)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[10, 10, 10])
        first = await publish(client, *(keyed(key, n) for n in range(10) for key in ("bad", "good")))
        await turn_until(relay, runtime, receipts(db, 10))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 10 from delivery_retry"))
        later = await publish(client, *(keyed(key, n) for n in range(5) for key in ("bad", "good")))
        await turn_until(relay, runtime, receipts(db, 15))
        # Only the first was sent, and the others used up no attempt.
        assert by_key(receiver.calls)["bad"] == first[:1]
        assert await db.fetchval("select sum(attempts) from delivery_retry") == 1
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda: len(by_key(receiver.calls)["bad"]) == 2)
        down.clear()
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, receipts(db, 30))
    all_sent = [*first, *later]
    assert by_key(receiver.calls)["good"] == all_sent[1::2]
    assert by_key(receiver.calls)["bad"] == [all_sent[0], all_sent[0], *all_sent[::2]]
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_a_change_loses_nothing_that_waits_behind_its_key(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answered = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def wait(call: Call) -> web.Response:
        await answered[call.headers["ce-subject"]].wait()
        return web.Response()

    async with Responder(wait) as receiver:
        await subscribe(client, receiver, ordered="key", timeout_s=60)
        sent = await publish(client, keyed("a", 1), keyed("a", 2), keyed("b", 3))
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        # The second of `a` waits; one of `b`, which comes after it, is in flight. The change ends the stream.
        changed = {"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, "ordered": "key"}
        assert (await client.put("/subscriptions/mailer", json=changed)).status_code == 200
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: any(stream.closing for stream in relay.streams.values()))
        answered["a"].set()
        await turn_until(relay, runtime, receipts(db, 1))
        for _ in range(3):
            await step(relay, runtime)
        answered["b"].set()
        await turn_until(relay, runtime, receipts(db, 3))
    assert by_key(receiver.calls) == {"a": sent[:2], "b": sent[2:]}


async def test_messages_without_a_key_are_not_ordered(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, ordered="key")
        answered = asyncio.Event()

        async def first_hangs(call: Call) -> web.Response:
            if len(receiver.calls) == 1:
                await answered.wait()
            return web.Response()

        receiver.answer = first_hangs
        await publish(client, *({**order(n), "key": None} for n in range(5)))
        await turn_until(relay, runtime, receipts(db, 4))
        answered.set()
        await turn_until(relay, runtime, receipts(db, 5))


async def test_a_dead_letter_releases_its_key(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async def poison(call: Call) -> web.Response:
        return web.Response(status=500 if b"999" in call.body else 200)

    async with Responder(poison) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[])
        sent = await publish(client, keyed("k", 1), keyed("k", 999), keyed("k", 2), keyed("k", 3))
        await turn_until(relay, runtime, receipts(db, 3))
    assert by_key(receiver.calls)["k"] == sent
    assert await db.fetchval('select "offset" from dead_letter') == sent[1]


async def test_with_on_dead_hold_a_key_waits_until_its_dead_letter_is_gone(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async def poison(call: Call) -> web.Response:
        return web.Response(status=500 if b"999" in call.body else 200)

    async with Responder(poison) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[])
        sent = await publish(client, keyed("k", 1), keyed("k", 999), keyed("k", 2), keyed("other", 4), keyed("k", 3))
        await turn_until(relay, runtime, receipts(db, 2))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from delivery_retry"))
        # A new holder holds the key as well.
        await relay.drain(runtime)
        later = await publish(client, keyed("k", 5))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from delivery_retry"))
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval('select "offset" >= $1 from checkpoint', later[0]))
        assert by_key(receiver.calls)["k"] == sent[:2]
        await db.execute("delete from dead_letter")
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, receipts(db, 5))
    assert by_key(receiver.calls)["k"] == [sent[0], sent[1], sent[2], sent[4], *later]


async def test_with_rows_that_upkeep_removed_a_shard_that_held_the_most_reads_on(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.relay.key_order.HELD_MOST", 3)
    monkeypatch.setattr("app.relay.assignments.ROOM_EVERY", timedelta())
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[])
        [dead, *_] = await publish(client, *(keyed("k", number) for number in range(4)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from delivery_retry"))
        assert all(stream.queue.full for stream in relay.streams.values())
        await remove_retries(db, runtime)
        await drop_dead_letters(client)
        receiver.status = 200
        later = await publish(client, keyed("other", 5), keyed("k", 6))
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, receipts(db, 2))
    assert by_key(receiver.calls) == {"k": [dead, later[1]], "other": [later[0]]}


async def test_with_on_dead_hold_the_dead_letters_that_upkeep_made_hold_their_key(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.relay.key_order.HELD_MOST", 3)
    monkeypatch.setattr("app.relay.assignments.ROOM_EVERY", timedelta())
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[3600])
        [tried, *_] = await publish(client, *(keyed("k", number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from delivery_retry"))
        await remove_retries(db, runtime)
        receiver.status = 200
        later = await publish(client, keyed("other", 4), keyed("k", 5))
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, receipts(db, 1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        assert by_key(receiver.calls) == {"k": [tried], "other": [later[0]]}
        await drop_dead_letters(client)
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, receipts(db, 2))
    assert by_key(receiver.calls) == {"k": [tried, later[1]], "other": [later[0]]}


async def test_a_shard_that_holds_the_most_does_not_forget_what_is_not_stored_yet(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.relay.key_order.HELD_MOST", 3)
    monkeypatch.setattr("app.relay.assignments.ROOM_EVERY", timedelta())
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[10])
        sent = await publish(client, *(keyed("k", number) for number in range(3)))
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        [stream] = relay.streams.values()
        await until(lambda: len(stream.outcomes.buffer) == 3)
        assert await db.fetchval("select count(*) from delivery_retry") == 0
        receiver.status = 200
        # The next turn begins with a refresh and settles after it.
        later = await publish(client, keyed("k", 4))
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) >= 3 from delivery_retry"))
        for _ in range(3):
            await step(relay, runtime)
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, receipts(db, 4))
    assert by_key(receiver.calls)["k"] == [sent[0], *sent, *later]


async def test_a_message_that_is_redelivered_by_a_clock_that_is_ahead_is_not_passed(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[])
        [dead] = await publish(client, keyed("k", 1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        receiver.status = 200
        now = runtime.clock.now()
        runtime.clock.fixed = now + timedelta(seconds=3)
        wanted = {"filter": {"subscription": "mailer"}, "reason": "again", "dry_run": False}
        assert (await client.post("/dead-letters/redeliver", json=wanted)).status_code == 200
        runtime.clock.fixed = now + timedelta(seconds=1.5)
        await step(relay, runtime)
        [later] = await publish(client, keyed("k", 2))
        for _ in range(5):
            await step(relay, runtime)
        assert by_key(receiver.calls)["k"] == [dead]
        runtime.clock.fixed = None
        runtime.clock.offset_s += 3
        await turn_until(relay, runtime, receipts(db, 2))
    assert by_key(receiver.calls)["k"] == [dead, dead, later]


async def test_a_message_that_is_redelivered_while_a_new_holder_opens_its_shard_is_not_passed(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[])
        [dead] = await publish(client, keyed("k", 1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await relay.drain(runtime)
        receiver.status = 200
        later = await publish(client, keyed("k", 2))
        both = checkpoints.dead_keys, checkpoints.stored_keys
        reads = []

        def then_redelivered(read: Callable[..., Any]) -> Callable[..., Any]:
            async def reading(*arguments: Any) -> Any:
                found = await read(*arguments)
                reads.append(read)
                if len(reads) == 1:
                    wanted = {"filter": {"subscription": "mailer"}, "reason": "again", "dry_run": False}
                    assert (await client.post("/dead-letters/redeliver", json=wanted)).status_code == 200
                return found

            return reading

        for read in both:
            monkeypatch.setattr(checkpoints, read.__name__, then_redelivered(read))
        await turn_until(relay, runtime, receipts(db, 2))
    assert set(reads) == set(both)
    assert by_key(receiver.calls)["k"] == [dead, dead, *later]


async def test_a_delayed_message_is_ordered_from_its_due_time(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, ordered="key", retry=[10])
        sent = await publish(client, keyed("k", 1, deliver_after_s=60), keyed("k", 2))
        await turn_until(relay, runtime, receipts(db, 1))
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, receipts(db, 2))
        assert by_key(receiver.calls)["k"] == [sent[1], sent[0]]
        # A due message that fails is like any other: later ones of its key wait.
        receiver.status = 500
        # The database's clock dates it, and that clock was not advanced.
        late = await publish(client, keyed("k", 3, deliver_after_s=600))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        runtime.clock.offset_s += 600
        await turn_until(relay, runtime, lambda: db.fetchval("select attempts = 1 from delivery_retry"))
        after = await publish(client, keyed("k", 4))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from delivery_retry"))
        receiver.status = 200
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, receipts(db, 4))
    assert by_key(receiver.calls)["k"] == [sent[1], sent[0], late[0], late[0], after[0]]


async def test_what_is_sent_again_after_a_takeover_arrives_in_order(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Whenever the holder dies, no message of a key arrives after a later one, not even when it is sent again."""

    async def slow(call: Call) -> web.Response:
        await asyncio.sleep(random.uniform(0, 0.005))
        return web.Response(status=random.choice([200, 200, 200, 500]))

    async with Responder(slow) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[0.01] * 50, max_in_flight=8)
        sent = await publish(client, *(keyed(f"k{n % 4}", n) for n in range(80)))
        takeovers = 0
        while await db.fetchval("select count(*) < 80 from receipt"):
            relay = Relay(runtime)
            reached = await db.fetchval("select count(*) + 9 from receipt")
            # The new holder's retries are due whatever the jitter.
            await turn_until(relay, runtime, receipts(db, min(80, reached)))
            for stream in relay.streams.values():
                stream.drop()
            await asyncio.gather(*(stream.close_destination() for stream in relay.streams.values()))
            takeovers += 1
            runtime.clock.offset_s += 11
        assert takeovers > 3
    for number in range(4):
        received = by_key(receiver.calls)[f"k{number}"]
        assert received == sorted(received)
        assert sorted(set(received)) == sent[number::4]


@pytest.mark.parametrize("fields", [{}, {"expire_after_s": 600}], ids=["plain", "expiring"])
async def test_retries_of_a_key_that_are_sent_for_longer_than_their_claim_are_sent_once(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, fields: dict[str, Any]
) -> None:
    messages, claimed_for, down = 8, RETRY_LEASE.total_seconds(), True

    async def slow(call: Call) -> web.Response:
        if down:
            return web.Response(status=500)
        runtime.clock.offset_s += claimed_for / messages * 2
        return web.Response()

    async with Responder(slow) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[10], **fields)
        sent = await publish(client, *(keyed("k", number) for number in range(messages)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = $1 from delivery_retry", messages))
        down = False
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 0 from delivery_retry"))
    dead = [row[0] for row in await db.fetch('select "offset" from dead_letter')]
    # Those that are not sent in time expire.
    assert bool(dead) == bool(fields)
    assert by_key(receiver.calls)["k"] == [sent[0], *(offset for offset in sent if offset not in dead)]
    assert await db.fetchval("select count(*) from receipt") == messages - len(dead)


async def test_claimed_retries_of_one_key_do_not_delay_the_retries_of_others(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """A claim takes many rows of one key, which are sent one after another."""
    failed: set[str] = set()
    others_are_through = asyncio.Event()

    async def answer(call: Call) -> web.Response:
        key = call.headers["ce-subject"]
        if key not in failed:
            failed.add(key)
            return web.Response(status=500)
        if key == "hot" and len(by_key(receiver.calls)["hot"]) > 2:
            await others_are_through.wait()
        return web.Response()

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", max_in_flight=16, retry=[10], timeout_s=60)
        sent = await publish(client, *(keyed("hot", number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 20 from delivery_retry"))
        runtime.clock.offset_s += 6
        # With one more failure in a row the breaker would open.
        await publish(client, *(keyed(f"k{number}") for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 23 from delivery_retry"))
        runtime.clock.offset_s += 6
        # The first one was sent before, and comes alone; those after it come together.
        await turn_until(relay, runtime, lambda: len(by_key(receiver.calls)["hot"]) == 3)
        assert await db.fetchval("select count(*) > 16 from delivery_retry where leased_until is not null")
        runtime.clock.offset_s += 6
        await turn_until(relay, runtime, receipts(db, 3))
        assert len(by_key(receiver.calls)["hot"]) == 3
        others_are_through.set()
        await turn_until(relay, runtime, receipts(db, 23), within_s=60)
    assert by_key(receiver.calls)["hot"] == [sent[0], *sent]


async def test_a_delayed_message_that_is_due_does_not_pass_a_failure_that_is_not_recorded(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    may_fail, failed = asyncio.Event(), False

    async def answer(call: Call) -> web.Response:
        nonlocal failed
        await may_fail.wait()
        status, failed = 200 if failed else 500, True
        return web.Response(status=status)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[10])
        sent = await publish(client, keyed("k", 1), keyed("k", 2, deliver_after_s=60))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        [stream] = relay.streams.values()
        await turn_until(relay, runtime, lambda: not len(stream.outcomes.buffer))
        runtime.clock.offset_s += 61
        may_fail.set()
        async with asyncio.timeout(10):
            while not stream.outcomes.buffer.has_unsettled:
                await asyncio.sleep(0.001)
        # This turn claims what is due, and records the failure after that.
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from delivery_retry"))
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, receipts(db, 2))
    assert by_key(receiver.calls)["k"] == [sent[0], sent[0], sent[1]]


async def test_with_on_dead_hold_the_stored_messages_of_a_key_are_claimed_together(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """One of them dies: those after it wait for a person."""
    fails, may_answer = [1, 2, 2], asyncio.Event()

    async def answer(call: Call) -> web.Response:
        offset = int(call.headers["halfnote-offset"])
        if offset == sent[1] and len(fails) == 2:
            await may_answer.wait()
        if fails and offset == sent[fails[0] - 1]:
            del fails[0]
            return web.Response(status=500)
        return web.Response()

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[10], timeout_s=60)
        sent: list[int] = []
        sent += await publish(client, *(keyed("k", number) for number in range(5)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 5 from delivery_retry"))
        runtime.clock.offset_s += 12
        # The first one was sent before, and comes alone. The others come together.
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 3)
        assert await db.fetchval("select count(*) = 4 from delivery_retry where leased_until is not null")
        may_answer.set()
        await turn_until(relay, runtime, lambda: db.fetchval("select max(attempts) = 1 from delivery_retry"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from delivery_retry"))
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await turn_until(
            relay, runtime, lambda: db.fetchval("select count(*) = 3 from delivery_retry where leased_until is null")
        )
        assert len(receiver.calls) == 4
        await drop_dead_letters(client)
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, receipts(db, 4))
    assert by_key(receiver.calls)["k"] == [sent[0], sent[0], sent[1], sent[1], *sent[2:]]


@pytest.mark.slow
async def test_past_ten_thousand_held_rows_the_window_stops_and_continues_later(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """One key whose messages all fail, with a backlog that is longer than the limit of held rows."""
    messages, working = HELD_MOST + 3000, False
    held = "select count(*) from delivery_retry"
    reached = 'select "offset" from checkpoint'

    async def failing(call: Call) -> web.Response:
        return web.Response(status=200 if working else 500)

    async with Responder(failing) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[0.5] * 100)
        await db.execute(FILL, messages, 1)
        await turn_until(relay, runtime, lambda: db.fetchval(f"select ({held}) >= $1", HELD_MOST), within_s=60)
        # However often the attempts fail, neither rows nor checkpoint pass the last window read. (The checkpoint
        # moves only from time to time, so it does not show yet where the window stopped.)
        furthest = HELD_MOST + WINDOW_MOST
        attempts = len(receiver.calls)
        await turn_until(relay, runtime, lambda: len(receiver.calls) > attempts + 5, within_s=60)
        rows = await db.fetchval(held)
        assert HELD_MOST <= rows < messages
        assert rows <= furthest
        assert await db.fetchval(reached) <= furthest
        assert await db.fetchval("select count(*) from receipt") == 0
        working, attempts = True, len(receiver.calls)
        # With room again, the rest of the log is read.
        await turn_until(relay, runtime, lambda: db.fetchval(f"select ({reached}) > $1", furthest), within_s=60)
    received = by_key(receiver.calls[attempts:])["k0"]
    assert len(received) > rows - HELD_MOST
    assert received == sorted(received)
