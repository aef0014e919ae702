"""Days: partitions made beside readers and by several replicas at once, and which day an id is of."""

import asyncio
from datetime import date, timedelta

import asyncpg
import httpx
import pytest

from app import migrate
from app.database.connection import Connection, connect
from app.ids import day_bounds, uuid7
from app.migrate import ensure_days
from app.runtime.state import Runtime
from app.store.retention import days, partitions
from tests.support.days import go_to, long_ago, partitions_of, post_half

THEN = long_ago(20)


async def test_a_day_has_a_partition_of_every_table(db: Connection) -> None:
    assert await ensure_days(db, THEN, days_ahead=1) == [
        (THEN + timedelta(days=ahead)).date().isoformat() for ahead in (-1, 0, 1)
    ]
    for ahead in (-1, 0, 1):
        made = await partitions_of(db, (THEN + timedelta(days=ahead)).date())
        assert len(made) == 5
        assert all(made.values())
    assert await ensure_days(db, THEN, days_ahead=1) == []


async def test_a_day_that_left_is_not_made_again(db: Connection) -> None:
    await ensure_days(db, THEN, days_ahead=0)
    for table in partitions.DETACHED:
        await partitions.detach(db, table, THEN.date(), finalize=False)
    await partitions.drop(db, THEN.date())
    await db.execute("update day set state = 'gone' where day = $1", THEN.date())
    assert await ensure_days(db, THEN, days_ahead=0) == []
    assert await partitions_of(db, THEN.date()) == {}


async def test_ids_of_a_day_go_into_its_partition(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    midnight = THEN.replace(hour=0)
    for at in (midnight, midnight - timedelta(milliseconds=1)):
        await go_to(runtime, db, at)
        transaction_id = await post_half(client)
        found = await db.fetchrow("select transaction_id, tableoid::regclass::text as partition from half")
        assert found is not None
        assert str(found["transaction_id"]) == transaction_id
        assert found["partition"] == days.partition_name("half", at.date())
        await db.execute("delete from half")


async def test_which_day_an_id_is_of(db: Connection) -> None:
    await ensure_days(db, THEN, days_ahead=0)
    low, high = day_bounds(THEN.date())
    found = await days.day_of(db, low)
    assert found is not None
    assert (found.day, found.state, found.archive, found.held) == (THEN.date(), "open", None, [])
    assert await days.day_of(db, high) is None
    assert await days.day_of(db, uuid7(THEN - timedelta(days=9))) is None


async def test_no_default_partition(db: Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="no partition"):
        await db.execute("insert into op values ($1, 1, 0, null, null, now())", uuid7(THEN))


async def test_replicas_that_make_the_same_days_take_turns(dsn: str, db: Connection) -> None:
    replicas = [await connect(dsn) for _ in range(4)]
    try:
        await asyncio.gather(*(ensure_days(replica, THEN, days_ahead=2) for replica in replicas))
    finally:
        for replica in replicas:
            await replica.close()
    made = [day.day for day in await days.days(db) if day.day <= (THEN + timedelta(days=2)).date()]
    assert made == [(THEN + timedelta(days=ahead)).date() for ahead in (-1, 0, 1, 2)]
    for day in made:
        assert list((await partitions_of(db, day)).values()) == [True] * 5


async def test_half_made_day_is_finished(db: Connection) -> None:
    async with db.transaction():
        await days.attach(db, "op", THEN.date())
    await ensure_days(db, THEN, days_ahead=0)
    assert list((await partitions_of(db, THEN.date())).values()) == [True] * 5


async def test_attaching_beside_a_reader_needs_no_wait(
    client: httpx.AsyncClient, dsn: str, db: Connection, group: str
) -> None:
    reader = await connect(dsn)
    try:
        async with reader.transaction(isolation="repeatable_read"):
            await reader.fetchval("select count(*) from half, op, outbox, receipt, attempt")
            assert len(await ensure_days(db, THEN, days_ahead=3)) == 5
            await post_half(client)
    finally:
        await reader.close()


async def test_attaching_gives_way_to_a_lock_and_tries_again(
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
                while not await waiting(holder, db.get_server_pid()):
                    assert not attaching.done()
        await attaching
    finally:
        await holder.close()
    assert await partitions.standing(db, "half", day) == "attached"


async def waiting(watcher: Connection, pid: int) -> bool:
    await watcher.execute("select pg_stat_clear_snapshot()")
    return bool(
        await watcher.fetchval(
            "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')", pid
        )
    )
