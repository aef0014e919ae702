"""A receiver that answers 429 or 503 with `Retry-After`: its shard waits, and it does not count as down."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from app.database.connection import Connection
from app.policy.circuit_breaker import LIMITS_AT_MOST, LONGEST_RETRY_AFTER, MESSAGES
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.relay.checkpoints import Shard, StoredBreaker, set_breaker, start_positions
from tests.support.check_responder import Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

DOWN = "select opened_at is not null from checkpoint"
LIMITED = "select bool_or(limited_since is not null) from checkpoint"
PAUSED_UNTIL = "select paused_until from checkpoint"
ANNOUNCED = "select count(*) from outbox where topic like 'halfnote.subscription.breaker%'"
RECEIVED = "select count(*) = $1 from receipt"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def limited(relay: Relay, runtime: Runtime, db: Connection, receiver: Responder) -> int:
    """Let the receiver limit the shard; return how many calls it has got."""
    await turn_until(relay, runtime, lambda: db.fetchval(LIMITED))
    await finished(relay, runtime)
    return len(receiver.calls)


async def finished(relay: Relay, runtime: Runtime) -> None:
    """Wait until nothing is in flight."""
    await turn_until(relay, runtime, lambda: all(stream.sender.idle for stream in relay.streams.values()))


async def test_a_receiver_that_limits_its_rate_gets_nothing_until_it_may_and_does_not_look_down(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=429, **{"retry-after": "3600"}) as receiver, Responder() as other:
        await subscribe(client, receiver, retry=[], max_in_flight=4)
        await subscribe(client, other, "other")
        await publish(client, *(order(number) for number in range(20)))
        asked = await limited(relay, runtime, db, receiver)
        await turn_until(relay, runtime, lambda: len(other.calls) == 20)
        assert await db.fetchval("select count(*) = 1 from checkpoint where limited_since is not null")
        assert MESSAGES <= asked < MESSAGES + 4
        shown = (await client.get("/subscriptions/mailer")).json()
        assert (shown["state"], shown["breaker"]["state"]) == ("active", "closed")
        assert shown["breaker"]["paused_until"] is not None
        for probes in range(3):
            runtime.clock.offset_s += LONGEST_RETRY_AFTER.total_seconds() - 20
            for _ in range(4):
                await step(relay, runtime)
            assert len(receiver.calls) == asked + probes
            runtime.clock.offset_s += 21
            await turn_until(relay, runtime, lambda at=asked + probes: len(receiver.calls) > at)
            await finished(relay, runtime)
        receiver.status = 200
        runtime.clock.offset_s += LONGEST_RETRY_AFTER.total_seconds() + 1
        name = "r join subscription s using (subscription_id) where s.name = 'mailer'"
        # The messages that were answered first wait for their own hour.
        await turn_until(relay, runtime, lambda: db.fetchval(f"select count(*) >= 20 - $1 from receipt {name}", asked))
        runtime.clock.offset_s += 3600
        await turn_until(relay, runtime, lambda: db.fetchval(f"select count(*) = 20 from receipt {name}"))
    assert await db.fetchval("select max(attempts) from receipt") == 1
    assert await db.fetchval("select count(*) from dead_letter") == 0
    assert await db.fetchval(ANNOUNCED) == 0
    assert await db.fetchval("select max(num_nonnulls(opened_at, limited_since, paused_until)) from checkpoint") == 0
    assert 'halfnote_breakers_total{subscription="mailer"' not in runtime.metrics.exposition().decode()


async def test_a_new_holder_keeps_to_the_pause(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=503, **{"retry-after": "120"}) as receiver:
        await subscribe(client, receiver, max_in_flight=1)
        await publish(client, *(order(number) for number in range(20)))
        asked = await limited(relay, runtime, db, receiver)
        await relay.drain(runtime)
        receiver.status = 200
        other = Relay(runtime)
        try:
            runtime.clock.offset_s += 60
            await turn_until(other, runtime, lambda: other.streams)
            for _ in range(5):
                await step(other, runtime)
            assert len(receiver.calls) == asked
            assert await db.fetchval(LIMITED)
            runtime.clock.offset_s += 61
            await turn_until(other, runtime, lambda: db.fetchval(RECEIVED, 20))
        finally:
            await other.drain(runtime)
    assert not await db.fetchval(LIMITED)


async def test_a_receiver_that_asks_for_pauses_forever_counts_as_down_and_uses_up_no_try(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=429, **{"retry-after": "60"}) as receiver:
        await subscribe(client, receiver, retry=[])
        await publish(client, *(order(number) for number in range(8)))
        await limited(relay, runtime, db, receiver)
        runtime.clock.offset_s += LIMITS_AT_MOST.total_seconds()
        await turn_until(relay, runtime, lambda: db.fetchval(DOWN))
        assert await db.fetchval(ANNOUNCED) == 1
        assert not await db.fetchval(LIMITED)
        shown = (await client.get("/subscriptions/mailer")).json()
        assert shown["state"] == "open"
        assert "no message was taken since " in shown["breaker"]["because"]
        # Longer than a message may be postponed.
        runtime.clock.offset_s += 80 * 3600
        before = len(receiver.calls)
        await turn_until(relay, runtime, lambda: len(receiver.calls) > before)
        await finished(relay, runtime)
        receiver.status = 200
        runtime.clock.offset_s += 61
        await turn_until(relay, runtime, lambda: db.fetchval(RECEIVED, 8))
    assert await db.fetchval("select max(attempts) from receipt") == 1
    assert await db.fetchval("select count(*) from dead_letter") == 0


async def test_a_call_with_a_batch_counts_once(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=429, **{"retry-after": "60"}) as receiver:
        destination = {"type": "webhook", "url": receiver.url, "mode": "batch", "batch_max": 10}
        await subscribe(client, receiver, destination=destination, retry=[], max_in_flight=1)
        await publish(client, *(order(number) for number in range(10)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 10 from delivery_retry"))
        calls = len(receiver.calls)
        assert calls < MESSAGES
        assert not await db.fetchval(LIMITED)
        for number in range(MESSAGES - calls):
            assert not await db.fetchval(LIMITED)
            await publish(client, order(100 + number))
            await turn_until(relay, runtime, lambda at=calls + number: len(receiver.calls) > at)
        await turn_until(relay, runtime, lambda: db.fetchval(LIMITED))
    assert not await db.fetchval(DOWN)


async def test_a_person_ends_a_pause(client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection) -> None:
    async with Responder(status=429, **{"retry-after": "250"}) as receiver:
        await subscribe(client, receiver)
        await publish(client, *(order(number) for number in range(20)))
        asked = await limited(relay, runtime, db, receiver)
        receiver.status = 200
        assert (await client.post("/subscriptions/mailer/reset-breaker")).status_code == 200
        assert await db.fetchval(PAUSED_UNTIL) is None
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) >= 20 - $1 from receipt", asked))
    assert [
        one["target"]
        for one in (await client.get("/audit", params={"what": "subscription.reset_breaker"})).json()["items"]
    ] == ["mailer"]
    assert await db.fetchval(ANNOUNCED) == 0


async def test_the_pause_of_a_probe_in_flight_does_not_undo_a_reset(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=429, **{"retry-after": "250"}) as receiver:
        await subscribe(client, receiver)
        await publish(client, *(order(number) for number in range(20)))
        await limited(relay, runtime, db, receiver)
        [stream] = relay.streams.values()
        shard = Shard(await db.fetchval("select subscription_id from subscription"))
        stored = (await start_positions(db, [shard]))[shard].breaker
        assert stored.limited_since is not None
        later = replace(stored, paused_until=runtime.clock.now() + timedelta(seconds=1))
        assert await set_breaker(db, stream.lease, shard, later, only_pause=True)
        assert await db.fetchval(PAUSED_UNTIL) == later.paused_until
        await client.post("/subscriptions/mailer/reset-breaker")
        assert not await set_breaker(db, stream.lease, shard, stored, only_pause=True)
        assert (await start_positions(db, [shard]))[shard].breaker == StoredBreaker()


async def test_messages_of_a_key_stay_in_order_after_a_pause(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=429, **{"retry-after": "30"}) as receiver:
        await subscribe(client, receiver, ordered="key", max_in_flight=4)
        sent = await publish(client, *(order(number % 7) for number in range(28)))
        await limited(relay, runtime, db, receiver)
        receiver.calls.clear()
        receiver.status = 200

        async def received() -> bool:
            runtime.clock.offset_s += 1
            return bool(await db.fetchval(RECEIVED, 28))

        await turn_until(relay, runtime, received)
    for key in range(7):
        of_key = [offset for n, offset in enumerate(sent) if n % 7 == key]
        assert [offset for offset in offsets(receiver) if offset in of_key] == of_key


async def test_a_changed_number_of_shards_keeps_the_pause(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=429, **{"retry-after": "250"}) as receiver:
        made = await subscribe(client, receiver)
        await publish(client, *(order(number) for number in range(20)))
        asked = await limited(relay, runtime, db, receiver)
        until = await db.fetchval(PAUSED_UNTIL)
        fields = {"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, "shards": 2}
        assert (await client.put(f"/subscriptions/{made['name']}", json=fields)).status_code == 200
        runtime.clock.offset_s += 20
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from checkpoint"))
        await turn_until(relay, runtime, lambda: len(relay.streams) == 2)
        for _ in range(3):
            await step(relay, runtime)
        rows = await db.fetch("select limited_since is not null as limited, paused_until from checkpoint")
        assert [tuple(row) for row in rows] == [(True, until)] * 2
        assert len(receiver.calls) == asked


async def test_a_pause_that_ended_long_ago_says_nothing(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """The subscription was paused by a person meanwhile, or an older version delivered: one failure is no outage."""
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver)
        await db.execute(
            "update checkpoint set limited_since = now() - interval '9 h', paused_until = now() - interval '8 h'"
        )
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        answer = await client.get("/subscriptions/mailer")
    assert answer.json()["breaker"] == {"state": "closed", "opened_at": None, "because": None, "paused_until": None}
    assert await db.fetchval(ANNOUNCED) == 0
