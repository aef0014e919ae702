"""Days: partitions created beside readers and by several replicas at once, and the day of an id."""

import asyncio
from datetime import date, timedelta

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from app import migrate
from app.database.connection import Connection, connect
from app.ids import day_bounds, uuid7
from app.migrate import ensure_days
from app.runtime.state import Runtime
from app.store.retention import days, partitions
from tests.support.days import go_to, long_ago, partitions_of, post_half

OLD_TIME = long_ago(20)


async def test_a_day_has_a_partition_of_every_table(db: Connection) -> None:
    assert await ensure_days(db, OLD_TIME, days_ahead=1) == [
        (OLD_TIME + timedelta(days=ahead)).date().isoformat() for ahead in (-1, 0, 1)
    ]
    for ahead in (-1, 0, 1):
        created = await partitions_of(db, (OLD_TIME + timedelta(days=ahead)).date())
        assert len(created) == 5
        assert all(created.values())
    assert await ensure_days(db, OLD_TIME, days_ahead=1) == []


async def test_a_day_that_was_removed_is_not_created_again(db: Connection) -> None:
    await ensure_days(db, OLD_TIME, days_ahead=0)
    for table in partitions.DETACHED:
        await partitions.detach(db, table, OLD_TIME.date(), finalize=False)
    await partitions.drop(db, OLD_TIME.date())
    await db.execute("update day set state = 'gone' where day = $1", OLD_TIME.date())
    assert await ensure_days(db, OLD_TIME, days_ahead=0) == []
    assert await partitions_of(db, OLD_TIME.date()) == {}


async def test_ids_of_a_day_go_into_its_partition(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    midnight = OLD_TIME.replace(hour=0)
    for at in (midnight, midnight - timedelta(milliseconds=1)):
        await go_to(runtime, db, at)
        transaction_id = await post_half(client)
        found = await db.fetchrow("select transaction_id, tableoid::regclass::text as partition from half")
        assert found is not None
        assert str(found["transaction_id"]) == transaction_id
        assert found["partition"] == days.partition_name("half", at.date())
        await db.execute("delete from half")


async def test_the_day_of_an_id(db: Connection) -> None:
    await ensure_days(db, OLD_TIME, days_ahead=0)
    low, high = day_bounds(OLD_TIME.date())
    found = await days.day_of(db, low)
    assert found is not None
    assert (found.day, found.state, found.archive, found.held) == (OLD_TIME.date(), "open", None, [])
    assert await days.day_of(db, high) is None
    assert await days.day_of(db, uuid7(OLD_TIME - timedelta(days=9))) is None


async def test_no_default_partition(db: Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="no partition"):
        await db.execute("insert into op values ($1, 1, 0, null, null, now())", uuid7(OLD_TIME))


async def test_replicas_that_create_the_same_days_take_turns(dsn: str, db: Connection) -> None:
    replicas = [await connect(dsn) for _ in range(4)]
    try:
        await asyncio.gather(*(ensure_days(replica, OLD_TIME, days_ahead=2) for replica in replicas))
    finally:
        for replica in replicas:
            await replica.close()
    created = [day.day for day in await days.days(db) if day.day <= (OLD_TIME + timedelta(days=2)).date()]
    assert created == [(OLD_TIME + timedelta(days=ahead)).date() for ahead in (-1, 0, 1, 2)]
    for day in created:
        assert list((await partitions_of(db, day)).values()) == [True] * 5


async def test_a_partly_created_day_is_completed(db: Connection) -> None:
    async with db.transaction():
        await days.attach(db, "op", OLD_TIME.date())
    await ensure_days(db, OLD_TIME, days_ahead=0)
    assert list((await partitions_of(db, OLD_TIME.date())).values()) == [True] * 5


@pytest.mark.parametrize("lost", [partitions.DETACHED, ("half",), ("op", "attempt")])
async def test_an_open_day_that_lost_partitions_is_completed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, lost: tuple[str, ...]
) -> None:
    await go_to(runtime, db, OLD_TIME)
    for table in lost:
        await db.execute(f"drop table {days.partition_name(table, OLD_TIME.date())}")
    with capture_logs() as logs:
        assert await ensure_days(db, OLD_TIME, days_ahead=0) == [OLD_TIME.date().isoformat()]
        assert await ensure_days(db, OLD_TIME, days_ahead=0) == []
    assert [(one["event"], one["day"], sorted(one["made"])) for one in logs] == [
        ("day_was_incomplete", OLD_TIME.date().isoformat(), sorted(lost))
    ]
    assert list((await partitions_of(db, OLD_TIME.date())).values()) == [True] * 5
    await post_half(client)


async def test_a_day_that_is_being_removed_is_not_completed(dsn: str, db: Connection) -> None:
    await ensure_days(db, OLD_TIME, days_ahead=0)
    await db.execute(f"alter table half detach partition {days.partition_name('half', OLD_TIME.date())}")
    remover = await connect(dsn)
    try:
        async with remover.transaction():
            # The day looks open until the commit.
            await days.close_day(remover, OLD_TIME.date(), OLD_TIME)
            completing = asyncio.create_task(ensure_days(db, OLD_TIME, days_ahead=0))
            async with asyncio.timeout(20):
                while not await waits_for_lock(remover, db.get_server_pid()):
                    assert not completing.done()
        assert await completing == []
    finally:
        await remover.close()
    assert await partitions.standing(db, "half", OLD_TIME.date()) == "detached"


async def test_attaching_does_not_wait_for_a_reader(
    client: httpx.AsyncClient, dsn: str, db: Connection, group: str
) -> None:
    reader = await connect(dsn)
    try:
        async with reader.transaction(isolation="repeatable_read"):
            await reader.fetchval("select count(*) from half, op, outbox, receipt, attempt")
            assert len(await ensure_days(db, OLD_TIME, days_ahead=3)) == 5
            await post_half(client)
    finally:
        await reader.close()


async def test_attaching_yields_to_a_lock_and_retries(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await connect(dsn)
    day = date(2033, 3, 1)
    try:
        async with holder.transaction():
            await holder.execute("lock table half in share update exclusive mode")
            monkeypatch.setattr(migrate, "LOCK_RETRIES", 2)
            with pytest.raises(asyncpg.LockNotAvailableError):
                await migrate.attach_patiently(db, "half", day)
            monkeypatch.setattr(migrate, "LOCK_RETRIES", 1000)
            attaching = asyncio.create_task(migrate.attach_patiently(db, "half", day))
            async with asyncio.timeout(20):
                while not await waits_for_lock(holder, db.get_server_pid()):
                    assert not attaching.done()
        await attaching
    finally:
        await holder.close()
    assert await partitions.standing(db, "half", day) == "attached"


async def waits_for_lock(watcher: Connection, pid: int) -> bool:
    await watcher.execute("select pg_stat_clear_snapshot()")
    return bool(
        await watcher.fetchval(
            "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')", pid
        )
    )
