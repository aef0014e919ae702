"""A whole day is read in ranges, with the results of one statement for the day, and no statement that reads it all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.database.connection import Connection
from app.migrate import ensure_days
from app.models import DAY_TABLES
from app.retention import archive_check, day_reading
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from app.store.retention import day_ranges, days
from app.store.retention.archive_manifest import TableDigest, holding_of
from app.store.retention.day_ranges import by_ranges
from app.store.retention.days import Day, partition_name
from app.store.retention.partitions import Manifest
from tests.coordinator.test_statement_plans import full
from tests.support.days import go_to, long_ago, partitions_of, write_transactions
from tests.support.examples import examples
from tests.support.explain import scans

__all__ = ["full"]

pytestmark = pytest.mark.usefixtures("group")

AT = datetime(2026, 1, 5, 12, tzinfo=UTC)
DAY = AT.date()
HALF, OP, OUTBOX, RECEIPT, ATTEMPT = (partition_name(table, DAY) for table in DAY_TABLES)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

# One statement for the whole day, as earlier versions read it.
WHOLE_MANIFEST = f"""
select (select count(*) from {HALF} where position = 0) as halves, (select count(*) from {OP}) as ops,
  (select count(*) from {HALF}) as messages, (select count(*) from {OUTBOX}) as published,
  (select count(*) from {HALF} h left join {OP} o using (transaction_id)
   where h.position = 0 and o.transaction_id is null) as undecided,
  (select count(*) from {OP} o left join (select transaction_id from {HALF} where position = 0) h using (transaction_id)
   where h.transaction_id is null) as strays,
  (select count(*) from {HALF} h join {OP} o using (transaction_id)
   left join {OUTBOX} b on b.transaction_id = h.transaction_id and b.position = h.position
   where o.verdict = 1 and b.transaction_id is null) as unpublished,
  (select count(*) from {OUTBOX} b left join (
     select h.transaction_id, h.position from {HALF} h join {OP} o using (transaction_id) where o.verdict = 1
   ) c using (transaction_id, position)
   where c.transaction_id is null) as ghosts
