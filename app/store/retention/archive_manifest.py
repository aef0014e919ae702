"""Compare the manifest of a day's archive with the rows that the day's tables hold.

The archive (spark/jobs/archive.py) writes day.archive_manifest in the same form. Both sides contain the statement,
because neither imports the other. A test checks that the two statements are equal.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import Column, DateTime, Double, LargeBinary, Text
from sqlalchemy.dialects.postgresql import JSONB

from app.database.connection import Connection
from app.models import DAY_TABLES, metadata
from app.store.retention.day_ranges import IdRange
from app.store.retention.days import partition_name

# Primary key; one row.
MANIFEST = "select archive_manifest from day where day = $1 and archive is not null"

# The digest leaves out the body and includes body_digest, which the archive computes again from the body that it
# writes.
APART = {("half", "body")}
HEX_DIGITS = 15
# A table has no page with this number.
PAGE_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TableDigest:
    """A table's rows, lowest and highest id (None: no rows), and digest."""

    rows: int
    first_id: str | None
    last_id: str | None
    digest: str

    @classmethod
    def total(cls, parts: Iterable["TableDigest"]) -> "TableDigest":
        """Return the digest of the rows of all parts together. Each row is in one part."""
        filled = [part for part in parts if part.rows]
        return cls(
            sum(part.rows for part in filled),
            min((part.first_id for part in filled if part.first_id is not None), default=None),
            max((part.last_id for part in filled if part.last_id is not None), default=None),
            str(sum(int(part.digest) for part in filled)),
        )


async def manifest(connection: Connection, day: date) -> dict[str, TableDigest] | None:
    """Return what the day's archive holds, by table, or None if it is not archived."""
    stored = await connection.fetchval(MANIFEST, day)
    if stored is None:
        return None
    tables: dict[str, dict[str, Any]] = json.loads(stored)["tables"]
    return {table: TableDigest(*(holds[name] for name in TableDigest.__slots__)) for table, holds in tables.items()}


async def counts(connection: Connection, day: date, ids: IdRange) -> dict[str, int]:
    """Count the rows of the day's tables, attached or not, in a range of ids and in one snapshot."""
    parts = ", ".join(
        f"(select count(*) from {partition_name(table, day)} where transaction_id between $1 and $2) as {table}"  # noqa: S608
        for table in DAY_TABLES
    )
    row = await connection.fetchrow(f"select {parts}", ids.first, ids.last)
    assert row is not None
    return dict(row)


async def holding(connection: Connection, day: date, table: str, first_page: int, end_page: int | None) -> TableDigest:
    """Return the digest of a table's rows in pages of the day, attached or not. The read blocks no other session.

    From `first_page` and before `end_page`; None: to the end. A TID range scan reads the pages in their order on disk.
    """
    statement = f"{holding_of(table, partition_name(table, day))} where ctid >= $1 and ctid < $2"
    row = await connection.fetchrow(statement, (first_page, 0), (PAGE_MAX if end_page is None else end_page, 0))
    assert row is not None
    return TableDigest(**row)


def holding_of(table: str, relation: str) -> str:
    """Return the statement that computes the TableDigest of a relation with a table's columns.

    A row's text is its columns joined by `|`, with null as `\\N`. The digest is the sum over all rows of the first 60
    bits of the MD5 of this text.
    """
    columns = [column for column in metadata.tables[table].columns if (table, column.name) not in APART]
    text = " || '|' || ".join(f"coalesce({_text(column)}, '\\N')" for column in columns)
    number = f"('x' || left(md5(convert_to({text}, 'UTF8')), {HEX_DIGITS}))::bit({HEX_DIGITS * 4})::bigint"
    return f"""select count(*) as rows, min("transaction_id"::text collate "C") as first_id,
  max("transaction_id"::text collate "C") as last_id, coalesce(sum({number}), 0)::text as digest
from {relation}"""  # noqa: S608 -- names of tables and columns


def _text(column: Column[Any]) -> str:
    name, kind = f'"{column.name}"', column.type
    if isinstance(kind, Text):
        return _escaped(name)
    if isinstance(kind, JSONB):
        return _escaped(f"{name}::text")
    if isinstance(kind, Double):
        return f"round({name} * 1000000)::bigint::text"
    if isinstance(kind, LargeBinary):
        return f"encode({name}, 'hex')"
    if isinstance(kind, DateTime):
        return f"(extract(epoch from {name}) * 1000000)::bigint::text"
    return f"{name}::text"


def _escaped(text: str) -> str:
    return rf"replace(replace({text}, '\', '\\'), '|', '\|')"
