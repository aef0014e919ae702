"""`halfnote-ledger export`: writes a producer's barrier or a consumer's inbox in the format of the nightly proof.

docs/ledgers.md of the service explains the columns. CSV (also `.csv.gz`) needs no other package; Parquet needs
`halfnote[parquet]`.
"""

import argparse
import csv
import gzip
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path
from typing import IO, Any, TypeAlias
from urllib.parse import unquote, urlsplit
from uuid import UUID

from halfnote.barrier import TABLE as BARRIER
from halfnote.barrier_sql import LOCAL, BarrierSql
from halfnote.databases.base import Database, Script
from halfnote.databases.dbapi import DbApi
from halfnote.ids import lowest_id
from halfnote.inbox import TABLE as INBOX
from halfnote.inbox_sql import InboxSql

PAGE = 10_000
DATABASE = "HALFNOTE_LEDGER_DATABASE"
COLUMNS = {
    "producer": ("transaction_id", "verdict"),
    "consumer": ("message_id", "times_seen", "subscription"),
}

Row: TypeAlias = tuple[Any, ...]
Write: TypeAlias = Callable[[Sequence[Row]], None]
_Page: TypeAlias = Callable[[str], Script[list[Any]]]

_NIL = str(UUID(int=0))


def producer_rows(database: Database, since: date, until: date, *, table: str = BARRIER) -> Iterator[list[Row]]:
    """Yield (transaction_id, verdict) of the days from `since` to `until`, both included, in pages."""
    sql = BarrierSql(database.dialect, table, 0)
    low, high = _range(since, until)
    for page in _pages(database, lambda after: sql.exporting(after, high, PAGE), low):
        yield [(found, "commit" if reason == LOCAL else "rollback") for found, reason in page]


def consumer_rows(
    database: Database, consumer: str, since: date, until: date, *, table: str = INBOX
) -> Iterator[list[Row]]:
    """Yield (message_id, times_seen, subscription) of the days from `since` to `until`, both included, in pages.

    Each message counts once: the table's key ensures one run for each row, and one more run for a person's replay is
    correct.
    """
    sql = InboxSql(database.dialect, table, consumer)
    low, high = _range(since, until)
    for page in _pages(database, lambda after: sql.exporting(after, high, PAGE), low):
        yield [(message_id, 1, subscription) for message_id, subscription in page]


