"""The reasons of dead letters are compared with what a person redelivered."""

import json
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession

from spark.postgres.connections import open_snapshot
from spark.sources.deliveries import write_wrong_deliveries
from tests.spark.days import days_ago, fill_day, rows

MOVED = """
with gone as (
  delete from receipt where "offset" = 1 returning *
), dead as (
  insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, reason, died_at)
  select subscription_id, transaction_id, position, "offset", 'order', 'order-1', 0, 'retries_exhausted', now()
  from gone
)
select 1
"""
REDELIVERED = """
insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, died_because,
  attempts)
select subscription_id, replay, transaction_id, position, "offset", 'redelivered', died_at, died_at, reason, 0
from dead_letter returning 1
"""


def test_one_that_was_never_tried_since_a_redelivery_has_the_reason_of_before(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    fill_day(dsn, days_ago(3), 30)
    rows(dsn, MOVED)
    assert found(spark, dsn, tmp_path / "alone") == ["reason"]
    rows(dsn, REDELIVERED)
    assert found(spark, dsn, tmp_path / "redelivered") == []


def test_one_of_a_day_that_was_closed_in_between_too(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    """The day is open again, and no dead letter of a removal dates from since."""
    fill_day(dsn, days_ago(3), 30)
    rows(dsn, MOVED)
    with psycopg.connect(dsn) as db:
        db.execute("update dead_letter set reason = 'day_left'")
        db.execute("update day set changed_at = now() - interval '1 hour'")
    assert found(spark, dsn, tmp_path / "alone") == ["reason"]
    rows(dsn, REDELIVERED)
    assert found(spark, dsn, tmp_path / "redelivered") == []


def found(spark: SparkSession, dsn: str, path: Path) -> list[str]:
    """What is wrong with deliveries of the day."""
    with open_snapshot(dsn) as snapshot:
        write_wrong_deliveries(spark, snapshot, snapshot.day(days_ago(3)), str(path))
    return [json.loads(line)["differs"] for one in path.glob("*.json") for line in one.read_text().splitlines()]
