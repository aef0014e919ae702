"""Restores an archived day into a separate schema of Postgres, for people to query; no program reads it.

halfnote restore 2026-11-10           # the schema restored_20261110
halfnote restore 2026-11-10 --drop
"""

import sys
from collections.abc import Sequence
from datetime import date
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from spark import manifest
from spark.archive import records
from spark.archive.layout import problems, read, rows_at_once, small_batches
from spark.archive.records import ArchivedDay
from spark.engine.filesystem import FAILURES, files_for
from spark.engine.niceness import stand_behind
from spark.engine.progress import Progress
from spark.engine.session import session
from spark.errors import RunFailedError
from spark.manifest import TABLES
from spark.options import restore as options
from spark.options.common import parsed
from spark.postgres import audit, connections
from spark.postgres.connections import Connection
from spark.sources import frames
from spark.sources.failures import root_cause

DONE, FAILED = 0, 1
BATCH_ROWS = 1000

EXISTS = "select to_regnamespace(%s) is not null as there"
# Columns, defaults, constraints and indexes, but no partitions. Bodies may have been left out or redacted.
LIKE = "create table {schema}.{table} (like {table} including all)"
MAY_LACK = "alter table {schema}.half alter body drop not null"
WRONG_BODIES = "select count(*) as wrong from {schema}.half where sha256(body) <> body_digest"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0: done; 1: it failed; 2: wrong usage."""
    given = parsed(options.parser(), argv)
    try:
        connection = connections.connect(given.url)
        with records.archive_lock(connection):
            if given.drop:
                drop(connection, given.day)
                return DONE
            day = records.day_of(connection, given.day)
            if _there(connection, schema_of(day.day)):
                raise RunFailedError(f"{schema_of(day.day)} exists already. Drop it first, with --drop.")
            restore(session(given.master), connection, day, Progress())
    except (RunFailedError, *FAILURES, psycopg.Error) as error:
        print(f"Nothing was restored: {root_cause(str(error))}", file=sys.stderr)
        return FAILED
    print(f"Restored: {schema_of(given.day)}. Query it with SQL, for example:")
    print(f"  select * from {schema_of(given.day)}.half where key = 'order-1030'")  # noqa: S608 -- not run
    return DONE


def schema_of(day: date) -> str:
    """Return the name of the schema that a day is restored into."""
    return f"restored_{day:%Y%m%d}"


def aside_of(day: date) -> str:
    """Return the name of the schema that is filled first."""
    return f"{schema_of(day)}_aside"


def is_restored(connection: Connection, day: date) -> bool:
    """Return whether a day is restored, completely or in part."""
    return _there(connection, schema_of(day)) or _there(connection, aside_of(day))


def restore(spark: SparkSession, connection: Connection, day: ArchivedDay, progress: Progress) -> None:
    """Fill a temporary schema, compare it with the manifest, and only then rename it. Raises RunFailedError."""
    if day.archive is None or day.archive_manifest is None:
        raise RunFailedError(f"{day.day} is not archived.")
    with progress.stage("check the archive", day.day):
        wrong = problems(spark, files_for(spark), day.archive, day.archive_manifest)
    if wrong:
        raise RunFailedError(f"{day.archive} differs from the written archive: {'; '.join(wrong)}.")
    aside = aside_of(day.day)
    _execute(connection, f"drop schema if exists {aside} cascade")
    try:
        _fill(spark, connection, day, aside, progress)
        _compare(connection, day, aside)
        with connection.transaction():
            _execute(connection, f"alter schema {aside} rename to {schema_of(day.day)}")
            audit.record(connection, "archive.restore", day.day, archive=day.archive)
    except BaseException:
        if not connection.closed:
            _execute(connection, f"drop schema if exists {aside} cascade")
        raise


def drop(connection: Connection, day: date) -> None:
    """Drop a restored day, or the rest of a killed restore. Raises RunFailedError if the schema does not exist."""
    if not is_restored(connection, day):
        raise RunFailedError(f"{schema_of(day)} does not exist.")
    with connection.transaction():
        for schema in (schema_of(day), aside_of(day)):
            _execute(connection, f"drop schema if exists {schema} cascade")
        audit.record(connection, "archive.drop_restored", day)
    print(f"Removed: {schema_of(day)}.")


def _fill(spark: SparkSession, connection: Connection, day: ArchivedDay, schema: str, progress: Progress) -> None:
    assert day.archive is not None
    assert day.archive_manifest is not None
    _execute(connection, f"create schema {schema}")
    for table in TABLES:
        _execute(connection, LIKE.format(schema=schema, table=table))
    _execute(connection, MAY_LACK.format(schema=schema))
    largest: int = day.archive_manifest["largest_body"]
    reach = frames.jdbc_to(connection)
    # uuid and jsonb are text to Spark.
    properties = reach["properties"] | {"stringtype": "unspecified", "reWriteBatchedInserts": "true"}
    for table in TABLES:
        with progress.stage(f"restore {table}", day.day) as stage, small_batches(spark, largest):
            batch = min(BATCH_ROWS, rows_at_once(largest)) if table == "half" else BATCH_ROWS
            rows = read(spark, day.archive, day.archive_manifest, table)
            rows.write.jdbc(
                reach["url"], f"{schema}.{table}", mode="append", properties=properties | {"batchsize": str(batch)}
            )
            stage.rows = day.archive_manifest["tables"][table]["rows"]


def _compare(connection: Connection, day: ArchivedDay, schema: str) -> None:
    expected = manifest.tables(day.archive_manifest or {})
    for table in TABLES:
        found = manifest.of_relation(connection, table, f"{schema}.{table}")
        if found != expected[table]:
            raise RunFailedError(f"{table} was restored as {found} instead of {expected[table]}.")
    row = connection.execute(WRONG_BODIES.format(schema=schema)).fetchone()
    if row is None or row["wrong"]:
        raise RunFailedError(f"{row and row['wrong']} restored bodies do not match their digests.")


def _there(connection: Connection, schema: str) -> bool:
    row = connection.execute(EXISTS, [schema]).fetchone()
    return row is not None and bool(row["there"])


def _execute(connection: Connection, statement: str) -> Any:
    return connection.execute(statement)


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
