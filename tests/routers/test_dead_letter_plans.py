"""Plans of the queries on dead letters over many rows: short index ranges and key lookups."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from app.database.connection import Connection, connect
from app.store.subscriptions.dead_letters import (
    COUNTED_MOST,
    COUNTS,
    COUNTS_OF_KIND,
    FLOORS,
    GROUP_FLOORS,
    GROUPED_MOST,
    GROUPED_ROWS,
    GROUPS,
    HIGHEST,
    LOWEST,
    ONE,
    OWN_PLANS,
    PAGES,
    PER_SUBSCRIPTION,
    SCOPED_GROUPS,
    SCOPED_PAGE,
    WINDOW_ROWS,
    DeadLetterCursor,
    DeadLetterSearch,
    bounds,
)
from app.store.subscriptions.redeliveries import DROP, EARLIER, FORGET, REDELIVER
from tests.coordinator.test_statement_plans import full_days
from tests.support import postgres
from tests.support.explain import Scan, big, scans

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
SUBSCRIPTIONS, EACH = 10, 3000
PLACE = ["timestamptz", "uuid", "smallint", "int", "int"]
WINDOW = ["timestamptz", *PLACE, *PLACE, "text", "text", "text", "text", "bigint"]
DONE = ["text", "text", "timestamptz"]
SOURCES = pytest.mark.parametrize("source", ["all", "subscription"])


@pytest.fixture
async def dead() -> AsyncIterator[Connection]:
    """A connection to a database with dead letters of stored messages.

    EACH for each of the subscriptions, a thousand of them of one settle. Its statements use the plans of the pages.
    """
    url = await asyncio.to_thread(lambda: postgres.create_database(_dead_letters()))
    connection = await connect(url)
    await connection.execute(OWN_PLANS.replace("set local", "set"))
    yield connection
    await connection.close()
    await asyncio.to_thread(postgres.drop_database, url)


def _dead_letters() -> str:
    days = full_days()
    return postgres.ensure_template("halfnote_dead_letters", lambda url: asyncio.run(_seed(url)), template=days)


async def _seed(url: str) -> None:
    full = await connect(url)
    await full.execute(
        "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, "
        "created_at, updated_at, started_after, matches_since) "
        "select 's' || n, '{order}', '{}', '[]', '{}', 1, 1, '{}', 'active', now(), now(), 0, now() "
        "from generate_series(1, $1::int) n",
        SUBSCRIPTIONS,
    )
    await full.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, reason, '
        'response, died_at) select s.subscription_id, o.transaction_id, 0, o."offset", o.topic, o.key, 17, '
        "'retries_exhausted', repeat('x', 400), $1::timestamptz + (o.n / 1000) * interval '1 min' from subscription s, "
        '(select *, row_number() over (order by "offset") as n from outbox order by "offset" limit $2) o',
        AT,
        EACH,
    )
    await full.execute(
        'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, '
        "died_because, attempts) select subscription_id, 0, transaction_id, 0, \"offset\", 'redelivered', "
        "$1::timestamptz + \"offset\" * interval '1 s', died_at, 'x', 1 from dead_letter",
        AT,
    )
    await full.execute("vacuum analyze dead_letter, redelivery, subscription")
    await full.close()


def of(found: Sequence[Scan], table: str) -> list[Scan]:
    return [scan for scan in found if scan.table == table]


def wanted(source: str, topic: str | None = None) -> DeadLetterSearch:
    return DeadLetterSearch(None if source == "all" else 1, topic=topic)


def types_of(source: str, types: Sequence[str]) -> list[str]:
    return [*types, *(["int"] if source == "subscription" else [])]


async def asked(dead: Connection, statement: str, types: Sequence[str], arguments: Sequence[Any]) -> list[Scan]:
    found = await scans(dead, statement, types, arguments, generic=False)
    assert not [
        scan for scan in found if scan.node == "Seq Scan" and scan.rows and scan.table not in ("subscription", "day")
    ]
    return found


@SOURCES
@pytest.mark.parametrize("below", [HIGHEST, DeadLetterCursor(AT + timedelta(minutes=1), UUID(int=(1 << 128) - 1))])
async def test_a_page_is_a_short_index_range(dead: Connection, source: str, below: DeadLetterCursor) -> None:
    filters = DeadLetterSearch(wanted(source).subscription_id, below=below)
    floor_types = types_of(source, ["timestamptz", *PLACE])
    found = await asked(dead, FLOORS[source], floor_types, (*filters.range_to(), *filters.own))
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= WINDOW_ROWS + 1
    found = await asked(dead, PAGES[source], types_of(source, WINDOW), bounds(filters, LOWEST, 101))
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 102
    assert {scan.index for scan in of(found, "dead_letter")} == {f"dead_letter_{'died' if source == 'all' else 'of'}"}


async def test_a_page_of_a_keys_topics_is_a_short_index_range(dead: Connection) -> None:
    filters = wanted("subscription")
    row = await dead.fetchrow(FLOORS["subscription"], *filters.range_to(), *filters.own)
    assert row is not None
    types = [*types_of("subscription", WINDOW), "text[]"]
    for scope in (["order", "order.*"], ["nobody", "no*"]):
        found = await asked(dead, SCOPED_PAGE, types, (*bounds(filters, DeadLetterCursor(*row), 101), scope))
        assert sum(scan.rows for scan in of(found, "dead_letter")) <= WINDOW_ROWS + 1
        assert {scan.index for scan in of(found, "dead_letter")} == {"dead_letter_of"}


@SOURCES
async def test_a_filter_that_nothing_meets_reads_one_window(dead: Connection, source: str) -> None:
    filters = wanted(source, topic="nobody")
    row = await dead.fetchrow(FLOORS[source], *filters.range_to(), *filters.own)
    assert row is not None
    arguments = bounds(filters, DeadLetterCursor(*row), 101)
    found = await asked(dead, PAGES[source], types_of(source, WINDOW), arguments)
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= WINDOW_ROWS + 1


@SOURCES
@pytest.mark.parametrize("statements", [REDELIVER, DROP], ids=["redeliver", "drop"])
async def test_a_step_of_a_large_filter_touches_its_own_rows(
    dead: Connection, statements: dict[str, str], source: str
) -> None:
    arguments = (*bounds(wanted(source), LOWEST, 1000), "dana", "why", AT)
    found = await asked(dead, statements[source], [*types_of(source, WINDOW), *DONE], arguments)
    # Once to choose them, once to delete them.
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 2002
    assert big(found) == []


@pytest.mark.parametrize("statements", [REDELIVER, DROP], ids=["redeliver", "drop"])
async def test_named_ones_are_keyed(dead: Connection, statements: dict[str, str]) -> None:
    rows = await dead.fetch("select subscription_id, replay, transaction_id, position from dead_letter limit 200")
    columns = [[row[index] for row in rows] for index in range(4)]
    types = ["int[]", "int[]", "uuid[]", "smallint[]", "timestamptz", *DONE]
    await dead.execute("set enable_sort = on")
    found = await asked(dead, statements["named"], types, (*columns, HIGHEST.died_at, "dana", "why", AT))
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 400


async def test_a_redelivery_from_a_closed_day_reads_the_message_by_key(dead: Connection) -> None:
    rows = await dead.fetch("select subscription_id, replay, transaction_id, position from dead_letter limit 50")
    columns = [[row[index] for row in rows] for index in range(4)]
    await dead.execute("update day set state = 'archiving'")
    types = ["int[]", "int[]", "uuid[]", "smallint[]", "timestamptz", *DONE]
    await dead.execute("set enable_sort = on")
    found = await asked(dead, REDELIVER["named"], types, (*columns, HIGHEST.died_at, "dana", "why", AT))
    assert {scan.table.partition("_2")[0] for scan in big(found) if scan.rows} == {"half", "outbox"}
    assert sum(scan.rows for scan in big(found)) <= 100


@SOURCES
async def test_a_count_goes_no_further_than_it_says(dead: Connection, source: str) -> None:
    types = types_of(source, WINDOW)
    found = await asked(dead, COUNTS[source], types, bounds(wanted(source), LOWEST, 500))
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 501
    assert COUNTED_MOST > SUBSCRIPTIONS * EACH
    # Whether their subscriptions are deleted is read once, and not for each dead letter.
    found = await asked(dead, COUNTS[source], types, bounds(wanted(source, topic="none-such"), LOWEST, 500))
    assert sum(scan.rows for scan in of(found, "dead_letter")) == EACH * (SUBSCRIPTIONS if source == "all" else 1)
    assert sum(scan.rows for scan in of(found, "subscription")) <= SUBSCRIPTIONS
    # A count of a kind of error makes the kind once for each text, and not for each dead letter.
    filters = DeadLetterSearch(wanted(source).subscription_id, kind="none")
    found = await scans(dead, COUNTS_OF_KIND[source], types, bounds(filters, LOWEST, 500), generic=False, parts=True)
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= SUBSCRIPTIONS * EACH
    assert await dead.fetchval(COUNTS_OF_KIND[source], *bounds(filters, LOWEST, 500)) == 500
    filters = DeadLetterSearch(wanted(source).subscription_id, kind="other")
    assert await dead.fetchval(COUNTS_OF_KIND[source], *bounds(filters, LOWEST, 500)) == 0


@SOURCES
async def test_groups_read_a_range_of_the_index_once(dead: Connection, source: str) -> None:
    types = types_of(source, WINDOW)
    found = await asked(dead, GROUPS[source], types, bounds(wanted(source), LOWEST, 500))
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 501
    assert {scan.index for scan in of(found, "dead_letter")} == {f"dead_letter_{'died' if source == 'all' else 'of'}"}
    # A filter that nothing meets reads no more.
    nothing = bounds(wanted(source, topic="nobody"), LOWEST, 500)
    found = await asked(dead, GROUPS[source], types, nothing)
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 501
    filters = wanted(source)
    found = await asked(
        dead, GROUP_FLOORS[source], types_of(source, ["timestamptz", *PLACE]), (*filters.range_to(), *filters.own)
    )
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= GROUPED_ROWS + 1
    assert GROUPED_MOST > SUBSCRIPTIONS * EACH


async def test_groups_of_a_keys_topics_read_a_range_of_the_index_once(dead: Connection) -> None:
    types = [*types_of("subscription", WINDOW), "text[]"]
    arguments = (*bounds(wanted("subscription"), LOWEST, 500), ["order.*"])
    found = await asked(dead, SCOPED_GROUPS, types, arguments)
    assert sum(scan.rows for scan in of(found, "dead_letter")) <= 501
    assert {scan.index for scan in of(found, "dead_letter")} == {"dead_letter_of"}


@pytest.mark.parametrize("generic", [False, True])
async def test_one_its_records_and_the_gauge(dead: Connection, generic: bool) -> None:
    await dead.execute("reset all")
    row = await dead.fetchrow("select subscription_id, replay, transaction_id, position from dead_letter offset 7")
    assert row is not None
    found = await scans(dead, ONE, ["int", "int", "uuid", "smallint"], tuple(row), generic=generic)
    assert {scan.rows for scan in found} == {1}
    records = (row[2], row[3], row[0], row[1], 1000)
    found = await scans(dead, EARLIER, ["uuid", "smallint", "int", "int", "int"], records, generic=generic)
    assert sum(scan.rows for scan in found) <= SUBSCRIPTIONS
    found = await scans(dead, PER_SUBSCRIPTION + " and $1::int = 1", ["int"], (1,), generic=generic)
    assert {scan.node for scan in of(found, "dead_letter")} <= {"Index Only Scan", "Bitmap Heap Scan", "Index Scan"}
    found = await scans(dead, FORGET, ["timestamptz"], (AT + timedelta(days=45, seconds=9),), generic=generic)
    # The small tables have a row for each day and each setting.
    assert not [scan for scan in found if scan.node == "Seq Scan" and scan.table not in ("day", "shared_rule")]
