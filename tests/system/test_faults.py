"""Faults of the database, on a server of each test: down and up again, a cancelled wait for a standby, a full disk."""

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
from uuid import UUID

import httpx
import pytest

from app.config import LOOPBACK, Settings
from app.coordinator.commit_lanes import CommitLanes
from app.coordinator.group_commit import WAITING_FOR_STANDBY_MAX, LaneLimits
from app.database.connection import Connection, connect
from app.database.lent_connections import LENT_FOR_LOOKS
from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.errors import DatabaseUnavailable, OutcomeUnknown
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.migrate import migrate
from app.runtime.state import Runtime
from app.store.coordinator.halves import Half, stored_halves
from app.store.coordinator.ops import End, read_recorded
from tests.conftest import client_of, register_group
from tests.coordinator.test_group_commit import new_half
from tests.coordinator.test_races import end_of, now

ORDER: dict[str, Any] = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}

CANCEL = "select count(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'"


@dataclass
class OwnServer:
    """A database server of one test, and the service on it."""

    server: EmbeddedPostgres
    runtime: Runtime
    client: httpx.AsyncClient


@pytest.fixture
async def own_server(data_dir: Path) -> AsyncIterator[OwnServer]:
    server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    await migrate(server.url, days_ahead=2)
    db = await connect(server.url)
    await register_group(db, "shop")
    await db.close()
    settings = Settings(_env_file=None, database_url=server.url, flush_timeout_s=5, allow_networks=LOOPBACK)  # type: ignore[call-arg]
    async with AsyncExitStack() as stack:
        runtime = await assemble(settings, server.url, stack)
        client = await stack.enter_async_context(client_of(runtime))
        own_server = OwnServer(server, runtime, client)
        yield own_server
    # The server that runs now: a test may have replaced it.
    await asyncio.to_thread(own_server.server.stop)


async def _stop_and_start(own_server: OwnServer, data_dir: Path, down_s: float) -> None:
    half = (await own_server.client.post("/half", json=ORDER)).json()
    await asyncio.to_thread(own_server.server.kill)
    since, refused = monotonic(), []
    while monotonic() < since + down_s or not refused:
        answers = await asyncio.gather(
            own_server.client.post("/half", json=ORDER),
            own_server.client.post("/end", json=end_of(half["transaction_id"], "commit")),
            own_server.client.post("/messages", json=ORDER),
            own_server.client.post("/end", json=end_of(half["transaction_id"], "unknown")),
        )
        refused += answers
        await asyncio.sleep(0.05)
    assert {answer.status_code for answer in refused} == {503}
    kinds = {answer.json()["type"] for answer in refused}
    assert kinds <= {f"/problems/{slug}" for slug in ("database-unavailable", "outcome-unknown", "database-read-only")}
    assert all("retry-after" in answer.headers for answer in refused)
    own_server.server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir)
    async with asyncio.timeout(30):
        while (await own_server.client.post("/half", json=ORDER)).status_code != 201:
            await asyncio.sleep(0.05)
    end = await own_server.client.post("/end", json=end_of(half["transaction_id"], "commit"))
    assert end.status_code == 200


async def test_a_restart_of_the_database_loses_nothing(own_server: OwnServer, data_dir: Path) -> None:
    await _stop_and_start(own_server, data_dir, 0.5)


@pytest.mark.slow
async def test_a_database_that_is_down_for_ten_seconds_loses_nothing(own_server: OwnServer, data_dir: Path) -> None:
    await _stop_and_start(own_server, data_dir, 10)


async def test_a_cancelled_wait_for_a_standby_is_an_unknown_outcome(own_server: OwnServer) -> None:
    """Postgres reports success with a warning only: the commit is on this disk but not on the standby."""
    db = await connect(own_server.server.url)
    await db.execute("set synchronous_commit = local")
    half = (await own_server.client.post("/half", json=ORDER)).json()
    await _require_standby(db, "absent")
    await _until_commits_wait(own_server, db)
    requests = [
        ("/half", {**ORDER, "transaction_id": str(uuid7(now()))}),
        ("/end", end_of(half["transaction_id"], "commit")),
        ("/messages", {**ORDER, "transaction_id": str(uuid7(now()))}),
    ]
    for path, request in requests:
        request_task = asyncio.create_task(own_server.client.post(path, json=request))
        await _cancel_standby_wait(db)
        answer = await request_task
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/outcome-unknown")
        assert answer.json()["transaction_id"] == request["transaction_id"]
    await _require_standby(db, "")
    for path, request in requests:
        again = await own_server.client.post(path, json=request)
        assert (again.status_code, again.json()["replayed"]) == (200, True)
    await db.close()


