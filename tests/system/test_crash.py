"""kill -9 of the service and of Postgres under load: nothing that was acknowledged is lost, no verdict changes."""

import asyncio
import random
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.database.connection import connect
from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.shutdown import kill_server
from app.embedded_postgres.stale_processes import postmasters_of
from app.ids import uuid7
from app.verdicts import Verdict
from tests.conftest import register_group
from tests.support.processes import Service

WORKERS = 12
MESSAGES = [{"topic": "order", "body": {"order": 1030}}, {"topic": "points", "body": 10}]


class Producer:
    """Posts halves and ends continuously, repeats unacknowledged ones, and records the acknowledged ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.halves: set[str] = set()
        self.verdicts: dict[str, str] = {}
        self.conflicts = 0
        self.stopping = False

    async def run(self, seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self._url, timeout=15) as client:
            while not self.stopping:
                one = str(uuid7(datetime.now(UTC)))
                half = {"producer_group": "shop", "transaction_id": one, "messages": MESSAGES}
                if not await self._until_acknowledged(client, "/half", half):
                    return
                self.halves.add(one)
                verdict = rng.choice(["commit", "rollback"])
                end = {"producer_group": "shop", "transaction_id": one, "verdict": verdict}
                if rng.random() < 0.1 or not await self._until_acknowledged(client, "/end", end):
                    continue
                self.verdicts[one] = verdict

    async def _until_acknowledged(self, client: httpx.AsyncClient, path: str, request: dict[str, Any]) -> bool:
        while not self.stopping:
            try:
                answer = await client.post(path, json=request)
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            if answer.status_code in (200, 201):
                return True
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.05)
        return False


async def _crash_rounds(data_dir: Path, rounds: int) -> None:
    rng = random.Random(1030)
    service = Service(data_dir)
    try:
        await _crash_and_verify(data_dir, service, rng, rounds)
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()
        # Shown only if the test fails.
        print(*(line for line in service.log.read_text().splitlines() if '"level": "error"' in line), sep="\n")


async def _crash_and_verify(data_dir: Path, service: Service, rng: random.Random, rounds: int) -> None:
    await service.start()
    await _register(data_dir, service)
    producer = Producer(service.url)
    producing = [asyncio.create_task(producer.run(seed)) for seed in range(WORKERS)]
    for turn in range(rounds):
        before = len(producer.verdicts)
        await _until(lambda before=before: len(producer.verdicts) > before + 100)
        await asyncio.sleep(rng.random() * 0.3)
        if turn % 2:
            for postmaster in postmasters_of(find_paths(data_dir)):
                await asyncio.to_thread(kill_server, postmaster)
        else:
            service.kill()
            await service.start()
    before = len(producer.verdicts)
    await _until(lambda: len(producer.verdicts) > before + 100)
    producer.stopping = True
    await asyncio.gather(*producing)
    # uvicorn raises the signal again once it has drained.
    assert service.stop() in (0, -signal.SIGTERM)
    await _verify(data_dir, producer)


async def _until(reached: Any) -> None:
    async with asyncio.timeout(90):
        while not reached():
            await asyncio.sleep(0.02)


async def _register(data_dir: Path, service: Service) -> None:
    service.stop()
    server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    db = await connect(server.url)
    # The check is due long after the test: transactions without an end must still be stored and undecided.
    await register_group(db, "shop", immunity_s=86_400)
    await db.close()
    await asyncio.to_thread(server.stop)
    await service.start()


async def _verify(data_dir: Path, producer: Producer) -> None:
    server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    db = await connect(server.url)
    stored = {str(row[0]) for row in await db.fetch("select transaction_id from half where position = 0")}
    ops = {str(key): Verdict(value).word for key, value in await db.fetch("select transaction_id, verdict from op")}
    outbox = dict(await db.fetch("select transaction_id::text, count(*) from outbox group by 1"))
    halves = dict(await db.fetch("select transaction_id::text, count(*) from half group by 1"))
    await db.close()
    await asyncio.to_thread(server.stop)
    assert producer.halves - stored == set()
    assert {one: ops.get(one) for one in producer.verdicts} == producer.verdicts
    assert {one for one, verdict in ops.items() if verdict == "commit"} == set(outbox)
    assert set(outbox.values()) <= {len(MESSAGES)}
    assert set(halves.values()) == {len(MESSAGES)}


async def test_nothing_acknowledged_is_lost(data_dir: Path) -> None:
    await _crash_rounds(data_dir, rounds=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nothing_acknowledged_is_lost_over_many_crashes(data_dir: Path) -> None:
    await _crash_rounds(data_dir, rounds=24)
