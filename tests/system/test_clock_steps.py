"""Processes whose clock is set an hour forward and back while they deliver."""

import asyncio
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from tests.support.processes import Service
from tests.support.receiver import Sink
from tests.support.relay_stepping import order, publish
from tests.support.stepped_clock import SteppedClock, stepped_clock

STEPS_S = (0, 3600, 0, -3600, 3600)
BATCH = 40
HELD = "select name, owner, epoch from lease where name like 'relay:%' order by name"
RENEWED = "select name, expires_at from lease where name like 'relay:%'"
# Two workers hold two shards each.
SHARED = """
select array_agg(held) = '{2,2}' from (select count(*) as held from lease where name like 'relay:%' group by owner) h
"""


@pytest.fixture
def clock() -> Iterator[SteppedClock]:
    with stepped_clock() as made:
        yield made


async def until(reached: Any, within_s: float = 40) -> None:
    async with asyncio.timeout(within_s):
        while True:
            result = reached()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.05)


async def subscribe(client: httpx.AsyncClient, sink: Sink, **fields: Any) -> None:
    subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": sink.url}, **fields}
    answer = await client.put("/subscriptions/mailer", json=subscription)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("fields", [{}, {"ordered": "key", "rate_per_s": 500.0}], ids=["plain", "ordered"])
async def test_steps_of_a_workers_clock_stop_nothing_and_repeat_nothing(
    client: httpx.AsyncClient,
    db: Connection,
    group: str,
    dsn: str,
    tmp_path: Path,
    clock: SteppedClock,
    fields: dict[str, Any],
) -> None:
    """Step only the worker's clock: leases and due times use the database's clock, which does not change."""
    (tmp_path / "worker").mkdir()
    worker = Service(tmp_path / "worker" / "data", "serve", "--role", "worker", HALFNOTE_DATABASE_URL=dsn, **clock.env)
    async with Sink() as sink:
        await subscribe(client, sink, **fields)
        await worker.start()
        try:
            sent: list[int] = []
            for step_s in STEPS_S:
                clock.set(step_s)
                await until(lambda at=step_s: has_stepped(worker, at))
                sent += await publish(client, *({**order(n), "key": f"k{n % 7}"} for n in range(BATCH)))
                count = len(sent)
                await until(lambda at=count: db.fetchval("select count(*) = $1 from receipt", at))
        finally:
            await asyncio.to_thread(worker.stop)
    assert sorted(sink.counts) == sorted(sent)
    assert set(sink.counts.values()) == {1}
    if fields:
        assert_in_order(sink)


async def test_steps_of_one_workers_clock_take_no_lease_from_another(
    client: httpx.AsyncClient, db: Connection, group: str, dsn: str, tmp_path: Path, clock: SteppedClock
) -> None:
    """Step the clock of one of two workers. Each would take the other's shards if they disagreed on the time."""
    workers = []
    for name, env in (("stepped", clock.env), ("steady", {})):
        (tmp_path / name).mkdir()
        arguments = ("serve", "--role", "worker")
        workers.append(Service(tmp_path / name / "data", *arguments, HALFNOTE_DATABASE_URL=dsn, **env))
    async with Sink() as sink:
        await subscribe(client, sink, ordered="key", shards=4)
        await asyncio.gather(*(worker.start() for worker in workers))
        try:
            await until(lambda: db.fetchval(SHARED))
            held = await db.fetch(HELD)
            sent: list[int] = []
            for step_s in (3600, 0, -3600, 0):
                clock.set(step_s)
                await until(lambda at=step_s: has_stepped(workers[0], at))
                sent += await publish(client, *({**order(n), "key": f"k{n}"} for n in range(BATCH)))
                for _ in range(2):
                    before = await db.fetch(RENEWED)
                    await until(lambda seen=before: all_differ(db, seen))
                assert await db.fetch(HELD) == held
            await until(lambda: db.fetchval("select count(*) = $1 from receipt", len(sent)))
        finally:
            await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))
    assert sorted(sink.counts) == sorted(sent)
    assert set(sink.counts.values()) == {1}


@pytest.mark.parametrize("fields", [{}, {"ordered": "key"}], ids=["plain", "ordered"])
async def test_steps_of_a_machines_clock_stop_nothing_and_repeat_nothing(
    tmp_path: Path, clock: SteppedClock, fields: dict[str, Any]
) -> None:
    """Step the clock of the service and of its Postgres, which leases and due times use. Each transaction begins
    before a step and ends after it."""
    service = Service(tmp_path / "data", "serve", **clock.env)
    await service.start()
    try:
        async with Sink() as sink, httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            await subscribe(client, sink, **fields)
            answer = await client.put("/producer-groups/shop", json={"check_urls": ["http://127.0.0.1:1/check"]})
            assert answer.status_code == 201, answer.text
            sent: list[int] = []
            for step_s in STEPS_S:
                open_halves = [await half(client, number) for number in range(BATCH)]
                clock.set(step_s)
                await until(lambda at=step_s: has_stepped(service, at))
                sent.extend([await end(client, transaction_id) for transaction_id in open_halves])
                await until(lambda: set(sent) <= set(sink.counts))
            await until(lambda: settled(client))
            assert sorted(sink.counts) == sorted(sent)
            assert set(sink.counts.values()) == {1}
            assert sent == sorted(sent)
            if fields:
                assert_in_order(sink)
    finally:
        await asyncio.to_thread(service.stop)


async def all_differ(db: Connection, before: list[Any]) -> bool:
    """Return whether each lease of a shard was renewed, or taken, since it was read."""
    return not set(map(tuple, before)) & set(map(tuple, await db.fetch(RENEWED)))


async def has_stepped(service: Service, step_s: int) -> bool:
    """Return whether the dates of a process's answers differ from the machine's clock by this much."""
    async with httpx.AsyncClient(base_url=service.url) as client:
        date = parsedate_to_datetime((await client.get("/livez")).headers["date"])
    return abs(date.timestamp() - time.time() - step_s) < 60


async def half(client: httpx.AsyncClient, number: int) -> str:
    message = {**order(number), "key": f"k{number % 7}"}
    answer = await client.post("/half", json={"producer_group": "shop", "messages": [message]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def end(client: httpx.AsyncClient, transaction_id: str) -> int:
    request = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": "commit"}
    answer = await client.post("/end", json=request)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["messages"][0]["offset"])


async def settled(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/subscriptions/mailer")).json()["lag"]["messages"] == 0)


def assert_in_order(sink: Sink) -> None:
    for key in {key for key, _ in sink.received}:
        received = [offset for received_key, offset in sink.received if received_key == key]
        assert received == sorted(received)
