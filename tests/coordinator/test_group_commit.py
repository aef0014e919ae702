"""Group commit under faults: which requests fail alone, which fail together, and which outcomes stay unknown."""

import asyncio
import os
import signal
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import asyncpg
import httpx
import pytest
from msgspec.structs import replace

from app.config import Settings
from app.coordinator.commit_lanes import CommitLanes, answer_repeat_half
from app.coordinator.group_commit import GroupCommitLane, LaneLimits
from app.database.connection import Connection, connect
from app.database.errors import problem_of
from app.errors import DatabaseUnavailable, OutcomeUnknown, Overloaded
from app.ids import uuid7
from app.runtime.state import Runtime
from app.server.fast_path import FastPath
from app.store.coordinator import halves
from app.store.coordinator.halves import Half
from tests.conftest import client_of
from tests.coordinator.test_races import end_of, half_with, now, store_halves, until_waiting

ORDER: dict[str, Any] = {"topic": "order", "body": {"order": 1030}}


def new_half(at: datetime | None = None) -> Half:
    return half_with(uuid7(at or now()), b"{}")


def lanes_with(runtime: Runtime, **limits: Any) -> CommitLanes:
    return CommitLanes(runtime.database, runtime.clock, runtime.metrics, LaneLimits(**limits))


async def test_a_bad_row_fails_alone(runtime: Runtime, db: Connection, group: str) -> None:
    halves = [new_half() for _ in range(20)]
    homeless = new_half(now() + timedelta(days=30))
    outcomes = await asyncio.gather(
        *(runtime.lanes.half.enqueue(half) for half in [*halves, homeless]), return_exceptions=True
    )
    assert isinstance(outcomes[-1], DatabaseUnavailable)
    assert [outcome.fresh for outcome in outcomes[:-1]] == [True] * 20  # type: ignore[union-attr]
    assert await db.fetchval("select count(*) from half") == 20


async def test_a_full_queue_refuses_and_stores_nothing(runtime: Runtime, db: Connection, group: str) -> None:
    lanes = lanes_with(runtime, queue_max=3)
    accepted = [lanes.half.enqueue(new_half()) for _ in range(3)]
    with pytest.raises(Overloaded) as refused:
        lanes.half.enqueue(new_half())
    assert refused.value.retry_after_s == 1
    await asyncio.gather(*accepted)
    assert await db.fetchval("select count(*) from half") == 3
    await lanes.close()


async def test_a_batch_is_bounded(runtime: Runtime, group: str) -> None:
    sizes: list[int] = []

    async def flush(connection: Connection, halves: Any) -> list[Any]:
        sizes.append(len(halves))
        return list(halves)

    lane: GroupCommitLane[Half, Any] = GroupCommitLane(
        runtime.database.dedicated, flush, answer_repeat_half, LaneLimits(batch_max=8), lambda *figures: None
    )
    await asyncio.gather(*(lane.enqueue(new_half()) for _ in range(20)))
    await lane.close()
    assert sizes == [8, 8, 4]


async def test_a_connection_that_dies_in_a_flush_leaves_the_outcome_unknown(
    client: httpx.AsyncClient, db: Connection, dsn: str, group: str
) -> None:
    chosen = str(uuid7(now()))
    request = {"producer_group": "shop", "transaction_id": chosen, "messages": [ORDER]}
    async with _holding(dsn, UUID(chosen)):
        asked = asyncio.create_task(client.post("/half", json=request))
        await until_waiting(db)
        await db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where wait_event_type = 'Lock' "
            "and datname = current_database()"
        )
        answer = await asked
    assert answer.status_code == 503
    assert answer.json()["type"] == "/problems/outcome-unknown"
    assert answer.json()["transaction_id"] == chosen
    again = await client.post("/half", json=request)
    assert again.status_code == 201