async def test_a_repeat_is_acknowledged_only_when_the_standby_has_its_row(own_server: OwnServer) -> None:
    """The first request's row is visible, because its wait for the standby was canceled; a failover would lose it."""
    db = await connect(own_server.server.url)
    await db.execute("set synchronous_commit = local")
    half = (await own_server.client.post("/half", json=ORDER)).json()
    await _require_standby(db, "absent")
    await _until_commits_wait(own_server, db)
    stored, published = str(uuid7(now())), str(uuid7(now()))
    requests = [
        ("/half", {**ORDER, "transaction_id": stored}, 200),
        ("/end", end_of(half["transaction_id"], "commit"), 200),
        ("/messages", {**ORDER, "transaction_id": published}, 200),
        ("/end", end_of(half["transaction_id"], "rollback"), 409),
    ]
    for _ in ("the first", "a repeat"):
        for path, request, _ in requests:
            asked = asyncio.create_task(own_server.client.post(path, json=request))
            async with asyncio.timeout(10):
                while not (asked.done() or await db.fetchval(CANCEL)):
                    await asyncio.sleep(0.01)
            answer = await asked
            assert (answer.status_code, answer.json().get("type")) == (503, "/problems/outcome-unknown"), (
                path,
                answer.text,
            )
    await _require_standby(db, "")
    for path, request, code in requests:
        assert (await own_server.client.post(path, json=request)).status_code == code
    # Without a synchronous standby a repeat writes nothing.
    async with db.transaction():
        await stored_halves(db, [UUID(stored)], ["shop"])
        await read_recorded(db, [End(UUID(published), None, None)], now())
        assert await db.fetchval("select pg_current_xact_id_if_assigned()") is None
    await db.close()


async def test_an_acknowledgement_is_answered_only_when_the_standby_has_it(own_server: OwnServer) -> None:
    db = await connect(own_server.server.url)
    await db.execute("set synchronous_commit = local")
    client = own_server.client
    body = {"topics": ["order"], "destination": {"type": "pull"}}
    assert (await client.put("/subscriptions/points", json=body)).status_code == 201
    assert (await client.post("/messages", json=ORDER)).status_code == 201
    claimed = (await client.post("/subscriptions/points/claim", json={"wait_s": 5})).json()
    acknowledgement = {"handles": [one["handle"] for one in claimed["messages"]]}
    assert len(acknowledgement["handles"]) == 1
    await _require_standby(db, "absent")
    await _until_commits_wait(own_server, db)
    for _ in ("the first", "a repeat"):
        asked = asyncio.create_task(client.post("/subscriptions/points/ack", json=acknowledgement))
        async with asyncio.timeout(10):
            while not (asked.done() or await db.fetchval(CANCEL)):
                await asyncio.sleep(0.01)
        answer = await asked
        assert (answer.status_code, answer.json().get("type")) == (503, "/problems/database-unavailable"), answer.text
        assert await db.fetchval("select count(*) from receipt") == 1
    await _require_standby(db, "")
    answer = await client.post("/subscriptions/points/ack", json=acknowledgement)
    [settled] = answer.json()["outcomes"]
    assert (settled["status"], settled["replayed"]) == (200, True)
    await db.close()


async def test_an_act_is_answered_only_when_the_standby_has_it(own_server: OwnServer) -> None:
    """A reissue, and a change of a subscription; each repeat is answered for what the first one wrote."""
    db = await connect(own_server.server.url)
    await db.execute("set synchronous_commit = local")
    client = own_server.client
    body = {"topics": ["order"], "destination": {"type": "pull"}}
    half = (await client.post("/half", json=ORDER)).json()["transaction_id"]
    assert (await client.post("/end", json=end_of(half, "rollback"))).status_code == 200
    await _require_standby(db, "absent")
    await _until_commits_wait(own_server, db)
    acts: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"/transactions/{half}/reissue", {"reason": "paid after all"}),
        ("PUT", "/subscriptions/points", body),
        # Their repeats change nothing.
        ("POST", "/subscriptions/points/pause", {}),
        ("POST", "/subscriptions/points/resume", {}),
        ("DELETE", "/dead-letters", {"filter": {"subscription": "points"}, "dry_run": False}),
    ]
    for _ in ("the first", "a repeat"):
        for method, path, request in acts:
            asked = asyncio.create_task(client.request(method, path, json=request))
            async with asyncio.timeout(10):
                while not asked.done():
                    await db.execute(CANCEL)
                    await asyncio.sleep(0.01)
            answer = await asked
            told = (answer.status_code, answer.json().get("type"))
            assert told == (503, "/problems/database-unavailable"), answer.text
            assert "standby" in answer.json()["detail"]
    await _require_standby(db, "")
    answer = await client.post(f"/transactions/{half}/reissue", json={"reason": "paid after all"})
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/not-reissuable")
    assert answer.json()["reissued_as"] == str(await db.fetchval("select reissued_as from reissue"))
    assert (await client.put("/subscriptions/points", json=body)).status_code == 200
    await db.close()


