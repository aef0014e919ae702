"""The running relay while the clock steps and while the database is down."""

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
from app.relay.loop import EVERY_S, INTERVALS_S, Relay
from app.runtime.loop_runner import Loop, run
from app.runtime.state import Runtime
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import offsets, order, publish, subscribe
from tests.system.test_faults import OwnServer, own_server

__all__ = ["own_server"]


@asynccontextmanager
async def running(runtime: Runtime) -> AsyncIterator[Relay]:
    """Run the relay of a process as the service does."""
    relay, stopping = Relay(runtime), asyncio.Event()
    loop = Loop("relay", relay.step, EVERY_S, runtime.wake_ups.relay, relay.drain, INTERVALS_S)
    task = asyncio.create_task(run(loop, runtime, stopping))
    try:
        yield relay
    finally:
        stopping.set()
        runtime.wake_ups.relay.set()
        await task


async def until(reached: Callable[[], Any], within_s: float = 40) -> None:
    async with asyncio.timeout(within_s):
        while True:
            result = reached()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fields", [{}, {"ordered": "key", "rate_per_s": 200.0}], ids=["plain", "ordered"])
async def test_a_clock_that_steps_an_hour_stops_nothing_and_sends_nothing_twice(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, fields: dict[str, Any]
) -> None:
    rng = random.Random(1030)

    async def unreliable(call: Call) -> web.Response:
        await asyncio.sleep(rng.uniform(0, 0.01))
        return web.Response(status=rng.choice([200, 200, 200, 500]))

    async with Responder(unreliable) as receiver:
        await subscribe(client, receiver, retry=[0.1] * 60, **fields)
        async with running(runtime):
            sent: list[int] = []
            for step_s in (0, 3600, -3600, -3600, 7200):
                runtime.clock.offset_s += step_s
                sent += await publish(client, *({**order(n), "key": f"k{n % 7}"} for n in range(20)))
                count = len(sent)
                await until(lambda at=count: db.fetchval("select count(*) = $1 from receipt", at))
    assert await db.fetchval("select count(*) from dead_letter") == 0
    attempts = await db.fetchval("select sum(attempts) from receipt")
    probes = await db.fetchval("select coalesce(sum(times), 0) from postponement where outcome = 'probe'")
    # Each attempt is one request: none was sent without a record.
    assert len(receiver.calls) == attempts + probes
    assert set(offsets(receiver)) == set(sent)


async def deliver_over_a_restart(own_server: OwnServer, data_dir: Path, down_s: float) -> None:
    async with Responder() as receiver:
        await subscribe(own_server.client, receiver, max_in_flight=8)
        sent = await publish(own_server.client, *(order(number) for number in range(200)))
        async with running(own_server.runtime):
            await until(lambda: len(receiver.calls) >= 40)
            await asyncio.to_thread(own_server.server.stop)
            # The length of the outage is what the test varies: below or above the time of a lease.
            await asyncio.sleep(down_s)
            own_server.server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
            db = await connect(own_server.server.url)
            try:
                await until(lambda: db.fetchval("select count(*) = 200 from receipt"))
                assert await db.fetchval("select count(*) from dead_letter") == 0
                assert await db.fetchval("select count(*) from delivery_retry") == 0
            finally:
                await db.close()
    counts = Counter(offsets(receiver))
    assert set(counts) == set(sent)
    assert max(counts.values()) <= 2


async def test_a_restart_of_the_database_loses_nothing(own_server: OwnServer, data_dir: Path) -> None:
    await deliver_over_a_restart(own_server, data_dir, 2)


@pytest.mark.slow
async def test_a_database_that_is_down_past_the_lease_loses_nothing(own_server: OwnServer, data_dir: Path) -> None:
    await deliver_over_a_restart(own_server, data_dir, 12)
