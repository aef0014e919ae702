"""Describe a table by values that Postgres and Spark compute identically: row count, lowest and highest id, digest.

The canonical text of a row is its columns in the order of COLUMNS, joined by `|`. Null is `\\N`. A `\\` or `|` within a
text is escaped by a `\\`, so that two different rows never have the same text. Times are microseconds since 1970,
numbers with a fraction are whole millionths, bytes are hex, jsonb is the text that Postgres prints. The digest is the
sum, in any order of the rows, of the first 60 bits of the MD5 of that text. It detects lost, repeated and damaged rows;
it does not protect against forgery.

The text of half contains the body's SHA-256 (body_digest) and not the body. A reader that has the body computes it
again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Self, TypeAlias

import psycopg
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

Connection: TypeAlias = "psycopg.Connection[Any]"


def _columns(lines: str) -> tuple[tuple[str, str], ...]:
    """Parse lines of the form `kind: name name …` into (name, kind)."""
    kinds = [line.split(":") for line in lines.strip().splitlines()]
    return tuple((name, kind) for kind, names in kinds for name in names.split())


# Every column of the day's own tables, in the order of the migrations; a test compares the two.
COLUMNS = {
    "half": _columns("""
uuid: transaction_id
short: position
text: producer_group topic key tag
json: headers
text: content_type
bytes: body body_digest
double: deliver_after_s
time: born_at first_check_at
bytes: digest
json: context policy
text: traceparent
uuid: reissued_from
"""),
    "op": _columns("""
uuid: transaction_id
short: verdict source
text: actor reason
time: decided_at
"""),
    "outbox": _columns("""
uuid: transaction_id
short: position
long: offset
text: topic key tag
time: due_at committed_at
"""),
    "receipt": _columns("""
uuid: transaction_id
short: position
int: subscription_id
long: offset
text: outcome
int: attempts
time: first_at
int: duration_ms status
bytes: digest
time: settled_at
int: replay
"""),
    "attempt": _columns("""
