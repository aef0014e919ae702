"""Processes whose machine's clock is put an hour forward and back while they deliver."""

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
FEW = 40


class SteppedClock:
    """A clock for processes started with `env`, and for their children; `put` steps it while they run."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "seconds"
        self._file.write_bytes(bytes(8))
        self._file.chmod(0o644)
        library = directory / "stepped_clock.so"
        source = Path(__file__).parents[1] / "support" / "stepped_clock.c"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def put(self, seconds: int) -> None:
        """Set the clock ahead of or behind the machine's."""
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


@pytest.fixture
def clock() -> Iterator[SteppedClock]:
    if sys.platform != "linux" or shutil.which("cc") is None:
        absent("a C compiler on Linux is needed to step a process's clock", "DEPS")
    # Not below pytest's directory, which only its owner may enter: Postgres may run as another user.
    with tempfile.TemporaryDirectory(prefix="halfnote-clock-") as made:
        Path(made).chmod(0o755)
        yield SteppedClock(Path(made))


async def until(reached: Any, within_s: float = 40) -> None:
    async with asyncio.timeout(within_s):
        while True:
            so = reached()
            if so if isinstance(so, bool) else await so:
                return
            await asyncio.sleep(0.05)


async def subscribe(client: httpx.AsyncClient, sink: Sink, **fields: Any) -> None:
    wanted = {"topics": ["order"], "destination": {"type": "webhook", "url": sink.url}, **fields}
    answer = await client.put("/subscriptions/mailer", json=wanted)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("fields", [{}, {"ordered": "key", "rate_per_s": 500.0}], ids=["plain", "ordered"])
async def test_a_workers_clock_steps_and_nothing_stops_or_comes_twice(
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
                clock.put(step_s)
                await until(lambda at=step_s: stepped(worker, at))
                sent += await publish(client, *({**order(n), "key": f"k{n % 7}"} for n in range(FEW)))
                count = len(sent)
                await until(lambda at=count: db.fetchval("select count(*) = $1 from receipt", at))
        finally:
            await asyncio.to_thread(worker.stop)
    assert sorted(sink.counts) == sorted(sent)
    assert set(sink.counts.values()) == {1}
    if fields:
        in_order(sink)


@pytest.mark.parametrize("fields", [{}, {"ordered": "key"}], ids=["plain", "ordered"])
async def test_a_whole_machines_clock_steps_and_nothing_stops_or_comes_twice(
    tmp_path: Path, clock: SteppedClock, fields: dict[str, Any]
) -> None:
    """The service's and its Postgres' clock, by which leases and due times are judged. Each transaction is begun
    before a step and ended after it."""
    service = Service(tmp_path / "data", "serve", **clock.env)
    await service.start()
    try:
        async with Sink() as sink, httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            await subscribe(client, sink, **fields)
            answer = await client.put("/producer-groups/shop", json={"check_urls": ["http://127.0.0.1:1/check"]})
            assert answer.status_code == 201, answer.text
            sent: list[int] = []
            for step_s in STEPS_S:
                begun = [await half(client, number) for number in range(FEW)]
                clock.put(step_s)
                await until(lambda at=step_s: stepped(service, at))
                sent.extend([await end(client, transaction_id) for transaction_id in begun])
                await until(lambda: set(sent) <= set(sink.counts))
            await until(lambda: settled(client))
            assert sorted(sink.counts) == sorted(sent)
            assert set(sink.counts.values()) == {1}
            assert sent == sorted(sent)
            if fields:
                in_order(sink)
    finally:
        await asyncio.to_thread(service.stop)


async def stepped(service: Service, step_s: int) -> bool:
    """Return whether the dates of a process's answers are off by this much."""
    async with httpx.AsyncClient(base_url=service.url) as client:
        dated = parsedate_to_datetime((await client.get("/livez")).headers["date"])
    return abs(dated.timestamp() - time.time() - step_s) < 60


async def half(client: httpx.AsyncClient, number: int) -> str:
    message = {**order(number), "key": f"k{number % 7}"}
    answer = await client.post("/half", json={"producer_group": "shop", "messages": [message]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def end(client: httpx.AsyncClient, transaction_id: str) -> int:
    wanted = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": "commit"}
    answer = await client.post("/end", json=wanted)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["messages"][0]["offset"])


async def settled(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/subscriptions/mailer")).json()["lag"]["messages"] == 0)


def in_order(sink: Sink) -> None:
    for key in {key for key, _ in sink.received}:
        came = [offset for one, offset in sink.received if one == key]
        assert came == sorted(came)
