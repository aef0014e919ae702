"""Sweeps: which transactions become in doubt; what the main sweep missed is found; nothing is swept twice."""

import asyncio
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from uuid import UUID

import httpx
import pytest

from app.checkback import sweep
from app.checkback.sweep import Sweeps
from app.config import Settings
from app.database.connection import Connection
from app.ids import day_bounds, uuid7
from app.lifecycle.startup import assemble
from app.migrate import ensure_days
from app.runtime.state import Runtime
from app.store.checkback import sweeps as store
from app.store.checkback.sweeps import Range
from app.store.proof.shared_settings import LONGEST_ID_SKEW, raise_rule
from tests.support.explain import scans

SWEPT = "select transaction_id, at from attempt where kind = 'swept' order by attempt_id"


def quiet() -> None:
    """Do nothing when a sweep finds something."""


async def post_half(client: httpx.AsyncClient, **fields: object) -> UUID:
    answer = await client.post(
        "/half", json={"producer_group": "shop", "messages": [{"topic": "order", "body": 1}], **fields}
    )
    assert answer.status_code == 201
    return UUID(answer.json()["transaction_id"])


async def post_end(client: httpx.AsyncClient, transaction_id: UUID, verdict: str = "commit") -> None:
    answer = await client.post(
        "/end", json={"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": verdict}
    )
    assert answer.status_code == 200


async def in_doubt(db: Connection) -> set[UUID]:
    return {row["transaction_id"] for row in await db.fetch("select transaction_id from check_back")}


async def insert_halves(db: Connection, born_at: datetime, count: int = 1, ends: int = 0) -> list[UUID]:
    """Write halves born at that time that are visible only now; the first `ends` of them have an op."""
    await ensure_days(db, born_at, days_ahead=0)
    ids = sorted(uuid7(born_at) for _ in range(count))
    await db.executemany(
        "insert into half (transaction_id, position, producer_group, topic, content_type, body, body_digest, born_at, "
        "first_check_at) values ($1, 0, 'shop', 'order', 'application/json', '1', '', $2, $3)",
        [(one, born_at, born_at + timedelta(seconds=6)) for one in ids],
    )
    await db.executemany(
        "insert into op (transaction_id, verdict, source, decided_at) values ($1, 1, 0, $2)",
        [(one, born_at) for one in ids[:ends]],
    )
    return ids


async def run_passes(swept: Sweeps, runtime: Runtime, now: datetime, steps: int = 12) -> int:
    """Take steps until every pass is complete; return how many halves were swept."""
    return sum([(await swept.step(runtime, now)).done for _ in range(steps)])