async def test_a_connection_whose_commit_waits_for_a_standby_is_not_closed(own_server: OwnServer) -> None:
    """Its backend would go on to wait, so each turn of a loop would leave another one, up to `max_connections`.

    To end the wait would show to all what a failover loses.
    """
    db = await connect(own_server.server.url)
    await db.execute("set synchronous_commit = local")
    await _require_standby(db, "absent")
    await _until_commits_wait(own_server, db)
    database = own_server.runtime.database
    waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"

    async def commit() -> None:
        async with database.connection() as connection:
            await connection.execute("insert into service_switch values ('waits', 'on', now())")

    committed = asyncio.create_task(commit())
    async with asyncio.timeout(30):
        while not await db.fetchval(waiting):
            await asyncio.sleep(0.01)
    for _ in range(2 * LENT_FOR_LOOKS + 2):
        assert await database.close_overdue() == 0
    assert not committed.done()
    assert await db.fetchval("select count(*) from service_switch where name = 'waits'") == 0
    await _require_standby(db, "")
    await committed
    assert await db.fetchval("select count(*) from service_switch where name = 'waits'") == 1
    await db.close()


async def test_a_missing_standby_takes_few_connections(own_server: OwnServer) -> None:
    """Each flush that is given up leaves a backend that waits; there may be a few, and all end with the wait."""
    runtime = own_server.runtime
    db = await connect(own_server.server.url)
    await db.execute("set synchronous_commit = local")
    lanes, patient = (
        CommitLanes(runtime.database, runtime.clock, runtime.metrics, LaneLimits(flush_timeout_s=seconds))
        for seconds in (0.5, 60)
    )
    # The topic is stored: a flush that waits for another one's topic waits for no standby.
    await patient.half.enqueue(new_half())
    await _require_standby(db, "absent")
    await _until_commits_wait(own_server, db)
    waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
    given_up: list[Half] = []
    async with asyncio.timeout(60):
        while not given_up or await db.fetchval(waiting) < WAITING_FOR_STANDBY_MAX:
            given_up.append(new_half())
            with pytest.raises(OutcomeUnknown):
                await lanes.half.enqueue(given_up[-1])
    refused = new_half()
    for _ in range(3):
        with pytest.raises(DatabaseUnavailable, match="Commits wait in the database"):
            await lanes.half.enqueue(refused)
    assert await db.fetchval(waiting) == WAITING_FOR_STANDBY_MAX
    assert await db.fetchval("select count(*) from half where transaction_id = $1", refused.transaction_id) == 0
    await _require_standby(db, "")
    async with asyncio.timeout(10):
        while await db.fetchval(waiting):
            await asyncio.sleep(0.01)
    for half in [refused, *given_up]:
        await patient.half.enqueue(half)
    await lanes.close()
    await patient.close()
    await db.close()


async def _require_standby(db: Connection, name: str) -> None:
    await db.execute(f"alter system set synchronous_standby_names = '{name}'")
    await db.execute("select pg_reload_conf()")
    async with asyncio.timeout(10):
        while await db.fetchval("show synchronous_standby_names") != name:
            await asyncio.sleep(0.01)


async def _until_commits_wait(own_server: OwnServer, db: Connection) -> None:
    """Commit until a commit waits: they wait only once the checkpointer, too, has read the setting."""
    probe = await connect(own_server.server.url)
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
    """Yield a file system of a few megabytes that the server's user owns."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = data_dir.parent / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_a_full_disk_is_reported_and_the_service_recovers_by_itself(
    own_server: OwnServer, small_disk: Path, data_dir: Path
) -> None:
    space = small_disk / "space"
    space.mkdir()
    find_paths(data_dir).account.own(space)
    db = await connect(own_server.server.url)
    await db.execute(f"create tablespace small location '{space}'")
    partition = await db.fetchval("select tableoid::regclass::text from half limit 1") or await db.fetchval(
        "select 'half_' || to_char(current_date, 'YYYYMMDD')"
    )
    await db.execute(f"alter table {partition} set tablespace small")
    big = {"producer_group": "shop", "messages": [{"topic": "order", "body_base64": _noise(800_000)}]}
    answers = [await own_server.client.post("/half", json=big) for _ in range(12)]
    codes = [answer.status_code for answer in answers]
    assert codes[0] == 201
    assert codes[-1] == 503
    assert {answer.json()["type"] for answer in answers if answer.status_code != 201} == {"/problems/storage-full"}
    assert await db.fetchval("select count(*) from half") == codes.count(201)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert (await own_server.client.post("/half", json=big)).status_code == 201
    await db.execute(f"alter table {partition} set tablespace pg_default")
    await db.execute("drop tablespace small")
    await db.close()


def _noise(size: int) -> str:
    # Random bytes, because Postgres cannot compress them.
    return base64.b64encode(os.urandom(size)).decode()
