"""Faults, on a server of the test's own: away and back, a cancelled standby wait, a full disk."""

import asyncio
import base64
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from app.config import LOOPBACK, Settings
from app.database.connection import Connection, connect
from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.migrate import migrate
from app.runtime.state import Runtime
from tests.conftest import client_of, register_group
from tests.coordinator.test_races import end_of, now

ORDER: dict[str, Any] = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}

CANCEL = "select count(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'"


@dataclass
class Own:
    """A server of the test's own, with the service over it."""

    server: EmbeddedPostgres
    runtime: Runtime
    client: httpx.AsyncClient


@pytest.fixture
async def own(data_dir: Path) -> AsyncIterator[Own]:
    server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    await migrate(server.url, days_ahead=2)
    db = await connect(server.url)
    await register_group(db, "shop")
    await db.close()
    settings = Settings(_env_file=None, database_url=server.url, flush_timeout_s=5, allow_networks=LOOPBACK)  # type: ignore[call-arg]
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings, server.url, stack)
        client = await stack.enter_async_context(client_of(runtime))
        made = Own(server, runtime, client)
        yield made
    # The one that runs now: a test may have put another in its place.
    await asyncio.to_thread(made.server.stop)


async def _away_and_back(own: Own, data_dir: Path, away_s: float) -> None:
    half = (await own.client.post("/half", json=ORDER)).json()
    await asyncio.to_thread(own.server.kill)
    since, refused = monotonic(), []
    while monotonic() < since + away_s or not refused:
        answers = await asyncio.gather(
            own.client.post("/half", json=ORDER),
            own.client.post("/end", json=end_of(half["transaction_id"], "commit")),
            own.client.post("/messages", json=ORDER),
            own.client.post("/end", json=end_of(half["transaction_id"], "unknown")),
        )
        refused += answers
        await asyncio.sleep(0.05)
    assert {answer.status_code for answer in refused} == {503}
    kinds = {answer.json()["type"] for answer in refused}
    assert kinds <= {f"/problems/{slug}" for slug in ("database-unavailable", "outcome-unknown", "database-read-only")}
    assert all("retry-after" in answer.headers for answer in refused)
    own.server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    async with asyncio.timeout(30):
        while (await own.client.post("/half", json=ORDER)).status_code != 201:
            await asyncio.sleep(0.05)
    end = await own.client.post("/end", json=end_of(half["transaction_id"], "commit"))
    assert end.status_code == 200


async def test_a_restart_of_the_database_loses_nothing(own: Own, data_dir: Path) -> None:
    await _away_and_back(own, data_dir, 0.5)


@pytest.mark.slow
async def test_the_database_is_away_for_ten_seconds(own: Own, data_dir: Path) -> None:
    await _away_and_back(own, data_dir, 10)


async def test_a_cancelled_wait_for_a_standby_is_an_unknown_outcome(own: Own) -> None:
    """Postgres reports success with a mere warning: the commit is on this disk, but not where it was promised."""
    db = await connect(own.server.url)
    await db.execute("set synchronous_commit = local")
    half = (await own.client.post("/half", json=ORDER)).json()
    await _require_standby(db, "nobody")
    await _until_commits_wait(own, db)
    requests = [
        ("/half", {**ORDER, "transaction_id": str(uuid7(now()))}),
        ("/end", end_of(half["transaction_id"], "commit")),
        ("/messages", {**ORDER, "transaction_id": str(uuid7(now()))}),
    ]
    for path, request in requests:
        asked = asyncio.create_task(own.client.post(path, json=request))
        await _cancel_standby_wait(db)
        answer = await asked
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/outcome-unknown")
        assert answer.json()["transaction_id"] == request["transaction_id"]
    await _require_standby(db, "")
    for path, request in requests:
        again = await own.client.post(path, json=request)
        assert (again.status_code, again.json()["replayed"]) == (200, True)
    await db.close()


async def _require_standby(db: Connection, name: str) -> None:
    await db.execute(f"alter system set synchronous_standby_names = '{name}'")
    await db.execute("select pg_reload_conf()")
    async with asyncio.timeout(10):
        while await db.fetchval("show synchronous_standby_names") != name:
            await asyncio.sleep(0.01)


async def _until_commits_wait(own: Own, db: Connection) -> None:
    """Commits wait only once the checkpointer, too, has read the setting: until then one is tried after the other."""
    probe = await connect(own.server.url)
    async with asyncio.timeout(10):
        waited = False
        while not waited:
            commit = asyncio.create_task(probe.execute("select pg_logical_emit_message(true, 'probe', '')"))
            while not (waited or commit.done()):
                waited = bool(await db.fetchval(CANCEL))
            await commit
    await probe.close()


async def _cancel_standby_wait(db: Connection) -> None:
    async with asyncio.timeout(10):
        while not await db.fetchval(CANCEL):
            await asyncio.sleep(0.01)


@pytest.fixture
def small_disk(data_dir: Path) -> Iterator[Path]:
    """A file system of a few megabytes that the server's user owns."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = data_dir.parent / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_a_full_disk_is_said_and_recovers_by_itself(own: Own, small_disk: Path, data_dir: Path) -> None:
    space = small_disk / "space"
    space.mkdir()
    find_paths(data_dir).account.own(space)
    db = await connect(own.server.url)
    await db.execute(f"create tablespace small location '{space}'")
    partition = await db.fetchval("select tableoid::regclass::text from half limit 1") or await db.fetchval(
        "select 'half_' || to_char(current_date, 'YYYYMMDD')"
    )
    await db.execute(f"alter table {partition} set tablespace small")
    big = {"producer_group": "shop", "messages": [{"topic": "order", "body_base64": _noise(800_000)}]}
    answers = [await own.client.post("/half", json=big) for _ in range(12)]
    codes = [answer.status_code for answer in answers]
    assert codes[0] == 201
    assert codes[-1] == 503
    assert {answer.json()["type"] for answer in answers if answer.status_code != 201} == {"/problems/storage-full"}
    assert await db.fetchval("select count(*) from half") == codes.count(201)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert (await own.client.post("/half", json=big)).status_code == 201
    await db.execute(f"alter table {partition} set tablespace pg_default")
    await db.execute("drop tablespace small")
    await db.close()


def _noise(size: int) -> str:
    # Postgres compresses what it can; noise it cannot.
    return base64.b64encode(os.urandom(size)).decode()
