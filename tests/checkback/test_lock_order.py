"""Statements that lock several transactions in doubt: no two of them wait for each other."""

import asyncio
from uuid import UUID

from app.database.connection import Connection, connect
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_all_now
from app.store.checkback.results import SettledCheck, hold, release, settle
from app.store.checkback.sweeps import remove_decided
from tests.coordinator.test_races import until_waiting
from tests.support.check_stepping import many_in_doubt

LOCK = "select from check_back where transaction_id = $1 for update"


async def test_checks_are_settled_while_a_person_asks_for_the_same_ones(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    """The settle waits in its middle, and a request for checks takes rows that it has before it and after it."""
    now = runtime.clock.now()
    first, second, third = await many_in_doubt(db, runtime, group, 3)
    holder, settling, asking = [await connect(dsn) for _ in range(3)]
    rows = [
        SettledCheck(third, 0, 1, now, next_check_at=now),
        SettledCheck(second, 0, 1, now, next_check_at=now),
        SettledCheck(first, 0, 1, now, over=True),
    ]
    async with holder.transaction():
        await holder.execute(LOCK, third)
        settled = asyncio.create_task(settle(settling, rows, now))
        await until_waiting(db)
        asked = asyncio.create_task(ask_all_now(asking, [first, second], now))
        await until_waiting(db, 2)
    await settled
    # The first one was removed meanwhile; it is not decided, so the request adds it again.
    assert await asked == [first, second]
    await close(holder, settling, asking)


async def test_leases_are_held_and_released_while_a_person_asks_for_the_same_checks(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    now = runtime.clock.now()
    ids = await many_in_doubt(db, runtime, group, 3)
    # A plan may read the rows in the order of the table.
    for one in reversed(ids):
        await db.execute("update check_back set asked = 1 where transaction_id = $1", one)
    holder, changing, asking = [await connect(dsn) for _ in range(3)]
    await changing.execute("set enable_indexscan = off; set enable_bitmapscan = off")
    for change in (lambda: hold(changing, [(one, 0) for one in ids], now), lambda: release(changing, of(ids))):
        async with holder.transaction():
            await holder.execute(LOCK, ids[1])
            changed = asyncio.create_task(change())
            await until_waiting(db)
            asked = asyncio.create_task(ask_all_now(asking, ids, now))
            await until_waiting(db, 2)
        await changed
        assert await asked == ids
    assert await db.fetchval("select count(*) from check_back where lease_epoch = 1 and leased_until is null") == 3
    await close(holder, changing, asking)


async def test_a_row_that_another_session_has_locked_is_left_to_the_next_pass(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    ids = await many_in_doubt(db, runtime, group, 2)
    await db.executemany(
        "insert into op (transaction_id, verdict, source, decided_at) values ($1, 2, 0, now())", [(one,) for one in ids]
    )
    holder = await connect(dsn)
    async with holder.transaction():
        await holder.execute(LOCK, ids[0])
        async with asyncio.timeout(10):
            assert (await remove_decided(db, UUID(int=0), 100)).swept == 1
    assert (await remove_decided(db, UUID(int=0), 100)).swept == 1
    assert await db.fetchval("select count(*) from check_back") == 0
    await close(holder)


def of(ids: list[UUID]) -> list[tuple[UUID, int]]:
    return [(one, 0) for one in ids]


async def close(*connections: Connection) -> None:
    for one in connections:
        await one.close()
