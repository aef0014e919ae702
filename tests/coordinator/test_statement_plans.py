"""Plans of the hot statements over full days: index probes in the days of the ids, for every batch size."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.database.connection import Connection, connect
from app.ids import id_day, uuid7
from app.migrate import ensure_days, migrate
from app.store.checkback.requests import ASK_NOW
from app.store.coordinator.halves import (
    INSERT_HALF,
    INSERT_HALVES,
    INSERT_NEW_HALF,
    INSERT_NEW_HALVES,
    INSERT_NEW_SINGLE_HALVES,
    INSERT_SINGLE_HALVES,
    STORED_HALVES,
)
from app.store.coordinator.ops import (
    CHECKS,
    READ_RECORDED,
    RECORD_END,
    RECORD_ENDS,
    RECORD_ENDS_OF_CHECKS,
    RECORD_FIRST_END,
    RECORD_FIRST_ENDS,
)
from app.store.retention.days import partition_name
from tests.conftest import register_group
from tests.support import postgres
from tests.support.explain import big, scans

DAYS = 4
PER_DAY = 5000

SEED = """
with ids as (
  select n, (lpad(to_hex($1::bigint + n), 12, '0') || '7000' || '8' || lpad(to_hex(n), 15, '0'))::uuid as id
  from generate_series(1, $2::int) n
), halves as (
  insert into half (transaction_id, position, producer_group, topic, key, content_type, body, body_digest, born_at,
    first_check_at, digest)
  select id, 0, 'shop', 'order', 'order-' || n, 'application/json', '{}', '\\x00', to_timestamp($1 / 1000.0),
    to_timestamp($1 / 1000.0 + 6), '\\x00' from ids
), ops as (
  insert into op select id, 1, 0, null, null, to_timestamp($1 / 1000.0) from ids where n % 2 = 0
)
insert into outbox select id, 0, nextval('outbox_offset'), 'order', 'order-' || n, null, null, to_timestamp($1 / 1000.0)
from ids where n % 2 = 0
"""


async def _seed(url: str) -> None:
    await migrate(url, days_ahead=1)
    db = await connect(url)
    now = datetime.now(UTC)
    await register_group(db, "shop")
    for back in range(DAYS):
        noon = (now - timedelta(days=back)).replace(hour=0, minute=0, second=1)
        await ensure_days(db, noon, days_ahead=0)
        await db.execute(SEED, int(noon.timestamp() * 1000), PER_DAY)
    await db.execute("analyze")
    await db.close()


def full_days() -> str:
    """Make the database with four full days, once a run; return its name."""
    return postgres.ensure_template("halfnote_plans", lambda url: asyncio.run(_seed(url)))


@pytest.fixture
async def full() -> AsyncIterator[Connection]:
    """A connection to a database with four full days; its statements are rolled back."""
    url = await asyncio.to_thread(lambda: postgres.create_database(full_days()))
    connection = await connect(url)
    yield connection
    await connection.close()
    await asyncio.to_thread(postgres.drop_database, url)


async def stored_ids(db: Connection, count: int, *, odd: bool) -> list[UUID]:
    """Ids of today, one of three days ago among them if there is more than one."""
    chosen = (
        "select transaction_id from half where (right(key, 1) in ('1','3','5','7','9')) = $2 order by 1 {} limit $1"
    )
    recent = [row[0] for row in await db.fetch(chosen.format("desc"), max(1, count - 1), odd)]
    old = [row[0] for row in await db.fetch(chosen.format("asc"), 1, odd)]
    return sorted({*recent, *(old if count > 1 else [])})


def assert_keyed(found: list, ids: list[UUID], *, rows_each: int = 3) -> None:  # type: ignore[type-arg]
    """Assert that large tables are read by index only, only in the days of the ids, and about one row for each id."""
    executed = big(found)
    assert executed, "nothing was read at all"
    assert [scan for scan in executed if "Seq Scan" in scan.node] == []
    days = {id_day(one) for one in ids}
    own = {partition_name(table, day) for day in days for table in ("half", "op", "outbox", "attempt", "receipt")}
    assert {scan.table for scan in executed} <= own
    for scan in executed:
        assert scan.rows <= rows_each * len(ids), f"{scan.table} read {scan.rows:g} rows for {len(ids)} ids"


both_plans = pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
batches = pytest.mark.parametrize("count", [1, 50, 500])


@both_plans
@batches
@pytest.mark.parametrize("statement", [RECORD_ENDS, RECORD_FIRST_ENDS], ids=["any", "first"])
async def test_end_probes_the_ids_own_days(full: Connection, statement: str, count: int, generic: bool) -> None:
    ids = await stored_ids(full, count, odd=True)
    size = len(ids)
    found = await scans(
        full,
        statement,
        ["uuid[]", "text[]", "smallint[]", "smallint[]", "text[]", "text[]", "bool[]", "timestamptz"],
        [ids, ["shop"] * size, [1] * size, [0] * size, [None] * size, [None] * size, [True] * size, datetime.now(UTC)],
        generic=generic,
    )
    assert_keyed(found, ids)


@both_plans
@batches
async def test_an_end_of_a_check_probes_the_ids_own_days(full: Connection, count: int, generic: bool) -> None:
    ids = await stored_ids(full, count, odd=True)
    size, now = len(ids), datetime.now(UTC)
    nothing: list[list[None]] = [[None] * size] * 7
    ends = [ids, ["shop"] * size, [1] * size, [0] * size, [None] * size, [None] * size, [True] * size]
    found = await scans(
        full,
        RECORD_ENDS_OF_CHECKS,
        [f"{kind}[]" for kind in ("uuid", "text", "smallint", "smallint", "text", "text", "bool")]
        + ["timestamptz", *CHECKS.types],
        [*ends, now, ids, [1] * size, [now] * size, *nothing],
        generic=generic,
    )
    assert_keyed([scan for scan in found if scan.table != "check_back"], ids)


@both_plans
@batches
async def test_reading_what_stands_probes_the_ids_own_days(full: Connection, count: int, generic: bool) -> None:
    ids = await stored_ids(full, count, odd=False)
    size = len(ids)
    found = await scans(
        full,
        READ_RECORDED,
        ["uuid[]", "text[]", "smallint[]", "smallint[]", "timestamptz"],
        [ids, ["shop"] * size, [2] * size, [0] * size, datetime.now(UTC)],
        generic=generic,
    )
    assert_keyed(found, ids)


@both_plans
@batches
async def test_asking_now_probes_the_ids_own_days(full: Connection, count: int, generic: bool) -> None:
    ids = await stored_ids(full, count, odd=True)
    found = await scans(full, ASK_NOW, ["uuid[]", "timestamptz"], [ids, datetime.now(UTC)], generic=generic)
    assert_keyed([scan for scan in found if scan.table != "check_back"], ids)


@both_plans
@batches
async def test_reading_stored_halves_probes_the_ids_own_days(full: Connection, count: int, generic: bool) -> None:
    ids = await stored_ids(full, count, odd=False)
    found = await scans(full, STORED_HALVES, ["uuid[]", "text[]"], [ids, ["shop"] * len(ids)], generic=generic)
    assert_keyed(found, ids)


@both_plans
@batches
@pytest.mark.parametrize(
    "statement",
    [INSERT_HALVES, INSERT_SINGLE_HALVES, INSERT_NEW_HALVES, INSERT_NEW_SINGLE_HALVES],
    ids=["any", "single", "new", "new-single"],
)
async def test_storing_halves_reads_no_big_table(full: Connection, statement: str, count: int, generic: bool) -> None:
    ids = sorted(uuid7(datetime.now(UTC)) for _ in range(count))
    size = len(ids)
    none = [None] * size
    types = ["uuid[]", "smallint[]", *["text[]"] * 4, "jsonb[]", "text[]", "bytea[]", "bytea[]", "float8[]", "bytea[]"]
    found = await scans(
        full,
        statement,
        [*types, "jsonb[]", "jsonb[]", "int[]", "text[]", "uuid[]", "timestamptz", "text[]"],
        [
            *[ids, [0] * size, ["shop"] * size, ["order"] * size, none, none, none, ["application/json"] * size],
            *[[b"{}"] * size, [b"0"] * size, none, [b"0"] * size, none, none, none, none, none],
            *[datetime.now(UTC), ["order"]],
        ],
        generic=generic,
    )
    assert big(found) == []
    assert {scan.table for scan in found} <= {"producer_group"}


@both_plans
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("statement", [RECORD_END, RECORD_FIRST_END], ids=["any", "first"])
async def test_a_lone_end_probes_its_own_day(full: Connection, statement: str, old: bool, generic: bool) -> None:
    ids = (await stored_ids(full, 2, odd=True))[0 if old else 1 :][:1]
    types = ["uuid", "text", "smallint", "smallint", "text", "text", "timestamptz"]
    arguments = [ids[0], "shop", 1, 0, None, None, datetime.now(UTC)]
    assert_keyed(await scans(full, statement, types, arguments, generic=generic), ids)


@both_plans
@pytest.mark.parametrize("statement", [INSERT_HALF, INSERT_NEW_HALF], ids=["any", "new"])
async def test_storing_a_lone_half_reads_no_big_table(full: Connection, statement: str, generic: bool) -> None:
    types = ["uuid", *["text"] * 5, "jsonb", "text", "bytea", "bytea", "float8", "bytea", "jsonb", "jsonb", "int"]
    one = uuid7(datetime.now(UTC))
    arguments = [one, "shop", "order", None, None, None, "application/json", b"{}", b"0", None, b"0"]
    found = await scans(
        full,
        statement,
        [types[0], "text", "text", "text", "text", *types[6:], "text", "uuid", "timestamptz"],
        [*arguments, None, None, None, None, None, datetime.now(UTC)],
        generic=generic,
    )
    assert big(found) == []
    assert {scan.table for scan in found} <= {"producer_group"}


@both_plans
async def test_days_that_are_gone_cost_an_end_nothing(full: Connection, generic: bool) -> None:
    await full.execute(
        "insert into day (day, low, high, state, changed_at) select "
        "current_date - 1000 + n, lpad(to_hex(n), 32, '0')::uuid, lpad(to_hex(n + 1), 32, '0')::uuid, 'gone', now() "
        "from generate_series(1, 400) n"
    )
    await full.execute("analyze day")
    # As on the connections that look up rows by key.
    await full.execute("set enable_seqscan = off")
    ids = [row[0] for row in await full.fetch("select transaction_id from half order by 1 desc limit 50")]
    later = await full.fetchval("select count(*) from day where high > $1", ids[-1])
    now, size = datetime.now(UTC), len(ids)
    many = [sorted(ids), ["shop"] * size, [1] * size, [0] * size, [None] * size, [None] * size, [False] * size, now]
    kinds = ["uuid[]", "text[]", "smallint[]", "smallint[]", "text[]", "text[]", "bool[]", "timestamptz"]
    one = ["uuid", "text", "smallint", "smallint", "text", "text", "timestamptz"]
    for statement, types, arguments in (
        (RECORD_ENDS, kinds, many),
        (RECORD_END, one, [ids[0], "shop", 1, 0, None, None, now]),
    ):
        found = await scans(full, statement, types, arguments, generic=generic)
        assert 0 < sum(scan.rows for scan in found if scan.table == "day") <= later
