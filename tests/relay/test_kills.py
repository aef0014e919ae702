"""Worker processes that are killed or stopped: what is sent twice, and that nothing is lost or reordered."""

import asyncio
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import psutil
import pytest

from app.database.connection import Connection
from tests.support.processes import Service
from tests.support.receiver import Sink
from tests.support.relay_stepping import order, publish

KEYS = 50
IN_FLIGHT = 64
# The ids are version 7 UUIDs of the present time, so that their day has partitions.
FILL = """
with made as (
  select n, (
    lpad(to_hex((extract(epoch from now()) * 1000)::bigint), 12, '0') || '7000a' || lpad(to_hex(n), 15, '0')
  )::uuid as id
  from generate_series(1, $1::int) n
), halves as (
  insert into half (transaction_id, position, producer_group, topic, key, content_type, body, body_digest, born_at,
    first_check_at, digest)
  select id, 0, 'shop', 'order', 'k' || n % $2::int, 'application/json', convert_to(n::text, 'utf8'),
    sha256(convert_to(n::text, 'utf8')), now(), now(), 'x' from made
), ops as (
  insert into op (transaction_id, verdict, source, decided_at) select id, 1, 0, now() from made
)
insert into outbox (transaction_id, position, "offset", topic, key, committed_at)
select id, 0, nextval('outbox_offset'), 'order', 'k' || n % $2, now() from made order by n
"""
RECEIPTS = "select count(*) from receipt"


class Workers:
    """Worker processes over one database; `start` adds one."""

    def __init__(self, path: Path, dsn: str) -> None:
        self._path, self._dsn = path, dsn
        self.running: list[Service] = []

    async def start(self) -> Service:
        """Start a worker and wait until it answers."""
        folder = self._path / f"worker-{len(list(self._path.iterdir()))}"
        folder.mkdir()
        made = Service(folder / "data", "serve", "--role", "worker", HALFNOTE_DATABASE_URL=self._dsn)
        await made.start()
        self.running.append(made)
        return made

    def kill(self, one: Service) -> None:
        """kill -9."""
        one.kill()
        self.running.remove(one)

    def lost_leases(self) -> list[str]:
        """Return what the workers logged of leases that they lost: why a message may have been sent once more."""
        logs = sorted(self._path.glob("worker-*/service.log"))
        return [line for log in logs for line in log.read_text().splitlines() if "lease_lost" in line]


@pytest.fixture
async def workers(tmp_path: Path, dsn: str) -> AsyncIterator[Workers]:
    made = Workers(tmp_path, dsn)
    yield made
    for one in made.running:
        one.kill()


async def until(reached: Callable[[], Any], within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while True:
            result = reached()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.05)


async def subscribe(client: httpx.AsyncClient, sink: Sink, **fields: Any) -> None:
    subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": sink.url}, **fields}
    answer = await client.put("/subscriptions/mailer", json=subscription)
    assert answer.status_code in (200, 201), answer.text


