"""What a run over few rows leaves out: the better compilers, and JDBC. What the report's address is."""

from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row

from spark.postgres import size
from spark.postgres.connections import partition_name
from spark.proof.parquet_output import url_of_report
from tests.spark.days import days_ago, fill_day


def test_a_database_is_small_until_its_days_have_many_rows(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with psycopg.connect(dsn, row_factory=dict_row, autocommit=True) as connection:
        monkeypatch.setattr(size, "SMALL_ROWS", 10)
        assert size.is_small(connection)
        fill_day(dsn, days_ago(1), 10)
        # The counters come a moment after the commit; ANALYZE writes the catalog.
        connection.execute("analyze")
        assert not size.is_small(connection)
        monkeypatch.setattr(size, "SMALL_ROWS", 1_000_000)
        assert size.is_small(connection)


def test_a_locked_day_does_not_hold_up_the_estimate(dsn: str) -> None:
    fill_day(dsn, days_ago(1), 10)
    with psycopg.connect(dsn) as upkeep, psycopg.connect(dsn, row_factory=dict_row) as connection:
        upkeep.execute(f"lock table {partition_name('half', days_ago(1))} in access exclusive mode")
        connection.execute("set lock_timeout = 100")
        assert size.is_small(connection)


@pytest.mark.parametrize("place", ["s3a://bucket/proof", "file:/srv/proof/", "hdfs://node/proof"])
def test_the_reports_address_is_that_of_the_directory(place: str) -> None:
    assert url_of_report(place) == f"{place.rstrip('/')}/report.html"


def test_the_reports_address_of_a_path_is_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert url_of_report("a proof/") == f"file://{tmp_path}/a%20proof/report.html"
