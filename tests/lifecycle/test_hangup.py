"""A closed terminal ends a service as SIGTERM does: requests are answered, and no Postgres is left."""

import asyncio
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app.database.connection import Connection
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.stale_processes import postmasters_of
from tests.conftest import register_group
from tests.lifecycle.test_serve import ORDER, halves_held_up, until_refused, until_waiting
from tests.support.processes import ROOT, Service, free_port

WITHIN_S = 60
# Without another line on the terminal; the first start makes a database.
START_WITHIN_S = 120


@pytest.fixture(params=["1", "2"])
def served(data_dir: Path, dsn: str, request: pytest.FixtureRequest) -> Iterator[Service]:
    """`halfnote serve` as one process, and as several."""
    env = {"HALFNOTE_WORKERS": request.param, "HALFNOTE_DATABASE_URL": dsn, "HALFNOTE_DRAIN_S": "40"}
    service = Service(data_dir, "serve", **env)
    yield service
    if service.process is not None:
        service.stop()


def hang_up(service: Service) -> None:
    """Send SIGHUP to the parent and its children, as a terminal does."""
    assert service.process is not None
    os.killpg(service.process.pid, signal.SIGHUP)


async def test_a_hangup_answers_requests_in_flight(served: Service, dsn: str, db: Connection) -> None:
    await served.start()
    await served.until_ready()
    assert await hung_up_with_a_request_in_flight(served, dsn, db) == 0


async def test_a_hangup_of_plain_uvicorn_answers_requests_in_flight(data_dir: Path, dsn: str, db: Connection) -> None:
    service = Service(data_dir, HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    try:
        # Uvicorn raises the signal again that ended it.
        assert await hung_up_with_a_request_in_flight(service, dsn, db) == -signal.SIGTERM
    finally:
        service.stop()


async def hung_up_with_a_request_in_flight(served: Service, dsn: str, db: Connection) -> int:
    """Return the exit status of a service that is hung up while a half waits for the database, and answers it."""
    await register_group(db, "shop")
    assert served.process is not None
    async with httpx.AsyncClient(base_url=served.url, timeout=WITHIN_S) as client:
        async with halves_held_up(dsn):
            half = asyncio.create_task(client.post("/half", json=ORDER))
            await until_waiting(db, "%insert into half%")
            hang_up(served)
            await until_refused(served)
            # The shell and the kernel may each send it.
            hang_up(served)
        assert (await half).status_code == 201
    status = await asyncio.to_thread(served.process.wait, WITHIN_S)
    said = served.log.read_text()
    assert "process_died" not in said
    assert "Traceback" not in said
    return status


async def test_a_hangup_that_nohup_ignores_stays_ignored(served: Service) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        await served.start()
        await served.until_ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert served.process is not None
    parent = psutil.Process(served.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        assert ignores(process.pid, signal.SIGHUP), process.cmdline()
    hang_up(served)
    assert httpx.get(f"{served.url}/livez").status_code == 200
    assert served.stop() == 0


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_closed_terminal_leaves_no_postgres_behind(data_dir: Path, workers: str) -> None:
    """A real terminal: after it is closed, nothing can be printed on it."""
    ours, terminal = os.openpty()

    def control() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", "--workers", workers, "--port", str(free_port())],
        cwd=ROOT,
        env=inherited | {"HALFNOTE_DATA_DIR": str(data_dir)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=control,
    )
    os.close(terminal)
    said = bytearray()
    try:
        while b"Halfnote is ready" not in said:
            assert select.select([ours], [], [], START_WITHIN_S)[0], said.decode()
            said += os.read(ours, 65536)
        [postmaster] = postmasters_of(find_paths(data_dir))
        children = psutil.Process(process.pid).children(recursive=True)
        assert postmaster.pid in [child.pid for child in children]
    finally:
        os.close(ours)
    assert process.wait(WITHIN_S) == 0, said.decode()
    _, left = psutil.wait_procs(children, timeout=WITHIN_S)
    assert left == []
