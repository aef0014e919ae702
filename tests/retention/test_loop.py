"""Upkeep: which days are created and which removed, what holds the others, and that upkeep blocks no request."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from app.config import Settings
from app.database.connection import Connection, connect
from app.ids import uuid7
from app.loops import gauges
from app.retention import day_holders, day_reading
from app.retention import loop as retention_loop
from app.retention.loop import RESOLVED_AFTER, let_leave
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.proof.shared_settings import LONGEST_ID_SKEW, raise_rule
from app.store.retention import day_blockers, days, orphans, partitions
from app.store.retention.day_blockers import SubscriptionRoute
from app.store.retention.day_changes import DayLook
from app.store.retention.days import partition_name
from app.store.subscriptions import redeliveries
from app.store.subscriptions.subscriptions import page
from tests.conftest import DAYS_AHEAD, assembled
from tests.support.days import (
    ORDER,
    all_delivered,
    go_to,
    long_ago,
    lowest,
    park,
    partitions_of,
    post_end,
    post_half,
    post_transaction,
    subscribe,
)
from tests.support.explain import scans
from tests.support.processes import ROOT
from tests.support.proof_runs import find, find_many, looked_at, reconciled, resolve

pytestmark = pytest.mark.usefixtures("group")

METRICS = ROOT / "docs" / "metrics.md"
# Long enough for any machine, and far less than a request behind a held lock would wait.
PROMPTLY_S = 20
OLD_TIME = long_ago(10)
DAY = OLD_TIME.date()
# Past retention (7 days), not past the longest one (45 days).
NOW = OLD_TIME + timedelta(days=9)
AFTER_MAX_RETENTION = OLD_TIME + timedelta(days=46)


@pytest.fixture
async def old_time(runtime: Runtime, db: Connection) -> datetime:
    """Set the service's clock to a time in a day that is to be removed; return that time."""
    await go_to(runtime, db, OLD_TIME)
    # The day before is empty; marked as gone, it leaves one day to the test.
    await db.execute("update day set state = 'gone' where day = $1", DAY - timedelta(days=1))
    return OLD_TIME


async def day_row(db: Connection, day: date = DAY) -> days.Day:
    return {row.day: row for row in await days.days(db)}[day]


