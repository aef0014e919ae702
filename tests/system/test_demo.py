"""`make demo`: with a running service, and with the one that it starts."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from tests.support.processes import ROOT, Service, free_port

LINES = (
    "order 1030 delivered, signature verified",
    "killed before it can post the end (SIGKILL)",
    "check from Halfnote: the order is in the database. Answer: commit",
    "order 1031 delivered, signature verified",
    "order 1032 fails here",
    "Delivered: 1030, 1031, 1033. Not 1032.",
    "All steps succeeded.",
)


@pytest.fixture
def service(data_dir: Path, dsn: str) -> Iterator[Service]:
    """Yield a service on the test's database; it is stopped at the end."""
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    yield service
    if service.process is not None:
        service.stop()


def run_demo(**env: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    return subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, env=inherited | env, capture_output=True, text=True, timeout=240
    )


async def test_the_demo_runs_twice_with_a_running_service_and_leaves_nothing(service: Service, db: Connection) -> None:
    await service.start()
    for _ in range(2):
        completed = await asyncio.to_thread(run_demo, HALFNOTE_URL=service.url)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        places = [completed.stdout.index(line) for line in LINES]
        assert places == sorted(places)
        assert "order 1032 delivered" not in completed.stdout
    async with httpx.AsyncClient(base_url=service.url) as client:
        assert (await client.get("/subscriptions")).json()["items"] == []
        assert (await client.get("/producer-groups")).json()["items"] == []
    # 1 commit, 2 rollback; 0 the producer, 1 a check.
    verdicts = await db.fetch("select verdict, source, count(*) from op group by 1, 2 order by 1, 2")
    assert [tuple(row) for row in verdicts] == [(1, 0, 4), (1, 1, 2), (2, 0, 2)]


def test_the_demo_starts_a_service_if_none_runs() -> None:
    completed = run_demo(HALFNOTE_PORT=str(free_port()))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Starting one for the demo" in completed.stdout
    assert LINES[-1] in completed.stdout


async def test_the_demo_fails_if_a_step_does_not_succeed(service: Service, db: Connection) -> None:
    """A paused subscription delivers nothing."""
    await service.start()
    demo = asyncio.create_task(asyncio.to_thread(run_demo, HALFNOTE_URL=service.url, DEMO_WAIT_S="3"))
    async with asyncio.timeout(150):
        while await db.execute("update subscription set state = 'paused'") != "UPDATE 1":
            await asyncio.sleep(0.01)
    completed = await demo
    assert completed.returncode == 1
    assert "without success" in completed.stderr
