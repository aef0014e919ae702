"""Leases under concurrency: one holder at a time, and an epoch that only rises."""

import asyncio
from datetime import UTC, datetime, timedelta

from app.database.connection import Connection, connect
from app.store.relay.leases import claim, leave, release, renew, workers_present

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
UNTIL = NOW + timedelta(seconds=10)
NAMES = [f"relay:{number}" for number in range(20)]


async def test_many_claim_at_once_and_each_lease_has_one_holder(dsn: str) -> None:
    connections = [await connect(dsn) for _ in range(6)]
    for turn in range(5):
        now = NOW + turn * timedelta(seconds=11)
        taken = await asyncio.gather(
            *(
                claim(connection, NAMES, f"worker-{number}", now + timedelta(seconds=10), 20, now)
                for number, connection in enumerate(connections)
            )
        )
        leases = [lease for found in taken for lease in found]
        assert sorted(lease.name for lease in leases) == sorted(NAMES)
        assert {lease.epoch for lease in leases} == {turn + 1}
    for connection in connections:
        await connection.close()


async def test_a_held_lease_is_not_taken_until_it_expires(db: Connection) -> None:
    [first] = await claim(db, ["a"], "one", UNTIL, 9, NOW)
    assert await claim(db, ["a"], "two", UNTIL, 9, UNTIL - timedelta(microseconds=1)) == []
    [second] = await claim(db, ["a"], "two", UNTIL + timedelta(seconds=10), 9, UNTIL)
    assert (first.epoch, second.epoch) == (1, 2)


async def test_a_claim_takes_at_most_its_limit(db: Connection) -> None:
    assert len(await claim(db, NAMES, "one", UNTIL, 3, NOW)) == 3
    assert len(await claim(db, NAMES, "two", UNTIL, 99, NOW)) == 17


async def test_only_the_newest_epoch_is_renewed(db: Connection) -> None:
    await claim(db, ["a", "b"], "one", UNTIL, 9, NOW)
    await claim(db, ["a"], "two", UNTIL + timedelta(seconds=10), 9, UNTIL)
    assert await renew(db, {"a": 1, "b": 1}, "one", UNTIL + timedelta(seconds=20)) == {"b"}
    # The same owner in an older epoch (a claim whose answer was lost) is stale as well.
    assert await renew(db, {"a": 1}, "two", UNTIL) == set()
    assert await renew(db, {"a": 2}, "two", UNTIL + timedelta(seconds=20)) == {"a"}


async def test_a_released_lease_is_free_at_once_and_its_epoch_still_rises(db: Connection) -> None:
    await claim(db, ["a"], "one", UNTIL, 9, NOW)
    await release(db, {"a": 1}, "two", NOW)
    assert await claim(db, ["a"], "two", UNTIL, 9, NOW) == []
    await release(db, {"a": 1}, "one", NOW)
    [taken] = await claim(db, ["a"], "two", UNTIL, 9, NOW)
    assert taken.epoch == 2


async def test_a_claim_waits_for_a_settle_that_holds_the_row(db: Connection, dsn: str) -> None:
    await claim(db, ["a"], "one", UNTIL, 9, NOW)
    other = await connect(dsn)
    settling = db.transaction()
    await settling.start()
    await db.execute("select from lease where name = 'a' for share")
    claiming = asyncio.create_task(claim(other, ["a"], "two", UNTIL + timedelta(seconds=10), 9, UNTIL))
    await asyncio.wait([claiming], timeout=0.1)
    assert not claiming.done()
    await settling.commit()
    assert len(await claiming) == 1
    await other.close()


async def test_workers_are_present_until_they_leave_or_their_lease_expires(db: Connection) -> None:
    assert await workers_present(db, "relay-worker", "one", UNTIL, NOW) == {"one"}
    assert await workers_present(db, "relay-worker", "two", UNTIL, NOW) == {"one", "two"}
    assert await workers_present(db, "relay-worker", "one", UNTIL, NOW) == {"one", "two"}
    await leave(db, "relay-worker", "one")
    assert await workers_present(db, "relay-worker", "two", UNTIL, NOW) == {"two"}
    assert await workers_present(db, "relay-worker", "three", UNTIL, UNTIL) == {"three"}
    await workers_present(db, "relay-worker", "three", UNTIL, NOW + timedelta(hours=2))
    assert await db.fetchval("select count(*) from lease") == 1
