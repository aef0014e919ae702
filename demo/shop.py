"""The shop's own database, a SQLite file: orders and stock. Halfnote never reads it."""

import sqlite3
from contextlib import closing
from pathlib import Path

SCHEMA = """
create table if not exists stock (article text primary key, pieces int not null check (pieces >= 0));
create table if not exists orders (
    number int primary key, article text not null, pieces int not null, transaction_id text not null unique
);
insert into stock values ('teapot', 10) on conflict do nothing;
"""


class OutOfStock(Exception):
    """The stock is too small; nothing was changed."""


class Shop:
    """The shop's database in one file; every call is one database transaction."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with closing(self._open()) as database:
            database.executescript(SCHEMA)

    def place(self, number: int, article: str, pieces: int, transaction_id: str) -> None:
        """Take the pieces from stock and store the order, both or neither. Raises OutOfStock."""
        with closing(self._open()) as database:
            try:
                with database:
                    database.execute(
                        "insert into orders values (?, ?, ?, ?)", (number, article, pieces, transaction_id)
                    )
                    database.execute("update stock set pieces = pieces - ? where article = ?", (pieces, article))
            except sqlite3.IntegrityError as error:
                raise OutOfStock(f"Not enough stock: {pieces:,} of {article} ordered") from error

    def has(self, transaction_id: str) -> bool:
        """Return whether the local database transaction of this id was committed."""
        with closing(self._open()) as database:
            found = database.execute("select 1 from orders where transaction_id = ?", (transaction_id,))
            return found.fetchone() is not None

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=10)