"""
WHOLE_UNDECIDED = f"""
select h.transaction_id from {HALF} h left join {OP} o using (transaction_id)
where h.position = 0 and o.transaction_id is null order by 1
"""
SWEPT = f"""
select count(*) filter (where state = 1), count(*) filter (where state = 2) from check_back c
where not exists (select from {OP} o where o.transaction_id = c.transaction_id)
"""


@dataclass(frozen=True)
class Rows:
    """A transaction's rows in the day's tables, of which each may lack some."""

    number: int
    messages: int = 1
    verdict: int | None = 1
    published: int = 1
    receipts: int = 0
    attempts: int = 0
    swept: int | None = None


transactions = st.builds(
    Rows,
    # Ids are next to each other, or far apart; the day's first and last one are among them.
    number=st.integers(0, 40) | st.integers(0, 86_400_000 * 2**80 - 1) | st.just(86_400_000 * 2**80 - 1),
    messages=st.integers(0, 3),
    verdict=st.sampled_from([None, 1, 1, 2]),
    published=st.integers(0, 3),
    receipts=st.integers(0, 5),
    attempts=st.integers(0, 5),
    swept=st.sampled_from([None, None, 1, 2]),
)


@pytest.fixture
async def day(db: Connection) -> Day:
    """The day of AT, which is empty."""
    await ensure_days(db, AT, days_ahead=0)
    return await day_of(db, DAY)


async def day_of(db: Connection, day: date) -> Day:
    return {one.day: one for one in await days.days(db)}[day]


def limit(monkeypatch: pytest.MonkeyPatch, rows: int, pages: int = 1) -> None:
    """Set the size of a range."""
    monkeypatch.setattr(day_reading, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(day_reading, "PAGES_AT_ONCE", pages)


async def write(db: Connection, low: UUID, written: Sequence[Rows]) -> None:
    """Replace the rows of the day. The pages of the former rows stay, empty."""
    for table in (HALF, OP, OUTBOX, RECEIPT, ATTEMPT, "check_back"):
        await db.execute(f"delete from {table}")
    rows = [(UUID(int=low.int + one.number), one) for one in written]
    await db.executemany(
        f"insert into {HALF} (transaction_id, position, producer_group, topic, content_type, body, body_digest, "
        "born_at, first_check_at) select $1, n, 'shop', repeat(md5($1::uuid::text || n), 40), '', '', '', $3, $3 "
        "from generate_series(0, $2::int - 1) n",
        [(id, one.messages, AT) for id, one in rows],
    )
    await db.executemany(
        f"insert into {OP} (transaction_id, verdict, source, decided_at) values ($1, $2, 0, $3)",
        [(id, one.verdict, AT) for id, one in rows if one.verdict is not None],
    )
    await db.executemany(
        f'insert into {OUTBOX} (transaction_id, position, "offset", topic, committed_at) '
        "select $1, n, 1, 'order', $3 from generate_series(0, $2::int - 1) n",
        [(id, one.published, AT) for id, one in rows],
    )
    await db.executemany(
        f'insert into {RECEIPT} (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, settled_at) select $1, 0, n, 1, 'delivered', 1, $3, 1, $3 "
        "from generate_series(0, $2::int - 1) n",
        [(id, one.receipts, AT) for id, one in rows],
    )
    await db.executemany(
        f"insert into {ATTEMPT} (transaction_id, kind, at, outcome, error) "
        "select $1, 'check', $3, '', repeat(md5($1::uuid::text || n), 40) from generate_series(1, $2::int) n",
        [(id, one.attempts, AT) for id, one in rows],
    )
    await db.executemany(
        "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
        "values ($1, 'shop', $2, $3, $3)",
        [(id, one.swept, AT) for id, one in rows if one.swept is not None],
    )


LARGE = [Rows(7 * number, 2, 1 + number % 2, 2 - number % 2 * 2, 3, 4) for number in range(30)]


@settings(max_examples=examples(150), suppress_health_check=FIXTURES)
@given(st.lists(transactions, max_size=12, unique_by=lambda one: one.number), st.integers(1, 15))
@example([], 1)
@example(LARGE, 1)
@example(LARGE, 4)
@example(LARGE, 1000)
@example([Rows(0, 3, 1, 3, 5, 5), Rows(1, 3, None, 0)], 2)
async def test_the_ranges_of_a_day_add_up_to_the_day(
    db: Connection, day: Day, written: list[Rows], at_once: int
) -> None:
    await write(db, day.low, written)
    counts = {table: await db.fetchval(f"select count(*) from {partition_name(table, DAY)}") for table in DAY_TABLES}
    undecided = [f"shop/{row[0]}" for row in await db.fetch(WHOLE_UNDECIDED)]
    in_doubt, parked = await db.fetchrow(SWEPT) or ()
    whole_manifest = Manifest(**(await db.fetchrow(WHOLE_MANIFEST) or {}))
    digests = {
        table: TableDigest(**(await db.fetchrow(holding_of(table, partition_name(table, DAY))) or {}))
        for table in DAY_TABLES
    }
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, at_once, at_once)
        assert await day_reading.counts(db, DAY) == counts
        assert await day_reading.manifest(db, DAY) == whole_manifest
        assert await day_reading.holdings(db, DAY) == digests
        found = await day_reading.undecided(db, day, whole=True)
        assert (found.in_doubt, found.parked, found.undecided) == (in_doubt, parked, len(undecided))
        found = await day_reading.undecided(db, day)
        assert (found.in_doubt, found.parked, found.undecided) == (in_doubt, parked, None)
        for at_most in (1, 3, 20):
            assert await day_reading.undecided_ids(db, DAY, at_most) == undecided[:at_most]


async def test_rows_are_read_that_lie_after_the_pages_that_were_counted(
    db: Connection, day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has grown meanwhile."""
    await write(db, day.low, LARGE)
    whole = await day_reading.holdings(db, DAY)

    async def fewer(connection: Connection, relation: str) -> int:
        return await day_ranges.pages(connection, relation) // 2

    monkeypatch.setattr(day_reading, "pages", fewer)
    limit(monkeypatch, 1)
    assert await day_reading.holdings(db, DAY) == whole


