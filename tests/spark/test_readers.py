"""Connections that read a snapshot: they begin at once, share what the driver knows, and none is left."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any

import psycopg
import pytest
from adbc_driver_manager import Error as AdbcError

from spark.postgres.connections import Snapshot, open_snapshot
from spark.postgres.readers import Readers
from tests.spark.days import rows

AT_ONCE = 8
STATES = "select state, count(*) as sessions from pg_stat_activity where application_name = 'halfnote proof' and "
STATES += "datname = current_database() group by state order by state"


def sessions(dsn: str) -> dict[str, int]:
    return {row["state"]: row["sessions"] for row in rows(dsn, STATES)}


def topics_seen(snapshot: Snapshot, begin: Barrier) -> int:
    begin.wait(30)
    with snapshot.readers.cursor() as cursor:
        cursor.execute("select count(*) from topic where name = 'order'")
        count: int = cursor.fetchone()[0]
    return count


def test_readers_that_begin_at_once_read_the_snapshot_and_none_is_left(dsn: str) -> None:
    with open_snapshot(dsn) as snapshot, ThreadPoolExecutor(AT_ONCE) as pool:
        rows(dsn, "insert into topic (name, first_seen_at) values ('order', now()) returning 1")
        begin = Barrier(AT_ONCE)
        found = [pool.submit(topics_seen, snapshot, begin) for _ in range(AT_ONCE)]
        assert [one.result() for one in found] == [0] * AT_ONCE
    deadline = time.monotonic() + 30
    while sessions(dsn) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sessions(dsn) == {}


def test_the_connection_that_readers_share_is_in_no_database_transaction(dsn: str) -> None:
    with open_snapshot(dsn) as snapshot:
        for _ in range(2):
            with snapshot.readers.cursor() as cursor:
                cursor.execute("select 1")
                assert cursor.fetchone() == (1,)
                assert sessions(dsn) == {"idle": 1, "idle in transaction": 1}


def test_no_session_compiles_expressions(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'alter database "{connection.info.dbname}" set jit = on')
    with open_snapshot(dsn) as snapshot, snapshot.readers.cursor() as cursor:
        cursor.execute("select current_setting('jit')")
        assert cursor.fetchone() == ("off",)
        assert snapshot.rows("show jit") == [{"jit": "off"}]


def test_a_reader_that_fails_leaves_the_others(dsn: str) -> None:
    with open_snapshot(dsn) as snapshot:
        with snapshot.readers.cursor() as cursor, pytest.raises(AdbcError, match="division by zero"):
            cursor.execute("select 1 / 0")
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where application_name = 'halfnote proof' and datname = current_database()"
            )
        with snapshot.readers.cursor() as cursor:
            cursor.execute("select 1")
            assert cursor.fetchone() == (1,)


def test_the_first_connection_is_closed_after_the_others(dsn: str) -> None:
    """They share memory with it. A signal may have ended the wait for a thread that still reads."""
    lent, goes_on = threading.Event(), threading.Event()
    rows: list[Any] = []

    def read(readers: Readers) -> None:
        with readers.cursor() as cursor:
            lent.set()
            goes_on.wait(60)
            cursor.execute("select 1030 as order_id")
            rows.append(cursor.fetchone()[0])

    with open_snapshot(dsn) as snapshot, ThreadPoolExecutor(2) as pool:
        readers = Readers(snapshot.connection, snapshot.name)
        reading = pool.submit(read, readers)
        assert lent.wait(60)
        closing = pool.submit(readers.close)
        assert not wait([closing], 0.2).done
        goes_on.set()
        reading.result(60)
        closing.result(60)
        with pytest.raises(OSError, match="was ended"), readers.cursor():
            pass
    assert rows == [1030]
