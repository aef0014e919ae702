"""The nightly proof reads what `halfnote-ledger export` writes of a producer's barrier and a consumer's inbox."""

import sqlite3
from contextlib import closing
from datetime import UTC, date, datetime, time
from pathlib import Path
from uuid import UUID

import pytest
from halfnote.barrier import Barrier
from halfnote.databases.dbapi import DbApi
from halfnote.ids import new_id
from halfnote.inbox import Inbox
from halfnote.ledger import main as ledger
from halfnote.message import Message

from tests.spark.days import days_ago, fill_day, prove, rows

pytestmark = pytest.mark.usefixtures("spark")


class Shop:
    """A SQLite database that is the producer's and the consumer's, with what is in Halfnote's."""

    def __init__(self, file: Path, dsn: str) -> None:
        self._file = file
        database = DbApi(lambda: sqlite3.connect(file), "sqlite")
        self.barrier, inbox = Barrier(database), Inbox(database, "billing")
        self.barrier.create_table()
        inbox.create_table()
        self.ids = [row["transaction_id"] for row in rows(dsn, "select transaction_id from half order by 1")]
        for one in self.ids:
            self.commit(one)
            inbox.receive(Message(f"{one}-0", "order", b"1", subscription="billing"), lambda message, connection: None)

    def commit(self, transaction_id: UUID) -> None:
        """Commit a local database transaction."""
        with closing(sqlite3.connect(self._file)) as connection:
            self.barrier.enter(connection, transaction_id)
            connection.commit()

    def spoil(self, statement: str, value: str) -> None:
        """Change one row, as no client does."""
        with closing(sqlite3.connect(self._file)) as connection:
            assert connection.execute(statement, [value]).rowcount == 1
            connection.commit()

    def export(self, day: date, directory: Path) -> tuple[Path, Path]:
        """Export both ledgers of a day; return their files."""
        producer, consumer = directory / "orders.csv.gz", directory / "billing.parquet"
        common = ["--database", f"sqlite:///{self._file}", "--since", str(day), "--until", str(day)]
        assert ledger(["export", "producer", str(producer), *common]) == 0
        assert ledger(["export", "consumer", str(consumer), "--consumer", "billing", *common]) == 0
        return producer, consumer


def test_exported_ledgers_agree_with_what_was_sent_and_faults_in_them_are_found(dsn: str, tmp_path: Path) -> None:
    day = days_ago(2)
    fill_day(dsn, day, 20)
    shop = Shop(tmp_path / "shop.db", dsn)
    producer, consumer = shop.export(day, tmp_path)
    options = ("--day", day, "--producer-ledger", producer, "--consumer-ledger", consumer)
    assert prove(dsn, *options) == 0

    contradicted, not_consumed = shop.ids[3], shop.ids[7]
    noon = datetime.combine(day, time(12), UTC)
    not_sent = new_id(noon.timestamp())
    shop.commit(not_sent)
    shop.spoil("update halfnote_barrier set reason = 'rollback' where transaction_id = ?", str(contradicted))
    shop.spoil("delete from halfnote_inbox where message_id = ?", f"{not_consumed}-0")
    assert shop.export(day, tmp_path) == (producer, consumer)
    assert prove(dsn, *options) == 3
    found = rows(dsn, "select kind, transaction_id from finding order by kind")
    assert [(row["kind"], row["transaction_id"]) for row in found] == [
        ("ledger_disagrees", contradicted),
        ("ledger_not_sent", not_sent),
        ("never_consumed", not_consumed),
    ]
