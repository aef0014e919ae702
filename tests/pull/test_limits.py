"""Limits of subscriptions whose messages consumers claim: how long they wait, how many wait, and how many a second."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import pytest

from app.clock import Clock
from app.database.connection import Connection, connect
from app.field_rules import RATE_LEAST_PER_S
from app.policy.expiry import COUNT_EVERY
from app.pull import expiry, sweep
from app.pull.claiming import claim
from app.pull.pacing import CLAIMED_AT, paced_until_of, pacer_of
from app.pull.wake import wake_consumers
from app.runtime.state import Runtime
from app.store.pull import waiting_limits
from app.store.pull.claims import PulledSubscription, pulled
from app.store.pull.waiting import claimable
from app.store.subscriptions.subscriptions import limited_pulled
from tests.pull.test_waiting import waiting
from tests.relay.test_expiry import shown
from tests.support.consumers import Consumer, lapse, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
DEAD = 'select reason, attempts, error, replay from dead_letter order by "offset"'


async def dead(db: Connection) -> list[tuple[str, int]]:
    return [(row["reason"], row["attempts"]) for row in await db.fetch(DEAD)]


async def subscribed(client: httpx.AsyncClient, **fields: Any) -> Consumer:
    await put_pulled(client, **fields)
    return Consumer(client)


async def counted(db: Connection, runtime: Runtime, seconds: float = 10) -> Callable[[], Awaitable[object]]:
    """Let a worker count what waits; return what it does then."""
    now = runtime.clock.now() + timedelta(seconds=seconds)
    [subscription] = await limited_pulled(db)
    turn = await waiting_limits.take_turn(db, subscription.subscription_id, COUNT_EVERY, now)
    assert turn is not None
    found = await expiry._count(db, subscription, turn, now)
    return partial(expiry._expire, db, subscription, turn, found, now)


@pytest.mark.parametrize("ordered", ["none", "key"])
async def test_what_no_consumer_holds_expires_after_its_time(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, ordered: str
) -> None:
    consumer = await subscribed(client, expire_after_s=60, ordered=ordered)
    await publish(client, *({**order(n), "key": f"k{n}"} for n in range(4)))
    [held, failed] = await consumer.claim(max=2, invisible_s=600)
    await consumer.settle("nack", failed["handle"], retry_after_s=3600, error="no paper")
    await sweep_after(runtime, 55)
    assert await dead(db) == []
    await sweep_after(runtime, 61)
    assert await dead(db) == [("expired", 1), ("expired", 0), ("expired", 0)]
    assert (await db.fetchrow(DEAD))["error"] == "no paper"  # type: ignore[index]
    assert await consumer.claim() == []
    assert await consumer.ack(held) == [200]
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    await sweep_after(runtime)
    offsets = await db.fetchrow(
        'select max(o."offset"), max(c."offset") from outbox o, checkpoint c where topic = $1', "order"
    )
    assert offsets is not None
    assert offsets[0] <= offsets[1]


async def test_a_message_that_was_not_settled_in_time_expires(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, expire_after_s=60)
    await publish(client, order(1))
    assert len(await consumer.claim()) == 1
    await lapse(db, runtime)
    await sweep_after(runtime, 61)
    assert await dead(db) == [("expired", 1)]


async def test_a_paused_subscription_expires_and_a_delayed_message_waits_from_its_due_time(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await subscribed(client, expire_after_s=60)
    assert (await client.post("/subscriptions/worker/pause")).status_code == 200
    await publish(client, {**order(1), "deliver_after_s": 100}, order(2))
    await sweep_after(runtime, 61)
    assert await dead(db) == [("expired", 0)]
    await sweep_after(runtime, 159)
    assert len(await dead(db)) == 1
    await sweep_after(runtime, 165)
    assert len(await dead(db)) == 2


async def test_what_is_far_behind_other_messages_expires(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for statement in ("PASS_OVER", "OLDEST_AHEAD"):
        short = getattr(waiting_limits, statement).replace(f"limit {waiting_limits.SPAN}", "limit 3")
        monkeypatch.setattr(waiting_limits, statement, short.replace(f">= {waiting_limits.SPAN}", ">= 3"))
    await subscribed(client, expire_after_s=60)
    assert (await client.post("/subscriptions/worker/pause")).status_code == 200
    await publish(client, *(order(n, topic="other") for n in range(20)), order(1))
    await sweep_after(runtime, 61)
    assert await dead(db) == [("expired", 0)]


async def test_a_message_of_a_replay_waits_from_its_start(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, expire_after_s=60)
    await publish(client, order(1))
    assert await consumer.ack(*await consumer.claim()) == [200]
    await db.execute("update outbox set committed_at = committed_at - interval '1 hour'")
    answer = await client.post("/subscriptions/worker/replay", json={"from": "earliest"})
    assert answer.status_code in (200, 201, 202), answer.text
    await sweep_after(runtime)
    assert await dead(db) == []
    await sweep_after(runtime, 61)
    [row] = await db.fetch(DEAD)
    assert (row["reason"], row["replay"] > 0) == ("expired", True)


async def test_the_oldest_of_a_backlog_go_if_two_counts_find_them_too_many(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, max_backlog=100)
    sent = await publish(client, *(order(n) for n in range(100)))
    sent += await publish(client, *(order(n) for n in range(6)))
    [first, held] = await consumer.claim(max=2, invisible_s=600)
    await consumer.settle("nack", first["handle"], retry_after_s=0)
    await sweep_after(runtime)
    assert await dead(db) == []
    await publish(client, *(order(n) for n in range(3)))
    # The second count of the same moment is another worker's, and none.
    await sweep_after(runtime)
    assert await dead(db) == []
    await sweep_after(runtime, 5)
    assert await dead(db) == [("backlog", 1), *[("backlog", 0)] * 4]
    assert await db.fetchval('select array_agg("offset" order by "offset") from dead_letter') == [
        sent[0],
        *sent[2:6],
    ]
    await sweep_after(runtime, 10)
    assert len(await dead(db)) == 8
    await sweep_after(runtime, 15)
    assert len(await dead(db)) == 8
    assert len(await consumer.claim(max=200)) == 100
    assert await consumer.ack(held) == [200]


async def test_what_consumers_hold_for_long_is_not_too_many(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, max_backlog=100)
    await publish(client, *(order(n) for n in range(60)))
    held = await consumer.claim(max=60, invisible_s=600)
    await sweep_after(runtime, 31)
    assert await db.fetchval("select count(*) from delivery_retry where leased_until is not null") == 60
    await publish(client, *(order(n) for n in range(60)))
    for seconds in (40, 50):
        await sweep_after(runtime, seconds)
    assert await dead(db) == []
    await consumer.settle("nack", *(one["handle"] for one in held), retry_after_s=0)
    for seconds in (60, 70):
        await sweep_after(runtime, seconds)
    assert len(await dead(db)) == 20


async def test_delayed_messages_of_the_log_count_once_they_are_due(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await subscribed(client, max_backlog=100)
    sent = await publish(client, *(order(n) for n in range(60)))
    await publish(client, *(order(n, deliver_after_s=600) for n in range(60)))
    for seconds in (0, 5, 10):
        await sweep_after(runtime, seconds)
    assert await dead(db) == []
    assert await db.fetchval("select limit_used from pull_cursor") == 0.6
    for seconds in (605, 611):
        await sweep_after(runtime, seconds)
    assert await db.fetchval('select array_agg("offset" order by "offset") from dead_letter') == sent[:20]


async def test_delayed_messages_that_are_claimed_during_a_count_are_not_subtracted(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """The cursor passes messages that did not count; those that did are still there."""
    consumer = await subscribed(client, max_backlog=100)
    await publish(client, *(order(n, deliver_after_s=600) for n in range(30)))
    await publish(client, *(order(n) for n in range(120)))
    await sweep_after(runtime)
    assert await db.fetchval("select excess from pull_cursor") == 20
    expire = await counted(db, runtime)
    assert len(await consumer.claim(max=10)) == 10
    await expire()
    assert await dead(db) == [("backlog", 0)] * 10


async def test_the_oldest_of_a_backlog_go_though_many_delayed_messages_are_before_them(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = waiting_limits.PASS_OVER.replace(f"+ {waiting_limits.DELAYED_AT_ONCE}", "+ 7")
    monkeypatch.setattr(waiting_limits, "PASS_OVER", short)
    await subscribed(client, max_backlog=100)
    await publish(client, *(order(n, deliver_after_s=600) for n in range(60)))
    sent = await publish(client, *(order(n) for n in range(104)))
    for seconds in (0, 5):
        await sweep_after(runtime, seconds)
    assert await db.fetchval('select array_agg("offset" order by "offset") from dead_letter') == sent[:4]
    assert await db.fetchval('select "offset" from pull_cursor') == sent[3]


async def test_a_burst_that_is_claimed_meanwhile_loses_nothing(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, max_backlog=100)
    await publish(client, *(order(n) for n in range(100)))
    await publish(client, *(order(n) for n in range(20)))
    await sweep_after(runtime)
    await consumer.ack(*await consumer.claim(max=25))
    await sweep_after(runtime, 5)
    assert await dead(db) == []


@pytest.mark.parametrize("stored", [False, True])
async def test_what_is_claimed_during_a_count_is_not_too_much(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, stored: bool
) -> None:
    consumer = await subscribed(client, max_backlog=100)
    await publish(client, *(order(n) for n in range(100)))
    await publish(client, *(order(n) for n in range(20)))
    if stored:
        claimed = await consumer.claim(max=50)
        await consumer.settle("nack", *(one["handle"] for one in claimed), retry_after_s=0)
    await sweep_after(runtime)
    expire = await counted(db, runtime)
    assert len(await consumer.claim(max=25)) == 25
    await expire()
    assert await dead(db) == []
    assert await db.fetchval("select excess from pull_cursor") == 0


async def test_what_others_take_of_the_log_does_not_hide_a_backlog(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """A claim during the count passes ten of its messages, and four times as many of another topic."""
    consumer = await subscribed(client, max_backlog=100)
    for _ in range(6):
        await publish(client, *(order(n, topic="order" if n % 5 == 0 else "other") for n in range(100)))
    await sweep_after(runtime)
    assert await db.fetchval("select excess from pull_cursor") == 20
    expire = await counted(db, runtime)
    assert len(await consumer.claim(max=10)) == 10
    await expire()
    assert len(await dead(db)) == 10
    assert await db.fetchval("select limit_used from pull_cursor") >= 1


@pytest.mark.parametrize(
    ("limits", "changed"),
    [
        ({"max_backlog": 100}, {"max_backlog": None}),
        ({"max_backlog": 100}, {"max_backlog": 1000}),
        ({"expire_after_s": 60}, {"expire_after_s": None}),
        ({"expire_after_s": 60}, {"expire_after_s": 3600}),
        ({"max_backlog": 100}, {"topics": ["order", "other"]}),
    ],
)
async def test_nothing_goes_by_a_limit_that_is_changed_during_a_count(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    group: str,
    limits: dict[str, Any],
    changed: dict[str, Any],
) -> None:
    await subscribed(client, **limits)
    await publish(client, *(order(n) for n in range(100)))
    await publish(client, *(order(n) for n in range(6)))
    await db.execute("update outbox set committed_at = committed_at - interval '100 seconds'")
    # As if an earlier count had found them too many.
    await db.execute("update pull_cursor set excess = 6")
    expire = await counted(db, runtime)
    assert (await client.patch("/subscriptions/worker", json=changed)).status_code == 200
    await expire()
    assert await dead(db) == []


async def test_nothing_goes_while_the_subscription_is_being_changed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    await subscribed(client, expire_after_s=60)
    await publish(client, order(1))
    expire = await counted(db, runtime, seconds=100)
    other = await connect(dsn)
    try:
        async with other.transaction():
            await other.execute("update subscription set expire_after_s = null")
            await expire()
    finally:
        await other.close()
    assert await dead(db) == []


async def test_both_limits_count_a_message_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, max_backlog=100, expire_after_s=60)
    sent = await publish(client, *(order(n) for n in range(100)))
    await publish(client, *(order(n) for n in range(6)))
    await sweep_after(runtime)
    assert await dead(db) == []
    await db.execute(
        "update outbox set committed_at = committed_at - interval '1 hour' where \"offset\" <= $1", sent[1]
    )
    await sweep_after(runtime, 5)
    assert await dead(db) == [("expired", 0)] * 2 + [("backlog", 0)] * 4
    assert len(await consumer.claim(max=200)) == 100


async def test_many_go_in_several_turns(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "AT_ONCE", 4)
    await subscribed(client, expire_after_s=60)
    await publish(client, *(order(n) for n in range(10)))
    result = await sweep.step(runtime, runtime.clock.now() + timedelta(seconds=61))
    assert (len(await dead(db)), result.more) == (4, True)
    await sweep_after(runtime, 61)
    assert len(await dead(db)) == 10


async def test_the_approach_of_a_limit_is_announced_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await subscribed(client, max_backlog=100)
    announced = "select count(*) from half where topic = 'halfnote.subscription.expiring'"
    await publish(client, *(order(n) for n in range(49)))
    await sweep_after(runtime)
    assert await db.fetchval(announced) == 0
    await publish(client, order(49))
    await sweep_after(runtime, 5)
    assert await db.fetchval(announced) == 1
    assert shown(runtime, "halfnote_waiting_limit_used", subscription="worker") == 0.5
    await publish(client, order(5))
    await sweep_after(runtime, 10)
    assert await db.fetchval(announced) == 1


async def test_the_approach_of_the_time_is_announced_though_a_delayed_message_is_the_first(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await subscribed(client, expire_after_s=60)
    announced = "select count(*) from half where topic = 'halfnote.subscription.expiring'"
    await publish(client, order(1, deliver_after_s=3600), order(2))
    await sweep_after(runtime, 20)
    assert await db.fetchval(announced) == 0
    await sweep_after(runtime, 40)
    assert await db.fetchval(announced) == 1
    assert 0.6 < shown(runtime, "halfnote_waiting_limit_used", subscription="worker") < 0.75


async def test_a_subscription_without_limits_is_not_counted(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await subscribed(client)
    await publish(client, order(1))
    await sweep_after(runtime, 1_000_000)
    assert await dead(db) == []
    assert await db.fetchval("select counted_at from pull_cursor") is None


@pytest.mark.parametrize("ordered", ["none", "key"])
async def test_claims_follow_the_rate_together(
    client: httpx.AsyncClient, db: Connection, group: str, ordered: str
) -> None:
    await subscribed(client, rate_per_s=20, ordered=ordered)
    await publish(client, *(order(n) for n in range(100)))
    subscription, clock, got = await pulled(db, "worker"), Clock(fixed=datetime.now(UTC)), []
    assert isinstance(subscription, PulledSubscription)
    for _ in range(40):
        claimed = await claim(db, clock, subscription, 100, timedelta(seconds=600))
        got.append(len(claimed.messages))
        clock.fixed += timedelta(milliseconds=25)
    # In the first moment the share of a tenth of a second, then one each 50 ms.
    assert got[0] == 3
    assert sum(got) == 3 + 19
    assert max(got[1:]) == 1
    # A clock that steps back delays nothing.
    clock.fixed -= timedelta(hours=1)
    for expected in (1, 0):
        assert len((await claim(db, clock, subscription, 100, timedelta(seconds=600))).messages) == expected


async def test_the_lowest_rate_lets_claims_through_and_lower_ones_are_refused(
    client: httpx.AsyncClient, group: str
) -> None:
    """The time until the next message must be one that can be added to the time of a claim."""
    consumer = await subscribed(client, rate_per_s=RATE_LEAST_PER_S)
    await publish(client, order(1), order(2))
    assert len(await consumer.claim(max=5)) == 1
    assert await consumer.claim(max=5) == []
    for lower in (RATE_LEAST_PER_S / 2, 1e-300):
        refused = await client.patch("/subscriptions/worker", json={"rate_per_s": lower})
        assert (refused.status_code, refused.json()["field"]) == (422, "rate_per_s")


@pytest.mark.parametrize("stored", [1e-5, 1e-300])
async def test_a_stored_rate_below_the_lowest_one_lets_claims_through(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, stored: float
) -> None:
    """An older version stored such rates."""
    consumer = await subscribed(client, rate_per_s=RATE_LEAST_PER_S)
    await db.execute("update subscription set rate_per_s = $1", stored)
    await publish(client, order(1), order(2))
    assert len(await consumer.claim(max=5)) == 1
    assert await consumer.claim(max=5) == []
    subscription_id = await db.fetchval("select subscription_id from subscription")
    [found] = await claimable(db, {subscription_id: 5}, runtime.clock.now())
    assert found.rate_per_s == RATE_LEAST_PER_S


async def test_a_claim_sees_what_one_at_the_same_time_took_of_the_rate(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    consumer = await subscribed(client, rate_per_s=20)
    await publish(client, *(order(n) for n in range(10)))
    now = runtime.clock.fixed = runtime.clock.now()
    waits = (
        "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())"
    )
    watcher = await connect(dsn)
    try:
        async with db.transaction():
            await db.execute("update pull_cursor set paced_until = $1", now + timedelta(milliseconds=500))
            claiming = asyncio.create_task(consumer.claim(max=100))
            async with asyncio.timeout(30):
                while not await watcher.fetchval(waits):
                    assert not claiming.done()
    finally:
        await watcher.close()
    assert await claiming == []


async def test_retries_count_in_the_rate(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    consumer = await subscribed(client, rate_per_s=20)
    await publish(client, *(order(n) for n in range(10)))
    claimed = await consumer.claim(max=100)
    await consumer.settle("nack", *(message["handle"] for message in claimed), retry_after_s=0)
    subscription, clock = await pulled(db, "worker"), Clock(fixed=datetime.now(UTC))
    assert isinstance(subscription, PulledSubscription)
    clock.fixed += timedelta(seconds=1)
    found = await claim(db, clock, subscription, 100, timedelta(seconds=600))
    assert [message.message.used for message in found.messages] == [1, 1, 1]
    assert (await claim(db, clock, subscription, 100, timedelta(seconds=600))).messages == []


async def test_a_waiting_claim_is_woken_when_the_rate_allows_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    consumer = await subscribed(client, rate_per_s=0.01)
    await publish(client, order(1), order(2))
    assert len(await consumer.claim(max=5)) == 1
    async with waiting(runtime, consumer) as [task]:
        result = await wake_consumers(runtime, runtime.clock.now())
        assert runtime.waiting_consumers.any_waiting
        assert result.within_s is not None
        assert 80 < result.within_s <= 100
        await db.execute("update pull_cursor set paced_until = now() - interval '1 second'")
        await wake_consumers(runtime, runtime.clock.now())
        assert len(await task) == 1


def test_a_time_far_ahead_is_from_before_a_clock_step() -> None:
    assert pacer_of(2.0, NOW + timedelta(hours=1), NOW).room(CLAIMED_AT, 100) == 1
    assert pacer_of(2.0, NOW + timedelta(seconds=1.4), NOW).room(CLAIMED_AT, 100) == 0
    pacer = pacer_of(2.0, None, NOW)
    pacer.sent(CLAIMED_AT, 1)
    assert paced_until_of(pacer, NOW) == NOW + timedelta(seconds=0.4)
    assert pacer_of(2.0, NOW, NOW).room(CLAIMED_AT, 100) == 1
    assert pacer_of(2.0, None, NOW).room(CLAIMED_AT, 100) == 1