# Rows with each kind of value in each column, in the order of the ids and not.
AWKWARD = f"""
create temp view rows as
select n, ('019b8d3c-e' || lpad(to_hex(n * n % 61), 3, '0') || '-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid as id,
  '2026-01-05 12:00:00.000001+00'::timestamptz + n * interval '1.000007 s' as at,
  (array[null, '', 'a|b\\c', 'ä€𝄞', '\\N', repeat('x', 5000)])[1 + n % 6] as text,
  case when n % 5 > 0 then decode(md5(n::text), 'hex') end as bytes, nullif(n % 7, 0)::smallint as number
from generate_series(1, 61) n;
insert into {HALF} select id, position, 'shop', 'order.' || n, text, text, case when n % 3 > 0 then
    jsonb_build_object('b|', text, 'a', n) end, 'text/plain', '\\x00ff', coalesce(bytes, ''), n / 7.0, at, at, bytes,
    case when n % 4 > 0 then jsonb_build_array(1.50, text) end, '{{"max_checks": 3}}', text,
    case when n % 2 > 0 then id end
  from rows, generate_series(0, n % 3) position;
insert into {OP} select id, 1 + n % 2, n % 4, text, text, at from rows where n % 4 > 0;
insert into {OUTBOX} select id, position, n * 1000000007::bigint, 'order', text, text, case when n % 2 > 0 then at end,
    at from rows, generate_series(0, n % 3) position where n % 2 = 0;
insert into {RECEIPT} select id, 0, n, n, coalesce(text, 'x'), n, at, n, number, bytes, at, n % 2 from rows;
insert into {ATTEMPT} select id, n, 'check', at, number, coalesce(text, ''), number, number, number, number, text,
    number, number, text, text, number from rows;
drop view rows;
"""
# What the version that read each table in one statement computed of these rows.
ARCHIVED: dict[str, dict[str, Any]] = {
    "half": {
        "rows": 122,
        "first_id": "019b8d3c-e000-7000-8000-00000000003d",
        "last_id": "019b8d3c-e03c-7000-8000-000000000032",
        "digest": "63697645327438369260",
    },
    "op": {
        "rows": 46,
        "first_id": "019b8d3c-e000-7000-8000-00000000003d",
        "last_id": "019b8d3c-e03c-7000-8000-000000000032",
        "digest": "25452873971255776445",
    },
    "outbox": {
        "rows": 60,
        "first_id": "019b8d3c-e001-7000-8000-00000000003c",
        "last_id": "019b8d3c-e03c-7000-8000-000000000032",
        "digest": "32386014434819987133",
    },
    "receipt": {
        "rows": 61,
        "first_id": "019b8d3c-e000-7000-8000-00000000003d",
        "last_id": "019b8d3c-e03c-7000-8000-000000000032",
        "digest": "32591814602906317231",
    },
    "attempt": {
        "rows": 61,
        "first_id": "019b8d3c-e000-7000-8000-00000000003d",
        "last_id": "019b8d3c-e03c-7000-8000-000000000032",
        "digest": "35319927754613119475",
    },
}


