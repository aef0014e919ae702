"""A retry waits for an earlier message of its key as the relay has it: each row says so when a day is read."""

from typing import LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark import schemas
from spark.postgres.connections import open_snapshot
from spark.sources.frames import copy_queries, source_of
from tests.spark.days import days_ago, fill_day, prove, rows

RETRY: LiteralString = """
insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
  due_at, leased_until)
select subscription_id, %s, transaction_id, 0, "offset", 'order', %s, %s, {first_at}, {due_at}, {leased}
from outbox, subscription where "offset" = %s
"""
DEAD: LiteralString = """
insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, reason, died_at)
select subscription_id, transaction_id, 0, "offset", 'order', 'k', 1, 'refused', now() from outbox, subscription
where "offset" = %s
"""
CLAIM: LiteralString = """
insert into pull_claim (subscription_id, lowest, size, settled, claimed_at, held_until, sweep_at, transaction_ids,
  positions, keys)
select subscription_id, "offset", 1, %s, now(), now() + interval '1 hour', now(), array[transaction_id], '{0}', '{k}'
from outbox, subscription where "offset" = %s
"""
# The message of the offset 5 waits in each case without a try, due for two hours. What is beside it, and whether it is
# kept back: an earlier message of its key if none is named otherwise.
CASES: dict[str, bool] = {
    "nothing": False,
    "one that is due": True,
    "one that was tried": True,
    "one that is held": True,
    "one that is delayed": False,
    "a later one": False,
    "one of another key": False,
    "one of a replay": False,
    "one of the day before": True,
    "a dead one": False,
    "a dead one that holds its key": True,
    "a claimed one": True,
    "a claimed one that was settled": False,
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


def beside(dsn: str, what: str) -> None:
    """Store what is beside the message."""
    later: LiteralString = "now() + interval '2 hours'"
    if what == "one that is due":
        retry(dsn, 3)
    elif what == "one that was tried":
        retry(dsn, 3, first_at="now()", due_at=later)
    elif what == "one that is held":
        retry(dsn, 3, due_at=later, leased=later)
    elif what == "one that is delayed":
        retry(dsn, 3, due_at=later)
    elif what == "a later one":
        retry(dsn, 7)
    elif what == "one of another key":
        retry(dsn, 3, key="other")
    elif what == "one of a replay":
        retry(dsn, 3, replay=1)
    elif what == "one of the day before":
        retry(dsn, 1, first_at="now()", due_at=later)
    elif what.startswith("a dead one"):
        rows(dsn, "update subscription set on_dead = %s returning 1", "hold" if "holds" in what else "release")
        with psycopg.connect(dsn) as db:
            db.execute(DEAD, [3])
    elif what.startswith("a claimed one"):
        with psycopg.connect(dsn) as db:
            db.execute(CLAIM, ["{1}" if "settled" in what else "{}", 3])


@pytest.fixture
def day(dsn: str) -> str:
    """Two days of an ordered subscription, the second from the offset 2 on."""
    fill_day(dsn, days_ago(4), 1)
    fill_day(dsn, days_ago(3), 10, first=2)
    rows(dsn, "update subscription set ordered = 'key' returning 1")
    return dsn


def kept_back(dsn: str) -> dict[int, bool]:
    """By offset, whether a row of the day is kept back; alike for this process and for executors."""
    with open_snapshot(dsn) as snapshot:
        of_day = snapshot.day(days_ago(3))
        [query] = copy_queries(snapshot, of_day, "delivery_retry", [])
        copied = snapshot.rows(query)
        brought = snapshot.rows(source_of(snapshot, of_day, "delivery_retry").query)
    found = {row["offset"]: row["kept_back"] for row in copied}
    assert all(list(row) == schemas.DELIVERY_RETRY.names for row in (*copied, *brought))
    assert {row["offset"]: row["kept_back"] for row in brought} == found
    return found


@pytest.mark.parametrize("what", CASES)
def test_a_retry_waits_only_for_what_keeps_it_back(day: str, what: str) -> None:
    retry(day, 5)
    beside(day, what)
    assert kept_back(day)[5] is CASES[what]


def test_nothing_waits_for_a_key_without_an_order(day: str) -> None:
    retry(day, 3, key=None)
    retry(day, 5, key=None)
    assert kept_back(day) == {3: False, 5: False}
    rows(day, "update delivery_retry set key = 'k' returning 1")
    assert kept_back(day) == {3: False, 5: True}
    rows(day, "update subscription set ordered = 'none' returning 1")
    assert kept_back(day) == {3: False, 5: False}


def test_a_redelivered_dead_letter_that_no_worker_sends_is_found(spark: SparkSession, day: str) -> None:
    with psycopg.connect(day) as db:
        assert db.execute('delete from receipt where "offset" = 11').rowcount == 1
        db.execute(
            'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, '
            "died_because, attempts) select subscription_id, 0, transaction_id, 0, \"offset\", 'redelivered', "
            "now() - interval '2 hours', now() - interval '3 hours', 'refused', 0 from outbox, subscription "
            'where "offset" = 11'
        )
    retry(day, 11, key="order-11")
    prove(day, "--day", days_ago(3))
    open_ones = rows(day, "select subject, detail from finding where kind = 'retry_overdue' and resolved_at is null")
    assert [(one["subject"], one["detail"]["retries"]) for one in open_ones] == [("billing", 1)]
