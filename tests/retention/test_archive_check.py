"""With an archive configured, no day is removed before its archive exists and agrees with its tables."""

import json
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from app.config import Settings
from app.database.connection import Connection
from app.ids import uuid7
from app.loops import gauges
from app.retention import day_reading
from app.retention import loop as retention_loop
from app.retention.loop import let_leave
from app.runtime.state import Runtime
from app.store.retention import partitions
from app.store.retention.days import partition_name
from tests.support.days import (
    ORDER,
    go_to,
    long_ago,
    park,
    partitions_of,
    post_end,
    post_half,
    post_transaction,
    subscribe,
    write_transactions,
)

pytestmark = pytest.mark.usefixtures("group")

OLD_TIME = long_ago(10)
DAY = OLD_TIME.date()
# Past retention (7 days), not past the longest one (45 days).
NOW = OLD_TIME + timedelta(days=9)
AFTER_MAX_RETENTION = OLD_TIME + timedelta(days=46)
PLACE = f"file:/archive/day={DAY}/0b6f6a1e-6a0e-4f4b-9d51-0b2f3d1c7a55"


@pytest.fixture
def settings(dsn: str) -> Settings:
    options = {"database_url": dsn, "pool_size": 8, "linger_s": 0, "archive": "/archive", "days_ahead": 1}
    return Settings(_env_file=None, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
async def old_time(runtime: Runtime, db: Connection) -> datetime:
    """Set the service's clock to a time in a day that is to be removed; return that time."""
    await go_to(runtime, db, OLD_TIME)
    # The day before is empty; marked as gone, it leaves one day to the test.
    await db.execute("update day set state = 'gone' where day = $1", DAY - timedelta(days=1))
    return OLD_TIME


async def archive(db: Connection) -> None:
    """Write what `halfnote archive` would write of the day as it is (tests/spark/test_archive.py runs that itself)."""
    found = await day_reading.holdings(db, DAY)
    tables = {table: {name: getattr(held, name) for name in held.__slots__} for table, held in found.items()}
    await db.execute(
        "update day set archive = $2, archive_manifest = $3, archived_at = now() where day = $1",
        DAY,
        PLACE,
        json.dumps({"tables": tables}),
    )


async def day_state(db: Connection) -> tuple[str, list[str]]:
    """Return the day's state and what holds it."""
    row = await db.fetchrow("select state, held from day where day = $1", DAY)
    assert row is not None
    return row["state"], row["held"]


def logged_errors(lines: list[Any]) -> list[str]:
    return [line["event"] for line in lines if line["log_level"] == "error"]


async def test_a_day_waits_for_its_archive_and_is_then_removed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    transaction_id = await post_transaction(client, ORDER, ORDER)
    await post_transaction(client, verdict="rollback")
    with capture_logs() as lines:
        await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["archive"])
    assert [line["causes"] for line in lines if line["event"] == "day_held"] == [["archive"]]
    assert len(await partitions_of(db, DAY)) == 5
    # The day still serves reads and accepts what a closed day would refuse.
    assert (await client.get(f"/transactions/{transaction_id}")).status_code == 200
    assert (await post_end(client, transaction_id)).status_code == 200
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("gone", [])
    assert await partitions_of(db, DAY) == {}


async def test_a_request_for_a_gone_day_gets_the_place_of_its_archive(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    transaction_id = await post_transaction(client)
    await archive(db)
    await retention_loop.step(runtime, NOW)
    for answer in (await client.get(f"/transactions/{transaction_id}"), await post_end(client, transaction_id)):
        assert (answer.status_code, answer.json()["type"]) == (410, "/problems/day-gone")
        assert answer.json()["archive"] == PLACE
        assert PLACE in answer.json()["detail"]


async def test_days_that_wait_for_an_archive_are_shown(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    await post_transaction(client)
    await retention_loop.step(runtime, NOW)
    await gauges.step(runtime, NOW)
    assert f'halfnote_day_held{{cause="archive",day="{DAY}"}} 1.0' in runtime.metrics.exposition().decode()
    warnings = (await client.get("/readyz")).json()["warnings"]
    assert [one["detail"] for one in warnings if one["name"] == "days_held"] == [
        f"past their retention, but held: {DAY} by archive"
    ]


async def test_all_causes_are_reported_together(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    await post_transaction(client)
    await subscribe(db, "billing", "order")
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["archive", "undelivered:billing"])
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["undelivered:billing"])


async def test_an_archive_that_lacks_rows_does_not_close_the_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """A row was written after the archive, as a replay writes a receipt. The day must be archived again."""
    await post_transaction(client)
    await archive(db)
    await post_transaction(client)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["archive"])
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("gone", [])


