"""Offsets that an earlier day had too: the run searches all stored days for them, and reads nothing else of those."""

import io
from datetime import date
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark.engine.progress import Progress
from spark.errors import SnapshotLostError
from spark.postgres.connections import open_snapshot
from spark.proof.read_days import Wish, read_days
from spark.sources.frames import frames_from_parquet
from spark.sources.same_offsets import others_with_same
from tests.spark.days import days_ago, fill_day, rows

EARLIEST, BEFORE, LAST = days_ago(4), days_ago(3), days_ago(2)


@pytest.fixture
def days(dsn: str) -> str:
    """Three days of 20; the first one's last message was committed after midnight, as some are."""
    for number, day in enumerate((EARLIEST, BEFORE, LAST)):
        fill_day(dsn, day, 20, first=1 + 20 * number)
    with psycopg.connect(dsn) as db:
        db.execute('update outbox set "offset" = "offset" * 10')
        db.execute('update outbox set "offset" = 225 where "offset" = 200')
    return dsn


def same(spark: SparkSession, dsn: str, day: date, path: Path) -> list[tuple[str, int]] | None:
    with open_snapshot(dsn) as snapshot:
        found = others_with_same(spark, snapshot, snapshot.day(day), str(path / f"staged-{day}"))
    return None if found is None else [(row["transaction_id"], row["offset"]) for row in found.collect()]


def test_ranges_that_meet_share_no_offset(spark: SparkSession, days: str, tmp_path: Path) -> None:
    assert [same(spark, days, day, tmp_path) for day in (EARLIEST, BEFORE, LAST)] == [None, None, None]


def test_an_offset_is_found_that_any_earlier_day_had(spark: SparkSession, days: str, tmp_path: Path) -> None:
    [first] = rows(days, """select transaction_id::text as id from outbox where "offset" = 100""")
    # The sequence is set back when the last day begins.
    rows(days, 'update outbox set "offset" = 100 where "offset" = 410 returning 1')
    assert same(spark, days, EARLIEST, tmp_path) is None
    assert same(spark, days, BEFORE, tmp_path) is None
    read = read_days(spark, days, Wish([LAST], {}, 3600.0), str(tmp_path / "read"), Progress(stream=io.StringIO()))
    [day] = read.days
    for frames in (day.frames, frames_from_parquet(spark, str(tmp_path / "read" / str(LAST)))):
        assert frames.same_offset is not None
        assert [tuple(row) for row in frames.same_offset.collect()] == [(first["id"], 0, 100)]


def test_a_late_commit_is_compared_with_later_days_that_are_final(
    spark: SparkSession, days: str, tmp_path: Path
) -> None:
    [last] = rows(days, """select transaction_id::text as id from outbox where "offset" = 410""")
    # The sequence was set back, and then a parked transaction of the first day was committed.
    rows(days, 'update outbox set "offset" = 410 where "offset" = 100 returning 1')
    assert same(spark, days, EARLIEST, tmp_path / "provisional") is None
    final = """insert into reconciliation_day (day, run_id, state, reconciled_at, counts, found, signature, figures)
      values (%s, 1, 'final', now(), '{}', '{}', '{}', '{}') returning 1"""
    rows(days, final, LAST)
    assert same(spark, days, EARLIEST, tmp_path / "final") == [(last["id"], 410)]
    # Other days have other offsets.
    assert same(spark, days, BEFORE, tmp_path / "final") is None


def test_a_day_that_leaves_meanwhile_needs_a_new_snapshot(spark: SparkSession, days: str, tmp_path: Path) -> None:
    with open_snapshot(days) as snapshot:
        day = snapshot.day(LAST)
        with psycopg.connect(days) as db:
            db.execute(f"drop table outbox_{EARLIEST:%Y%m%d}")
        with pytest.raises(SnapshotLostError, match="removed while offsets were compared"):
            others_with_same(spark, snapshot, day, str(tmp_path))
