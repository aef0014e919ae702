"""The nightly programs behind a real pgbouncer: they work in session mode, and refuse the others by themselves.

On every engine: executors' engines run the files of spark/jobs, where no command of the service refuses first.
"""

from collections.abc import Callable, Sequence

import pytest
from pyspark.sql import SparkSession

from spark.errors import RunFailedError
from spark.jobs import archive, reconcile, redact, restore
from spark.postgres import connections
from tests.spark.days import days_ago, fill_day, flip_ops, rows
from tests.support.pgbouncer import Mode, pooling

MESSAGE = "019a9f1c-1030-7b1e-8f00-1030a1030a10-0"


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize(
    ("main", "options"),
    [
        (reconcile.main, []),
        (archive.main, ["--archive", "/nowhere"]),
        (restore.main, ["2026-11-10"]),
        (redact.main, [MESSAGE, "--reason", "request 17"]),
    ],
    ids=["reconcile", "archive", "restore", "redact"],
)
def test_a_pooler_of_transactions_is_refused(
    dsn: str,
    mode: Mode,
    main: Callable[[Sequence[str]], int],
    options: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pooling(dsn, mode) as url:
        assert main(["--database-url", url, *options]) == 1
        said = capsys.readouterr().err
        assert "leads to a transaction pooler" in said
        assert "session mode" in said
        assert "Traceback" not in said
    assert rows(dsn, "select from reconciliation_run") == []


def test_so_is_one_before_a_standby(dsn: str) -> None:
    with (
        pooling(dsn, "transaction") as url,
        pytest.raises(RunFailedError, match="leads to a transaction pooler"),
        connections.open_snapshot(url),
    ):
        pass


@pytest.mark.slow
def test_in_session_mode_a_day_is_proved(spark: SparkSession, dsn: str) -> None:
    day = days_ago(5)
    fill_day(dsn, day, 300)
    flipped = flip_ops(dsn, 2)
    with pooling(dsn, "session") as url:
        assert reconcile.main(["--database-url", url, "--day", str(day)]) == 3
    assert {one["subject"] for one in rows(dsn, "select subject from finding")} == {f"{one}-0" for one in flipped}
