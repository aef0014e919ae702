"""The rules as SQL, which the benchmark compares with the proof, find the same as the proof."""

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyspark.sql import SparkSession

from app.models import DAY_TABLES
from app.store.retention.days import partition_name
from bench.spark_sql import Found, by_duckdb, by_postgres
from spark import schemas
from spark.transforms.rules import findings
from tests.spark.frames import DAY, RULES, Day, born
from tests.spark.test_rules_screen import SLA_S, random_day

TYPES = {
    "string": "text",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "double": "float8",
    "binary": "bytea",
    "timestamp": "timestamptz",
    "array": "text[]",
}
OF_COLUMN = {"transaction_id": "uuid", "headers": "jsonb", "policy": "jsonb", "filters": "jsonb"}
# fmt: off
KINDS = [
    "op_without_half", "half_stuck", "committed_not_published", "published_without_commit",
    "published_after_rollback", "offset_of_two_messages", "message_with_two_offsets", "offsets_contradict_time",
    "unrouted", "undelivered", "delivery_late", "retry_overdue", "checkpoint_differs", "receipt_without_message",
    "receipt_not_matched", "content_differs", "parked", "checks_beyond_max", "verdict_refused",
]
# fmt: on


def damaged_day(seed: int) -> Day:
    """A random day with faults of all KINDS, without ledgers."""
    chance = random.Random(seed)
    day = random_day(chance, 120)
    day.extra.clear()
    day.subscribe(8, "order*", lowest=20_000)
    day.subscribe(9, "elsewhere")
    day.rows["checkpoint"].pop()
    for row in day.rows["delivery_retry"][::2]:
        row["due_at"] = day.seen_at - timedelta(hours=chance.choice((0, 2)))
    day.rows["outbox"].append(day.rows["outbox"][5] | {"transaction_id": day.rows["outbox"][9]["transaction_id"]})
    day.half(900)
    day.half(901, first_check_at=born(200_000))
    day.half(902)
    day.check_back(902, state=2)
    for half in day.rows["half"]:
        # Postgres writes JSON in one form, and the script for DuckDB relies on it.
        half["headers"] = half.get("headers") and json.dumps(json.loads(half["headers"]))
    return day


def by_rules(spark: SparkSession, day: Day) -> Found:
    rows = findings(day.frames(spark), sla_s=SLA_S).select("kind", "subject").collect()
    return frozenset((row.kind, row.subject) for row in rows)


def fill(dsn: str, day: Day) -> None:
    """Put the rows into plain tables, because a damaged day does not fit into Halfnote's own."""
    with psycopg.connect(dsn) as db:
        db.execute(f"alter database {db.info.dbname} set search_path = damaged")
        db.execute("create schema damaged")
        db.execute("set search_path = damaged")
        for name, schema in schemas.FRAMES.items():
            table = partition_name(name, DAY) if name in DAY_TABLES else name
            kinds = {one.name: OF_COLUMN.get(one.name, TYPES[one.dataType.typeName()]) for one in schema.fields}
            columns = ", ".join(f'"{column}" {kind}' for column, kind in kinds.items())
            db.execute(f"create table {table} ({columns})")
            rows = [[_value(kind, row.get(column)) for column, kind in kinds.items()] for row in day.of_day()[name]]
            marks = ", ".join(["%s"] * len(kinds))
            db.cursor().executemany(f"insert into {table} values ({marks})", rows)
        db.execute("create table shared_rule (name text, value float8)")
        db.cursor().executemany("insert into shared_rule values (%s, %s)", list(RULES.items()))


def _value(kind: str, value: Any) -> Any:
    return Jsonb(json.loads(value)) if kind == "jsonb" and value is not None else value


@pytest.mark.parametrize("seed", [1, 2, 4])
async def test_the_scripts_find_what_the_rules_find(spark: SparkSession, dsn: str, seed: int, tmp_path: Path) -> None:
    day = damaged_day(seed)
    wanted = by_rules(spark, day)
    assert {kind for kind, _ in wanted} == set(KINDS)
    day.in_files(spark, tmp_path / "frames")
    described = {"seen_at": day.seen_at.isoformat(), "rules": RULES}
    (tmp_path / "frames" / "frames.json").write_text(json.dumps(described))
    by_files = by_duckdb(tmp_path / "frames", tmp_path / "spill").found
    assert (sorted(by_files - wanted), sorted(wanted - by_files)) == ([], [])
    fill(dsn, day)
    by_tables = (await by_postgres(dsn, DAY, day.seen_at, None)).found
    assert (sorted(by_tables - wanted), sorted(wanted - by_tables)) == ([], [])
