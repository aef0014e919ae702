"""The rate limit of a subscription: batches, retries and shards share it."""

from collections.abc import AsyncIterator
from time import monotonic

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.policy.rate_limiter import CATCH_UP_S
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, publish, subscribe, turn_until


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


@pytest.mark.parametrize("shards", [1, 3])
async def test_no_time_span_has_more_deliveries_than_the_rate_allows(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, shards: int
) -> None:
    arrivals: list[float] = []

    async def note(call: Call) -> web.Response:
        arrivals.append(monotonic())
        return web.Response()

    rate = 60.0
    async with Responder(note) as receiver:
        await subscribe(client, receiver, rate_per_s=rate, shards=shards)
        await publish(client, *(order(number) for number in range(90)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 90 from receipt"))
    # The receiver measures arrivals, which may lag behind sending; the bound allows 0.25 s for that.
    for first, begin in enumerate(arrivals):
        for last in range(first + 1, len(arrivals)):
            allowed = rate * (arrivals[last] - begin + CATCH_UP_S + 0.25) + shards
            assert last - first + 1 <= allowed


async def test_retries_are_limited_as_well(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, rate_per_s=4.0, retry=[10] * 5)
        await publish(client, *(order(number) for number in range(4)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from delivery_retry"))
        receiver.status = 200
        runtime.clock.offset_s += 12
        began = monotonic()
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from receipt"))
        assert monotonic() - began >= 3 / 4.0 - CATCH_UP_S - 0.05
    assert len(receiver.calls) == 8


REPLAY = """insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at)
  select subscription_id, 0, $1, 0, 'running', now(), now() from subscription"""


async def test_a_replay_shares_the_rate_of_all_shards_of_its_worker(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    arrivals: list[float] = []

    async def note(call: Call) -> web.Response:
        arrivals.append(monotonic())
        return web.Response()

    rate, shards = 75.0, 3
    async with Responder(note) as receiver:
        await subscribe(client, receiver, rate_per_s=rate, shards=shards)
        sent = await publish(client, *(order(number) for number in range(30)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 30 from receipt"))
        arrivals.clear()
        await db.execute(REPLAY, sent[-1])
        await publish(client, *(order(number) for number in range(30)))
        runtime.clock.offset_s += 1.5
        await turn_until(relay, runtime, lambda: any(shard.replay for shard in relay.streams))
        [replay] = [stream for shard, stream in relay.streams.items() if shard.replay]
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 30 from receipt where replay > 0"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 90 from receipt"))
        # All shards are idle now: each allows its part of the rate in CATCH_UP_S, and one message more.
        pacer, later = replay.sender.pacer, monotonic() + 60
        assert pacer is not None
        each = int(CATCH_UP_S * rate / shards) + 1
        assert pacer.room(later, 100) == shards * each
        lost = next(stream for shard, stream in relay.streams.items() if not shard.replay and shard.shard == 1)
        lost.drop()
        assert pacer.room(later, 100) == (shards - 1) * each
    for first, begin in enumerate(arrivals):
        for last in range(first + 1, len(arrivals)):
            allowed = rate * (arrivals[last] - begin + CATCH_UP_S + 0.25) + shards
            assert last - first + 1 <= allowed
