"""The due times of retries are compared with the schedules of their subscriptions while a day is read."""

import json
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from app.policy import delivery_retry
from spark.postgres.connections import open_snapshot
from spark.sources import retries
from tests.spark.days import days_ago, fill_day, rows

# One retry each: when it was first tried, when it is due, and whether that can be.
RETRIES: tuple[tuple[LiteralString | None, LiteralString, bool], ...] = (
    ("now() - interval '1 minute'", "'2099-01-01'", False),
    ("'2099-01-01'", "'2099-01-02'", False),
    # `Retry-After` counts from the first try.
    ("now() - interval '1 hour'", "now() + interval '70 hours'", True),
    ("now() - interval '1 hour'", "now() + interval '72 hours'", False),
    # The former schedule had an hour, and jitter adds a tenth.
    ("now() - interval '80 hours'", "now() + interval '65 minutes'", True),
    ("now() - interval '80 hours'", "now() + interval '67 minutes'", False),
    ("now() - interval '80 hours'", "now() - interval '67 minutes'", True),
    # Without a try it is due at once; a clock may be ahead by some seconds.
    (None, "now() + interval '3 seconds'", True),
    (None, "now() + interval '1 minute'", False),
)
INSERT: LiteralString = """
insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, due_at)
select s.subscription_id, o.transaction_id, o.position, o."offset", o.topic, 1, {first_at}, {due_at}
from subscription s, outbox o where o."offset" = %s and s.name = 'billing'
"""


@pytest.fixture
def day(dsn: str) -> str:
    """A database with a day of a subscription whose pauses were longer before."""
    fill_day(dsn, days_ago(3), 30)
    with psycopg.connect(dsn) as db:
        db.execute("update subscription set retry = '{10, 3600}'")
        db.execute("update subscription set retry = '{10}'")
    return dsn


def found(spark: SparkSession, dsn: str, path: Path) -> list[tuple[str, int, str]]:
    """The subscriptions with such retries, their number, and the message that is due last."""
    with open_snapshot(dsn) as snapshot:
        retries.write_never_due(spark, snapshot, snapshot.day(days_ago(3)), str(path))
    lines = [json.loads(line) for one in path.glob("*.json") for line in one.read_text().splitlines()]
    return [(line["name"], line["retries"], line["last"]) for line in lines]


def retry(dsn: str, offset: int, first_at: LiteralString | None, due_at: LiteralString) -> str:
    """Store a retry of a message; return its id."""
    with psycopg.connect(dsn) as db:
        db.execute(INSERT.format(first_at=first_at or "null", due_at=due_at), [offset])
    [row] = rows(dsn, 'select transaction_id::text as id from outbox where "offset" = %s', offset)
    return f"{row['id']}-0"


def test_a_retry_that_is_due_later_than_any_schedule_says_is_found(
    spark: SparkSession, day: str, tmp_path: Path
) -> None:
    for number, (first_at, due_at, possible) in enumerate(RETRIES):
        one = retry(day, number + 1, first_at, due_at)
        wanted = [] if possible else [("billing", 1, one)]
        assert found(spark, day, tmp_path / str(number)) == wanted, (first_at, due_at)
        rows(day, "delete from delivery_retry returning 1")


def test_those_of_a_subscription_are_one_finding(spark: SparkSession, day: str, tmp_path: Path) -> None:
    last = [retry(day, offset, "now()", f"'2099-01-0{offset}'") for offset in range(1, 4)][-1]
    assert found(spark, day, tmp_path / "all") == [("billing", 3, last)]
    rows(day, "update subscription set deleted_at = now() returning 1")
    assert found(spark, day, tmp_path / "deleted") == []


def test_a_delay_is_the_producers(spark: SparkSession, day: str, tmp_path: Path) -> None:
    rows(day, "update outbox set due_at = date_trunc('day', now()) + interval '40 days' returning 1")
    retry(day, 1, None, "date_trunc('day', now()) + interval '40 days'")
    assert found(spark, day, tmp_path / "kept") == []
    late = retry(day, 2, None, "date_trunc('day', now()) + interval '41 days'")
    assert found(spark, day, tmp_path / "exceeded") == [("billing", 1, late)]


def test_a_consumer_may_hold_a_message_for_twelve_hours(spark: SparkSession, day: str, tmp_path: Path) -> None:
    rows(day, 'update subscription set destination = \'{"type": "pull"}\' returning 1')
    retry(day, 1, "now() - interval '80 hours'", "now() + interval '719 minutes'")
    assert found(spark, day, tmp_path / "held") == []
    late = retry(day, 2, "now() - interval '80 hours'", "now() + interval '721 minutes'")
    assert found(spark, day, tmp_path / "longer") == [("billing", 1, late)]


def test_the_limits_are_those_of_the_relay() -> None:
    assert retries.JITTER == delivery_retry.JITTER
    hours = delivery_retry.POSTPONED_AT_MOST.total_seconds() / 3600
    assert f"{hours:.0f} hours" == retries.POSTPONED_AT_MOST