# Each change applies to the day as the previous one left it.
CHANGES = {
    "a row more": [
        "attempt",
        "insert into attempt_{0:%Y%m%d} (transaction_id, kind, at, outcome) "
        f"values ('{uuid7(OLD_TIME)}', 'check', now(), '')",
    ],
    "a row fewer": ["attempt", "delete from attempt_{0:%Y%m%d} where kind = 'check'"],
    "another verdict's reason": ["op", "update op_{0:%Y%m%d} set reason = 'because'"],
    "another digest": ["half", "update half_{0:%Y%m%d} set body_digest = 'x'"],
    "a later time": ["outbox", "update outbox_{0:%Y%m%d} set committed_at = committed_at + interval '1 us'"],
}


async def test_tables_that_differ_from_the_archive_are_not_dropped(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, subtests: pytest.Subtests
) -> None:
    """Not even if the numbers of rows agree, and not at the longest retention either."""
    transaction_id = await post_transaction(client)
    await db.execute(
        "insert into attempt (transaction_id, kind, at, outcome) values ($1, 'swept', now(), 'x')", transaction_id
    )
    await db.execute("update day set state = 'archiving', decided = true where day = $1", DAY)
    for table in partitions.DETACHED:
        await partitions.detach(db, table, DAY, finalize=False)
    for change, (table, statement) in CHANGES.items():
        with subtests.test(change):
            await archive(db)
            # A difference is logged when it is found, and not again in later turns.
            await db.execute("update day set held = '{}' where day = $1", DAY)
            assert await db.execute(statement.format(DAY)) in ("INSERT 0 1", "DELETE 1", "UPDATE 1")
            with capture_logs() as lines:
                for now in (NOW, NOW + timedelta(minutes=1)):
                    await retention_loop.step(runtime, now)
                    assert len(await partitions_of(db, DAY)) == 5
            assert await day_state(db) == ("archiving", ["archive_differs"])
            (line,) = [line for line in lines if line["event"] == "day_archive_differs"]
            assert (line["log_level"], line["archive"], line["tables"]) == ("error", PLACE, [table])
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert len(await partitions_of(db, DAY)) == 5
    assert await day_state(db) == ("archiving", ["archive_differs"])
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("gone", [])


async def scans_of_day(db: Connection) -> int:
    """Return how often this session has scanned the day's tables."""
    return await scans_of(db, *(partition_name(table, DAY) for table in partitions.DETACHED))


async def scans_of(db: Connection, *names: str) -> int:
    """Return how often this session has scanned these tables."""
    await report_counts(db)
    scans: int = await db.fetchval(
        "select sum(seq_scan + coalesce(idx_scan, 0))::int from pg_stat_user_tables where relname = any($1)", names
    )
    return scans


async def report_counts(db: Connection) -> None:
    """Make this session report at once what it did to each table."""
    await db.execute("select pg_stat_force_next_flush()")


async def test_a_closed_day_that_waits_for_its_archive_is_read_when_it_changed(
    runtime: Runtime, db: Connection
) -> None:
    await write_transactions(db, OLD_TIME, 3)
    await subscribe(db, "billing", "order")
    await report_counts(db)
    await let_leave(runtime, db, AFTER_MAX_RETENTION)
    assert await day_state(db) == ("archiving", ["archive"])
    scans = await scans_of_day(db)
    for minutes in (1, 2):
        await let_leave(runtime, db, AFTER_MAX_RETENTION + timedelta(minutes=minutes))
        assert await scans_of_day(db) == scans
    assert await day_state(db) == ("archiving", ["archive"])
    # It has more rows than its archive: it waits for another one.
    await archive(db)
    await db.execute(
        "insert into attempt (transaction_id, kind, at, outcome) values ($1, 'swept', now(), 'x')", uuid7(OLD_TIME)
    )
    scans = await scans_of_day(db)
    await let_leave(runtime, db, AFTER_MAX_RETENTION)
    assert await scans_of_day(db) > scans
    scans = await scans_of_day(db)
    await let_leave(runtime, db, AFTER_MAX_RETENTION)
    assert await scans_of_day(db) == scans
    assert await day_state(db) == ("archiving", ["archive"])
    await archive(db)
    await let_leave(runtime, db, AFTER_MAX_RETENTION)
    assert await day_state(db) == ("gone", [])


async def test_an_open_day_with_other_rows_than_its_archive_is_counted_when_it_changed(
    runtime: Runtime, db: Connection
) -> None:
    """Or after an hour, as a closed one."""
    await write_transactions(db, OLD_TIME, 3)
    await db.execute("update day set decided = true where day = $1", DAY)
    await archive(db)
    await db.execute(
        "insert into attempt (transaction_id, kind, at, outcome) values ($1, 'swept', now(), 'x')", uuid7(OLD_TIME)
    )
    attempt = partition_name("attempt", DAY)
    await report_counts(db)
    await let_leave(runtime, db, NOW)
    assert await day_state(db) == ("open", ["archive"])
    scans = await scans_of(db, attempt)
    for minutes in (1, 2):
        await let_leave(runtime, db, NOW + timedelta(minutes=minutes))
        assert await scans_of(db, attempt) == scans
    await let_leave(runtime, db, NOW + timedelta(hours=1))
    assert await scans_of(db, attempt) > scans
    assert await day_state(db) == ("open", ["archive"])
    await archive(db)
    await let_leave(runtime, db, NOW + timedelta(hours=1))
    assert await day_state(db) == ("gone", [])


