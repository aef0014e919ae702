"""What workers are scaled by, how long a check or a delivery has been due without a worker taking it; and how long
messages have been tried in vain."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.database.connection import Connection
from app.ids import uuid7
from app.loops import gauges
from app.runtime.state import Runtime
from app.store.admin.gauges import OLDEST_DUE, RETRIES, Retries, oldest_due, retries_of
from tests.conftest import register_group
from tests.support.explain import big, scans

NOW = datetime(2026, 11, 21, 10, 30, tzinfo=UTC)
MANY = 3000


async def in_doubt(db: Connection, group: str, due_s: float, **columns: Any) -> None:
    """Write a check_back row that is due since `due_s` seconds."""
    row = {
        "transaction_id": uuid7(NOW),
        "producer_group": group,
        "state": 1,
        "swept_at": NOW,
        "next_check_at": NOW - timedelta(seconds=due_s),
        **columns,
    }
    await insert(db, "check_back", row)


async def subscription(db: Connection, name: str, **columns: Any) -> int:
    """Write a subscription's row; return its number."""
    row = {
        "name": name,
        "topics": ["order"],
        "destination": "{}",
        "secrets": "[]",
        "start": "{}",
        "max_in_flight": 32,
        "timeout_s": 5.0,
        "retry": [5.0],
        "state": "active",
        "created_at": NOW,
        "updated_at": NOW,
        "started_after": 0,
        "matches_since": NOW,
        **columns,
    }
    await insert(db, "subscription", row)
    number: int = await db.fetchval("select subscription_id from subscription where name = $1", name)
    return number


async def retry(db: Connection, number: int, due_s: float, **columns: Any) -> None:
    """Write a delivery_retry row that is due since `due_s` seconds."""
    row = {
        "subscription_id": number,
        "transaction_id": uuid7(NOW),
        "position": 0,
        "offset": 1,
        "topic": "order",
        "attempts": 1,
        "first_at": NOW - timedelta(hours=1),
        "due_at": NOW - timedelta(seconds=due_s),
        **columns,
    }
    await insert(db, "delivery_retry", row)


async def insert(db: Connection, table: str, row: dict[str, Any]) -> None:
    names = ", ".join(f'"{name}"' for name in row)
    marks = ", ".join(f"${index}" for index in range(1, len(row) + 1))
    await db.execute(f"insert into {table} ({names}) values ({marks})", *row.values())


async def waits(db: Connection) -> tuple[float | None, float | None]:
    """How long the oldest check and the oldest delivery are due, in seconds."""
    found = await oldest_due(db, NOW)
    check, delivery = (at and (NOW - at).total_seconds() for at in (found.check_at, found.delivery_at))
    return check, delivery


async def test_nothing_is_due(runtime: Runtime, db: Connection) -> None:
    assert await waits(db) == (None, None)
    await gauges.step(runtime, NOW)
    shown = runtime.metrics.exposition().decode()
    assert 'halfnote_oldest_due_seconds{what="check"} 0.0' in shown
    assert 'halfnote_oldest_due_seconds{what="delivery"} 0.0' in shown


async def test_unclaimed_checks_count_and_others_do_not(runtime: Runtime, db: Connection) -> None:
    for name in ("shop", "bank"):
        await register_group(db, name)
    await register_group(db, "held", held_until=NOW + timedelta(seconds=60))
    await in_doubt(db, "shop", 10)
    await in_doubt(db, "shop", 400, leased_until=NOW + timedelta(seconds=5))
    await in_doubt(db, "bank", 30, leased_until=NOW - timedelta(seconds=5))
    await in_doubt(db, "bank", -30)
    await in_doubt(db, "bank", 0, state=2, next_check_at=None)
    await in_doubt(db, "held", 500)
    assert await waits(db) == (30, None)
    await gauges.step(runtime, NOW)
    assert 'halfnote_oldest_due_seconds{what="check"} 30.0' in runtime.metrics.exposition().decode()


