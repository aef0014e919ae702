"""Brings an archived day back into Postgres, in a schema of its own, to be looked at; nothing reads it but people.

halfnote restore 2026-11-10           # the schema restored_20261110
halfnote restore 2026-11-10 --drop
"""

import sys
from collections.abc import Sequence
from datetime import date
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from spark import archive_options, archive_store, audit, database, manifest, sources
from spark.archive import JAVA_FAILED, problems, read, rows_at_once, small_batches
from spark.archive_files import ArchiveFiles
from spark.archive_store import ArchivedDay
from spark.database import Connection
from spark.errors import RunFailedError
from spark.manifest import TABLES
from spark.niceness import stand_behind
from spark.progress import Progress
from spark.session import session

DONE, FAILED = 0, 1
BATCH_ROWS = 1000

EXISTS = "select to_regnamespace(%s) is not null as there"
# Columns, defaults, constraints and indexes, but no partitions. Bodies may have been left out or redacted.
LIKE = "create table {schema}.{table} (like {table} including all)"
MAY_LACK = "alter table {schema}.half alter body drop not null"
WRONG_BODIES = "select count(*) as wrong from {schema}.half where sha256(body) <> body_digest"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 done, 1 it failed, 2 wrong usage."""
    options = archive_options.parser("halfnote restore", "Brings an archived day back to be looked at.")
    options.add_argument("day", type=archive_options.day, metavar="DAY", help="as 2026-11-10")
    options.add_argument("--drop", action="store_true", help="remove what was restored")
    given = archive_options.parsed(options, argv)
    try:
        connection = database.connect(given.url)
        with archive_store.archive_lock(connection):
            if given.drop:
                drop(connection, given.day)
                return DONE
            day = archive_store.day_of(connection, given.day)
            if _there(connection, schema_of(day.day)):
                raise RunFailedError(f"{schema_of(day.day)} is there already. Remove it by --drop first.")
            restore(session(given.master), connection, day, Progress())
    except (RunFailedError, *JAVA_FAILED, psycopg.Error, OSError) as error:
        print(f"Nothing was restored: {sources.root_cause(str(error))}", file=sys.stderr)
        return FAILED
    print(f"Restored: {schema_of(given.day)}. It answers plain SQL:")
    print(f"  select * from {schema_of(given.day)}.half where key = 'order-1030'")  # noqa: S608 -- not run
    return DONE


def schema_of(day: date) -> str:
    """Return the name of the schema that a day is restored into."""
    return f"restored_{day:%Y%m%d}"


def aside_of(day: date) -> str:
    """Return the name of the schema that is filled first."""
    return f"{schema_of(day)}_aside"


def is_restored(connection: Connection, day: date) -> bool:
    """Tell whether a day is restored, be it in part."""
    return _there(connection, schema_of(day)) or _there(connection, aside_of(day))


def restore(spark: SparkSession, connection: Connection, day: ArchivedDay, progress: Progress) -> None:
    """Fill a schema aside, compare it with the manifest, and give it its name only then. Raises RunFailedError."""
    if day.archive is None or day.archive_manifest is None:
        raise RunFailedError(f"{day.day} is not archived.")
    with progress.stage("check the archive", day.day):
        wrong = problems(spark, ArchiveFiles(spark), day.archive, day.archive_manifest)
    if wrong:
        raise RunFailedError(f"{day.archive} is not what was written: {'; '.join(wrong)}.")
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
    """Remove a restored day, or what a killed restore left of one. Raises RunFailedError if there is none."""
    if not is_restored(connection, day):
        raise RunFailedError(f"There is no {schema_of(day)}.")
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
    reach = sources.jdbc_to(connection)
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
        raise RunFailedError(f"{row and row['wrong']} bodies were restored that are not of their digests.")


def _there(connection: Connection, schema: str) -> bool:
    row = connection.execute(EXISTS, [schema]).fetchone()
    return row is not None and bool(row["there"])


def _execute(connection: Connection, statement: str) -> Any:
    return connection.execute(statement)


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