def database_of(url: str) -> Database:
    """Return the database of a URL: `postgresql://` (psycopg), `mysql://` (PyMySQL), `sqlite:///file`.

    Raises ValueError, or ImportError if the driver is missing.
    """
    parts = urlsplit(url)
    if parts.scheme in ("postgresql", "postgres"):
        import psycopg

        return DbApi(lambda: psycopg.connect(url), "postgresql")
    if parts.scheme in ("mysql", "mariadb"):
        import pymysql

        connect: Any = pymysql.connect
        place = {"host": parts.hostname or "127.0.0.1", "port": parts.port or 3306, "database": parts.path[1:]}
        account = {"user": unquote(parts.username or ""), "password": unquote(parts.password or "")}
        return DbApi(lambda: connect(**place, **account), "mysql")
    if parts.scheme == "sqlite":
        file = Path(parts.path[1:])
        if not file.exists():
            raise ValueError(f"the file {file} does not exist")
        return DbApi(lambda: sqlite3.connect(file), "sqlite")
    raise ValueError("the URL of a database must be postgresql://…, mysql://… or sqlite:///file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    given = _parser().parse_args(arguments)
    if given.ledger == "consumer" and not given.consumer:
        print("halfnote-ledger: give the inbox's consumer with --consumer", file=sys.stderr)
        return 2
    url = given.database or os.environ.get(DATABASE)
    if not url:
        print(f"halfnote-ledger: give the URL of the database with --database or {DATABASE}", file=sys.stderr)
        return 2
    today = datetime.now(timezone.utc).date()
    since, until = given.since or today - timedelta(days=7), given.until or today
    try:
        database = database_of(url)
        if given.ledger == "producer":
            pages = producer_rows(database, since, until, table=given.table or BARRIER)
        else:
            pages = consumer_rows(database, given.consumer, since, until, table=given.table or INBOX)
        count = export(pages, COLUMNS[given.ledger], given.out)
    except (ValueError, ImportError, OSError) as error:
        print(f"halfnote-ledger: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        # The errors of drivers have no common base class, and a traceback would show the URL.
        print(f"halfnote-ledger: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{count} rows of {since} to {until} in {given.out}")
    return 0


def export(pages: Iterator[list[Row]], columns: Sequence[str], out: Path) -> int:
    """Write pages of rows to a file, which appears only when it is complete; return their number. Raises ValueError."""
    open_file = _parquet if out.suffix == ".parquet" else _csv
    if out.suffix != ".parquet" and not out.name.endswith((".csv", ".csv.gz")):
        raise ValueError(f"the name {out} must end in .csv, .csv.gz or .parquet")
    # The name begins with a dot, so that readers of the directory skip it.
    unfinished = out.with_name(f".{out.name}")
    count = 0
    try:
        with open_file(unfinished, columns) as write:
            for page in pages:
                write(page)
                count += len(page)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


@contextmanager
def _csv(file: Path, columns: Sequence[str]) -> Iterator[Write]:
    opened: Any = gzip.open if file.suffix == ".gz" else open
    stream: AbstractContextManager[IO[str]] = opened(file, "wt", encoding="utf-8", newline="")
    with stream as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        yield writer.writerows


@contextmanager
def _parquet(file: Path, columns: Sequence[str]) -> Iterator[Write]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet needs: pip install 'halfnote[parquet]'") from error
    kinds = {"times_seen": pyarrow.int64()}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in columns])
    with parquet.ParquetWriter(file, schema) as writer:

        def write(page: Sequence[Row]) -> None:
            arrays = [pyarrow.array([row[index] for row in page], field.type) for index, field in enumerate(schema)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        yield write


def _pages(database: Database, page: _Page, after: str) -> Iterator[list[Any]]:
    """Yield pages, each after the last id of the one before."""
    while True:
        found = database.run(page(after))
        if found:
            yield found
        if len(found) < PAGE:
            return
        after = found[-1][0]


def _range(since: date, until: date) -> tuple[str, str]:
    """Return the exclusive lower and upper bounds of the ids of these days. Raises ValueError."""
    if since > until:
        raise ValueError(f"{since} is after {until}")
    start = datetime.combine(since, time(), timezone.utc).timestamp()
    end = datetime.combine(until, time(), timezone.utc) + timedelta(days=1)
    low = lowest_id(start)
    return str(UUID(int=low.int - 1)) if low.int else _NIL, str(lowest_id(end.timestamp()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("halfnote-ledger", description="Ledgers for Halfnote's nightly proof.")
    ledgers = parser.add_subparsers(required=True, metavar="export").add_parser(
        "export", help="write a database's rows of some days to a file"
    )
    ledgers.add_argument("ledger", choices=sorted(COLUMNS), help="a producer's barrier or a consumer's inbox")
    ledgers.add_argument("out", type=Path, help="the file to write; its name ends in .csv, .csv.gz or .parquet")
    ledgers.add_argument(
        "--database", help=f"its URL (default: {DATABASE}, which other users of the machine cannot see)"
    )
    ledgers.add_argument("--consumer", default="", help="the inbox's consumer; a consumer's ledger needs it")
    ledgers.add_argument("--table", help=f"default: {BARRIER} or {INBOX}")
    ledgers.add_argument("--since", type=date.fromisoformat, help="first day of the ids, UTC (default: 7 days ago)")
    ledgers.add_argument("--until", type=date.fromisoformat, help="last day (default: today)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
