"""Messages of the outbox are compared with their halves in Postgres, while a day is read."""

import io
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark.engine.progress import Progress
from spark.frames import Frames
from spark.postgres.connections import open_snapshot
from spark.sources import scan
from spark.sources.frames import frames_from_postgres
from tests.spark.days import days_ago, fill_day, rows

# One change each, and the columns that then differ.
CHANGES = {
    "update outbox set topic = 'Order' where transaction_id = %s": "topic",
    "update outbox set key = null where transaction_id = %s": "key",
    "update outbox set tag = 'late', key = 'x' where transaction_id = %s": "key, tag",
    "update outbox set due_at = committed_at where transaction_id = %s": "due_at",
    "update half set deliver_after_s = 5 where transaction_id = %s": "due_at",
    # A delay that was kept is none that differs.
    "with delayed as (update half set deliver_after_s = 0.25 where transaction_id = %s returning transaction_id) "
    "update outbox o set due_at = committed_at + interval '250 ms' from delayed d "
    "where o.transaction_id = d.transaction_id": None,
    "with delayed as (update half set deliver_after_s = 0.25 where transaction_id = %s returning transaction_id) "
    "update outbox o set due_at = committed_at + interval '250001 us' from delayed d "
    "where o.transaction_id = d.transaction_id": "due_at",
}


def read(spark: SparkSession, dsn: str, directory: Path) -> Frames:
    day = days_ago(3)
    with open_snapshot(dsn) as snapshot:
        snapshot.lock([day])
        return frames_from_postgres(spark, snapshot, day, str(directory), Progress(io.StringIO()))


def test_each_changed_column_is_named(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_day(dsn, days_ago(3), 100)
    # Several ranges, most of them empty.
    monkeypatch.setattr(scan, "PAGES_AT_ONCE", 1)
    ids = [str(row["transaction_id"]) for row in rows(dsn, "select transaction_id from outbox order by 1")]
    victims = dict(zip(ids[:: len(ids) // len(CHANGES)], CHANGES.items(), strict=False))
    with psycopg.connect(dsn) as connection:
        for victim, (change, _) in victims.items():
            assert connection.execute(change, [victim]).rowcount == 1
    found = read(spark, dsn, tmp_path).differing
    assert found is not None
    wanted = {victim: differs for victim, (_, differs) in victims.items() if differs is not None}
    assert len(wanted) == len(CHANGES) - 1
    assert {row.transaction_id: row.differs for row in found.collect()} == wanted
    assert {(row.position, row.producer_group) for row in found.collect()} == {(0, "shop")}
