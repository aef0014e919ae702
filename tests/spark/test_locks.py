"""Whoever comes after a run must find its lock free, without a wait for the server to see that it ended."""

from contextlib import closing

import pytest

from spark.archive_store import archive_lock
from spark.database import connect, only_run
from spark.errors import BusyError, RunFailedError


def test_a_run_follows_another_at_once(dsn: str) -> None:
    for _ in range(50):
        with only_run(dsn) as connection:
            assert connection.execute("select 1").fetchone()


def test_an_archive_follows_another_at_once(dsn: str) -> None:
    for _ in range(50):
        with archive_lock(connect(dsn)):
            pass


def test_two_at_once_are_refused(dsn: str) -> None:
    with only_run(dsn), pytest.raises(BusyError, match="Another run is at it: halfnote proof"), only_run(dsn):
        pass
    with (
        archive_lock(connect(dsn)),
        closing(connect(dsn)) as other,
        pytest.raises(RunFailedError, match="Another archive"),
        archive_lock(other),
    ):
        pass


def fail(dsn: str) -> None:
    with only_run(dsn) as connection, connection.transaction():
        connection.execute("select 1")
        raise ZeroDivisionError


def test_a_run_that_fails_in_a_database_transaction_gives_its_lock_back(dsn: str) -> None:
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            fail(dsn)
