"""Ledgers of barriers and inboxes as files, and that the nightly proof reads them."""

import csv
import gzip
import sqlite3
from contextlib import closing
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from halfnote import CheckedTransaction
from halfnote import ledger as module
from halfnote.barrier import Barrier
from halfnote.databases.dbapi import DbApi
from halfnote.ids import new_id
from halfnote.inbox import Inbox
from halfnote.ledger import database_of, main
from halfnote.message import Message
from pyarrow import parquet

from tests.sdk.shop import fresh
from tests.sdk.sites import mariadb_database

# Chosen so that its day is over, wherever and whenever this runs.
DAY = date(2026, 11, 20)
AT = datetime(2026, 11, 20, 12, tzinfo=timezone.utc).timestamp()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite database with both tables."""
    file = tmp_path / "shop.db"
    database = DbApi(lambda: sqlite3.connect(file), "sqlite")
    Barrier(database).create_table()
    Inbox(database, "points").create_table()
    return file


def connect(file: Path) -> Any:
    return closing(sqlite3.connect(file))


def rows(out: Path) -> list[list[str]]:
    opened: Any = gzip.open if out.suffix == ".gz" else open
    with opened(out, "rt", newline="") as text:
        return list(csv.reader(text))


def filled(file: Path) -> tuple[str, str]:
    """Write one committed and one refused transaction, and one of another day; return the ids of the day's."""
    barrier = Barrier(DbApi(lambda: sqlite3.connect(file), "sqlite"))
    done, refused = new_id(AT), new_id(AT + 1)
    for transaction_id in (done, new_id(AT + 86_400)):
        with connect(file) as connection:
            barrier.enter(connection, transaction_id)
            connection.commit()
    barrier.check_local(CheckedTransaction(refused, "shop", 1, 15, datetime.now(timezone.utc), 10, None, [], True))
    return str(done), str(refused)


@pytest.mark.parametrize("name", ["orders.csv", "orders.csv.gz"])
def test_a_producer_s_ledger(file: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done, refused = filled(file)
    days = ["--since", str(DAY), "--until", str(DAY)]
    assert main(["export", "producer", str(tmp_path / name), "--database", f"sqlite:///{file}", *days]) == 0
    assert rows(tmp_path / name) == [["transaction_id", "verdict"], [done, "commit"], [refused, "rollback"]]
    assert capsys.readouterr().out.startswith("2 rows of 2026-11-20 to 2026-11-20 in ")
    assert not list(tmp_path.glob(".orders*"))


def test_a_consumer_s_ledger_as_parquet(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = DbApi(lambda: sqlite3.connect(file), "sqlite")
    inbox = Inbox(database, "points", on_replay="run")
    one, two = f"{new_id(AT)}-0", f"{new_id(AT + 1)}-1"
    for message in (
        Message(one, "order", b"1", subscription="points-web"),
        Message(one, "order", b"1", subscription="points-web", replay="7"),
        Message(two, "order", b"2"),
    ):
        inbox.receive(message, lambda message, connection: None)
    Inbox(database, "billing").receive(Message(one, "order", b"1"), lambda message, connection: None)
    monkeypatch.setenv("HALFNOTE_LEDGER_DATABASE", f"sqlite:///{file}")
    # More pages than one.
    monkeypatch.setattr(module, "PAGE", 1)
    out = tmp_path / "points.parquet"
    assert main(["export", "consumer", str(out), "--consumer", "points", "--since", "2026-11-20"]) == 0
    table = parquet.read_table(out)
    assert [str(field.type) for field in table.schema] == ["string", "int64", "string"]
    assert table.to_pylist() == [
        {"message_id": one, "times_seen": 1, "subscription": "points-web"},
        {"message_id": two, "times_seen": 1, "subscription": None},
    ]


def test_the_days_of_ids_count_to_the_millisecond(file: Path, tmp_path: Path) -> None:
    midnight = datetime(2026, 11, 20, tzinfo=timezone.utc).timestamp()
    ids = [str(new_id(midnight + offset_s)) for offset_s in (-0.001, 0, 86_399.999, 86_400)]
    for transaction_id in ids:
        with connect(file) as connection:
            connection.execute("insert into halfnote_barrier values (?, 'local', '')", (transaction_id,))
            connection.commit()
    out = tmp_path / "orders.csv"
    days = ["--since", str(DAY), "--until", str(DAY)]
    assert main(["export", "producer", str(out), "--database", f"sqlite:///{file}", *days]) == 0
    assert [row[0] for row in rows(out)[1:]] == ids[1:3]


def test_postgres(tmp_path: Path) -> None:
    url = fresh("")
    barrier, one = Barrier(database_of(url)), new_id()
    barrier.create_table()
    with psycopg.connect(url) as connection:
        barrier.enter(connection, one)
    assert main(["export", "producer", str(tmp_path / "orders.csv"), "--database", url]) == 0
    assert rows(tmp_path / "orders.csv")[1:] == [[str(one), "commit"]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give the URL of the database"),
        (["--database", "oracle://db"], "postgresql://"),
        (["--database", "sqlite:////nowhere/shop.db"], "does not exist"),
        (["--database", "sqlite:///{file}", "--since", "2026-11-21", "--until", "2026-11-20"], "is after"),
        (["--database", "sqlite:///{file}", "--table", "a;b"], "is not a table name"),
    ],
)
def test_wrong_usage_is_reported(
    file: Path, tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("{file}", str(file)) for argument in arguments]
    assert main(["export", "producer", str(tmp_path / "orders.csv"), *given]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "orders.csv").exists()


def test_a_database_that_has_no_such_table_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with connect(tmp_path / "empty.db") as connection:
        connection.execute("create table other (n int)")
    database = f"sqlite:///{tmp_path / 'empty.db'}"
    assert main(["export", "producer", str(tmp_path / "orders.csv"), "--database", database]) == 1
    assert "no such table: halfnote_barrier" in capsys.readouterr().err


@pytest.mark.slow
def test_mariadb(tmp_path: Path) -> None:
    with mariadb_database() as connect_to:
        with closing(connect_to()) as connection:
            url = f"mysql://root@{connection.host}:{connection.port}/{connection.db.decode()}"
        barrier, one = Barrier(database_of(url)), new_id()
        barrier.create_table()
        with closing(connect_to()) as connection:
            barrier.enter(connection, one)
            connection.commit()
        assert main(["export", "producer", str(tmp_path / "orders.csv"), "--database", url]) == 0
        assert rows(tmp_path / "orders.csv")[1:] == [[str(one), "commit"]]


def test_a_name_says_the_form(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "producer", str(tmp_path / "orders.txt"), "--database", f"sqlite:///{file}"]) == 2
    assert ".csv, .csv.gz or .parquet" in capsys.readouterr().err


def test_a_consumer_s_ledger_needs_its_consumer(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "points.csv"
    assert main(["export", "consumer", str(out), "--database", f"sqlite:///{file}"]) == 2
    assert "--consumer" in capsys.readouterr().err
    assert not out.exists()
