"""A table's manifest is one number, computed anywhere: Postgres for the service, Postgres for the proof, Spark."""

import hashlib
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, LiteralString, cast
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyspark.sql import DataFrame, SparkSession

from app import models
from app.ids import uuid7
from app.store.retention import archive_manifest
from spark import manifest
from spark.manifest import COLUMNS, TABLES, TableManifest
from tests.spark.places import jdbc_options

SQL_TYPES = {
    "uuid": "UUID",
    "text": "TEXT",
    "json": "JSONB",
    "short": "SMALLINT",
    "int": "INTEGER",
    "long": "BIGINT",
    "double": "DOUBLE PRECISION",
    "time": "TIMESTAMP WITH TIME ZONE",
    "bytes": "BYTEA",
}
TEXTS = [
    "",
    "\\N",
    "\\",
    "|",
    "a|b",
    "a\\|b",
    "naïve",
    "日本語",
    "🦆 duck",
    "\x7f",
    "tab\tnewline\n",
    "'",
    '"',
    "%s",
    "x" * 300,
]
JSONS = [{}, [], 0, 1.5, "|", None, {"b": 1, "a": ["\\", "é", {"c": None}]}, {"k": "x" * 200}, -1e30, True]
DOUBLES = [0.0, -0.0, 0.1, 0.5, 2.5, 1e-7, 0.0000005, 0.0000015, 3_456_000.0, 1 / 3, -12.25, 123_456_789.123456]


@pytest.fixture
def connection(dsn: str) -> Iterator["psycopg.Connection[Any]"]:
    with psycopg.connect(dsn, autocommit=True) as made:
        yield made


def value_of(kind: str, chance: random.Random) -> Any:
    """A value of a kind, with a liking for what goes wrong."""
    match kind:
        case "uuid":
            return UUID(int=chance.getrandbits(128))
        case "text":
            return chance.choice(TEXTS) or chr(chance.choice([0x20, 0xFF, 0x2603, 0x1F600])) * chance.randrange(3)
        case "json":
            return Jsonb(chance.choice(JSONS))
        case "short":
            return chance.choice([0, 1, -1, 32767, -32768])
        case "int":
            return chance.choice([0, -1, 2**31 - 1, -(2**31), chance.randrange(1000)])
        case "long":
            return chance.choice([0, -1, 2**63 - 1, -(2**63), chance.getrandbits(40)])
        case "double":
            return chance.choice([*DOUBLES, chance.uniform(0, 1e6)])
        case "time":
            since = chance.choice([0, -1, 1, chance.randrange(-(10**15), 4 * 10**15)])
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=since)
    return chance.randbytes(chance.randrange(40))


def copy_without_constraints(connection: "psycopg.Connection[Any]", table: str, seed: int, rows: int) -> str:
    """A table with the columns of one of the day's and random rows; return its name."""
    chance = random.Random(seed)
    name = f"copy_of_{table}"
    connection.execute(f"create table {name} as select * from {table} limit 0")
    marks = ", ".join(["%s"] * len(COLUMNS[table]))
    with connection.cursor() as cursor:
        cursor.executemany(
            cast(LiteralString, f"insert into {name} values ({marks})"),
            [
                [
                    uuid7(datetime.now(UTC))
                    if column == "transaction_id"
                    else value_of(kind, chance)
                    if column == "transaction_id" or chance.random() > 0.2
                    else None
                    for column, kind in COLUMNS[table]
                ]
                for _ in range(rows)
            ],
        )
    return name


def through_jdbc(spark: SparkSession, dsn: str, table: str, relation: str) -> DataFrame:
    """The relation in the archive's schema."""
    read = spark.read.format("jdbc").options(**jdbc_options(dsn), dbtable=relation).load()
    schema = manifest.schema(table)
    return read.select(*[read[f"`{field.name}`"].cast(field.dataType) for field in schema])


def test_columns_are_those_of_the_tables() -> None:
    assert models.DAY_TABLES == TABLES
    for table in TABLES:
        columns = models.metadata.tables[table].columns
        found = [(column.name, str(column.type.compile(dialect=models_dialect()))) for column in columns]
        assert found == [(name, SQL_TYPES[kind]) for name, kind in COLUMNS[table]]


def models_dialect() -> Any:
    from sqlalchemy.dialects.postgresql import dialect

    return dialect()  # type: ignore[no-untyped-call]


def test_service_and_proof_have_one_statement() -> None:
    for table in TABLES:
        assert archive_manifest.holding_of(table, "x") == manifest.sql(table, "x")


