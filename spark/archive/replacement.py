"""Compares a day's new attempt with its earlier ones, to find which of them it replaces."""

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from spark import manifest
from spark.archive.cleanup import attempts
from spark.archive.layout import damaged_files, read
from spark.archive.records import ArchivedDay
from spark.archive.removal import REPLACES, found_manifest, is_named
from spark.engine.filesystem import FAILURES, Files, name_of
from spark.errors import RunFailedError
from spark.manifest import TABLES, TableManifest
from spark.postgres.connections import Connection
from spark.sources.failures import root_cause


def refuse_changed(connection: Connection, day: ArchivedDay) -> None:
    """Raise RunFailedError if the day's tables have other rows than its archive, and not only more; reads the tables.

    It spares writing the day, which `replaced` would refuse.
    """
    if day.archive_manifest is None:
        return
    found = manifest.tables(manifest.of_day(connection, day.day))
    archived = manifest.tables(day.archive_manifest)
    changed = [
        table for table in TABLES if found[table] != archived[table] and found[table].rows <= archived[table].rows
    ]
    if changed:
        raise _refused(day, [f"{table} has other rows" for table in changed])


def replaced(
    spark: SparkSession,
    files: Files,
    root: str,
    day: ArchivedDay,
    place: str,
    described: Mapping[str, Any],
    *,
    asked: bool,
) -> list[str]:
    """Return the names of the day's attempts that the new one at `place` replaces, because it has all their rows.

    `asked`: a person asked for this day, and so for what the tables have, whatever its archive has. Raises
    RunFailedError if it was not asked for, and the day's present archive has rows that the new attempt lacks.
    """
    before = day.archive_manifest or {}
    names = []
    for other in attempts(files, root, day.day):
        found, name = found_manifest(files, other), name_of(other)
        if other == place or is_named(day, name) or found is None or isinstance(found, str):
            continue
        if name in before.get(REPLACES, ()) or not _lacking(spark, files, other, found, place, described):
            names.append(name)
    if day.archive is not None and day.archive_manifest is not None:
        lacking = [] if asked else _lacking(spark, files, day.archive, before, place, described)
        if lacking:
            raise _refused(day, lacking)
        names.append(name_of(day.archive))
    return names


def _lacking(
    spark: SparkSession, files: Files, older: str, has: Mapping[str, Any], newer: str, described: Mapping[str, Any]
) -> list[str]:
    """Return as texts what the older attempt has and the newer one lacks; none if the newer one has all of it."""
    if has["bodies"] and not described["bodies"]:
        return ["it has bodies, which would be left out"]
    found = []
    for table in TABLES:
        held, made = (TableManifest.of(one["tables"][table]) for one in (has, described))
        if held == made:
            continue
        if made.rows <= held.rows:
            found.append(f"{table} has other rows")
            continue
        try:
            damaged = damaged_files(files, older, has["tables"][table]["files"])
            missing = 0 if damaged else _missing(spark, older, has, newer, described, table)
        except FAILURES as error:
            damaged, missing = [root_cause(str(error))], 0
        if damaged:
            found.append(f"{table} cannot be compared ({'; '.join(damaged)})")
        elif missing:
            found.append(f"{table} lacks {missing} of its rows")
    return found


def _missing(
    spark: SparkSession, older: str, has: Mapping[str, Any], newer: str, described: Mapping[str, Any], table: str
) -> int:
    """Count the rows of a table that the older attempt has and the newer one has not. Reads no bodies."""
    row = manifest.row_digest(table).alias("row")
    ours, theirs = read(spark, older, has, table).select(row), read(spark, newer, described, table).select(row)
    return ours.join(theirs, "row", "left_anti").count()


def _refused(day: ArchivedDay, lacking: list[str]) -> RunFailedError:
    return RunFailedError(
        f"the tables do not have all that its archive {day.archive} has: {'; '.join(lacking)}. Both stay. Compare them "
        "(docs/findings/archive_differs.md); if the tables are right, "
        f"halfnote archive --day {day.day} replaces the archive."
    )