async def test_a_hanging_commit_times_out_and_the_lane_continues(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    lanes = lanes_with(runtime, flush_timeout_s=0.3)
    stuck = new_half()
    async with _holding(dsn, stuck.transaction_id):
        with pytest.raises(OutcomeUnknown) as unknown:
            await lanes.half.enqueue(stuck)
        assert unknown.value.extra["transaction_id"] == str(stuck.transaction_id)
        assert (await lanes.half.enqueue(new_half())).fresh
    assert (await lanes.half.enqueue(stuck)).digest == stuck.digest
    await lanes.close()


@pytest.mark.parametrize("lane", ["half", "plain"])
async def test_a_server_that_hangs_in_a_flush_leaves_the_outcome_unknown(
    runtime: Runtime, db: Connection, dsn: str, group: str, lane: Literal["half", "plain"]
) -> None:
    lanes = lanes_with(runtime, flush_timeout_s=2.0)
    hanging: GroupCommitLane[Half, Any] = lanes.half if lane == "half" else lanes.plain
    await hanging.enqueue(new_half())
    stuck = new_half()
    async with _holding(dsn, stuck.transaction_id):
        outcome = hanging.enqueue(stuck)
        # Inside the database transaction.
        await until_waiting(db)
        backend = await db.fetchval(
            "select pid from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        )
        os.kill(backend, signal.SIGSTOP)
        try:
            with pytest.raises(OutcomeUnknown):
                await asyncio.wait_for(outcome, 30)
            # The lane continues with another connection.
            await hanging.enqueue(new_half())
        finally:
            os.kill(backend, signal.SIGCONT)
    await lanes.close()


async def test_the_timeout_counts_from_each_flush_s_own_beginning(runtime: Runtime) -> None:
    limit_s, took = 2.0, asyncio.Event()

    async def flush(connection: Connection, halves: Any) -> list[Any]:
        if halves[0].digest != b"quick":
            took.set()
            await asyncio.sleep(limit_s * 0.5 if halves[0].digest == b"slow" else 3600)
        return list(halves)

    limits = LaneLimits(flush_timeout_s=limit_s)
    lane: GroupCommitLane[Half, Any] = GroupCommitLane(
        runtime.database.dedicated, flush, answer_repeat_half, limits, lambda *figures: None
    )
    await lane.enqueue(replace(new_half(), digest=b"quick"))
    # Past the first flush's time limit, within the slow one's.
    await asyncio.sleep(limit_s * 0.75)
    slow = replace(new_half(), digest=b"slow")
    assert await lane.enqueue(slow) == slow
    began = asyncio.get_running_loop().time()
    with pytest.raises(OutcomeUnknown):
        await lane.enqueue(replace(new_half(), digest=b"endless"))
    assert limit_s - 0.1 <= asyncio.get_running_loop().time() - began < limit_s * 3
    # And a lane that is closed in the midst of a flush answers before that takes too long.
    took.clear()
    cut_off = lane.enqueue(replace(new_half(), digest=b"endless"))
    await took.wait()
    began = asyncio.get_running_loop().time()
    await lane.close()
    assert asyncio.get_running_loop().time() - began < limit_s
    assert isinstance(cut_off.exception(), OutcomeUnknown)


async def test_a_caller_that_goes_away_does_not_take_its_batch_along(
    runtime: Runtime, db: Connection, group: str
) -> None:
    leaving = asyncio.create_task(_submit(runtime, new_half()))
    staying = [asyncio.create_task(_submit(runtime, new_half())) for _ in range(5)]
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(*staying)
    assert await db.fetchval("select count(*) from half") == 6


async def _submit(runtime: Runtime, half: Half) -> Any:
    return await runtime.lanes.half.enqueue(half)


class Held:
    """A lane whose flushes wait until they may go on, but for the first, which connected it."""

    def __init__(self, runtime: Runtime, **limits: Any) -> None:
        self.sizes: list[int] = []
        self.began, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.lane: GroupCommitLane[Half, Any] = GroupCommitLane(
            runtime.database.dedicated, self._flush, answer_repeat_half, LaneLimits(**limits), lambda *figures: None
        )

    async def _flush(self, connection: Connection, halves: Any) -> list[Any]:
        self.sizes.append(len(halves))
        if len(self.sizes) > 1:
            self.began.set()
            await self.may_go_on.wait()
        return list(halves)

    async def beside_one_alone(self) -> tuple["asyncio.Task[Any]", list["asyncio.Task[Any]"]]:
        """Connect, then have one ask alone and three more while it flushes."""
        await self.lane.enqueue(new_half())
        alone = asyncio.create_task(self.lane.commit(new_half()))
        await self.began.wait()
        others = [asyncio.create_task(self.lane.commit(new_half())) for _ in range(3)]
        async with asyncio.timeout(10):
            while self.lane.depth < len(others):
                await asyncio.sleep(0)
        return alone, others


async def test_requests_during_a_single_flush_share_the_next_flush(runtime: Runtime) -> None:
    held = Held(runtime)
    alone, others = await held.beside_one_alone()
    assert held.sizes == [1, 1]
    held.may_go_on.set()
    await asyncio.gather(alone, *others)
    assert held.sizes == [1, 1, 3]
    await held.lane.close()


async def test_a_lane_lingers_while_requests_come_and_no_longer(runtime: Runtime) -> None:
    held = Held(runtime, linger_s=3600)
    held.may_go_on.set()
    async with asyncio.timeout(10):
        await held.lane.enqueue(new_half())
        await asyncio.gather(*(held.lane.enqueue(new_half()) for _ in range(2)))
        coming = []
        for _ in range(4):
            coming.append(held.lane.enqueue(new_half()))
            await asyncio.sleep(0)
        await asyncio.gather(*coming)
    assert held.sizes == [1, 2, 4]
    await held.lane.close()


async def test_a_lane_lingers_for_its_limit_at_most(runtime: Runtime) -> None:
    held = Held(runtime, linger_s=1e-9)
    held.may_go_on.set()
    async with asyncio.timeout(10):
        await held.lane.enqueue(new_half())
        await asyncio.gather(*(held.lane.enqueue(new_half()) for _ in range(2)))
        first = held.lane.enqueue(new_half())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.gather(first, held.lane.enqueue(new_half()))
    assert held.sizes == [1, 2, 1, 1]
    await held.lane.close()


async def test_a_canceled_single_request_cancels_no_other(runtime: Runtime) -> None:
    held = Held(runtime)
    alone, others = await held.beside_one_alone()
    alone.cancel()
    held.may_go_on.set()
    await asyncio.gather(*others)
    assert alone.cancelled()
    assert held.sizes == [1, 1, 3]
    await held.lane.close()


async def test_a_single_request_whose_flush_hangs_fails_and_the_others_continue(runtime: Runtime) -> None:
    held = Held(runtime, flush_timeout_s=0.3)
    alone, others = await held.beside_one_alone()
    with pytest.raises(OutcomeUnknown):
        await alone
    held.may_go_on.set()
    await asyncio.gather(*others)
    assert held.sizes == [1, 1, 3]
    await held.lane.close()


async def test_a_lane_that_stops_tells_one_alone_that_its_outcome_is_unknown(
    runtime: Runtime, dsn: str, group: str
) -> None:
    lanes = lanes_with(runtime)
    await lanes.half.enqueue(new_half())
    stuck = new_half()
    async with _holding(dsn, stuck.transaction_id):
        alone = asyncio.create_task(lanes.half.commit(stuck))
        await asyncio.sleep(0)
        lanes.give_up()
        with pytest.raises(OutcomeUnknown) as unknown:
            await alone
    assert unknown.value.extra["transaction_id"] == str(stuck.transaction_id)
    await lanes.close()


async def test_a_client_that_disconnects_in_its_body_stores_nothing(
    runtime: Runtime, db: Connection, group: str
) -> None:
    app = client_of(runtime)._transport.app  # type: ignore[attr-defined]
    assert isinstance(app, FastPath)
    parts = iter(
        [
            {"type": "http.request", "body": b'{"producer_group":"shop",', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    sent: list[Any] = []

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"900")]
    await app({"type": "http", "method": "POST", "path": "/half", "headers": headers}, receive, send)
    assert sent == []
    assert await db.fetchval("select count(*) from half") == 0


async def test_read_only_is_said_and_recovers_by_itself(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    name = await db.fetchval("select current_database()")
    request = {"producer_group": "shop", "messages": [ORDER]}
    await db.execute(f"alter database {name} set default_transaction_read_only = on")
    refused = await client.post("/half", json=request)
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/database-read-only")
    assert "retry-after" in refused.headers
    await db.execute(f"alter database {name} set default_transaction_read_only = off")
    assert (await client.post("/half", json=request)).status_code == 201


async def test_lanes_commit_durably_whatever_the_database_says(runtime: Runtime, db: Connection, dsn: str) -> None:
    name = await db.fetchval("select current_database()")
    for weak in ("off", "local", "remote_write"):
        await db.execute(f"alter database {name} set synchronous_commit = {weak}")
        fresh = await runtime.database.dedicated()
        assert await fresh.fetchval("show synchronous_commit") == "on"
        await fresh.close()
    await db.execute(f"alter database {name} set synchronous_commit = remote_apply")
    strong = await connect(dsn)
    assert await strong.fetchval("show synchronous_commit") == "remote_apply"
    await strong.close()


@pytest.mark.parametrize(
    ("error", "slug"),
    [
        (asyncpg.ReadOnlySQLTransactionError("x"), "database-read-only"),
        (asyncpg.CannotConnectNowError("x"), "database-read-only"),
        (asyncpg.DiskFullError("x"), "storage-full"),
        (asyncpg.DeadlockDetectedError("x"), "database-unavailable"),
        (asyncpg.InvalidTextRepresentationError("x"), "invalid"),
        (ConnectionRefusedError(), "database-unavailable"),
        (asyncpg.InternalClientError("x"), "database-unavailable"),
        (RuntimeError("a defect"), "internal"),
    ],
)
def test_what_the_database_says_has_its_problem(error: Exception, slug: str) -> None:
    assert problem_of(error).slug == slug


async def test_requests_of_one_id_wait_without_holding_up_others(
    runtime: Runtime, settings: Settings, db: Connection, group: str
) -> None:
    same = new_half()
    different = replace(same, digest=b"other")
    others = [new_half() for _ in range(10)]
    outcomes = await asyncio.gather(
        *(runtime.lanes.half.enqueue(half) for half in [same, same, different, same, *others])
    )
    assert [outcome.fresh for outcome in outcomes] == [True, False, False, False, *[True] * 10]
    assert outcomes[2].digest == same.digest
    assert await db.fetchval("select count(*) from half") == 11


# As Postgres reports a full disk to one statement, while others still succeed.
DISK_FULL = """
create function disk_full() returns trigger language plpgsql as
$$ begin raise exception 'could not extend file' using errcode = 'disk_full'; end $$
"""
UNREADABLE = """
create function unreadable() returns text language plpgsql as
$$ begin raise exception 'could not read block' using errcode = 'io_error'; end $$
"""


async def test_a_refusal_that_cannot_be_recorded_is_still_answered_and_fails_no_other_end(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    refused, *others = [str(one) for one in await store_halves(db, 4)]
    assert (await client.post("/end", json=end_of(refused, "rollback"))).status_code == 200
    await db.execute(DISK_FULL)
    await db.execute("create trigger full_disk before insert on attempt for each row execute function disk_full()")
    answers = await asyncio.gather(
        *(client.post("/end", json=end_of(one, "commit")) for one in (others[0], refused, *others[1:]))
    )
    assert [answer.status_code for answer in answers] == [200, 409, 200, 200]
    assert answers[1].json()["recorded"]["verdict"] == "rollback"
    assert await db.fetchval("select count(*) from op where verdict = 1") == 3
    assert await db.fetchval("select count(*) from attempt") == 0


@pytest.mark.parametrize("path", ["/half", "/messages"])
async def test_a_repeat_that_cannot_be_read_fails_alone(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [{"producer_group": "shop", "transaction_id": str(uuid7(now())), "messages": [ORDER]} for _ in range(4)]
    repeated = requests[1]
    assert (await client.post(path, json=repeated)).status_code == 201
    await db.execute(UNREADABLE)
    unreadable = halves.STORED_HALVES.replace("h.digest,", "(h.digest || unreadable()::bytea) as digest,")
    assert unreadable != halves.STORED_HALVES
    with monkeypatch.context() as patched:
        patched.setattr(halves, "STORED_HALVES", unreadable)
        answers = await asyncio.gather(*(client.post(path, json=request) for request in requests))
    assert [answer.status_code for answer in answers] == [201, 503, 201, 201]
    assert await db.fetchval("select count(*) from half") == 4
    # The lane goes on, and the repeat gets its answer.
    assert (await client.post(path, json=repeated)).status_code == 200


class _holding:
    """Holds a half of an id uncommitted, so that a store of the same id waits; rolls it back at the end."""

    def __init__(self, dsn: str, transaction_id: UUID) -> None:
        self._dsn = dsn
        self._transaction_id = transaction_id

    async def __aenter__(self) -> None:
        self._connection = await connect(self._dsn)
        await self._connection.execute("begin")
        await self._connection.execute(
            "insert into half (transaction_id, position, producer_group, topic, content_type, body, body_digest, "
            "born_at, first_check_at) values ($1, 0, 'other', 't', 'a/b', '', '', now(), now())".replace(
                "$1", f"'{self._transaction_id}'"
            )
        )

    async def __aexit__(self, *error: object) -> None:
        await self._connection.execute("rollback")
        await self._connection.close()