uuid: transaction_id
long: attempt_id
text: kind
time: at
int: number
text: outcome
short: position
int: subscription_id
short: verdict source
text: destination
int: status duration_ms
text: error response
int: replay
"""),
}
TABLES = tuple(COLUMNS)
# What replays and redeliveries add to, as long as a day is open.
GROW = ("receipt", "attempt")
# These columns are in the archive, but not in the digest: see above.
APART = {"half": frozenset({"body"})}

TYPES: dict[str, DataType] = {
    "uuid": StringType(),
    "text": StringType(),
    "json": StringType(),
    "short": ShortType(),
    "int": IntegerType(),
    "long": LongType(),
    "double": DoubleType(),
    "time": TimestampType(),
    "bytes": BinaryType(),
}

_SQL = {
    "uuid": '"{}"::text',
    "text": r"""replace(replace("{}", '\', '\\'), '|', '\|')""",
    "json": r"""replace(replace("{}"::text, '\', '\\'), '|', '\|')""",
    "short": '"{}"::text',
    "int": '"{}"::text',
    "long": '"{}"::text',
    "double": 'round("{}" * 1000000)::bigint::text',
    "time": '(extract(epoch from "{}") * 1000000)::bigint::text',
    "bytes": "encode(\"{}\", 'hex')",
}
HEX_DIGITS = 15


@dataclass(frozen=True)
class TableManifest:
    """A table's rows, lowest and highest id (None: no rows), and digest, a decimal number."""

    rows: int
    first_id: str | None
    last_id: str | None
    digest: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return it from a mapping, such as JSON or a row, which may have more keys."""
        return cls(values["rows"], values["first_id"], values["last_id"], values["digest"])


def schema(table: str) -> StructType:
    """Return the schema of a table in the archive: all its columns, in order, each nullable."""
    return StructType([StructField(name, TYPES[kind]) for name, kind in COLUMNS[table]])


def sql(table: str, relation: str) -> str:
    """Return the statement that computes a table's manifest from a relation with its columns; it reads all rows."""
    texts = [f"coalesce({_SQL[kind].format(name)}, '\\N')" for name, kind in _digested(table)]
    text = " || '|' || ".join(texts)
    number = f"('x' || left(md5(convert_to({text}, 'UTF8')), {HEX_DIGITS}))::bit({HEX_DIGITS * 4})::bigint"
    return f"""select count(*) as rows, min("transaction_id"::text collate "C") as first_id,
  max("transaction_id"::text collate "C") as last_id, coalesce(sum({number}), 0)::text as digest
from {relation}"""  # noqa: S608 -- names of ours


def of_frame(frame: DataFrame, table: str) -> TableManifest:
    """Read a frame with a table's columns (body may be missing) and return its manifest."""
    row = frame.agg(*_totals(table)).first()
    assert row is not None
    return TableManifest.of(row.asDict())


def by_file(frame: DataFrame, table: str) -> dict[str, TableManifest]:
    """Read a frame and return the manifest of each of its files, by the file's URL."""
    rows = frame.groupBy(F.input_file_name().alias("file")).agg(*_totals(table)).collect()
    return {row["file"]: TableManifest.of(row.asDict()) for row in rows}


def total(parts: Iterable[TableManifest]) -> TableManifest:
    """Return the manifest of the rows of all parts together."""
    parts = [part for part in parts if part.rows]
    return TableManifest(
        sum(part.rows for part in parts),
        min((part.first_id for part in parts if part.first_id is not None), default=None),
        max((part.last_id for part in parts if part.last_id is not None), default=None),
        str(sum(int(part.digest) for part in parts)),
    )


def partition(table: str, day: date) -> str:
    """Return the service's name of a table's partition of a day, such as `half_20261121`."""
    return f"{table}_{day:%Y%m%d}"


def of_day(connection: Connection, day: date) -> dict[str, Any]:
    """Return the present manifest of the day's tables, attached or not, in the form of an archive's: `{"tables": …}`.

    Raises psycopg.errors.UndefinedTable if a table does not exist.
    """
    return {"tables": {table: asdict(of_relation(connection, table, partition(table, day))) for table in TABLES}}


def of_relation(connection: Connection, table: str, relation: str) -> TableManifest:
    """Return the manifest of a relation with a table's columns."""
    row = connection.execute(sql(table, relation)).fetchone()
    assert row is not None
    rows, first_id, last_id, digest = row.values() if isinstance(row, dict) else row
    return TableManifest(rows, first_id, last_id, digest)


def tables(manifest: Mapping[str, Any]) -> dict[str, TableManifest]:
    """Return the manifests of the tables in an archive's manifest, or in the result of `of_day`."""
    return {name: TableManifest.of(values) for name, values in manifest["tables"].items()}


def differing(archived: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return `{"archived": …, "found": …}` for each table that differs; null if one side does not have the table."""
    ours, theirs = tables(archived), tables(found)
    return {
        name: {
            "archived": asdict(ours[name]) if name in ours else None,
            "found": asdict(theirs[name]) if name in theirs else None,
        }
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    }


def before_growth(archived: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of tables without the receipts and attempts that a replay or a redelivery adds to a day.

    They come after the archive was written, and the next `halfnote archive` writes the day again.
    """
    grown = {name for name in GROW if found["tables"][name]["rows"] > archived["tables"][name]["rows"]}
    return {
        "tables": {name: archived["tables"][name] if name in grown else one for name, one in found["tables"].items()}
    }


def _digested(table: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind in COLUMNS[table] if name not in APART.get(table, frozenset())]


def _totals(table: str) -> list[Column]:
    return [
        F.count("*").alias("rows"),
        F.min("transaction_id").alias("first_id"),
        F.max("transaction_id").alias("last_id"),
        F.coalesce(F.sum(row_digest(table)), F.lit(0)).cast("string").alias("digest"),
    ]


def row_digest(table: str) -> Column:
    """Return a row's part of its table's digest: the first 60 bits of the MD5 of its canonical text, as a number."""
    texts = [F.coalesce(_text(F.col(f"`{name}`"), kind), F.lit("\\N")) for name, kind in _digested(table)]
    first_bits = F.substring(F.md5(F.concat_ws("|", *texts)), 1, HEX_DIGITS)
    return F.conv(first_bits, 16, 10).cast("decimal(20, 0)")


def _text(column: Column, kind: str) -> Column:
    if kind in ("text", "json"):
        return F.replace(F.replace(column, F.lit("\\"), F.lit("\\\\")), F.lit("|"), F.lit("\\|"))
    if kind == "double":
        return F.rint(column * 1_000_000.0).cast("long").cast("string")
    if kind == "time":
        return F.unix_micros(column).cast("string")
    if kind == "bytes":
        return F.lower(F.hex(column))
    return column.cast("string")
