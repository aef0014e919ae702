"""In the order of keys the next message of a key is judged, from the time since when nothing keeps it back."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from app.relay.expiry import CLAIM_FOR
from app.relay.loop import RETRY_LEASE
from app.schemas.claims import HELD_MOST_S, RETRY_AFTER_MOST_S
from spark.postgres.connections import open_snapshot, partition_name
from spark.sources.retries import (
    CLAIMED_AT_MOST,
    LOOKED_AHEAD,
    LOOKED_BACK,
    PLANNED,
    SENT_AT_MOST,
    ready_query,
    write_ready,
)
from tests.spark.days import days_ago, fill_day, prove, rows
from tests.support.postgres import IN_THIS_DATABASE

RETRY: LiteralString = """
insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
  due_at, leased_until)
select subscription_id, %s, transaction_id, 0, "offset", 'order', %s, %s, {first_at}, {due_at}, {leased}
from outbox, subscription where "offset" = %s
"""
DEAD: LiteralString = """
insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, reason, died_at)
select subscription_id, transaction_id, 0, "offset", 'order', 'k', 1, 'refused', now() - interval '1 minute'
from outbox, subscription where "offset" = %s
"""
EXPIRED: LiteralString = "update dead_letter set reason = 'expired' returning 1"
CLAIM: LiteralString = """
insert into pull_claim (subscription_id, lowest, size, settled, claimed_at, held_until, sweep_at, transaction_ids,
  positions, keys)
select subscription_id, "offset", 1, %s, now(), now() + %s::interval, now(), array[transaction_id], '{0}', '{k}'
from outbox, subscription where "offset" = %s
"""
DROPPED: LiteralString = """
insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, died_because,
  attempts)