async def test_unclaimed_deliveries_count_and_others_do_not(db: Connection) -> None:
    good = await subscription(db, "good")
    await retry(db, good, 20)
    await retry(db, good, 400, leased_until=NOW + timedelta(seconds=5))
    await retry(db, good, 400, replay=1)
    await retry(db, good, -20)
    ordered = await subscription(db, "ordered", ordered="key")
    await retry(db, ordered, 400, key="order-1030", first_at=None)
    await retry(db, await subscription(db, "paused", state="paused"), 400)
    await retry(db, await subscription(db, "gone", deleted_at=NOW), 400)
    broken = await subscription(db, "broken")
    await retry(db, broken, 400)
    place = {"subscription_id": broken, "shards": 1, "shard": 0, "offset": 0, "moved_at": NOW, "opened_at": NOW}
    await insert(db, "checkpoint", place)
    limits = await subscription(db, "limits")
    await retry(db, limits, 400)
    limited = {"subscription_id": limits, "opened_at": None, "limited_since": NOW, "paused_until": NOW}
    await insert(db, "checkpoint", place | limited)
    assert await waits(db) == (None, 20)
    await retry(db, ordered, 60, key="order-1031")
    assert await waits(db) == (None, 60)


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
async def test_each_group_and_subscription_is_one_probe(db: Connection, generic: bool) -> None:
    await register_group(db, "shop")
    number = await subscription(db, "good")
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
        "select gen_random_uuid(), 'shop', 1, $1::timestamptz, $1::timestamptz - make_interval(secs => n) "
        "from generate_series(1, $2::int) n",
        NOW,
        MANY,
    )
    await db.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "due_at) select $1::int, gen_random_uuid(), 0, n, 'order', 1, $2::timestamptz, "
        "$2::timestamptz - make_interval(secs => n) from generate_series(1, $3::int) n",
        number,
        NOW,
        MANY,
    )
    await db.execute("analyze check_back, delivery_retry")
    assert await waits(db) == (MANY, MANY)
    found = await scans(db, OLDEST_DUE, ["timestamptz"], [NOW.isoformat()], generic=generic)
    read = {scan.table: scan for scan in found if scan.table in ("check_back", "delivery_retry")}
    assert {table: scan.index for table, scan in read.items()} == {
        "check_back": "check_back_due",
        "delivery_retry": "delivery_retry_due",
    }
    assert all(scan.rows <= 1 for scan in read.values())
    assert big(found) == []


def shown(runtime: Runtime, name: str) -> dict[str, float]:
    """A gauge by subscription."""
    lines = (line.rpartition(" ") for line in runtime.metrics.exposition().decode().splitlines())
    return {series.split('"')[1]: float(value) for series, _, value in lines if series.startswith(f"{name}{{")}


async def test_what_waits_for_another_try_is_shown_however_far_off_it_is(runtime: Runtime, db: Connection) -> None:
    good = await subscription(db, "good")
    await retry(db, good, -3600, first_at=NOW - timedelta(hours=2))
    await retry(db, good, -50_000, first_at=NOW - timedelta(hours=9))
    await retry(db, good, 1, first_at=NOW - timedelta(seconds=6), leased_until=NOW + timedelta(minutes=15))
    # Never tried: its producer's delay.
    await retry(db, good, -60, first_at=None, attempts=0)
    await subscription(db, "well")
    gone = await subscription(db, "gone")
    await retry(db, gone, -60)
    await gauges.step(runtime, NOW)
    assert shown(runtime, "halfnote_retries_waiting") == {"good": 3, "well": 0, "gone": 1}
    assert shown(runtime, "halfnote_oldest_retry_seconds") == {"good": 9 * 3600, "well": 0, "gone": 3600}
    assert shown(runtime, "halfnote_relay_lag_seconds") == {}
    await db.execute("update subscription set deleted_at = $1 where subscription_id = $2", NOW, gone)
    await db.execute("delete from delivery_retry where due_at > $1", NOW + timedelta(hours=9))
    await gauges.step(runtime, NOW)
    assert shown(runtime, "halfnote_retries_waiting") == {"good": 2, "well": 0}
    assert shown(runtime, "halfnote_oldest_retry_seconds") == {"good": 2 * 3600, "well": 0}


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
async def test_retries_are_found_past_many_delays(db: Connection, generic: bool) -> None:
    number = await subscription(db, "good")
    await db.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
        "select $1::int, gen_random_uuid(), 0, n, 'order', 0, $2::timestamptz + make_interval(secs => n) "
        "from generate_series(1, $3::int) n",
        number,
        NOW,
        MANY,
    )
    for _ in range(2):
        await retry(db, number, -60)
    await db.execute("analyze delivery_retry")
    assert await retries_of(db) == {"good": Retries(2, NOW - timedelta(hours=1))}
    found = await scans(db, RETRIES, ["bigint"], [MANY], generic=generic)
    read = [scan for scan in found if scan.table == "delivery_retry"]
    assert [scan.index for scan in read] == ["delivery_retry_tried"] * 2
    assert all(scan.rows <= 2 for scan in read)
    assert big(found) == []
