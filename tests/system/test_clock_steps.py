"""Processes whose clock is set an hour forward and back while they deliver."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
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
from tests.support.requirements import absent

STEPS_S = (0, 3600, 0, -3600, 3600)
BATCH = 40


class SteppedClock:
    """A clock for processes started with `env`, and for their children; `set` steps it while they run."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "seconds"
        self._file.write_bytes(bytes(8))
        self._file.chmod(0o644)
        library = directory / "stepped_clock.so"
        source = Path(__file__).parents[1] / "support" / "stepped_clock.c"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's."""
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


@pytest.fixture
def clock() -> Iterator[SteppedClock]:
    if sys.platform != "linux" or shutil.which("cc") is None:
        absent("a C compiler on Linux is needed to step a process's clock", "DEPS")
    # Not in pytest's directory, which only its owner may enter: Postgres may run as another user.
    with tempfile.TemporaryDirectory(prefix="halfnote-clock-") as directory:
        Path(directory).chmod(0o755)
        yield SteppedClock(Path(directory))


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