@pytest.mark.parametrize("table", TABLES)
def test_spark_and_postgres_compute_the_same(
    spark: SparkSession, dsn: str, connection: "psycopg.Connection[Any]", table: str
) -> None:
    seed = random.randrange(2**32)
    relation = copy_without_constraints(connection, table, seed, 400)
    by_postgres = manifest.of_relation(connection, table, relation)
    assert manifest.of_frame(through_jdbc(spark, dsn, table, relation), table) == by_postgres, f"seed {seed}"
    assert by_postgres.rows == 400


def test_an_empty_table_has_a_manifest_too(spark: SparkSession, connection: "psycopg.Connection[Any]") -> None:
    nothing = TableManifest(0, None, None, "0")
    assert manifest.of_relation(connection, "op", "op") == nothing
    assert manifest.of_frame(spark.createDataFrame([], manifest.schema("op")), "op") == nothing
    assert manifest.total([nothing, nothing]) == nothing


def test_the_digest_is_what_the_module_says(connection: "psycopg.Connection[Any]") -> None:
    """The digest is computed in this test for two rows of op."""
    ids = [UUID(int=1), UUID(int=2)]
    at = datetime(2026, 10, 25, 0, 30, 0, 5, tzinfo=UTC)
    connection.execute("create table two_ops as select * from op limit 0")
    connection.execute("insert into two_ops values (%s, 1, 3, 'a|b\\N', null, %s)", [ids[0], at])
    connection.execute("insert into two_ops values (%s, 2, 0, null, '', %s)", [ids[1], at])
    texts = [rf"{ids[0]}|1|3|a\|b\\N|\N|1792888200000005", rf"{ids[1]}|2|0|\N||1792888200000005"]
    numbers = [int(hashlib.md5(text.encode()).hexdigest()[:15], 16) for text in texts]
    expected = TableManifest(2, str(ids[0]), str(ids[1]), str(sum(numbers)))
    assert manifest.of_relation(connection, "op", "two_ops") == expected


def test_parts_make_the_whole(connection: "psycopg.Connection[Any]") -> None:
    relation = copy_without_constraints(connection, "outbox", 7, 300)
    parts = [
        manifest.of_relation(
            connection, "outbox", f"(select * from {relation} where abs(hashtext(topic)) % 3 {part}) x"
        )
        for part in ("= 0", "= 1", "= 2", "is null")
    ]
    assert manifest.total(parts) == manifest.of_relation(connection, "outbox", relation)
    assert Decimal(manifest.total(parts).digest) > 2**60


@pytest.mark.parametrize(
    "change",
    [
        "delete from {0} where ctid = (select max(ctid) from {0})",
        "insert into {0} select * from {0} limit 1",
        "update {0} set topic = coalesce(topic, '') || ' ' where ctid = (select min(ctid) from {0})",
        "update {0} set topic = key, key = topic where topic is distinct from key",
        "update {0} set tag = '\\N' where tag is null",
        "update {0} set committed_at = coalesce(committed_at, now()) + interval '1 microsecond'",
    ],
)
def test_every_change_shows(connection: "psycopg.Connection[Any]", change: str) -> None:
    relation = copy_without_constraints(connection, "outbox", 11, 50)
    before = manifest.of_relation(connection, "outbox", relation)
    assert connection.execute(cast(LiteralString, change.format(relation))).rowcount > 0
    after = manifest.of_relation(connection, "outbox", relation)
    assert after.digest != before.digest


def test_what_differs_is_named_by_table() -> None:
    one, other = (TableManifest(rows, "a", "b", str(rows)).__dict__ for rows in (1, 2))
    same = {"half": one, "op": one}
    assert manifest.differing({"tables": same}, {"tables": dict(same)}) == {}
    assert manifest.differing({"tables": same}, {"tables": {"half": one, "op": other}}) == {
        "op": {"archived": one, "found": other}
    }
    assert manifest.differing({"tables": same}, {"tables": {"half": one}}) == {"op": {"archived": one, "found": None}}


def test_a_days_tables_are_read_by_name(connection: "psycopg.Connection[Any]") -> None:
    today = connection.execute("select current_date").fetchone()
    assert today is not None
    day: date = today[0]
    connection.execute("insert into op values (%s, 1, 0, null, null, now())", [uuid7(datetime.now(UTC))])
    found = manifest.tables(manifest.of_day(connection, day))
    assert {table: one.rows for table, one in found.items()} == dict.fromkeys(TABLES, 0) | {"op": 1}
