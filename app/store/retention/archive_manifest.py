"""Compare the manifest of a day's archive with the rows that the day's tables hold.

The archive (spark/jobs/archive.py) writes day.archive_manifest in the same form. Both sides contain the statement,
because neither imports the other. A test checks that the two statements are equal.
"""

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import Column, DateTime, Double, LargeBinary, Text
from sqlalchemy.dialects.postgresql import JSONB

from app.database.connection import Connection
from app.models import DAY_TABLES, metadata
from app.store.retention.days import partition_name

# Primary key; one row.
MANIFEST = "select archive_manifest from day where day = $1 and archive is not null"

# The digest leaves out the body and includes body_digest, which the archive computes again from the body that it
# writes.
APART = {("half", "body")}
HEX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class TableDigest:
    """A table's rows, lowest and highest id (None: no rows), and digest."""

    rows: int
    first_id: str | None
    last_id: str | None
    digest: str


async def manifest(connection: Connection, day: date) -> dict[str, TableDigest] | None:
    """Return what the day's archive holds, by table, or None if it is not archived."""
    stored = await connection.fetchval(MANIFEST, day)
    if stored is None:
        return None
    tables: dict[str, dict[str, Any]] = json.loads(stored)["tables"]
    return {table: TableDigest(*(holds[name] for name in TableDigest.__slots__)) for table, holds in tables.items()}


async def counts(connection: Connection, day: date) -> dict[str, int]:
    """Count the rows of the day's tables, attached or not, in one snapshot."""
    parts = ", ".join(f"(select count(*) from {partition_name(table, day)}) as {table}" for table in DAY_TABLES)  # noqa: S608
    row = await connection.fetchrow(f"select {parts}")
    assert row is not None
    return dict(row)


async def holdings(connection: Connection, day: date) -> dict[str, TableDigest]:
    """Read all rows of the day's tables, attached or not, and return the digests. The read blocks no other session."""
    rows = {table: await connection.fetchrow(holding_of(table, partition_name(table, day))) for table in DAY_TABLES}
    return {table: TableDigest(**row) for table, row in rows.items() if row is not None}


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