select subscription_id, 0, transaction_id, 0, "offset", 'dropped', now() - interval '1 minute', now(), 'refused', 1
from outbox, subscription where "offset" = %s
"""
DUE, RECENT = "2 hours", "1 minute"
# The message of the offset 5 waits in each case without a try, due for two hours. What is beside it, an earlier message
# of its key if none is named otherwise; and the next message of the key, and for how long it has been ready.
CASES: dict[str, tuple[int, str] | None] = {
    "nothing": (5, DUE),
    "one that is due": (3, DUE),
    "one that was tried": None,
    "one that was tried and is due": (3, DUE),
    "one that is sent": None,
    "one that was being sent": (3, DUE),
    "one that is sent for longer than is possible": (3, DUE),
    "one that is delayed": (5, DUE),
    "a later one": (5, DUE),
    "one of another key": (5, DUE),
    "one of a replay": (5, DUE),
    "one of the day before": None,
    "one that was settled": (5, RECENT),
    "one of the day before that was settled": (5, RECENT),
    "a later one that was settled": (5, DUE),
    "one of another key that was settled": (5, DUE),
    "one of a replay that was settled": (5, DUE),
    "a dead one": (5, RECENT),
    "a dead one that holds its key": None,
    "a dead one that held its key until a change of the subscription": (5, RECENT),
    "a dead one from long ago": (5, DUE),
    "a claimed one": None,
    "a claimed one that was settled": (5, DUE),
    "a claimed one for longer than is possible": (5, DUE),
    "a claimed one for which the time was just over": (5, RECENT),
    "a claimed one for which the time was long over": (5, DUE),
    "a later one that a consumer has": None,
    "a later one that a consumer has for longer than is possible": (5, DUE),
    "a later one that a consumer had": (5, RECENT),
    "a later one that a consumer settled": (5, RECENT),
    "a later one that a consumer gave back": (5, RECENT),
    "a later one that a consumer refused": (5, RECENT),
    "a later one that no consumer took in time": (5, DUE),
    "one of the next day that a consumer settled": (5, RECENT),
    "one of the next day that was settled": (5, DUE),
    "one of the next day and another key that a consumer settled": (5, DUE),
    "a later one that is sent": (5, DUE),
    "a dropped one": (5, RECENT),
    "a dropped one of the day before": (5, RECENT),
}
# For how long a claim holds its message from now on.
HELD = {
    "a claimed one for longer than is possible": "13 hours",
    "a claimed one for which the time was just over": "-1 minute",
    "a claimed one for which the time was long over": "-3 hours",
}
SETTLED = {
    "a later one that a consumer settled": 7,
    "one of the next day that a consumer settled": 12,
    "one of the next day that was settled": 12,
    "one of the next day and another key that a consumer settled": 12,
    "one that was settled": 3,
    "one of the day before that was settled": 1,
    "a later one that was settled": 7,
    "one of another key that was settled": 3,
    "one of a replay that was settled": 3,
}


def retry(
    dsn: str,
    offset: int,
    *,
    key: str | None = "k",
    replay: int = 0,
    first_at: LiteralString = "null",
    due_at: LiteralString = "now() - interval '2 hours'",
    leased: LiteralString = "null",
) -> None:
    """Store a retry of a message; it has an attempt if it has a first one."""
    with psycopg.connect(dsn) as db:
        attempts = int(first_at != "null")
        statement = RETRY.format(first_at=first_at, due_at=due_at, leased=leased)
        assert db.execute(statement, [replay, key, attempts, offset]).rowcount == 1
        if not replay:
            db.execute('delete from receipt where "offset" = %s', [offset])


def beside(dsn: str, what: str) -> None:
    """Store what is beside the message."""
    later: LiteralString = "now() + interval '2 hours'"
    if "consumer" in what:
        rows(dsn, 'update subscription set destination = \'{"type": "pull"}\' returning 1')
    if what == "one that is due":
        retry(dsn, 3)
    elif what == "one that was tried":
        retry(dsn, 3, first_at="now()", due_at=later)
    elif what == "one that was tried and is due":
        retry(dsn, 3, first_at="now()")
    elif what == "one that is sent":
        retry(dsn, 3, leased="now() + interval '1 minute'")
    elif what == "one that is sent for longer than is possible":
        retry(dsn, 3, leased="now() + interval '16 minutes'")
    elif what == "one that was being sent":
        retry(dsn, 3, leased="now() - interval '1 minute'")
    elif what == "one that is delayed":
        retry(dsn, 3, due_at=later)
    elif what == "a later one":
        retry(dsn, 7)
    elif what == "one of another key":
        retry(dsn, 3, key="other", first_at="now()", due_at=later)
    elif what == "one of a replay":
        retry(dsn, 3, replay=1, first_at="now()", due_at=later)
    elif what == "one of the day before":
        retry(dsn, 1, first_at="now()", due_at=later)
    elif what in SETTLED:
        with psycopg.connect(dsn) as db:
            if "another key" in what:
                db.execute("update outbox set key = 'other' where \"offset\" = %s", [SETTLED[what]])
            changed = "update receipt set settled_at = now() - interval '1 minute', replay = %s where \"offset\" = %s"
            assert db.execute(changed, [int("replay" in what), SETTLED[what]]).rowcount == 1
    elif what.startswith("a dead one"):
        holds = "holds" in what or "held" in what
        rows(dsn, "update subscription set on_dead = %s returning 1", "hold" if holds else "release")
        with psycopg.connect(dsn) as db:
            db.execute(DEAD, [3])
        if "held" in what or "long ago" in what:
            rows(dsn, "update dead_letter set died_at = now() - interval '3 hours' returning 1")
        if "held" in what:
            rows(dsn, "update subscription set on_dead = 'release' returning 1")
    elif what.startswith("a claimed one"):
        with psycopg.connect(dsn) as db:
            db.execute(CLAIM, ["{1}" if "settled" in what else "{}", HELD.get(what, "1 hour"), 3])
    elif what == "a later one that a consumer gave back":
        retry(dsn, 7, first_at="now() - interval '1 hour'", due_at="now() - interval '1 minute'")
    elif what in ("a later one that a consumer refused", "a later one that no consumer took in time"):
        with psycopg.connect(dsn) as db:
            db.execute(DEAD, [7])
        if "in time" in what:
            rows(dsn, EXPIRED)
    elif what == "a later one that a consumer has for longer than is possible":
        held: LiteralString = "now() + interval '13 hours'"
        retry(dsn, 7, first_at="now()", due_at=held, leased=held)
    elif what == "a later one that a consumer had":
        retry(dsn, 7, first_at="now() - interval '1 hour'", leased="now() - interval '1 minute'")
    elif what.startswith("a later one that"):
        retry(dsn, 7, first_at="now()", due_at=later, leased=later)
    elif what.startswith("a dropped one"):
        with psycopg.connect(dsn) as db:
            assert db.execute(DROPPED, [1 if "day before" in what else 3]).rowcount == 1


@pytest.fixture
def day(dsn: str) -> str:
    """Three days of an ordered subscription, the second from the offset 2 on, the third from 12 on."""
    fill_day(dsn, days_ago(4), 1)
    fill_day(dsn, days_ago(3), 10, first=2)
    fill_day(dsn, days_ago(2), 3, first=12)
    with psycopg.connect(dsn) as db:
        db.execute("update outbox set key = 'k'")
        db.execute("update subscription set ordered = 'key'")
    return dsn


def ready(spark: SparkSession, dsn: str, path: Path) -> dict[int, str]:
    """By offset, the messages that are ready, and for how long."""
    with open_snapshot(dsn) as snapshot:
        number = write_ready(spark, snapshot, snapshot.day(days_ago(3)), str(path))
        seen = snapshot.seen_at
    lines = [json.loads(line) for one in path.glob("*.json") for line in one.read_text().splitlines()]
    assert len(lines) == number
    ages = {line["offset"]: seen - datetime.fromisoformat(line["ready_at"]) for line in lines}
    return {offset: DUE if age > timedelta(hours=1) else RECENT for offset, age in ages.items()}


@pytest.mark.parametrize("what", CASES)
def test_the_next_message_of_a_key_is_ready_since_the_last_one_was_settled(
    spark: SparkSession, day: str, tmp_path: Path, what: str
) -> None:
    retry(day, 5)
    beside(day, what)
    wanted = CASES[what]
    assert ready(spark, day, tmp_path / "ready") == ({} if wanted is None else dict([wanted]))


def test_an_earlier_message_of_the_day_before_is_found_from_far_into_the_day(
    spark: SparkSession, day: str, tmp_path: Path
) -> None:
    far = 2 * LOOKED_BACK
    rows(day, 'update outbox set "offset" = %s where "offset" = 5 returning 1', far)
    retry(day, far)
    assert ready(spark, day, tmp_path / "before") == {far: DUE}
    rows(day, "update receipt set settled_at = now() - interval '1 minute' where \"offset\" = 1 returning 1")
    assert ready(spark, day, tmp_path / "after") == {far: RECENT}


def settled_ahead(dsn: str, at: int) -> None:
    """Give the next day many receipts of other keys that were settled just now, and one of the key at a place."""
    with psycopg.connect(dsn) as db:
        assert db.execute(LOG, [1_000_000, KEYS, 12, 3 * LOOKED_AHEAD]).rowcount == 3 * LOOKED_AHEAD
        db.execute(LOG_SETTLED)
        changed = "update outbox set key = 'k' where \"offset\" = %s"
        assert db.execute(changed, [1_000_000 + at]).rowcount == 1


@pytest.mark.parametrize(("at", "wanted"), [(1000, RECENT), (2 * LOOKED_AHEAD + 1000, RECENT)])
def test_a_later_message_is_found_among_the_first_and_the_last_receipts_of_later_days(
    spark: SparkSession, day: str, tmp_path: Path, at: int, wanted: str
) -> None:
    rows(day, 'update subscription set destination = \'{"type": "pull"}\' returning 1')
    retry(day, 5)
    settled_ahead(day, at)
    assert ready(spark, day, tmp_path / "ready") == {5: wanted}


WAITING: LiteralString = f"select from pg_locks where not granted and {IN_THIS_DATABASE}"


@pytest.mark.parametrize("removed", [("outbox", "receipt"), ("outbox",), ("receipt",)])
def test_tables_of_the_day_before_may_be_dropped_after_they_were_looked_up(
    spark: SparkSession, day: str, tmp_path: Path, removed: tuple[str, ...]
) -> None:
    retry(day, 5)
    rows(day, "update receipt set settled_at = now() - interval '1 minute' where \"offset\" = 1 returning 1")
    names = ", ".join(partition_name(table, days_ago(4)) for table in removed)
    with ThreadPoolExecutor(1) as pool:
        # The read finds the names of tables that are being dropped, and waits for them.
        with psycopg.connect(day) as upkeep, psycopg.connect(day, autocommit=True) as other:
            upkeep.execute(f"drop table {names}".encode())
            meanwhile = pool.submit(ready, spark, day, tmp_path / "meanwhile")
            while not meanwhile.done() and not other.execute(WAITING).fetchall():
                time.sleep(0.02)
        assert meanwhile.result() == {5: DUE}
    assert ready(spark, day, tmp_path / "after") == {5: DUE}


def test_a_key_without_an_order_has_no_next_message(spark: SparkSession, day: str, tmp_path: Path) -> None:
    retry(day, 3, key=None)
    retry(day, 5, key=None)
    assert ready(spark, day, tmp_path / "keyless") == {}
    rows(day, "update delivery_retry set key = 'k' returning 1")
    rows(day, "update subscription set ordered = 'none' returning 1")
    assert ready(spark, day, tmp_path / "unordered") == {}


def overdue(dsn: str) -> list[tuple[str, int]]:
    """The subjects of the open findings, and their numbers of retries, after a proof of the day."""
    prove(dsn, "--day", days_ago(3))
    found = rows(dsn, "select subject, detail from finding where kind = 'retry_overdue' and resolved_at is null")
    return [(one["subject"], one["detail"]["retries"]) for one in found]


def test_a_redelivered_message_that_no_worker_sends_is_found_and_a_slow_key_is_not(
    spark: SparkSession, day: str
) -> None:
    """They are in the order of a key, and have no attempt."""
    for offset in (11, 10):
        retry(day, offset)
    with psycopg.connect(day) as db:
        db.execute(
            'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, '
            "died_because, attempts) select subscription_id, 0, transaction_id, 0, \"offset\", 'redelivered', "
            "now() - interval '2 hours', now() - interval '3 hours', 'refused', 0 from outbox, subscription "
            'where "offset" in (10, 11)'
        )
    assert overdue(day) == [("billing", 1)]
    rows(day, "update receipt set settled_at = now() - interval '1 minute' where \"offset\" = 9 returning 1")
    assert overdue(day) == []


def test_a_retry_behind_another_of_its_key_that_is_not_due_is_not_found(spark: SparkSession, day: str) -> None:
    """It was tried before the earlier one was redelivered."""
    retry(day, 10, first_at="now() - interval '1 hour'", due_at="now() + interval '1 hour'")
    retry(day, 11, first_at="now() - interval '3 hours'")
    assert overdue(day) == []
    with psycopg.connect(day) as db:
        db.execute("update delivery_retry set due_at = now() - interval '2 hours' where \"offset\" = 10")
    assert overdue(day) == [("billing", 1)]


def test_a_retry_that_waited_for_its_key_until_the_order_ended_is_due_since_then(spark: SparkSession, day: str) -> None:
    retry(day, 10, first_at="now() - interval '1 hour'", due_at="now() + interval '1 hour'")
    retry(day, 11)
    rows(day, "update subscription set ordered = 'none' returning 1")
    assert overdue(day) == []
    rows(day, "update subscription_version set at = at - interval '2 hours' returning 1")
    assert overdue(day) == [("billing", 1)]


ROWS, KEYS = 20_000, 100
MANY: LiteralString = """
insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, due_at)
select s.subscription_id, o.transaction_id, n, 10000000 + n, 'order', 'k' || mod(n, %s), 0, now() - interval '2 hours'
from subscription s, (select * from outbox where "offset" = 2) o, generate_series(1, %s) n
"""
# Entries of a day's log whose message has the offset %s; their own offsets go on from there.
LOGGED = 120_000
LOG: LiteralString = """
insert into outbox (transaction_id, position, "offset", topic, key, committed_at)
select (left(o.transaction_id::text, 23) || '-' || lpad(to_hex(n), 12, '0'))::uuid, 1, %s + n, 'order',
  'k' || mod(n, %s), o.committed_at