@asynccontextmanager
async def open_snapshot(dsn: str, statement: str = "select count(*) from half") -> AsyncIterator[Connection]:
    """Hold a database transaction open that has read and keeps its snapshot."""
    connection = await connect(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval(statement)
            yield connection
    finally:
        await connection.close()


async def test_days_are_created_ahead_across_midnight(runtime: Runtime, db: Connection) -> None:
    last = long_ago(-3) + timedelta(hours=12, seconds=-1)
    missing = 3 + runtime.settings.days_ahead - DAYS_AHEAD
    assert (await retention_loop.step(runtime, last)).done == missing
    assert (await retention_loop.step(runtime, last)).done == 0
    newest = last.date() + timedelta(days=8)
    assert await partitions_of(db, newest) == {}
    assert (await retention_loop.step(runtime, last + timedelta(seconds=1))).done == 1
    created = await partitions_of(db, newest)
    assert len(created) == 5
    assert all(created.values())


async def test_a_settled_day_is_removed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    committed = await post_transaction(client, ORDER, ORDER)
    await post_transaction(client, verdict="rollback")
    await subscribe(db, "billing", "order")
    await all_delivered(db)
    await retention_loop.step(runtime, old_time + timedelta(days=7))
    assert len(await partitions_of(db, DAY)) == 5
    with capture_logs() as lines:
        await retention_loop.step(runtime, NOW)
    assert await partitions_of(db, DAY) == {}
    row = await day_row(db)
    assert (row.state, row.held, row.decided) == ("gone", [], True)
    assert next(line for line in lines if line["event"] == "day_left") == {
        "event": "day_left",
        "log_level": "info",
        "day": DAY.isoformat(),
        "halves": 2,
        "ops": 2,
        "published": 2,
    }
    late = await post_end(client, committed)
    assert late.status_code == 410
    assert late.json()["archive"] is None
    runtime.clock.fixed = None
    await post_transaction(client)


async def test_a_day_whose_removal_fails_does_not_keep_the_others(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await post_transaction(client, verdict="rollback")
    await retention_loop.step(runtime, old_time + timedelta(days=2))
    later = DAY + timedelta(days=1)
    # As a statement that takes too long: a table of the earlier day is missing.
    await db.execute(f"drop table receipt_{DAY:%Y%m%d}")
    runtime.heartbeats.pop("upkeep", None)
    with capture_logs() as lines:
        await retention_loop.step(runtime, NOW)
    assert [line["day"] for line in lines if line["event"] == "day_not_removed"] == [DAY.isoformat()]
    assert (await day_row(db)).held == ["failed"]
    assert (await day_row(db, later)).state == "gone"
    assert "upkeep" in runtime.heartbeats


async def remove_table(db: Connection) -> None:
    """Let the removal of the day fail, as a damaged page does."""
    await db.execute(f"alter table receipt_{DAY:%Y%m%d} rename to taken_away")


async def put_table_back(db: Connection) -> None:
    await db.execute(f"alter table taken_away rename to receipt_{DAY:%Y%m%d}")


def failing(lines: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the log lines about days that could not be removed."""
    return [line for line in lines if line["event"] == "day_not_removed"]


async def test_a_day_whose_removal_fails_rests_longer_each_time(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await post_transaction(client, verdict="rollback")
    await retention_loop.mark_decided(runtime, db, NOW)
    await remove_table(db)
    tries, turn = [], timedelta(minutes=1)
    for number in range(40):
        # A turn begins a little later than the last one plus its interval.
        now = NOW + number * (turn + timedelta(seconds=1))
        with capture_logs() as lines:
            await let_leave(runtime, db, now)
        tries += [number] if failing(lines) else []
        assert (await day_row(db)).held == ["failed"]
    gaps = [later - before for before, later in pairwise(tries)]
    assert gaps[:4] == [1, 2, 4, 8]
    assert set(gaps[4:]) == {10}
    failure = runtime.removal_failures[DAY]
    assert (failure.number, failure.since) == (len(tries), NOW)
    await put_table_back(db)
    await let_leave(runtime, db, failure.retry_at - timedelta(seconds=1))
    assert (await day_row(db)).held == ["failed"]
    await let_leave(runtime, db, failure.retry_at)
    assert (await day_row(db)).state == "gone"
    assert runtime.removal_failures == {}


async def test_a_day_that_rests_is_tried_at_once_by_another_process_or_when_a_person_asks(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, old_time: datetime
) -> None:
    await post_transaction(client, verdict="rollback")
    await retention_loop.mark_decided(runtime, db, NOW)
    await remove_table(db)
    with capture_logs() as lines:
        await let_leave(runtime, db, NOW)
        await let_leave(runtime, db, NOW)
        assert len(failing(lines)) == 1
        await db.execute("update day set held = '{}' where day = $1", DAY)
        await let_leave(runtime, db, NOW)
    assert [(line["failures"], line["failing_since"]) for line in failing(lines)] == [
        (1, NOW.isoformat()),
        (2, NOW.isoformat()),
    ]
    assert datetime.fromisoformat(failing(lines)[1]["retry_at"]) >= NOW + timedelta(seconds=90)
    await put_table_back(db)
    async with assembled(runtime.settings, dsn) as restarted:
        await let_leave(restarted, db, NOW)
    assert (await day_row(db)).state == "gone"


async def test_a_removal_that_ends_the_session_keeps_no_other_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server process that crashes at a damaged page. The next turn begins with the other days."""
    await post_transaction(client, verdict="rollback")
    await retention_loop.step(runtime, old_time + timedelta(days=2))
    later = DAY + timedelta(days=1)
    counted = day_reading.manifest

    async def manifest(connection: Connection, day: date) -> partitions.Manifest:
        if day == DAY:
            await connection.execute("select pg_terminate_backend(pg_backend_pid())")
        return await counted(connection, day)

    monkeypatch.setattr(day_reading, "manifest", manifest)
    with pytest.raises(asyncpg.PostgresError):
        await retention_loop.step(runtime, NOW)
    assert (await day_row(db, later)).state == "open"
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db, later)).state == "gone"
    assert (await day_row(db)).state == "archiving"
    with pytest.raises(asyncpg.PostgresError):
        await retention_loop.step(runtime, runtime.removal_failures[DAY].retry_at)
    monkeypatch.undo()
    await retention_loop.step(runtime, runtime.removal_failures[DAY].retry_at)
    assert (await day_row(db)).state == "gone"


async def test_retention_is_counted_from_the_end_of_the_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    end = retention_loop.ended(await day_row(db))
    assert end == OLD_TIME + timedelta(hours=12)
    await retention_loop.step(runtime, end + timedelta(days=7, seconds=-1))
    assert len(await partitions_of(db, DAY)) == 5
    await retention_loop.step(runtime, end + timedelta(days=7))
    assert await partitions_of(db, DAY) == {}


@pytest.mark.parametrize(("parked", "cause"), [(True, "parked"), (False, "in_doubt")])
async def test_an_undecided_transaction_holds_its_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime, parked: bool, cause: str
) -> None:
    transaction_id = await post_half(client)
    if parked:
        await park(db, transaction_id)
    with capture_logs() as lines:
        await retention_loop.step(runtime, NOW)
        await retention_loop.step(runtime, NOW)
    row = await day_row(db)
    assert (row.state, row.held, row.decided) == ("open", [cause], False)
    assert [line["causes"] for line in lines if line["event"] == "day_held"] == [[cause]]
    assert (await post_end(client, transaction_id)).status_code == 200
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"
    assert await db.fetchval("select count(*) from check_back") == 0


async def test_a_stale_check_back_row_holds_no_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await park(db, await post_transaction(client, verdict="rollback"))
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"


@pytest.mark.parametrize("state", ["active", "paused", "disabled"])
async def test_an_undelivered_message_holds_its_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime, state: str
) -> None:
    await post_transaction(client)
    await subscribe(db, "billing", "ord*", state=state)
    await subscribe(db, "stock", "stock")
    await subscribe(db, "vip", "order", filters=json.dumps({"headers": {"vip": "no"}}))
    await subscribe(db, "returns", "order", filters=json.dumps({"tags": ["returned"]}))
    await retention_loop.step(runtime, NOW)
    row = await day_row(db)
    assert (row.state, row.held, row.decided) == ("open", ["undelivered:billing"], True)
    await all_delivered(db)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"


async def rows_read(db: Connection, table: str) -> int:
    """Return how many rows of the day's partition this database transaction has read, and scans that found none."""
    found: int = await db.fetchval(
        "select seq_scan + coalesce(idx_scan, 0) + seq_tup_read + coalesce(idx_tup_fetch, 0) "
        "from pg_stat_xact_user_tables where relname = $1",
        partition_name(table, DAY),
    )
    return found