@pytest.mark.parametrize("at_once", [1, 3, 100_000])
async def test_the_archive_of_an_earlier_version_agrees_with_its_day(
    runtime: Runtime, db: Connection, day: Day, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    limit(monkeypatch, at_once, at_once)
    await db.execute(AWKWARD)
    assert await day_reading.counts(db, DAY) == {table: held["rows"] for table, held in ARCHIVED.items()}
    assert await day_reading.holdings(db, DAY) == {table: TableDigest(**held) for table, held in ARCHIVED.items()}
    await db.execute(
        "update day set archive = 'file:/archive', archive_manifest = $2, archived_at = now() where day = $1",
        DAY,
        json.dumps({"tables": ARCHIVED}),
    )
    archived = await day_of(db, DAY)
    assert await archive_check.differs(runtime, db, archived) == []
    assert await archive_check.unarchived(runtime, db, archived) == []
    await db.execute(f"update {OP} set reason = 'y' where actor = 'a|b\\c'")
    assert await archive_check.differs(runtime, db, archived) == [archive_check.DIFFERS]


# The plans


async def statements(db: Connection, day: Day) -> dict[str, list[Any]]:
    """Read a full day; return the statements that read ranges, each with the arguments of a range in the middle."""
    seen: dict[str, list[list[Any]]] = {}

    def note(query: Any) -> None:
        if query.args:
            seen.setdefault(query.query, []).append(list(query.args))

    db.add_query_logger(note)
    await day_reading.counts(db, day.day)
    await day_reading.holdings(db, day.day)
    await day_reading.manifest(db, day.day)
    await day_reading.undecided_ids(db, day.day, 10_000)
    await day_reading.undecided(db, day, whole=True)
    db.remove_query_logger(note)
    return {query: arguments[len(arguments) // 2] for query, arguments in seen.items()}


@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
async def test_each_statement_reads_a_range_of_the_day(
    full: Connection, generic: bool, analyzed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, pages = 500, 8
    limit(monkeypatch, rows, pages)
    first: UUID = await full.fetchval("select transaction_id from half order by transaction_id limit 1")
    day = next(day for day in await days.days(full) if day.low <= first < day.high)
    if not analyzed:
        await full.execute("delete from pg_statistic; update pg_class set reltuples = 100 where relkind = 'r'")
    read = await statements(full, day)
    # The pages of a table are asked for by its name.
    of_ranges = {query: arguments for query, arguments in read.items() if "pg_relation_size" not in query}
    # Five ways to cut the day, and what is read of each; five tables by pages.
    assert len(of_ranges) == 5 + 5 + 5
    for query, arguments in of_ranges.items():
        by_pages = isinstance(arguments[0], tuple)
        types = ["tid", "tid"] if by_pages else ["uuid", "uuid", "bigint"][: len(arguments)]
        values = [f"({one[0]},{one[1]})" if by_pages else one for one in arguments]
        async with by_ranges(full):
            found = [one for one in await scans(full, query, types, values, generic=generic) if one.rows]
        nodes = {"Tid Range Scan"} if by_pages else {"Index Scan", "Index Only Scan", "Bitmap Heap Scan"}
        assert {one.node for one in found} <= nodes, query
        # A page has no more than some hundred rows.
        assert all(one.rows <= (pages * 300 if by_pages else rows) for one in found), query


# A statement that takes longer than upkeep's limit

OLD_TIME = long_ago(10)
NOW = OLD_TIME + timedelta(days=9)
COUNT = 100_000


@pytest.fixture
async def large(runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch) -> date:
    """A day that takes longer to read than a statement may take, and has its archive."""
    monkeypatch.setattr(retention_loop, "SESSION", retention_loop.SESSION.replace("'10min'", "'150ms'"))
    await go_to(runtime, db, OLD_TIME)
    await db.execute("update day set state = 'gone' where day = $1", OLD_TIME.date() - timedelta(days=1))
    await write_transactions(db, OLD_TIME, COUNT)
    tables = {table: dict(await db.fetchrow(holding_of(table, table)) or {}) for table in DAY_TABLES}
    await db.execute(
        "update day set archive = 'file:/archive', archive_manifest = $2, archived_at = now() where day = $1",
        OLD_TIME.date(),
        json.dumps({"tables": tables}),
    )
    return OLD_TIME.date()


async def test_a_day_is_removed_that_takes_longer_than_a_statement_may(
    runtime: Runtime, db: Connection, large: date, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In one range it is as earlier versions read it.
    limit(monkeypatch, 10 * COUNT, 10 * COUNT)
    tries = (NOW + timedelta(hours=number) for number in count())
    for _ in range(2):
        await retention_loop.step(runtime, next(tries))
    # A transaction may be undecided if the day could not be counted either.
    assert (await day_of(db, large)).held in (["failed"], ["reader"])
    assert len(await partitions_of(db, large)) == 5
    limit(monkeypatch, 1000, 16)
    for _ in range(20):
        # On a busy machine even a short statement may take that long.
        await retention_loop.step(runtime, next(tries))
        if not await partitions_of(db, large):
            break
    assert (await day_of(db, large)).state == "gone"