from (select * from outbox where "offset" = %s) o, generate_series(1, %s) n
"""
LOG_SETTLED: LiteralString = """
insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms,
  settled_at)
select transaction_id, position, subscription_id, "offset", 'delivered', 1, now(), 1, now()
from outbox, subscription where position = 1
"""
CLAIMS, CLAIMED = 10, 1000
MANY_CLAIMS: LiteralString = """
insert into pull_claim (subscription_id, lowest, size, claimed_at, held_until, sweep_at, transaction_ids, positions,
  keys)
select subscription_id, 1, 1, now(), now() + interval '1 hour', now(), '{}', '{}', array(
  select 'other' || n from generate_series(1, %s) n
)
from subscription, generate_series(1, %s)
"""


def read_of(plan: dict[str, Any], table: str) -> float:
    """How many rows of a table, or of a function, a plan's node, and all below it, have read."""
    here = plan.get("Relation Name", plan.get("Function Name")) == table
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if here else 0
    below: float = sum(read_of(child, table) for child in plan.get("Plans", []))
    rows_read: float = own * plan["Actual Loops"] + below
    return rows_read


def most_of(plan: dict[str, Any]) -> float:
    """How many rows the node of a plan has that has most."""
    return max(plan["Actual Rows"] * plan["Actual Loops"], *map(most_of, plan.get("Plans", [])), 0)


