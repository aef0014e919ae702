"""Messages that wait too long for a subscription, or that are too many, become its dead letters, and none is lost."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.relay.loop import Relay
from app.retention import day_holders
from app.runtime.state import Runtime
from app.store.relay.expiry import AheadCount, matching_ahead
from app.store.retention import day_dead_letters, days
from app.store.retention.days import Day
from app.store.subscriptions.subscriptions import one
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, publish, step, subscribe, turn_until

OPEN = "select opened_at is not null from checkpoint"
REASONS = "select reason, count(*) from dead_letter group by reason"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


def dead(db: Connection, count: int) -> Callable[[], Any]:
    return lambda: db.fetchval("select count(*) = $1 from dead_letter", count)


async def dead_offsets(db: Connection) -> list[int]:
    return [row[0] for row in await db.fetch('select "offset" from dead_letter order by "offset"')]


async def publish_many(client: httpx.AsyncClient, count: int) -> None:
    """Commit messages without a key, all in one transaction."""
    messages = [{"topic": "order", "body": {"order": number}} for number in range(count)]
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
    assert answer.status_code == 201, answer.text


async def announced(db: Connection, topic: str) -> list[dict[str, Any]]:
    rows = await db.fetch(
        'select h.body from outbox o join half h using (transaction_id, position) where o.topic = $1 order by "offset"',
        f"halfnote.{topic}",
    )
    return [json.loads(row["body"]) for row in rows]


async def counted(relay: Relay, runtime: Runtime, times: int = 2) -> None:
    """Step until what waits was counted `times` times more."""
    for _ in range(times):
        runtime.clock.offset_s += 6
        await step(relay, runtime)


async def today(db: Connection) -> Day:
    stored = {day.day: day for day in await days.days(db)}
    return stored[await db.fetchval("select (now() at time zone 'utc')::date")]


async def test_a_paused_subscription_lets_its_day_go(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, expire_after_s=60.0)
        await client.post("/subscriptions/mailer/pause")
        sent = await publish(client, *(order(number) for number in range(5)))
        delayed = await publish(client, order(5, deliver_after_s=600))
        subscription, day = await one(db, "mailer"), await today(db)
        assert subscription is not None
        await counted(relay, runtime)
        assert await day_holders.waits(runtime, db, day, subscription, {})
        assert await db.fetchval("select count(*) from dead_letter") == 0
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, dead(db, 5))
        assert await dead_offsets(db) == sent
        # A delayed message waits from its due time.
        runtime.clock.offset_s += 540
        await counted(relay, runtime)
        assert await db.fetchval("select count(*) from dead_letter") == 5
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, dead(db, 6))
        assert (await dead_offsets(db))[5:] == delayed
        assert await db.fetch(REASONS) == [("expired", 6)]
        await turn_until(relay, runtime, lambda: db.fetchval('select "offset" >= $1 from checkpoint', delayed[0]))
        assert not await day_holders.waits(runtime, db, day, subscription, {})
        assert await day_dead_letters.keep_bodies(db, day, day.low) is None
        bodies = [json.loads(row[0]) for row in await db.fetch('select body from dead_letter order by "offset"')]
        assert bodies == [{"order": number} for number in range(6)]
        assert receiver.calls == []
    first, *_ = await announced(db, "delivery.dead")
    assert (first["subscription"], first["reason"], first["attempts"]) == ("mailer", "expired", 0)


async def test_an_outage_expires_messages_and_retries_and_finishes_what_is_sent(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    hangs, go_on = asyncio.Event(), asyncio.Event()

    async def answer(call: Call) -> web.Response:
        if hangs.is_set():
            await go_on.wait()
            return web.Response()
        return web.Response(status=500)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, expire_after_s=60.0, max_in_flight=4)
        sent = await publish(client, *(order(number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        assert await db.fetchval("select count(*) > 0 from delivery_retry")
        hangs.set()
        before = len(receiver.calls)
        runtime.clock.offset_s += 31
        await turn_until(relay, runtime, lambda: len(receiver.calls) == before + 1)
        [probed] = {int(receiver.calls[-1].headers["halfnote-offset"])}
        runtime.clock.offset_s += 31
        await turn_until(relay, runtime, dead(db, 19))
        await counted(relay, runtime)
        assert await dead_offsets(db) == [offset for offset in sent if offset != probed]
        go_on.set()
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        assert not await db.fetchval(OPEN)
    assert await db.fetchval('select "offset" from receipt') == probed
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    assert await db.fetchval("select max(attempts) from dead_letter where reason = 'expired'") == 1


@pytest.mark.parametrize(("on_dead", "delivered"), [("release", True), ("hold", False)])
async def test_the_next_message_of_a_key_follows_an_expired_one_unless_dead_letters_hold(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, on_dead: str, delivered: bool
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead=on_dead, retry=[10_000], expire_after_s=60.0)
        sent = await publish(client, order(1), order(1), order(1))
        late = await publish(client, order(1, deliver_after_s=80))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from delivery_retry"))
        assert len(receiver.calls) == 1
        receiver.status = 200
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, dead(db, 3))
        runtime.clock.offset_s += 25
        if delivered:
            await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
            assert int(receiver.calls[-1].headers["halfnote-offset"]) == late[0]
        else:
            await counted(relay, runtime)
            assert len(receiver.calls) == 1
            runtime.clock.offset_s += 61
            await turn_until(relay, runtime, dead(db, 4))
    assert (await dead_offsets(db))[:3] == sent


async def test_the_oldest_of_a_long_backlog_go_and_a_burst_does_not(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_backlog=100)
        await publish_many(client, 90)
        await publish_many(client, 90)
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 180)
        await counted(relay, runtime)
        await client.post("/subscriptions/mailer/pause")
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: [s for s in relay.streams.values() if not s.outcomes.sends])
        for _ in range(4):
            await publish_many(client, 90)
        last = await db.fetchval('select max("offset") from outbox')
        await counted(relay, runtime, times=1)
        assert await db.fetchval("select count(*) from dead_letter") == 0
        await counted(relay, runtime)
        await turn_until(relay, runtime, dead(db, 260))
        await counted(relay, runtime)
        assert await db.fetch(REASONS) == [("backlog", 260)]
        assert await db.fetchval('select max("offset") from dead_letter') == last - 100
        # The others still wait.
        await client.post("/subscriptions/mailer/resume")
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 280 from receipt"))
        assert len(receiver.calls) == 280


async def test_a_message_that_expires_with_hold_stops_the_next_of_its_key(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", expire_after_s=60.0)
        sent = await publish(client, order(1), order(1, deliver_after_s=30))
        # Both are read at once, and only the second one waits from a later time.
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, dead(db, 1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        await counted(relay, runtime)
        assert await dead_offsets(db) == sent[:1]
        assert receiver.calls == []


async def test_with_hold_a_message_that_expires_behind_one_in_flight_stops_those_after_it(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    go_on = asyncio.Event()

    async def answer(call: Call) -> web.Response:
        await go_on.wait()
        return web.Response()

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", expire_after_s=60.0)
        first, second, third = await publish(client, order(1), order(1), order(1, deliver_after_s=30))
        runtime.clock.offset_s += 31
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        [stream] = relay.streams.values()
        runtime.clock.offset_s += 30
        go_on.set()
        async with asyncio.timeout(15):
            while not stream.outcomes.buffer.finished:
                await asyncio.sleep(0.01)
        # One settle records the receipt of the first message and the dead letter of the second.
        await turn_until(relay, runtime, dead(db, 1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        await counted(relay, runtime)
        assert await dead_offsets(db) == [second]
        assert await db.fetchval('select "offset" from delivery_retry') == third
        assert [int(call.headers["halfnote-offset"]) for call in receiver.calls] == [first]


async def test_claimed_retries_that_are_not_sent_expire(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """They wait in memory behind one of their key, which is in flight."""
    go_on = asyncio.Event()

    async def answer(call: Call) -> web.Response:
        if len(receiver.calls) > 2:
            await go_on.wait()
        return web.Response(status=500 if len(receiver.calls) == 1 else 200)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", retry=[10], expire_after_s=60.0, timeout_s=60)
        sent = await publish(client, *(order(number, key="k") for number in range(5)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 5 from delivery_retry"))
        # As a redelivery does: it waits for less time than the others.
        await db.execute(
            """update delivery_retry set waiting_since = waiting_since + interval '40 s' where "offset" = $1""", sent[3]
        )
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 3)
        assert await db.fetchval("select count(*) = 4 from delivery_retry where leased_until is not null")
        for _ in range(4):
            # In steps, so that the lease is renewed.
            runtime.clock.offset_s += 14
            await step(relay, runtime)
        await turn_until(relay, runtime, dead(db, 2))
        assert await dead_offsets(db) == [sent[2], sent[4]]
        assert await db.fetch(REASONS) == [("expired", 2)]
        go_on.set()
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    assert await dead_offsets(db) == [sent[2], sent[4]]


async def test_a_delayed_message_keeps_no_older_one_from_expiring(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, expire_after_s=60.0)
        await client.post("/subscriptions/mailer/pause")
        _, second = await publish(client, order(1, deliver_after_s=30), order(2))
        runtime.clock.offset_s += 31
        await counted(relay, runtime, times=1)
        runtime.clock.offset_s += 30
        await turn_until(relay, runtime, dead(db, 1))
        assert await dead_offsets(db) == [second]


async def test_messages_that_come_after_a_backlog_was_cut_wait_for_two_counts(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_backlog=100, max_in_flight=1000)
        await client.post("/subscriptions/mailer/pause")
        await publish_many(client, 90)
        await publish_many(client, 60)
        await counted(relay, runtime)
        await turn_until(relay, runtime, dead(db, 50))
        await publish_many(client, 20)
        last = await db.fetchval('select max("offset") from outbox')
        [stream] = relay.streams.values()
        await turn_until(relay, runtime, lambda: stream.position == last)
        await turn_until(relay, runtime, lambda: not len(stream.outcomes.buffer))
        await counted(relay, runtime, times=1)
        assert await db.fetchval("select count(*) from dead_letter") == 50
        await counted(relay, runtime)
        await turn_until(relay, runtime, dead(db, 70))
        sent = [row[0] for row in await db.fetch("select \"offset\" from outbox where topic = 'order' order by 1")]
        assert await dead_offsets(db) == sent[:70]


async def test_delayed_messages_count_once_they_are_due(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_backlog=100)
        messages = [{"topic": "order", "body": n, "deliver_after_s": 60} for n in range(90)]
        for _ in range(2):
            await client.post("/messages", json={"producer_group": "shop", "messages": messages})
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 180 from delivery_retry"))
        await client.post("/subscriptions/mailer/pause")
        await counted(relay, runtime, times=3)
        assert await db.fetchval("select count(*) from dead_letter") == 0
        runtime.clock.offset_s += 61
        await counted(relay, runtime)
        await turn_until(relay, runtime, dead(db, 80))
        await counted(relay, runtime)
        assert await db.fetchval("select count(*) from dead_letter") == 80
        assert receiver.calls == []


async def test_messages_that_a_former_holder_settled_do_not_count(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_backlog=100)
        sent = await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
        [stream] = relay.streams.values()
        reader = replace(stream.window.reader, settled_to=sent[1])
        found = await matching_ahead(db, reader, sent[0] - 1, runtime.clock.now())
        assert found == AheadCount(taken=1, reached=sent[2], more=False)


async def test_a_redelivered_message_waits_from_its_redelivery(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, expire_after_s=60.0, retry=[10] * 9)
        await client.post("/subscriptions/mailer/pause")
        await publish(client, order(1))
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, dead(db, 1))
        await client.post("/subscriptions/mailer/resume")
        answer = await client.post(
            "/dead-letters/redeliver", json={"filter": {"subscription": "mailer"}, "reason": "again", "dry_run": False}
        )
        assert answer.status_code == 200, answer.text
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        await counted(relay, runtime)
        assert await db.fetchval("select count(*) from dead_letter") == 0
        runtime.clock.offset_s += 61
        await counted(relay, runtime)
        await turn_until(relay, runtime, dead(db, 1))


async def test_a_replay_of_old_messages_waits_from_its_start(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, expire_after_s=60.0)
        await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
        runtime.clock.offset_s += 1000
        replay = {"from": "earliest", "reason": "a test"}
        assert (await client.post("/subscriptions/mailer/replay", json=replay)).status_code == 202
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 6 from receipt"))
        await turn_until(relay, runtime, lambda: db.fetchval("select state = 'done' from replay"))
        await client.post("/subscriptions/mailer/pause")
        assert (await client.post("/subscriptions/mailer/replay", json=replay)).status_code == 202
        await counted(relay, runtime)
        assert await db.fetchval("select count(*) from dead_letter") == 0
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, dead(db, 3))
        assert await db.fetch("select replay, reason from dead_letter") == [(2, "expired")] * 3
        await turn_until(relay, runtime, lambda: db.fetchval("select bool_and(state = 'done') from replay"))


async def test_the_approach_of_a_limit_is_announced_and_shown(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, expire_after_s=60.0, max_backlog=1000)
        await client.post("/subscriptions/mailer/pause")
        await publish(client, order(1))
        await counted(relay, runtime)
        assert await announced(db, "subscription.expiring") == []
        runtime.clock.offset_s += 31
        await counted(relay, runtime)
        [told] = await announced(db, "subscription.expiring")
        assert (told["subscription"], told["state"], told["backlog"]) == ("mailer", "paused", 1)
        assert (told["expire_after_s"], told["max_backlog"]) == (60.0, 1000)
        assert 30 < told["oldest_s"] < 60
        assert 0.5 < shown(runtime, "halfnote_waiting_limit_used") < 1
        runtime.clock.offset_s += 31
        await turn_until(relay, runtime, dead(db, 1))
        await counted(relay, runtime)
        assert shown(runtime, "halfnote_waiting_limit_used") == 0
        assert shown(runtime, "halfnote_expired_messages_total", reason="expired") == 1


def shown(runtime: Runtime, name: str, **labels: str) -> float:
    """Return a metric of the subscription."""
    value = runtime.metrics.registry.get_sample_value(name, {"subscription": "mailer", **labels})
    assert value is not None
    return value


async def test_over_takeovers_each_message_is_delivered_or_dead_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Workers die with claimed rows and unsettled dead letters; the next holders finish."""
    answers = iter([200, 500, 500] * 10_000)

    async def mixed(call: Call) -> web.Response:
        return web.Response(status=next(answers))

    async with Responder(mixed) as receiver:
        await subscribe(client, receiver, expire_after_s=60.0, shards=2, ordered="key", retry=[10_000] * 3)
        sent = await publish(client, *(order(number % 20) for number in range(60)))
        relays = [Relay(runtime), Relay(runtime)]
        await turn_until(relays[0], runtime, lambda: len(receiver.calls) > 10)
        runtime.clock.offset_s += 61

        async def done() -> bool:
            return bool(await db.fetchval("select (select count(*) from dead_letter) + count(*) = 60 from receipt"))

        turns = 0
        while not await done():
            turns += 1
            assert turns < 100
            relay = relays[turns % 2]
            await step(relay, runtime)
            if turns < 8:
                # It dies before it settles what it claimed; its lease ends.
                for stream in relay.streams.values():
                    stream.drop()
                    await stream.sender.wait_idle()
                relays[turns % 2] = Relay(runtime)
                runtime.clock.offset_s += 11
        await relays[0].drain(runtime)
        await relays[1].drain(runtime)
    found = await db.fetch('select "offset" from dead_letter union all select "offset" from receipt order by 1')
    assert [row[0] for row in found] == sent
    assert await db.fetchval("select count(*) from dead_letter where reason = 'expired'") > 0
    assert await db.fetchval("select count(*) from delivery_retry") == 0
