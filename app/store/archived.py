"""What a day's archive holds, and whether the day's tables still hold the same.

The archive (spark/jobs/archive.py) writes day.archive_manifest in the same form. Both sides have the statement, because
neither imports the other; a test holds that it is one.
"""

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import Column, DateTime, Double, LargeBinary, Text
from sqlalchemy.dialects.postgresql import JSONB

from app.database import Connection
from app.models import DAY_TABLES, metadata
from app.store.days import partition_name

# One row by primary key.
MANIFEST = "select archive_manifest from day where day = $1 and archive is not null"

# The body is not in the digest: body_digest is, and the archive computed it anew from the body that it wrote.
APART = {("half", "body")}
HEX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Holding:
    """A table's rows, lowest and highest id (None: no rows), and digest."""

    rows: int
    first_id: str | None
    last_id: str | None
    digest: str


async def manifest(connection: Connection, day: date) -> dict[str, Holding] | None:
    """Return what the day's archive holds, by table, or None if it is not archived."""
    stored = await connection.fetchval(MANIFEST, day)
    if stored is None:
        return None
    tables: dict[str, dict[str, Any]] = json.loads(stored)["tables"]
    return {table: Holding(*(holds[name] for name in Holding.__slots__)) for table, holds in tables.items()}


async def counts(connection: Connection, day: date) -> dict[str, int]:
    """Count the rows of the day's tables, attached or not, in one snapshot."""
    parts = ", ".join(f"(select count(*) from {partition_name(table, day)}) as {table}" for table in DAY_TABLES)  # noqa: S608
    row = await connection.fetchrow(f"select {parts}")
    assert row is not None
    return dict(row)


async def holdings(connection: Connection, day: date) -> dict[str, Holding]:
    """Read the day's tables whole, attached or not, which disturbs nobody."""
    rows = {table: await connection.fetchrow(holding_of(table, partition_name(table, day))) for table in DAY_TABLES}
    return {table: Holding(**row) for table, row in rows.items() if row is not None}


def holding_of(table: str, relation: str) -> str:
    """Return the statement that computes the Holding of a relation with a table's columns.

    A row's text is its columns joined by `|`, null as `\\N`; the digest is the sum of the first 60 bits of its MD5.
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
