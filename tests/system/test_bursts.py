"""The whole service under a burst: requests that need the pool beside deliveries, and a backlog that grows."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

import httpx
import pytest
from aiohttp import web

from app.clock import Clock
from app.database.connection import Connection
from app.ids import uuid7
from tests.server.raw_http import read_answer
from tests.support.check_responder import Call, Responder
from tests.support.load import until
from tests.support.processes import Service
from tests.support.relay_stepping import order, subscribe

CALLERS = 40
DELIVERED = 20
BACKLOG, AT_ONCE = 20_000, 100


@pytest.fixture
async def service(data_dir: Path, dsn: str, group: str) -> AsyncIterator[Service]:
    """A running service with the group `shop`."""
    made = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_POOL_SIZE="5")
    await made.start()
    yield made
    made.stop()


def post(body: bytes) -> bytes:
    """Return a request to `/end`."""
    head = b"POST /end HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def publish(client: httpx.AsyncClient, first: int, count: int = 1) -> None:
    """Commit messages in one transaction."""
    messages = [order(number) for number in range(first, first + count)]
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
    assert answer.status_code == 201, answer.text


@pytest.mark.slow
async def test_a_burst_of_ends_of_unknown_ids_delays_no_delivery(service: Service) -> None:
    statuses: set[int] = set()
    async with Responder() as receiver, httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        await subscribe(client, receiver)

        async def caller() -> None:
            # A client of its own bytes: httpx would be slower than the service, and few requests would be in it.
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            try:
                while True:
                    end = {"transaction_id": str(uuid7(Clock().now())), "producer_group": "shop", "verdict": "unknown"}
                    writer.write(post(json.dumps(end).encode()))
                    answer = await read_answer(reader)
                    assert answer is not None
                    assert answer.status == 404 or "retry-after" in answer.headers, answer
                    statuses.add(answer.status)
            finally:
                writer.close()

        callers = [asyncio.create_task(caller()) for _ in range(CALLERS)]
        try:
            waited = []
            for number in range(DELIVERED):
                began = monotonic()
                await publish(client, number)
                await until(lambda number=number: len(receiver.calls) > number, callers)
                waited.append(monotonic() - began)
                assert (await client.get("/readyz")).status_code == 200
        finally:
            for task in callers:
                task.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
    assert 404 in statuses
    # A process whose pool is exhausted delivers after the pool's timeout, 10 s, at the earliest.
    assert sorted(waited)[DELIVERED // 2] < 5


@pytest.mark.slow
async def test_the_lag_is_exact_while_a_backlog_grows(service: Service, db: Connection) -> None:
    answers = asyncio.Event()

    async def never(call: Call) -> web.Response:
        await answers.wait()
        return web.Response()

    async with Responder(never) as receiver, httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        await subscribe(client, receiver, max_in_flight=1, timeout_s=60)
        try:
            for first in range(0, BACKLOG, AT_ONCE):
                await publish(client, first, AT_ONCE)
                if first % (BACKLOG // 4) == 0:
                    await shown(client, first + AT_ONCE)
            await shown(client, BACKLOG)
            assert len(receiver.calls) <= 2
        finally:
            answers.set()


async def shown(client: httpx.AsyncClient, count: int) -> None:
    """Wait until the lag metric is exactly this count."""
    found = None
    async with asyncio.timeout(60):
        while found != count:
            text = (await client.get("/metrics")).text
            values = re.findall(r"^halfnote_relay_lag_messages\{[^}]*\} ([0-9.e+]+)$", text, re.MULTILINE)
            found = sum(float(value) for value in values)
            await asyncio.sleep(0.1)