@pytest.mark.parametrize("counted", [True, False])
async def test_tables_that_differ_from_the_archive_are_read_when_they_changed(
    runtime: Runtime, db: Connection, counted: bool
) -> None:
    """Or after an hour: a server that crashes may lose what it counted."""
    await write_transactions(db, OLD_TIME, 3)
    await db.execute("update day set state = 'archiving', decided = true where day = $1", DAY)
    for table in partitions.DETACHED:
        await partitions.detach(db, table, DAY, finalize=False)
    await archive(db)
    op = partition_name("op", DAY)
    await db.execute(f"update {op} set reason = 'because'")
    await report_counts(db)
    await forget_counts(db)
    await let_leave(runtime, db, NOW)
    assert await day_state(db) == ("archiving", ["archive_differs"])
    scans = await scans_of_day(db)
    await let_leave(runtime, db, NOW)
    assert await scans_of_day(db) == scans
    await db.execute(f"update {op} set reason = null")
    await report_counts(db)
    if not counted:
        await forget_counts(db)
        await let_leave(runtime, db, NOW)
        assert await day_state(db) == ("archiving", ["archive_differs"])
    await let_leave(runtime, db, NOW if counted else NOW + timedelta(hours=1))
    assert await day_state(db) == ("gone", [])
    assert runtime.day_looks == {}


async def forget_counts(db: Connection) -> None:
    """Let the server forget what it counted of the day's table of verdicts."""
    await db.execute("select pg_stat_reset_single_table_counters($1::text::regclass)", partition_name("op", DAY))


async def test_the_longest_retention_does_not_drop_an_unarchived_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """Undelivered messages become dead letters as usual; the day is closed and stays until it is archived."""
    parked = await post_half(client)
    await park(db, parked)
    await post_transaction(client)
    await subscribe(db, "billing", "order")
    with capture_logs() as lines:
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
        await retention_loop.step(runtime, AFTER_MAX_RETENTION + timedelta(minutes=1))
    assert await day_state(db) == ("archiving", ["archive"])
    assert all((await partitions_of(db, DAY)).values())
    assert [row["reason"] for row in await db.fetch("select reason from dead_letter")] == ["day_left"]
    assert logged_errors(lines).count("day_unarchived") == 1
    await archive(db)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await day_state(db) == ("gone", [])


async def test_a_process_without_the_setting_drops_nothing_that_waits_for_its_archive(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    await post_transaction(client)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["archive"])
    # As after a rollback to a release without an archive.
    runtime.settings = runtime.settings.model_copy(update={"archive": None})
    for at in (NOW, AFTER_MAX_RETENTION):
        await retention_loop.step(runtime, at)
        assert (await day_state(db))[1] == ["archive"]
        assert len(await partitions_of(db, DAY)) == 5
    # What the page says of a day whose archive is given up.
    await db.execute("update day set held = '{}' where day = $1", DAY)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await day_state(db) == ("gone", [])


async def test_a_process_without_the_setting_compares_a_day_with_the_archive_that_it_has(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    await post_transaction(client)
    await archive(db)
    await post_transaction(client)
    runtime.settings = runtime.settings.model_copy(update={"archive": None})
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["archive"])
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("gone", [])


async def test_a_day_whose_removal_began_without_an_archive_waits_for_one(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """HALFNOTE_ARCHIVE was set between two turns, after the tables were detached."""
    await post_transaction(client)
    await db.execute("update day set state = 'archiving', decided = true where day = $1", DAY)
    for table in partitions.DETACHED:
        await partitions.detach(db, table, DAY, finalize=False)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("archiving", ["archive"])
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("gone", [])


async def test_an_empty_day_is_archived_too(runtime: Runtime, db: Connection) -> None:
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("open", ["archive"])
    await archive(db)
    await retention_loop.step(runtime, NOW)
    assert await day_state(db) == ("gone", [])


@pytest.mark.parametrize(("value", "expected"), [("", None), ("/archive", "/archive"), ("s3a://b/c", "s3a://b/c")])
def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None) -> None:
    monkeypatch.setenv("HALFNOTE_ARCHIVE", value)
    monkeypatch.setenv("HALFNOTE_ARCHIVE_KEEP_S", "")
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    assert (settings.archive, settings.archive_keep_s) == (expected, None)