def plan_of(dsn: str) -> dict[str, Any]:
    """The plan of the comparison of the day, as it was run."""
    with open_snapshot(dsn) as snapshot:
        of_day = snapshot.day(days_ago(3))
        names = {table: partition_name(table, of_day.day) for table in ("outbox", "receipt")}
        query = ready_query(snapshot, of_day).format(
            low=of_day.low, high=of_day.high, seen=datetime.now(UTC).isoformat(), **names
        )
    with psycopg.connect(dsn) as db:
        for statement in ("set local jit = off", "set local max_parallel_workers_per_gather = 0", *PLANNED):
            db.execute(statement)
        [row] = db.execute(f"explain (analyze, format json) {query}".encode()).fetchall()
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


def test_the_retries_of_a_day_are_read_once_and_one_more_for_each_key(day: str) -> None:
    with psycopg.connect(day) as db:
        assert db.execute(MANY, [KEYS, ROWS]).rowcount == ROWS
        db.execute("analyze delivery_retry")
    plan = plan_of(day)
    assert plan["Actual Rows"] == KEYS
    assert read_of(plan, "delivery_retry") == ROWS + KEYS


@pytest.mark.parametrize("analyzed", ["never", "before", "after"])
def test_the_log_of_a_day_is_read_once_for_all_keys(day: str, analyzed: str) -> None:
    with psycopg.connect(day) as db:
        if analyzed == "before":
            db.execute("analyze")
        assert db.execute(MANY, [KEYS, KEYS]).rowcount == KEYS
        for offset in (1, 2):
            assert db.execute(LOG, [offset * 1_000_000, KEYS, offset, LOGGED]).rowcount == LOGGED
        assert db.execute(LOG_SETTLED).rowcount == 2 * LOGGED
        if analyzed == "after":
            db.execute("analyze")
    plan = plan_of(day)
    assert plan["Actual Rows"] == KEYS
    assert read_of(plan, partition_name("outbox", days_ago(3))) <= LOGGED + 10
    # Each look for the last entry reads one more.
    assert read_of(plan, partition_name("outbox", days_ago(4))) <= LOOKED_BACK + 2
    # The receipts of both days.
    assert most_of(plan) <= 2 * (LOGGED + 10)


