"""The next run must find the lock free, without a wait for the server to notice that the last run ended."""

from contextlib import closing

import pytest

from spark.archive.records import archive_lock
from spark.errors import BusyError, RunFailedError
from spark.postgres.connections import connect, only_run
from tests.support.examples import examples


def test_a_run_follows_another_at_once(dsn: str) -> None:
    for _ in range(examples(50)):
        with only_run(dsn) as connection:
            assert connection.execute("select 1").fetchone()


def test_an_archive_follows_another_at_once(dsn: str) -> None:
    for _ in range(examples(50)):
        with archive_lock(connect(dsn)):
            pass


def test_two_at_once_are_refused(dsn: str) -> None:
    with only_run(dsn), pytest.raises(BusyError, match="Another run is active: halfnote proof"), only_run(dsn):
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
    for _ in range(examples(20)):
        with pytest.raises(ZeroDivisionError):
            fail(dsn)
