"""A worker whose database's machine loses its power while loops wait for its answers, and comes back."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from app.database.connection import Connection
from app.database.keepalive import SILENT_S
from tests.support.faulty_proxy import FaultyProxy, through
from tests.support.processes import Service
from tests.support.receiver import Sink
from tests.support.relay_stepping import order, publish
from tests.support.requirements import absent

# Of the loops that ask at least once a second: the relay, `accept`, `waiting`, the sweep and the checks.
STUCK = 4


async def until(reached: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await reached():
            await asyncio.sleep(0.1)


async def test_loops_go_on_after_the_databases_machine_has_vanished(
    client: httpx.AsyncClient, db: Connection, group: str, dsn: str, tmp_path: Path
) -> None:
    if sys.platform != "linux":
        absent("a socket's packets can be dropped on Linux only", "MACHINE")
    async with FaultyProxy(urlsplit(dsn).port or 5432) as proxy, Sink() as sink:
        url = through(proxy, dsn)
        worker = Service(tmp_path / "data", "serve", "--role", "worker", HALFNOTE_DATABASE_URL=url)
        subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": sink.url}}
        assert (await client.put("/subscriptions/mailer", json=subscription)).status_code == 201
        await worker.start()
        try:
            for vanishes in (False, True):
                if vanishes:
                    proxy.hold()
                    # Their statements are acknowledged by a kernel, and wait for their answers.
                    await until(lambda: is_stuck(proxy), 60)
                    proxy.vanish()
                    proxy.come_back()
                sent = await publish(client, *(order(n) for n in range(5)))
                last = max(sent)
                await until(lambda at=last: has(sink, at), 4 * SILENT_S)
                await until(lambda: db.fetchval("select count(*) = (select count(*) from outbox) from receipt"), 60)
        finally:
            await asyncio.to_thread(worker.stop)


async def is_stuck(proxy: FaultyProxy) -> bool:
    return proxy.held >= STUCK


async def has(sink: Sink, offset: int) -> bool:
    return sink.counts[offset] > 0