async def test_a_half_is_swept_only_after_its_immunity(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    one = await post_half(client)
    longer_immunity = await post_half(client, check={"immunity_s": 60})
    swept, now = Sweeps(quiet), runtime.clock.now()
    assert await run_passes(swept, runtime, now) == 0
    assert await run_passes(swept, runtime, now + timedelta(seconds=7)) == 1
    assert await in_doubt(db) == {one}
    row = await db.fetchrow("select state, swept_at, next_check_at, asked from check_back")
    assert row is not None
    assert (row["state"], row["asked"]) == (1, 0)
    assert row["swept_at"] == row["next_check_at"] == now + timedelta(seconds=7)
    assert await run_passes(swept, runtime, now + timedelta(seconds=61)) == 1
    assert await in_doubt(db) == {one, longer_immunity}
    assert [(row["transaction_id"], row["at"] - now) for row in await db.fetch(SWEPT)] == [
        (one, timedelta(seconds=7)),
        (longer_immunity, timedelta(seconds=61)),
    ]


async def test_a_half_with_an_id_that_only_another_process_permits_is_swept(
    db: Connection, runtime: Runtime, group: str
) -> None:
    """Another process permits ids three days from its own time; the id of this half is of a later day."""
    await raise_rule(db, LONGEST_ID_SKEW, 3 * 86_400)
    now = runtime.clock.now()
    swept = Sweeps(quiet)
    assert await run_passes(swept, runtime, now) == 0
    await ensure_days(db, now + timedelta(days=2), days_ahead=0)
    one = uuid7(now + timedelta(days=2))
    await db.execute(
        "insert into half (transaction_id, position, producer_group, topic, content_type, body, body_digest, born_at, "
        "first_check_at) values ($1, 0, 'shop', 'order', 'application/json', '1', '', $2, $2)",
        one,
        now + timedelta(seconds=1),
    )
    assert (await swept.step(runtime, now + timedelta(seconds=2))).done == 1
    assert await in_doubt(db) == {one}


async def test_no_sweep_is_recorded_in_a_day_that_is_being_removed(
    db: Connection, runtime: Runtime, group: str
) -> None:
    now = runtime.clock.now()
    born_at = now - timedelta(seconds=60)
    [one] = await insert_halves(db, born_at)
    await db.execute("update day set state = 'archiving'")
    # Its tables are detached one after the other.
    await db.execute(f"alter table attempt detach partition attempt_{born_at:%Y%m%d}")
    assert await run_passes(Sweeps(quiet), runtime, now) == 1
    assert await in_doubt(db) == {one}


async def test_a_decided_transaction_is_never_in_doubt(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    await db.execute("create table touched (n int)")
    await db.execute(
        "create function touch() returns trigger language plpgsql as "
        "'begin insert into touched values (1); return null; end'"
    )
    await db.execute(
        "create trigger touch after insert or update or delete on check_back for each row execute function touch()"
    )
    for verdict in ("commit", "rollback"):
        await post_end(client, await post_half(client), verdict)
    swept, now = Sweeps(quiet), runtime.clock.now()
    for later_s in (0, 7, 70, 3700):
        assert await run_passes(swept, runtime, now + timedelta(seconds=later_s)) == 0
    assert await db.fetchval("select count(*) from touched") == 0
    runtime.clock.offset_s += 3700
    await post_half(client)
    assert await run_passes(swept, runtime, now + timedelta(seconds=3800)) == 1
    assert await db.fetchval("select count(*) from touched") == 1


async def test_the_main_sweep_runs_in_batches_that_split_no_flush(
    db: Connection, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "BATCH", 7)
    now = runtime.clock.now()
    ids = [await insert_halves(db, now - timedelta(seconds=60 - n), count=5) for n in range(6)]
    swept = Sweeps(quiet)
    await db.execute("insert into sweep values ('trailing', $1, $1), ('hourly', $1, $1)", now)
    first = await swept.step(runtime, now)
    assert (first.done, first.more) == (10, True)
    assert await run_passes(swept, runtime, now) == 20
    assert await in_doubt(db) == {one for flush in ids for one in flush}
    last = await swept.step(runtime, now)
    assert (last.done, last.more) == (0, False)


@pytest.mark.parametrize("name", ["trailing", "hourly"])
async def test_a_run_is_due_after_the_databases_clock_stepped_back(db: Connection, runtime: Runtime, name: str) -> None:
    now = runtime.clock.now()
    assert await store.take_run(db, name, 60, now + timedelta(hours=1))
    assert await store.take_run(db, name, 60, now)
    # Not again, also for a replica whose clock is a little behind.
    assert not await store.take_run(db, name, 60, now)
    assert not await store.take_run(db, name, 60, now - timedelta(seconds=store.CLOCKS_APART_S))
    assert await store.take_run(db, name, 60, now + timedelta(seconds=60))


async def test_a_half_from_before_the_clocks_step_back_is_swept_soon(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    """The main sweep has gone past its time already, so another pass must find it."""
    now = runtime.clock.now()
    swept = Sweeps(quiet)
    await run_passes(swept, runtime, now + timedelta(hours=1))
    one = await post_half(client)
    assert await run_passes(swept, runtime, now + timedelta(seconds=30)) == 1
    assert await in_doubt(db) == {one}


@pytest.mark.parametrize(("age_s", "found_by"), [(300, "trailing"), (5 * 3600, "hourly")])
async def test_halves_that_became_visible_behind_the_cursor_are_found(
    db: Connection, runtime: Runtime, group: str, age_s: int, found_by: str
) -> None:
    swept, now = Sweeps(quiet), runtime.clock.now()
    await run_passes(swept, runtime, now)
    # Its commit took `age_s`, so the cursor has long passed its first check time.
    *_, late = await insert_halves(db, now - timedelta(seconds=age_s), count=20, ends=19)
    assert await run_passes(swept, runtime, now + timedelta(seconds=30)) == 0
    assert await run_passes(swept, runtime, now + timedelta(seconds=61)) == (1 if found_by == "trailing" else 0)
    assert await run_passes(swept, runtime, now + timedelta(seconds=3601)) == (0 if found_by == "trailing" else 1)
    assert await in_doubt(db) == {late}
    assert [one["transaction_id"] for one in await db.fetch(SWEPT)] == [late]


async def days_ago(db: Connection, now: datetime, *days: int) -> dict[int, list[UUID]]:
    """Write three halves of each of these days that are visible only now; return them by day."""
    return {number: await insert_halves(db, now - timedelta(days=number), count=3) for number in days}


async def test_a_half_of_today_does_not_wait_for_the_older_days(
    db: Connection, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "PASS_BATCH", 2)
    # Noon: near midnight the ids of tomorrow are permitted, so its day counts too.
    swept, now = Sweeps(quiet), runtime.clock.now().replace(hour=12)
    await run_passes(swept, runtime, now)
    late = await days_ago(db, now, 5, 4, 3, 1)

    async def first_of(*days: int, after_s: int) -> None:
        """Step until another half is found; it must be of one of these days."""
        before = found = await in_doubt(db)
        while found == before:
            await swept.step(runtime, now + timedelta(seconds=after_s))
            found = await in_doubt(db)
        assert found - before <= {one for number in days for one in late[number]}

    for _ in range(2):
        await first_of(1, after_s=3601)
    assert {*late[1]} == await in_doubt(db)
    await first_of(3, after_s=3602)
    # A run that takes longer than an hour begins again with the newest days, and goes on with those that are left.
    late[1] += await insert_halves(db, now - timedelta(days=1))
    await first_of(1, after_s=7202)
    await first_of(3, after_s=7203)
    assert {*late[1], *late[3]} == await in_doubt(db)
    await run_passes(swept, runtime, now + timedelta(seconds=7204), steps=20)
    assert {one for ids in late.values() for one in ids} == await in_doubt(db)


async def test_a_process_that_stops_returns_the_hourly_run_that_it_has_not_completed(
    db: Connection, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "PASS_BATCH", 2)
    first, now = Sweeps(quiet), runtime.clock.now().replace(hour=12)
    await run_passes(first, runtime, now)
    late = await days_ago(db, now, 2, 1)
    due = now + timedelta(seconds=3601)
    await first.step(runtime, due)
    await first.drain(runtime)
    second = Sweeps(quiet)
    await run_passes(second, runtime, due + timedelta(seconds=10), steps=20)
    assert await in_doubt(db) == {*late[1], *late[2]}
    # A pass that is complete, and the run of another process, are left as they are.
    for one in (first, second):
        await one.drain(runtime)
    assert await db.fetchval("select ran_at from sweep where name = 'hourly'") == due + timedelta(seconds=10)


async def test_a_decided_day_is_not_swept(db: Connection, runtime: Runtime, group: str) -> None:
    now = runtime.clock.now()
    await insert_halves(db, now - timedelta(seconds=3600))
    await db.execute("update day set decided = true")
    assert await run_passes(Sweeps(quiet), runtime, now) == 1, "the main sweep starts at the oldest day"
    await db.execute("delete from check_back")
    assert await run_passes(Sweeps(quiet), runtime, now + timedelta(seconds=3601)) == 0
    await db.execute("update day set decided = false")
    assert await run_passes(Sweeps(quiet), runtime, now + timedelta(seconds=7202)) == 1


async def test_rows_of_decided_transactions_are_removed(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    one, two = await post_half(client), await post_half(client)
    swept, now = Sweeps(quiet), runtime.clock.now()
    await run_passes(swept, runtime, now + timedelta(seconds=7))
    await db.execute("update check_back set state = 2, next_check_at = null")
    await post_end(client, one)
    await run_passes(swept, runtime, now + timedelta(seconds=68))
    assert await in_doubt(db) == {two}


async def test_two_replicas_sweep_each_half_once(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, settings: Settings, dsn: str, group: str
) -> None:
    for _ in range(20):
        await post_half(client)
    async with AsyncExitStack() as stack:
        other = await assemble(settings, dsn, stack)
        now = runtime.clock.now() + timedelta(seconds=7)
        first, second = Sweeps(quiet), Sweeps(quiet)
        done = await asyncio.gather(run_passes(first, runtime, now), run_passes(second, other, now))
    assert sum(done) == 20
    assert await db.fetchval("select count(*) from check_back") == 20
    assert len(await db.fetch(SWEPT)) == 20


async def test_a_second_replica_does_not_sweep_at_the_same_time(db: Connection, runtime: Runtime, group: str) -> None:
    now = runtime.clock.now()
    await insert_halves(db, now - timedelta(seconds=60))
    await db.execute("insert into sweep values ('trailing', $1, $1), ('hourly', $1, $1)", now)
    async with db.transaction():
        assert await store.take_turn(db)
        assert (await Sweeps(quiet).step(runtime, now)).done == 0
    assert (await Sweeps(quiet).step(runtime, now)).done == 1


async def test_an_idle_sweep_writes_nothing(db: Connection, runtime: Runtime, group: str) -> None:
    swept, now = Sweeps(quiet), runtime.clock.now()
    await run_passes(swept, runtime, now)
    before = await db.fetch("select name, reached, xmin from sweep order by name")
    assert len(before) == 3
    await run_passes(swept, runtime, now + timedelta(seconds=5))
    assert await db.fetch("select name, reached, xmin from sweep order by name") == before


async def quiet_sweeps(runtime: Runtime, now: datetime) -> Sweeps:
    """Return sweeps that found nothing, with no other pass at work."""
    swept = Sweeps(quiet)
    await run_passes(swept, runtime, now)
    return swept


async def test_a_sweep_without_work_asks_one_question(
    db: Connection, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = runtime.clock.now()
    swept = await quiet_sweeps(runtime, now)
    with monkeypatch.context() as no_other:
        no_other.setattr(runtime.database, "connection", None)
        result = await swept.step(runtime, now + timedelta(seconds=1))
    assert (result.done, result.more, result.within_s) == (0, False, sweep.EVERY_S)
    before = await db.fetchval(store.REACHED)
    await swept.step(runtime, now + timedelta(seconds=11))
    assert await db.fetchval(store.REACHED) > before


@pytest.mark.parametrize(
    ("after_s", "within_s"), [(0.01, sweep.BUSY_EVERY_S), (0.5, 0.5), (5, sweep.EVERY_S)], ids=["soon", "half", "later"]
)
async def test_a_sweep_waits_for_the_next_first_check(
    db: Connection, runtime: Runtime, group: str, after_s: float, within_s: float
) -> None:
    now = runtime.clock.now()
    swept = await quiet_sweeps(runtime, now)
    due_at = now + timedelta(seconds=after_s)
    [one] = await insert_halves(db, due_at - timedelta(seconds=6))
    result = await swept.step(runtime, now)
    assert result.done == 0
    assert result.within_s == pytest.approx(within_s)
    assert (await swept.step(runtime, due_at)).done == 1
    assert await in_doubt(db) == {one}


async def test_a_half_that_became_visible_after_its_first_check_is_found_by_the_next_step(
    db: Connection, runtime: Runtime, group: str
) -> None:
    now = runtime.clock.now()
    swept = await quiet_sweeps(runtime, now)
    await swept.step(runtime, now + timedelta(seconds=5))
    [one] = await insert_halves(db, now - timedelta(seconds=3))
    assert (await swept.step(runtime, now + timedelta(seconds=6))).done == 1
    assert await in_doubt(db) == {one}


async def test_a_sweep_that_another_replica_overtook_goes_on(
    db: Connection, runtime: Runtime, settings: Settings, dsn: str, group: str
) -> None:
    now = runtime.clock.now()
    swept = await quiet_sweeps(runtime, now)
    async with AsyncExitStack() as stack:
        other = await assemble(settings, dsn, stack)
        [first] = await insert_halves(db, now - timedelta(seconds=5))
        assert (await Sweeps(quiet).step(other, now + timedelta(seconds=2))).done == 1
    assert (await swept.step(runtime, now + timedelta(seconds=3))).done == 0
    [second] = await insert_halves(db, now - timedelta(seconds=2))
    assert (await swept.step(runtime, now + timedelta(seconds=5))).done == 1
    assert await in_doubt(db) == {first, second}


@pytest.fixture
async def full(db: Connection, runtime: Runtime, group: str) -> datetime:
    """Write some thousand decided halves a day over three days and analyze; return the time of the newest."""
    now = runtime.clock.now()
    for days_ahead in range(3):
        at = now + timedelta(days=days_ahead)
        await insert_halves(db, at, count=4000, ends=4000)
    await db.execute("analyze half, op, day")
    return now + timedelta(days=2)


@pytest.mark.parametrize("generic", [False, True])
async def test_plans_of_the_sweeps(db: Connection, full: datetime, generic: bool) -> None:
    times = Range(full - timedelta(minutes=1), full + timedelta(minutes=1), 300)
    kinds = ["timestamptz", "timestamptz", "uuid", "uuid", "int", "timestamptz"]
    arguments = [times.since, times.until, *times.ids(), 500, full]
    for statement in (store.SWEEP_MAIN, store.SWEEP_AGAIN):
        await _assert_keyed(db, statement, kinds, arguments, generic, today=f"{full:%Y%m%d}")
    await db.execute("vacuum half")
    found = await scans(db, store.NEXT_DUE, ["timestamptz", "uuid"], [times.since, times.low], generic=generic)
    read = [scan for scan in found if scan.table.startswith("half_2")]
    assert {scan.index and "first_check_at" in scan.index for scan in read} == {True}
    assert sum(scan.rows for scan in read) <= 3
    low, high = day_bounds(full.date())
    await _assert_keyed(
        db,
        store.SWEEP_IDS,
        ["uuid", "uuid", "int", "timestamptz"],
        [low, high, 500, full + timedelta(seconds=7)],
        generic,
        f"{full:%Y%m%d}",
    )


async def _assert_keyed(
    db: Connection, statement: str, kinds: list[str], arguments: list[object], generic: bool, today: str
) -> None:
    found = [scan for scan in await scans(db, statement, kinds, arguments, generic=generic) if scan.rows > 1]
    big = [scan for scan in found if scan.table.startswith(("half_2", "op_2"))]
    assert {scan.table for scan in big} == {f"half_{today}", f"op_{today}"}
    for scan in big:
        assert "Seq" not in scan.node
        assert scan.index is not None
        # A batch of 500 (all of one time in the test's data) reads about as many rows, not its whole partition twice.
        assert scan.rows <= 4001
