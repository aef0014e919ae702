"""Plans of the statements of `GET /stats` over full days: short index ranges, whatever the tables hold."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from app.database.connection import Connection, connect
from app.store.admin.figures import COUNTED_MOST, DEAD, OPEN_BREAKERS, UNDECIDED
from app.store.admin.minutes import ADD, DONE, FORGET, SERIES, SET, STANDS, WINDOWS
from app.store.relay.laggards import ENTRIES_MOST, LAGGARDS, SUBSCRIPTIONS_MOST
from app.verdicts import CheckBackState
from tests.coordinator.test_statement_plans import full_days
from tests.support import postgres
from tests.support.explain import Scan, big, scans

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
SUBSCRIPTIONS, MINUTES, MOST = 100, 40_000, 1000
PLANS = pytest.mark.parametrize("generic", [False, True])


@pytest.fixture
async def busy() -> AsyncIterator[Connection]:
    """A connection to full days with transactions in doubt, dead letters, lagging subscriptions and minutes."""
    url = await asyncio.to_thread(lambda: postgres.create_database(busy_days()))
    connection = await connect(url)
    yield connection
    await connection.close()
    await asyncio.to_thread(postgres.drop_database, url)


def busy_days() -> str:
    """Make the database with full days and much that stands open, once a run; return its name."""
    days = full_days()
    return postgres.ensure_template("halfnote_stats", lambda url: asyncio.run(_seed(url)), template=days)


async def _seed(url: str) -> None:
    db = await connect(url)
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) "
        "select transaction_id, 'shop', case when n % 10 = 0 then $1::int else $2::int end, now() "
        "from (select transaction_id, row_number() over () as n from half) h",
        CheckBackState.PARKED,
        CheckBackState.IN_DOUBT,
    )
    await db.execute(
        "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, "
        "created_at, updated_at, started_after, matches_since) "
        "select 's' || n, '{order}', '{}', '[]', '{}', 1, 1, '{}', 'active', now(), now(), 0, now() "
        "from generate_series(1, $1::int) n",
        SUBSCRIPTIONS,
    )
    # The furthest behind have receipts of everything that was looked at.
    await db.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select subscription_id, 1, 0, subscription_id * 10, now() from subscription"
    )
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, settled_at) select o.transaction_id, 0, s, o.\"offset\", 'delivered', 1, now(), 1, now() "
        'from outbox o, generate_series(1, 5) s where o."offset" < 2000'
    )
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, reason, '
        "died_at) select s.subscription_id, o.transaction_id, 0, o.\"offset\", o.topic, o.key, 17, 'x', now() "
        'from subscription s, (select * from outbox order by "offset" desc limit 300) o'
    )
    await db.execute(
        "insert into stats_minute (minute, halves) select $1::timestamptz - n * interval '1 min', 1 "
        "from generate_series(1, $2::int) n",
        AT,
        MINUTES,
    )
    await db.execute("vacuum analyze")
    await db.close()


def read(found: list[Scan], table: str) -> float:
    return sum(scan.rows for scan in found if scan.table == table)


@PLANS
async def test_undecided_transactions_are_read_up_to_the_limit(busy: Connection, generic: bool) -> None:
    found = await scans(busy, UNDECIDED, ["bigint", "bigint"], [MOST + 1, COUNTED_MOST], generic=generic)
    # Every row once to count it. Every tenth row is parked.
    rows = await busy.fetchval("select count(*) from check_back")
    assert read(found, "check_back") <= rows + 12 * (MOST + 1)
    assert all("_pkey" in (scan.index or "") for scan in big(found))
    assert sum(scan.rows for scan in big(found)) <= 2 * (MOST + 1) + 2


@PLANS
async def test_dead_letters_are_read_up_to_the_limit(busy: Connection, generic: bool) -> None:
    found = await scans(busy, DEAD, ["bigint", "bigint"], [MOST + 1, 2000], generic=generic)
    assert read(found, "dead_letter") <= MOST + 2 + 2000
    assert {scan.index for scan in found if scan.table == "dead_letter" and scan.rows == 1} == {"dead_letter_died"}


@PLANS
async def test_the_log_is_read_after_few_checkpoints(busy: Connection, generic: bool) -> None:
    found = await scans(busy, LAGGARDS, [], [], generic=generic)
    log = [scan for scan in big(found) if scan.table.startswith("outbox")]
    assert {"offset" in (scan.index or "") for scan in log} == {True}
    assert sum(scan.rows for scan in log) <= SUBSCRIPTIONS_MOST * ENTRIES_MOST + 10
    receipts = [scan for scan in big(found) if scan.table.startswith("receipt")]
    assert receipts
    assert all("_pkey" in (scan.index or "") for scan in receipts)


async def test_the_laggard_is_past_what_has_receipts(busy: Connection) -> None:
    names = [row["name"] for row in await busy.fetch(LAGGARDS)]
    assert names
    assert not {f"s{n}" for n in range(1, 6)} & set(names)


@PLANS
async def test_breakers_are_read_once_for_each_subscription(busy: Connection, generic: bool) -> None:
    found = await scans(busy, OPEN_BREAKERS, ["bigint"], [20], generic=generic)
    assert read(found, "checkpoint") <= SUBSCRIPTIONS


@PLANS
async def test_minutes_are_a_range_of_the_primary_key(busy: Connection, generic: bool) -> None:
    after = [AT - timedelta(minutes=15), AT - timedelta(days=1)]
    found = await scans(busy, WINDOWS, ["timestamptz[]", "timestamptz"], [after, AT], generic=generic)
    assert {scan.node for scan in found if scan.table == "stats_minute"} <= {
        "Index Scan",
        "Index Only Scan",
        "Bitmap Heap Scan",
    }
    assert read(found, "stats_minute") <= 1440 + 15
    day = [AT - timedelta(days=1), AT, timedelta(minutes=10)]
    found = await scans(busy, SERIES, ["timestamptz", "timestamptz", "interval"], day, generic=generic)
    assert read(found, "stats_minute") <= 1440
    for statement, names in ((ADD, DONE), (SET, STANDS)):
        kinds = ["timestamptz", *("bigint" for _ in names)]
        found = await scans(busy, statement, kinds, [AT, *(1 for _ in names)], generic=generic)
        assert read(found, "stats_minute") == 0
    found = await scans(busy, FORGET, ["timestamptz"], [AT - timedelta(minutes=MINUTES - 3)], generic=generic)
    assert read(found, "stats_minute") <= 3