@pytest.mark.parametrize("analyzed", ["never", "before", "after"])
def test_of_later_days_some_receipts_are_read_for_all_keys(day: str, analyzed: str) -> None:
    rows(day, 'update subscription set destination = \'{"type": "pull"}\' returning 1')
    with psycopg.connect(day) as db:
        if analyzed == "before":
            db.execute("analyze")
        assert db.execute(MANY, [KEYS, KEYS]).rowcount == KEYS
        assert db.execute(LOG, [1_000_000, KEYS, 12, LOGGED]).rowcount == LOGGED
        assert db.execute(LOG_SETTLED).rowcount == LOGGED
        if analyzed == "after":
            db.execute("analyze")
    plan = plan_of(day)
    assert plan["Actual Rows"] == KEYS
    later = days_ago(2)
    assert read_of(plan, partition_name("receipt", later)) == 2 * LOOKED_AHEAD
    assert read_of(plan, partition_name("outbox", later)) <= 2 * LOOKED_AHEAD
    assert most_of(plan) <= 2 * LOOKED_AHEAD + 10


def test_the_times_of_claims_are_those_of_the_service() -> None:
    assert timedelta(minutes=float(SENT_AT_MOST.removesuffix(" minutes"))) == RETRY_LEASE == CLAIM_FOR
    assert float(CLAIMED_AT_MOST.removesuffix(" hours")) * 3600 == HELD_MOST_S == RETRY_AFTER_MOST_S


def test_without_a_key_that_is_ready_the_log_is_not_read(day: str) -> None:
    retry(day, 3, first_at="now()", due_at="now() + interval '2 hours'")
    retry(day, 5)
    plan = plan_of(day)
    assert plan["Actual Rows"] == 0
    # A hash join reads the first row before it knows that the other side has none.
    assert read_of(plan, partition_name("outbox", days_ago(3))) <= 1
    assert read_of(plan, partition_name("outbox", days_ago(4))) <= 1


def test_the_keys_of_claims_are_read_once(day: str) -> None:
    with psycopg.connect(day) as db:
        assert db.execute(MANY, [KEYS, KEYS]).rowcount == KEYS
        assert db.execute(MANY_CLAIMS, [CLAIMED, CLAIMS]).rowcount == CLAIMS
    plan = plan_of(day)
    assert plan["Actual Rows"] == KEYS
    assert read_of(plan, "unnest") == CLAIMS * CLAIMED
