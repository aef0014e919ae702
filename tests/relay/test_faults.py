"""The relay as it runs, while clocks step and the database goes away."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection, connect
from app.embedded_postgres import EmbeddedPostgres
from app.relay.loop import EVERY_S, MIN_INTERVAL_S, Relay
from app.runtime.loop_runner import Loop, run
from app.runtime.state import Runtime
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import offsets, order, publish, subscribe
from tests.system.test_faults import Own, own

__all__ = ["own"]


@asynccontextmanager
async def running(runtime: Runtime) -> AsyncIterator[Relay]:
    """Turn the relay of a process as the service does."""
    relay, stopping = Relay(runtime), asyncio.Event()
    loop = Loop("relay", relay.step, EVERY_S, runtime.wake_ups.relay, relay.drain, MIN_INTERVAL_S)
    turning = asyncio.create_task(run(loop, runtime, stopping))
    try:
        yield relay
    finally:
        stopping.set()
        runtime.wake_ups.relay.set()
        await turning


async def until(reached: Callable[[], Any], within_s: float = 40) -> None:
    async with asyncio.timeout(within_s):
        while True:
            so = reached()
            if asyncio.iscoroutine(so):
                so = await so
            if so:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fields", [{}, {"ordered": "key", "rate_per_s": 200.0}], ids=["plain", "ordered"])
async def test_a_clock_that_steps_an_hour_stops_nothing_and_sends_nothing_twice(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, fields: dict[str, Any]
) -> None:
    chance = random.Random(1030)

    async def moody(call: Call) -> web.Response:
        await asyncio.sleep(chance.uniform(0, 0.01))
        return web.Response(status=chance.choice([200, 200, 200, 500]))

    async with Responder(moody) as receiver:
        await subscribe(client, receiver, retry=[0.1] * 60, **fields)
        async with running(runtime):
            sent: list[int] = []
            for step_s in (0, 3600, -3600, -3600, 7200):
                runtime.clock.offset_s += step_s
                sent += await publish(client, *({**order(n), "key": f"k{n % 7}"} for n in range(20)))
                count = len(sent)
                await until(lambda at=count: db.fetchval("select count(*) = $1 from receipt", at))
    assert await db.fetchval("select count(*) from dead_letter") == 0
    tries = await db.fetchval("select sum(attempts) from receipt")
    probes = await db.fetchval("select count(*) from attempt where outcome = 'probe'")
    # Each try is one request: nothing was sent that is not on record.
    assert len(receiver.calls) == tries + probes
    assert set(offsets(receiver)) == set(sent)


async def away_and_back(own: Own, data_dir: Path, away_s: float) -> None:
    async with Responder() as receiver:
        await subscribe(own.client, receiver, max_in_flight=8)
        sent = await publish(own.client, *(order(number) for number in range(200)))
        async with running(own.runtime):
            await until(lambda: len(receiver.calls) >= 40)
            await asyncio.to_thread(own.server.stop)
            await asyncio.sleep(away_s)
            own.server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
            db = await connect(own.server.url)
            try:
                await until(lambda: db.fetchval("select count(*) = 200 from receipt"))
                assert await db.fetchval("select count(*) from dead_letter") == 0
                assert await db.fetchval("select count(*) from delivery_retry") == 0
            finally:
                await db.close()
    counts = Counter(offsets(receiver))
    assert set(counts) == set(sent)
    assert max(counts.values()) <= 2


async def test_the_database_goes_away_and_comes_back(own: Own, data_dir: Path) -> None:
    await away_and_back(own, data_dir, 2)


@pytest.mark.slow
async def test_the_database_is_away_past_the_lease(own: Own, data_dir: Path) -> None:
    await away_and_back(own, data_dir, 12)