async def test_a_look_at_a_held_day_begins_where_the_last_one_ended(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await post_transaction(client, ORDER, ORDER, ORDER)
    await subscribe(db, "stock", "stock")
    subscriptions, day = await page(db, "", 10), await day_row(db)
    settled_to: dict[SubscriptionRoute, int] = {}
    async with db.transaction():
        before = await rows_read(db, "outbox")
        assert await day_holders.undelivered(runtime, db, day, subscriptions, settled_to) == []
        first = await rows_read(db, "outbox")
        assert first - before >= 3
        assert await day_holders.undelivered(runtime, db, day, subscriptions, settled_to) == []
        # One descent of the index, without a row.
        assert await rows_read(db, "outbox") <= first + 1
    waiting = await post_transaction(client, {"topic": "stock", "body": 1})
    for _ in range(2):
        assert await day_holders.undelivered(runtime, db, day, subscriptions, settled_to) == ["undelivered:stock"]
    await write_receipt(db, waiting, subscriptions[0].subscription_id)
    assert await day_holders.undelivered(runtime, db, day, subscriptions, settled_to) == []


async def test_a_day_is_looked_at_whole_before_it_is_closed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    """After a failover the database may lack receipts that the worker has seen at an earlier look."""
    delivered, held = await post_transaction(client), await post_half(client)
    billing = await subscribe(db, "billing", "order")
    await write_receipt(db, delivered, billing)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["in_doubt"]
    await db.execute("delete from receipt")
    await post_end(client, held, "rollback")
    await retention_loop.step(runtime, NOW)
    row = await day_row(db)
    assert (row.state, row.held) == ("open", ["undelivered:billing"])


async def test_what_is_known_of_a_day_that_another_worker_removed_is_forgotten(
    client: httpx.AsyncClient, runtime: Runtime, settings: Settings, dsn: str, db: Connection, old_time: datetime
) -> None:
    half = await post_half(client)
    await retention_loop.step(runtime, NOW)
    assert set(runtime.day_settled_to) == {DAY}
    runtime.day_readers[DAY] = day_blockers.DayReaders("1", frozenset())
    runtime.day_looks[DAY] = DayLook(("", False), NOW, ("archive",))
    await post_end(client, half, "rollback")
    async with assembled(settings, dsn) as other:
        await retention_loop.step(other, NOW)
        assert other.day_settled_to == other.day_readers == {}
    assert (await day_row(db)).state == "gone"
    await retention_loop.step(runtime, NOW)
    assert runtime.day_settled_to == runtime.day_readers == runtime.day_looks == {}


async def test_a_day_that_an_open_database_transaction_may_still_change_is_not_read_each_time(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, old_time: datetime
) -> None:
    await post_transaction(client)
    day, later = await day_row(db), datetime.now(UTC) + timedelta(days=1)
    async with open_snapshot(dsn), db.transaction():
        before = await rows_read(db, "half")
        assert await day_holders.undecided(db, day, later, whole=False) == ["reader"]
        assert await rows_read(db, "half") == before
        assert await day_holders.undecided(db, day, OLD_TIME, whole=False) == ["reader"]
        assert await rows_read(db, "half") > before


async def test_a_receipt_ahead_of_the_checkpoint_is_a_delivery(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_transaction(client)
    await write_receipt(db, transaction_id, await subscribe(db, "billing", "order"))
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"


async def test_a_retry_holds_its_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_transaction(client)
    subscription_id = await subscribe(db, "billing", "order")
    await write_retry(db, transaction_id, subscription_id)
    await all_delivered(db)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["undelivered:billing"]
    await db.execute("delete from delivery_retry")
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"


async def test_a_day_is_removed_at_the_longest_retention_whatever_holds_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    parked = await post_half(client)
    await park(db, parked)
    waiting = await post_transaction(client, ORDER, {"topic": "stock", "body": 1})
    tried = await post_transaction(client)
    delivered = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await write_retry(db, tried, billing)
    await write_receipt(db, delivered, billing)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["parked", "undelivered:billing"]
    with capture_logs() as lines:
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "gone"
    dead = await db.fetch("select * from dead_letter order by attempts")
    assert [(str(row["transaction_id"]), row["reason"], row["attempts"]) for row in dead] == [
        (waiting, "day_left", 0),
        (tried, "day_left", 3),
    ]
    assert dead[0]["body"] == b'{"order":1030}'
    assert (dead[0]["producer_group"], dead[0]["topic"], dead[0]["tag"]) == ("shop", "order", "created")
    assert (dead[0]["content_type"], json.loads(dead[0]["headers"])) == ("application/json", {"vip": "yes"})
    assert dead[0]["committed_at"] is not None
    assert dead[1]["error"] == "timed out"
    assert await db.fetchval("select (select count(*) from delivery_retry) + (select count(*) from check_back)") == 0
    by_event = {line["event"]: line for line in lines}
    assert by_event["day_left_undecided"]["some"] == [f"shop/{parked}"]
    assert sum(line["messages"] for line in lines if line["event"] == "day_left_undelivered") == 2
    assert metric(runtime, "halfnote_left_undecided_total") == 1
    assert metric(runtime, 'halfnote_left_undelivered_total{subscription="billing"}') == 2


async def test_commit_and_delivery_during_the_close_are_accounted_for(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, old_time: datetime
) -> None:
    """A verdict arrives after the dead letters were written but before the close; a delivery is confirmed meanwhile."""
    late = await post_half(client)
    confirmed = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    async with open_snapshot(dsn):
        # The reader keeps the day from being checked, as a slow database transaction would.
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "archiving"
    # As if both were under way when the day was closed; the relay skips a closed day and moves its checkpoint.
    await db.execute("update day set state = 'open'")
    runtime.clock.fixed = AFTER_MAX_RETENTION
    assert (await post_end(client, late)).status_code == 200
    await write_receipt(db, confirmed, billing)
    await db.execute("update day set state = 'archiving', changed_at = now() where day = $1", DAY)
    await all_delivered(db)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "gone"
    assert [str(row[0]) for row in await db.fetch("select transaction_id from dead_letter")] == [late]


async def test_a_dead_letter_outlives_its_day_with_its_body(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at) values ($1, $2, 0, 1, 'order', 5, 'retries_exhausted', now())",
        billing,
        transaction_id,
    )
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"
    row = await db.fetchrow("select * from dead_letter")
    assert row is not None
    assert (row["reason"], row["body"], row["producer_group"]) == ("retries_exhausted", b'{"order":1030}', "shop")


async def test_a_day_is_decided_only_when_no_session_may_still_write_in_it(
    runtime: Runtime, db: Connection, dsn: str
) -> None:
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    end = retention_loop.ended(await day_row(db, tomorrow))
    later = end + timedelta(seconds=runtime.settings.id_skew_s) + retention_loop.WRITTEN_LATER
    await retention_loop.mark_decided(runtime, db, later - timedelta(seconds=1))
    assert not (await day_row(db, tomorrow)).decided
    async with open_snapshot(dsn):
        await retention_loop.mark_decided(runtime, db, later)
        assert not (await day_row(db, tomorrow)).decided
    await retention_loop.mark_decided(runtime, db, later)
    assert (await day_row(db, tomorrow)).decided


async def test_the_session_of_a_frozen_worker_gives_upkeep_up(runtime: Runtime, db: Connection) -> None:
    frozen = await runtime.database.dedicated()
    assert "idle_session_timeout = '15min'" in retention_loop.SESSION
    await frozen.execute(retention_loop.SESSION.replace("'15min'", "'200ms'"))
    assert await days.take_upkeep(frozen)
    assert not await days.take_upkeep(db)
    async with asyncio.timeout(PROMPTLY_S):
        while not await days.take_upkeep(db):
            await asyncio.sleep(0.05)
    await frozen.close()


async def test_a_day_that_takes_too_long_to_count_keeps_no_other_day(
    runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = datetime.now(UTC).date() + timedelta(days=1)
    counted = day_reading.undecided

    async def undecided(connection: Connection, day: days.Day, *, whole: bool = False) -> day_blockers.DayUndecided:
        if whole and day.day == slow:
            async with connection.transaction():
                await connection.execute("set local statement_timeout = 1")
                await connection.execute("select pg_sleep(60)")
        return await counted(connection, day, whole=whole)

    monkeypatch.setattr(day_reading, "undecided", undecided)
    with capture_logs() as lines:
        await retention_loop.mark_decided(
            runtime, db, retention_loop.ended(await day_row(db, slow)) + timedelta(days=2)
        )
        # It rests until the next turn.
        await retention_loop.mark_decided(
            runtime, db, retention_loop.ended(await day_row(db, slow)) + timedelta(days=2)
        )
    assert [line["day"] for line in lines if line["event"] == "day_not_counted"] == [slow.isoformat()]
    assert not (await day_row(db, slow)).decided
    assert (await day_row(db, slow - timedelta(days=1))).decided
    assert (await day_row(db, slow + timedelta(days=1))).decided


async def test_a_day_is_not_decided_while_another_process_may_take_halves_of_it(
    runtime: Runtime, db: Connection
) -> None:
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    end = retention_loop.ended(await day_row(db, tomorrow))
    await raise_rule(db, LONGEST_ID_SKEW, 3600)
    longest = end + timedelta(hours=1) + retention_loop.WRITTEN_LATER
    assert runtime.settings.id_skew_s < 3600
    await retention_loop.mark_decided(runtime, db, longest - timedelta(seconds=1))
    assert not (await day_row(db, tomorrow)).decided
    await retention_loop.mark_decided(runtime, db, longest)
    assert (await day_row(db, tomorrow)).decided


async def test_a_day_with_an_undecided_half_is_not_decided(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_half(client)
    await post_transaction(client)
    await retention_loop.mark_decided(runtime, db, OLD_TIME + timedelta(days=1))
    assert not (await day_row(db)).decided
    await post_end(client, transaction_id, "rollback")
    await retention_loop.mark_decided(runtime, db, OLD_TIME + timedelta(days=1))
    assert (await day_row(db)).decided


async def test_a_closed_day_with_an_undecided_half_is_opened_again(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_half(client)
    # As if the half had been invisible when upkeep read the day.
    await db.execute("update day set state = 'archiving', decided = true where day = $1", DAY)
    assert (await post_end(client, transaction_id)).status_code == 410
    await retention_loop.step(runtime, NOW)
    row = await day_row(db)
    assert (row.state, row.decided, row.held) == ("open", False, ["in_doubt"])
    assert (await post_end(client, transaction_id)).status_code == 200


async def test_snapshots_older_than_the_close_are_seen(runtime: Runtime, db: Connection, dsn: str) -> None:
    day = (await days.days(db))[0]

    async def until_older_snapshots(count: int) -> None:
        """Wait for the count beside a new reader: a snapshot's xmin is the oldest open transaction of the whole
        server, so one in another test's database makes a new reader look old while it lasts."""
        async with asyncio.timeout(30):
            while True:
                async with open_snapshot(dsn):
                    if await day_blockers.older_snapshots(db, day.day) == count:
                        return
                await asyncio.sleep(0.02)

    async with open_snapshot(dsn):
        await days.close_day(db, day.day, NOW)
        assert await day_blockers.older_snapshots(db, day.day) == 1
        await until_older_snapshots(1)
    await until_older_snapshots(0)


async def test_no_request_waits_while_a_reader_delays_the_removal_of_a_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, old_time: datetime
) -> None:
    """A REPEATABLE READ transaction has read every table while an old day is removed and new days are attached."""
    await post_transaction(client)
    runtime.clock.fixed = None
    async with open_snapshot(
        dsn, "select count(*) from half h left join op o using (transaction_id), outbox, receipt, attempt"
    ):
        await post_during(client, retention_loop.step(runtime, NOW))
        row = await day_row(db)
        assert (row.state, row.held) == ("archiving", ["reader"])
        await post_during(client, retention_loop.step(runtime, long_ago(-4)))
        assert len(await partitions_of(db, long_ago(-11).date())) == 5
        # As with a reader that began a moment after upkeep had looked for readers; here nothing ends the wait.
        for finalize in (False, True):
            async with waiting_to_detach(dsn, finalize=finalize):
                async with asyncio.timeout(PROMPTLY_S):
                    for _ in range(20):
                        await post_transaction(client)
            assert await partitions.standing(db, "outbox", DAY) == "detaching"
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"
    assert await partitions_of(db, DAY) == {}


async def post_during(client: httpx.AsyncClient, step: Coroutine[Any, Any, StepResult]) -> None:
    """Post transactions until a step has ended; none may wait."""
    running = asyncio.create_task(step)
    async with asyncio.timeout(PROMPTLY_S):
        while not running.done():
            await post_transaction(client)
    await running


@asynccontextmanager
async def waiting_to_detach(dsn: str, *, finalize: bool) -> AsyncIterator[None]:
    """Hold open a session that waits for a reader in order to detach the day's outbox; cancel it at the end."""
    connection = await connect(dsn)
    detaching = asyncio.create_task(partitions.detach(connection, "outbox", DAY, finalize=finalize))
    observer = await connect(dsn)
    try:
        async with asyncio.timeout(PROMPTLY_S):
            while not await observer.fetchval(
                "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')",
                connection.get_server_pid(),
            ):
                assert not detaching.done()
        yield
        assert not detaching.done()
    finally:
        detaching.cancel()
        await asyncio.wait([detaching])
        await connection.close()
        await observer.close()


@pytest.mark.parametrize("fault", ["orphan op", "unpublished message", "ghost message"])
async def test_an_inconsistent_day_is_kept_for_an_operator(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime, fault: str
) -> None:
    await post_transaction(client)
    orphan = uuid7(OLD_TIME)
    if fault == "orphan op":
        await db.execute("insert into op values ($1, 2, 0, null, null, now())", orphan)
    elif fault == "unpublished message":
        await db.execute("delete from outbox")
    else:
        await db.execute(
            'insert into outbox (transaction_id, position, "offset", topic, committed_at) '
            "values ($1, 0, 99, 'x', now())",
            orphan,
        )
    await retention_loop.step(runtime, NOW)
    with capture_logs() as lines:
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    row = await day_row(db)
    assert (row.state, row.held) == ("archiving", ["manifest"])
    assert await partitions_of(db, DAY) == {
        f"{table}_{DAY:%Y%m%d}": False for table in ("half", "op", "outbox", "receipt", "attempt")
    }
    assert [line["log_level"] for line in lines if line["event"] == "day_unsound"] == ["error"]


async def test_a_day_that_contradicts_itself_is_ended_by_the_statement_of_the_page(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await park(db, await post_transaction(client))
    await db.execute("delete from outbox")
    await retention_loop.step(runtime, NOW)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert [one.held for one in await days.held_days(db)] == [["manifest"]]
    for table in partitions.DETACHED:
        await db.execute(f"alter table {partition_name(table, DAY)} rename to kept_{table}")
    [statement] = re.findall(r"```sql\n(update day set .*?)```", METRICS.read_text(), re.DOTALL)
    shown = "2026-11-21"
    assert shown in statement
    await db.execute(statement.replace(shown, str(DAY)).replace("now()", f"'{AFTER_MAX_RETENTION}'"))
    row = await day_row(db)
    assert (row.state, row.held) == ("gone", [])
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert await db.fetchval("select count(*) from check_back") == 0
    assert await db.fetchval("select count(*) from kept_half") == 1


async def test_a_day_that_is_gone_is_not_held(db: Connection, old_time: datetime) -> None:
    """A person may have set its state alone."""
    await db.execute("update day set state = 'gone', held = '{manifest}' where day = $1", DAY)
    assert await days.held_days(db) == []


async def test_tables_are_dropped_together_once_no_reader_is_left(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, old_time: datetime
) -> None:
    await post_transaction(client)
    await db.execute("update day set state = 'archiving', decided = true where day = $1", DAY)
    for table in partitions.DETACHED:
        await partitions.detach(db, table, DAY, finalize=False)
    async with open_snapshot(dsn, f"select count(*) from attempt_{DAY:%Y%m%d}"):
        await retention_loop.step(runtime, NOW)
        assert len(await partitions_of(db, DAY)) == 5
        assert (await day_row(db)).held == ["reader"]
    await retention_loop.step(runtime, NOW)
    assert await partitions_of(db, DAY) == {}


async def test_one_replica_does_upkeep(runtime: Runtime, db: Connection) -> None:
    later = long_ago(-5)
    assert await days.take_upkeep(db)
    assert await retention_loop.step(runtime, later) == StepResult()
    await db.execute("select pg_advisory_unlock_all()")
    # All days from yesterday on are missing then.
    assert (await retention_loop.step(runtime, later)).done == runtime.settings.days_ahead + 2


async def test_rows_of_a_deleted_subscription_are_removed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    transaction_id = await post_transaction(client)
    for name, deleted_at in (("gone", datetime.now(UTC)), ("active", None)):
        subscription_id = await subscribe(db, name, "order", deleted_at=deleted_at)
        await write_retry(db, transaction_id, subscription_id)
        await db.execute(
            'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
            "died_at) values ($1, $2, 1, 1, 'order', 5, 'refused', now())",
            subscription_id,
            transaction_id,
        )
        await write_replay(db, subscription_id)
        for shard in range(2):
            await db.execute(
                "insert into lease values ($1, 'me', 1, now() - interval '1 hour')",
                f"relay:{subscription_id}:2:{shard}",
            )
    await retention_loop.step(runtime, runtime.clock.now())
    for table in ("checkpoint", "delivery_retry", "dead_letter", "replay"):
        assert await db.fetch(f"select name from {table} join subscription using (subscription_id)") == [("active",)]
    own_leases = [f"relay:{subscription_id}:2:{shard}" for shard in range(2)]
    assert [row["name"] for row in await db.fetch("select name from lease order by name")] == own_leases


async def test_the_leases_of_a_deleted_subscription_are_not_mistaken_for_those_of_another(
    runtime: Runtime, db: Connection
) -> None:
    deleted = await subscribe(db, "gone", "order", deleted_at=datetime.now(UTC))
    for name in (f"relay:{deleted}:1:0", f"relay:{deleted}1:1:0", "relay-worker:me"):
        await db.execute("insert into lease values ($1, 'me', 1, now() - interval '1 hour')", name)
    await db.execute("insert into lease values ($1, 'me', 1, now() + interval '1 hour')", f"relay:{deleted}:2:0")
    await retention_loop.step(runtime, runtime.clock.now())
    left = {row["name"] for row in await db.fetch("select name from lease")}
    assert left == {f"relay:{deleted}1:1:0", "relay-worker:me", f"relay:{deleted}:2:0"}


async def test_a_retry_with_its_own_body_outlives_its_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    with_body, without_body = await post_transaction(client), await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    for transaction_id in (with_body, without_body):
        await write_retry(db, transaction_id, billing)
    await db.execute("update delivery_retry set body = '1' where transaction_id = $1", with_body)
    await all_delivered(db)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["undelivered:billing"]
    await db.execute("delete from delivery_retry where transaction_id = $1", without_body)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"
    await write_retry(db, without_body, billing, offset=1)
    await retention_loop.step(runtime, NOW + timedelta(minutes=1))
    assert [str(row[0]) for row in await db.fetch("select transaction_id from delivery_retry")] == [with_body]


async def test_the_slowest_shard_determines_what_is_delivered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_transaction(client)
    billing = await subscribe(db, "billing", "order", after=1000)
    await db.execute("update checkpoint set shards = 2")
    await db.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) values ($1, 2, 1, 0, now())',
        billing,
    )
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["undelivered:billing"]
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert [str(row[0]) for row in await db.fetch("select transaction_id from dead_letter")] == [transaction_id]


async def test_a_receipt_of_a_replay_does_not_count_as_live_delivery(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    transaction_id = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await write_receipt(db, transaction_id, billing, replay=3)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["undelivered:billing"]


async def test_a_replay_holds_the_days_that_it_has_not_read(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await all_delivered(db)
    await write_replay(db, billing)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["replay:billing"]
    await db.execute('update replay set "offset" = until')
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"


async def test_retries_of_a_replay_become_its_dead_letters(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    """A requested replay is not lost silently: its messages are in the list and can be redelivered."""
    transaction_id = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    replay = await write_replay(db, billing)
    await write_receipt(db, transaction_id, billing)
    await write_retry(db, transaction_id, billing, replay=replay)
    await all_delivered(db)
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).held == ["replay:billing", "undelivered:billing"]
    await subscribe(db, "people", "halfnote.delivery.dead")
    with capture_logs() as lines:
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "gone"
    (dead,) = await db.fetch("select replay, reason, attempts, body, length(body_digest) as digest from dead_letter")
    assert tuple(dead) == (replay, "day_left", 3, b'{"order":1030}', 32)
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    told = json.loads(await db.fetchval("select body from half where topic = 'halfnote.delivery.dead'"))
    assert (told["subscription"], told["replay"]) == ("billing", replay)
    assert "day_left_unreplayed" not in {line["event"] for line in lines}


async def test_what_a_replay_has_not_read_becomes_its_dead_letters(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    """The replay shows them, and a person can redeliver them."""
    read, unread = await post_transaction(client), await post_transaction(client)
    await post_transaction(client, {**ORDER, "key": "order-2"})
    await post_transaction(client, {**ORDER, "tag": "changed"})
    await post_transaction(client, {**ORDER, "headers": {"vip": "no"}})
    await post_transaction(client, {"topic": "stock", "body": 1})
    billing = await subscribe(db, "billing", "order")
    await all_delivered(db)
    # Not while the day is closed.
    await db.execute("update outbox set committed_at = committed_at - interval '1 day'")
    wanted = {"keys": ["order-1030"], "tags": ["created"], "topics": ["order"], "headers": {"vip": "yes"}}
    replay = await write_replay(db, billing)
    await db.execute(
        'update replay set filters = $1, "offset" = (select "offset" from outbox where transaction_id = $2)',
        json.dumps(wanted),
        read,
    )
    ended = await write_replay(db, billing, state="done")
    with capture_logs() as lines:
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "gone"
    [dead] = await db.fetch("select transaction_id, replay, reason, attempts, body from dead_letter")
    assert (str(dead["transaction_id"]), *list(dead)[1:]) == (unread, replay, "day_left", 0, b'{"order":1030}')
    [line] = [line for line in lines if line["event"] == "day_left_unreplayed"]
    assert (line["replay"], line["messages"]) == (replay, 1)
    answer = await client.get(f"/subscriptions/billing/replays/{replay}")
    assert (answer.json()["dead"], answer.json()["delivered"]) == (1, 0)
    assert (await client.get(f"/subscriptions/billing/replays/{ended}")).json()["dead"] == 0


async def test_a_replay_that_delivers_while_its_day_is_closed_has_no_dead_letter(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, old_time: datetime
) -> None:
    delivered = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await all_delivered(db)
    # Not while the day is closed.
    await db.execute("update outbox set committed_at = committed_at - interval '1 day'")
    replay = await write_replay(db, billing)
    async with open_snapshot(dsn):
        await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "archiving"
    assert await db.fetchval("select count(*) from dead_letter where replay = $1", replay) == 1
    await write_receipt(db, delivered, billing, replay=replay)
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert (await day_row(db)).state == "gone"
    assert await db.fetchval("select count(*) from dead_letter") == 0


async def test_a_dropped_dead_letter_is_not_written_again(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    """Not even if it was dropped during the removal of its day, when no receipt can record that."""
    dropped, waiting = await post_transaction(client), await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    await db.execute(
        'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, '
        "died_at, died_because, attempts) values ($1, 0, $2, 0, 1, 'dropped', now(), now(), 'x', 1)",
        billing,
        dropped,
    )
    await retention_loop.step(runtime, AFTER_MAX_RETENTION)
    assert [str(row[0]) for row in await db.fetch("select transaction_id from dead_letter")] == [waiting]


async def test_records_of_redeliveries_are_kept_for_45_days(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    for days_ago in (44, 46):
        await db.execute(
            'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, actor, at, '
            "died_at, died_because, attempts) "
            "values (1, 0, gen_random_uuid(), 0, 1, 'redelivered', $1, $2, $2, 'x', 1)",
            str(days_ago),
            now - timedelta(days=days_ago),
        )
    await retention_loop.step(runtime, now)
    assert [row["actor"] for row in await db.fetch("select actor from redelivery")] == ["44"]


async def test_records_of_redeliveries_are_kept_as_long_as_their_day(runtime: Runtime, db: Connection) -> None:
    now = long_ago(0)
    await db.execute("delete from day where day < $1", now.date())
    for days_ago in (61, 59, 44):
        await db.execute(
            'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, actor, at, '
            "died_at, died_because, attempts) "
            "values (1, 0, gen_random_uuid(), 0, 1, 'redelivered', $1, $2, $2, 'x', 1)",
            str(days_ago),
            now - timedelta(days=days_ago),
        )

    async def kept() -> list[str]:
        while await redeliveries.forget(db, now):
            pass
        return [row["actor"] for row in await db.fetch("select actor from redelivery order by at")]

    # Held for its archive, for example. An id may be ahead of its message by the skew, so by two days here.
    await db.execute(
        "insert into day (day, low, high, state, changed_at) values ($1, $2, $3, 'archiving', $4)",
        now.date() - timedelta(days=60),
        uuid7(now - timedelta(days=60)),
        uuid7(now - timedelta(days=59)),
        now,
    )
    await db.execute("update shared_rule set value = 2 * 86400 where name = $1", LONGEST_ID_SKEW)
    assert await kept() == ["61", "59", "44"]
    await db.execute("update shared_rule set value = 300 where name = $1", LONGEST_ID_SKEW)
    assert await kept() == ["59", "44"]
    await db.execute("update day set state = 'gone' where state = 'archiving'")
    assert await kept() == ["44"]


async def test_retries_of_a_cancelled_replay_are_removed_and_a_replay_that_ended_too_early_continues(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    transaction_id = await post_transaction(client)
    billing = await subscribe(db, "billing", "order")
    replays = {state: await write_replay(db, billing, state=state) for state in ("running", "done", "cancelled")}
    for replay in (0, *replays.values()):
        await write_retry(db, transaction_id, billing, replay=replay)
    finished, in_flight = (
        await write_replay(db, billing, state="done"),
        await write_replay(db, billing, state="cancelled"),
    )
    await write_retry(db, transaction_id, billing, replay=in_flight)
    await db.execute(
        "update delivery_retry set leased_until = now() + interval '1 min' where replay = any($1)",
        [0, in_flight],
    )
    await retention_loop.step(runtime, runtime.clock.now())
    left = [row["replay"] for row in await db.fetch("select replay from delivery_retry order by 1")]
    assert left == [0, replays["running"], replays["done"], in_flight]
    states = dict(await db.fetch("select replay_id, state from replay"))
    assert states == {
        replays["running"]: "running",
        replays["done"]: "running",
        replays["cancelled"]: "cancelled",
        finished: "done",
        in_flight: "cancelled",
    }


async def test_a_deleted_subscription_holds_no_day(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await post_transaction(client)
    await subscribe(db, "billing", "order", deleted_at=datetime.now(UTC))
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"


async def test_reissue_links_of_a_gone_day_are_removed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    await db.execute("insert into reissue values ($1, $2, null, 'again', now())", lowest(DAY), uuid7(NOW))
    await db.execute("insert into reissue values ($1, $2, null, 'again', now())", uuid7(NOW), uuid7(NOW))
    await retention_loop.step(runtime, NOW)
    assert await db.fetchval("select count(*) from reissue") == 1


async def test_findings_of_a_gone_day_are_resolved(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, old_time: datetime
) -> None:
    """No run can read the day again, so no run would resolve them. Also those that a run wrote after the removal.

    What is broken in the audit is of no day: the proof would report it again.
    """
    await find_many(db, "verdict_refused", 3, DAY)
    await find(db, "audit_broken", "head", DAY)
    await find(db, "subscription_differs", "points", DAY, detail='{"differs": "state, audit without change: pause"}')
    await find(db, "parked", "resolved by a run", DAY)
    await resolve(db, "resolved by a run", run_id=2)
    stored = DAY + timedelta(days=8)
    await find(db, "parked", "of a stored day", stored)
    run_id = await reconciled(db, "findings", DAY, stored)
    await looked_at(db, stored, run_id, "final")
    await gauges.step(runtime, NOW)
    assert metric(runtime, 'halfnote_reconciliation_findings{kind="verdict_refused"}') == 3
    assert metric(runtime, 'halfnote_reconciliation_days{state="provisional"}') == 1
    await retention_loop.step(runtime, NOW)
    assert (await day_row(db)).state == "gone"
    await retention_loop.step(runtime, NOW + RESOLVED_AFTER - timedelta(minutes=1))
    assert (await client.get("/reconciliation")).json()["open"]["verdict_refused"] == 3
    later = NOW + RESOLVED_AFTER + timedelta(minutes=1)
    await retention_loop.step(runtime, later)
    await gauges.step(runtime, later)
    assert metric(runtime, 'halfnote_reconciliation_findings{kind="verdict_refused"}') == 0
    assert metric(runtime, 'halfnote_reconciliation_findings{kind="parked"}') == 1
    assert metric(runtime, 'halfnote_reconciliation_days{state="provisional"}') == 0
    assert metric(runtime, 'halfnote_reconciliation_days{state="final"}') == 1
    shown = (await client.get("/reconciliation")).json()
    left = {"parked": 1, "audit_broken": 1, "subscription_differs": 1}
    assert (shown["open"], shown["provisional"], shown["final"]) == (left, 0, 1)
    items = (await client.get("/findings", params={"state": "resolved"})).json()["items"]
    assert [(one["kind"], one.get("resolved_run")) for one in items] == [("verdict_refused", None)] * 3 + [
        ("parked", 2)
    ]
    await find(db, "half_stuck", "of a late run", DAY)
    await retention_loop.step(runtime, later)
    assert (await client.get("/reconciliation")).json()["open"] == left


@pytest.mark.parametrize("generic", [False, True])
async def test_open_findings_of_gone_days_are_found_by_their_index(db: Connection, generic: bool) -> None:
    await db.execute(
        "insert into day (day, low, high, state, changed_at) select d, lpad(n::text, 32, '0')::uuid, "
        "lpad((n + 1)::text, 32, '0')::uuid, 'gone', now() "
        "from (select date '2020-01-01' + n as d, n from generate_series(1, 1000) n) s"
    )
    await find_many(db, "parked", 20_000, DAY)
    await find_many(db, "parked", 20, date(2020, 1, 2))
    await db.execute("vacuum analyze finding")
    await db.execute("vacuum analyze day")
    found = await scans(db, orphans.GONE_WITH_FINDINGS, ["timestamptz"], [NOW + timedelta(days=9)], generic=generic)
    assert {one.index for one in found if one.table == "finding"} == {"finding_open"}
    assert sum(one.rows for one in found) <= 10
    resolved = [date(2020, 1, 2), NOW]
    found = await scans(db, orphans.RESOLVE_FINDINGS, ["date", "timestamptz"], resolved, generic=generic)
    assert not [one for one in found if one.table == "finding" and one.node == "Seq Scan"]
    assert sum(one.rows for one in found if one.table == "finding") <= 3 * 20


async def write_retry(
    db: Connection, transaction_id: str, subscription_id: int, *, replay: int = 0, offset: int | None = None
) -> None:
    await db.execute(
        'insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, attempts, '
        'due_at, last_error) values ($1, $3, $2, 0, coalesce($4, (select "offset" from outbox '
        "where transaction_id = $2 and position = 0)), 'order', 3, now(), 'timed out')",
        subscription_id,
        transaction_id,
        replay,
        offset,
    )


async def write_receipt(db: Connection, transaction_id: str, subscription_id: int, *, replay: int = 0) -> None:
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        'duration_ms, settled_at, replay) values ($2, 0, $1, (select "offset" from outbox where transaction_id = $2 '
        "and position = 0), 'delivered', 1, now(), 1, now(), $3)",
        subscription_id,
        transaction_id,
        replay,
    )


async def write_replay(db: Connection, subscription_id: int, *, state: str = "running") -> int:
    """Write a replay of the whole log that has not read any of it; return its id."""
    replay_id: int = await db.fetchval(
        'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
        "values ($1, 0, 1000, 0, $2, now(), now()) returning replay_id",
        subscription_id,
        state,
    )
    return replay_id


def metric(runtime: Runtime, series: str) -> float:
    """Return the value of a series in `/metrics`."""
    for line in runtime.metrics.exposition().decode().splitlines():
        if line.startswith(f"{series} "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {series}")
