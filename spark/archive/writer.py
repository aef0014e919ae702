"""Writes a day's tables to the archive from one snapshot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from spark import manifest, schemas
from spark.archive.layout import beside_of, body_problems, files_of, rows_at_once
from spark.engine.filesystem import FAILURES, Files, files_for
from spark.engine.progress import Progress
from spark.errors import RunFailedError
from spark.frames import empty
from spark.manifest import COLUMNS, TABLES, TableManifest
from spark.postgres.connections import Day, Snapshot, partition_name
from spark.sources import frames
from spark.sources.failures import root_cause

VERSION = 2
# The estimate starts from the size of a page; the other columns of a row with a body are small.
FILE_BYTES = 256 * 1024 * 1024

# Reads only the table's own pages: a row contains the length of its body, even if the body is stored out of line.
LARGEST_BODY = "select coalesce(max(octet_length(body)), 0) as bytes from {}"
SIZES = """
select pg_table_size(to_regclass(%s)) as bytes,
  pg_relation_size(to_regclass(%s)) / current_setting('block_size')::bigint as pages
"""
# The order within a file is that of the primary keys.
SORTED = {
    "half": ("transaction_id", "position"),
    "op": ("transaction_id",),
    "outbox": ("transaction_id", "position"),
    "receipt": ("transaction_id", "position", "subscription_id", "replay"),
    "attempt": ("transaction_id", "attempt_id"),
}
# Columns with nearly unique values, for which a dictionary is useless.
UNLIKE = {"transaction_id", "key", "body", "body_digest", "digest", "offset", "attempt_id"}


class NotAsReadError(RunFailedError):
    """The rows that were read back differ from Postgres; the text says how."""


def write_day(
    spark: SparkSession, snapshot: Snapshot, day: Day, place: str, *, bodies: bool, progress: Progress
) -> dict[str, Any]:
    """Write a day's tables below `place` from the snapshot, and return the manifest without the files.

    Postgres computes the tables' values of the manifest. The caller has locked the day. Raises RunFailedError.
    """
    largest: int = _rows(snapshot, LARGEST_BODY.format(partition_name("half", day.day)))[0]["bytes"] if bodies else 0
    tables = {}
    for table in TABLES:
        with progress.stage(f"archive {table}", day.day) as stage:
            _write(spark, snapshot, day.day, table, f"{place}/{table}", bodies=bodies, largest=largest)
            held = manifest.of_relation(snapshot.connection, table, partition_name(table, day.day))
            tables[table] = asdict(held)
            stage.rows = held.rows
    with progress.stage("archive what rules need beside", day.day):
        _write_beside(spark, snapshot, day, place, {table: held["rows"] for table, held in tables.items()})
    return {
        "version": VERSION,
        "day": day.day.isoformat(),
        "seen_at": snapshot.seen_at.isoformat(),
        "written_at": datetime.now(UTC).isoformat(),
        "bodies": bodies,
        "largest_body": largest,
        "tables": tables,
        "beside": [],
        "redacted": [],
    }


def read_back(
    spark: SparkSession, files: Files, place: str, written: Mapping[str, Any], day: date, progress: Progress
) -> dict[str, Any]:
    """Read the written files and return the manifest with its files.

    Raises NotAsReadError if rows, ids, digests, or the SHA-256 of bodies differ from Postgres.
    """
    tables = {}
    for table in TABLES:
        with progress.stage(f"read back {table}", day) as stage:
            try:
                listed = files_of(spark, files, place, table)
            except FAILURES as error:
                raise NotAsReadError(f"{table} cannot be read back: {root_cause(str(error))}") from error
            found = manifest.total(TableManifest.of(file) for file in listed)
            expected = TableManifest.of(written["tables"][table])
            if found != expected:
                raise NotAsReadError(f"{table} was read back as {found}, but Postgres has {expected}.")
            tables[table] = {**written["tables"][table], "files": listed}
            stage.rows = found.rows
    described = {**written, "tables": tables, "beside": beside_of(files, place)}
    with progress.stage("compute bodies' digests", day):
        wrong = body_problems(spark, place, described)
    if wrong:
        raise NotAsReadError("Bodies that do not match their digests: " + "; ".join(wrong) + ".")
    return described


def _rows(snapshot: Snapshot, statement: str, *parameters: Any) -> list[dict[str, Any]]:
    return snapshot.connection.execute(statement, parameters).fetchall()


def _write(
    spark: SparkSession, snapshot: Snapshot, day: date, table: str, place: str, *, bodies: bool, largest: int
) -> None:
    """Write each range of pages as one file, sorted by id, without a shuffle.

    Pages fill in order of time, and ids contain their time, so the files hardly overlap.
    """
    left_out = set() if bodies else {"body"}
    kinds = [(name, kind) for name, kind in COLUMNS[table] if name not in left_out]
    biggest = largest if table == "half" else 0
    try:
        frame = _read(spark, snapshot, partition_name(table, day), kinds, rows_at_once(biggest))
        frame.sortWithinPartitions(*SORTED[table]).write.options(**parquet_options(kinds, biggest)).parquet(place)
    except FAILURES as error:
        raise RunFailedError(f"{table} could not be archived: {root_cause(str(error))}") from error


def _read(
    spark: SparkSession, snapshot: Snapshot, relation: str, kinds: list[tuple[str, str]], fetch: int
) -> DataFrame:
    ranges = _ranges(snapshot, relation)
    if not ranges:
        return empty(spark, StructType([StructField(name, manifest.TYPES[kind]) for name, kind in kinds]))
    columns = ", ".join(_brought(name, kind) for name, kind in kinds)
    reach = frames.jdbc_in(snapshot)
    # Read bodies as bytes, not as hex.
    properties = reach["properties"] | {"fetchsize": str(fetch), "prepareThreshold": "-1"}
    query = f"(select {columns}, ctid from {relation}) source"  # noqa: S608 -- names of ours
    read = spark.read.jdbc(url=reach["url"], table=query, predicates=ranges, properties=properties)
    return read.select(*[_column(name, kind) for name, kind in kinds])


def _ranges(snapshot: Snapshot, relation: str) -> list[str]:
    """Return conditions that divide a table into ranges of pages, each with about FILE_BYTES including bodies."""
    size = _rows(snapshot, SIZES, relation, relation)[0]
    pages: int = size["pages"]
    if pages == 0:
        return []
    at_once = -(-pages // max(1, -(-size["bytes"] // FILE_BYTES)))
    return [f"ctid >= '({first},0)'::tid and ctid < '({first + at_once},0)'::tid" for first in range(0, pages, at_once)]


def _brought(name: str, kind: str) -> str:
    if kind == "time":
        return f'(extract(epoch from "{name}") * 1000000)::bigint as "{name}"'
    return f'"{name}"::text as "{name}"' if kind in ("json", "uuid") else f'"{name}"'


def _column(name: str, kind: str) -> Any:
    brought = F.col(f"`{name}`")
    shown = F.timestamp_micros(brought) if kind == "time" else brought.cast(manifest.TYPES[kind])
    return shown.alias(name)


def parquet_options(kinds: Sequence[tuple[str, str]], largest: int) -> dict[str, str]:
    unlike = [name for name, kind in kinds if name in UNLIKE or kind == "time"]
    # How often a writer checks whether a page or a row group is full.
    often = str(min(100, rows_at_once(largest)))
    return {
        "compression": "zstd",
        "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        "parquet.page.write-checksum.enabled": "true",
        "parquet.page.size.row.check.min": often,
        "parquet.block.size.row.check.min": often,
    } | {f"parquet.enable.dictionary#{name}": "false" for name in unlike}


def _write_beside(spark: SparkSession, snapshot: Snapshot, day: Day, place: str, rows: dict[str, int]) -> None:
    """Write the small tables and frames.json, so that the rules can be run over the archive alone."""
    counts = snapshot.small_counts(day)
    for name in schemas.OF_DAY | schemas.WHOLE:
        rows[name] = 0
        if counts.get(name) != 0:
            source = frames.source_of(snapshot, day, name)
            rows[name] = frames.write_source(spark, snapshot, source, name, f"{place}/{name}")
    described = {**frames.described(snapshot, day, rows), "archived": True}
    files_for(spark).write_text(f"{place}/frames.json", json.dumps(described))