@asynccontextmanager
async def sink_for(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[Sink]:
    async with AsyncExitStack() as stack:
        sink = await stack.enter_async_context(Sink())
        await subscribe(client, sink, **fields)
        yield sink


async def stop_with_ports(worker: Service, sink: Sink) -> set[int]:
    """Send SIGSTOP to a worker; return the ports of its connections to the sink, which can no longer change."""
    assert worker.process is not None
    worker.process.send_signal(signal.SIGSTOP)
    stopped = psutil.Process(worker.process.pid)
    await until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    return {one.laddr.port for one in stopped.net_connections("tcp") if one.raddr and one.raddr.port == sink.port}


async def unreceipted(db: Connection, sink: Sink) -> set[int]:
    """Return the received offsets without a committed receipt: only those may be sent again after a kill."""
    receipted = {row[0] for row in await db.fetch('select "offset" from receipt')}
    return set(sink.counts) - receipted


async def deliver_during_kills(
    client: httpx.AsyncClient, db: Connection, workers: Workers, messages: int, kills: int, **fields: Any
) -> None:
    """Deliver messages while workers are killed; each kill permits one repeat of each message without a receipt."""
    rng = random.Random(1030)
    async with sink_for(client, **fields) as sink:
        for _ in range(2):
            await workers.start()
        await db.execute(FILL, messages, KEYS)
        allowed: dict[int, int] = defaultdict(lambda: 1)
        for number in range(kills):
            share = messages * (number + rng.random()) / (kills + 1)
            await until(lambda at=share: len(sink.counts) >= at, 120)
            victim = rng.choice(workers.running)
            ports = await stop_with_ports(victim, sink)
            workers.kill(victim)
            # Requests that the worker had written before the kill still arrive.
            await until(lambda dead=ports: dead <= sink.ended)
            for offset in await unreceipted(db, sink):
                allowed[offset] += 1
            await workers.start()
        await until(lambda: db.fetchval("select count(*) >= $1 from receipt", messages), 300)
        counts = sink.counts
        assert len(counts) == messages
        repeats = {offset: count for offset, count in counts.items() if count > allowed[offset]}
        assert repeats == {}, workers.lost_leases()
        offsets_by_key: dict[str, list[int]] = defaultdict(list)
        for key, offset in sink.received:
            offsets_by_key[key].append(offset)
        if fields.get("ordered") == "key":
            assert {key for key, offsets in offsets_by_key.items() if offsets != sorted(offsets)} == set()
    assert await db.fetchval(RECEIPTS) == messages
    assert await db.fetchval("select count(*) from dead_letter") == 0


@pytest.mark.parametrize("fields", [{"shards": 2}, {"shards": 2, "ordered": "key"}], ids=["unordered", "ordered"])
async def test_after_a_kill_every_message_arrives_and_only_those_in_flight_twice(
    client: httpx.AsyncClient, db: Connection, group: str, workers: Workers, fields: dict[str, Any]
) -> None:
    await deliver_during_kills(client, db, workers, 3000, 2, **fields)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fields", [{"shards": 2}, {"shards": 2, "ordered": "key"}], ids=["unordered", "ordered"])
async def test_over_many_kills_nothing_is_lost(
    client: httpx.AsyncClient, db: Connection, group: str, workers: Workers, fields: dict[str, Any]
) -> None:
    await deliver_during_kills(client, db, workers, 100_000, 20, **fields)


async def test_a_worker_that_was_suspended_past_its_lease_writes_nothing(
    client: httpx.AsyncClient, db: Connection, group: str, workers: Workers
) -> None:
    async with sink_for(client, ordered="key", max_in_flight=IN_FLIGHT) as sink:
        first = await workers.start()
        await until(
            lambda: db.fetchval("select count(*) = 1 from lease where name like 'relay:%' and expires_at > now()")
        )
        await db.execute(FILL, 4000, KEYS)
        await until(lambda: len(sink.received) > 500)
        assert first.process is not None
        await stop_with_ports(first, sink)
        await until(sink.has_read_all)
        # The sink's handlers run after the read.
        await asyncio.sleep(0.05)
        without_receipt = await unreceipted(db, sink)
        assert len(sink.counts) < 4000
        began = monotonic()
        await workers.start()
        before = len(sink.received)
        await until(lambda: len(sink.received) > before)
        # The lease, a turn, and the start of a process.
        assert monotonic() - began < 15
        first.process.send_signal(signal.SIGCONT)
        await until(lambda: db.fetchval("select count(*) = 4000 from receipt"))
        await until(lambda: "lease_lost" in first.log.read_text())
        counts = sink.counts
        assert len(counts) == 4000
        twice = {offset for offset, count in counts.items() if count > 1}
        # The resumed worker may still send what it had begun to send, before it reads the clock.
        assert len(twice - without_receipt) <= IN_FLIGHT
        assert max(counts.values()) <= 2
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_a_stopped_worker_hands_over_at_once_and_sends_nothing_twice(
    client: httpx.AsyncClient, db: Connection, group: str, workers: Workers
) -> None:
    async with sink_for(client) as sink:
        for _ in range(2):
            await workers.start()
        await db.execute(FILL, 2000, KEYS)
        await until(lambda: len(sink.received) > 300)
        for one in list(workers.running):
            # In a thread: the receiver answers while it drains.
            assert await asyncio.to_thread(one.stop) in (0, -signal.SIGTERM)
            workers.running.remove(one)
            if len(sink.received) < 1500:
                await workers.start()
        await workers.start()
        await until(lambda: db.fetchval("select count(*) = 2000 from receipt"))
    assert set(sink.counts.values()) == {1}
    assert len(sink.received) == 2000


async def test_a_new_message_wakes_a_worker_in_another_process(
    client: httpx.AsyncClient, db: Connection, group: str, workers: Workers
) -> None:
    async with sink_for(client) as sink:
        await workers.start()
        await publish(client, *(order(number) for number in range(5)))
        await until(lambda: len(sink.received) == 5)
