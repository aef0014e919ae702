"""Archives settled days as Parquet and verifies them against Postgres, so that upkeep may drop their tables.

    spark-submit spark/jobs/archive.py --database-url postgresql://… --archive s3a://bucket/halfnote
    halfnote archive [--day DAY] [--verify]

Without --day it archives every final day, and every closed day that waits for its archive, unless the day already has
an archive that equals its tables. The next run removes an incomplete attempt.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
from pyspark.sql import SparkSession

from spark.archive import records
from spark.archive.cleanup import finish_redactions, remove_expired, remove_rubbish
from spark.archive.files import sync
from spark.archive.layout import MANIFEST, manifest_of, problems
from spark.archive.records import ArchivedDay
from spark.archive.writer import read_back, write_day
from spark.engine.filesystem import FAILURES, Files, files_for
from spark.engine.niceness import stand_behind
from spark.engine.progress import Progress
from spark.engine.session import session
from spark.errors import RunFailedError
from spark.options import archive as options
from spark.options.common import ARCHIVE, BODIES, KEEP_S, from_environment, parsed, yes_or_no
from spark.postgres import audit, connections
from spark.postgres.connections import Connection
from spark.sources.frames import root_cause

DONE, FAILED, DIFFERS = 0, 1, 3
OWNER = "halfnote.json"
# Times in files are whole microseconds, which every reader supports.
CONF = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
# Rows may be added to a day while it is read; then it is read again.
TRIES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0: done; 1: it failed; 2: wrong usage; 3: an archive differs from the written one (--verify)."""
    parser = options.parser()
    given = parsed(parser, argv)
    progress = Progress()
    try:
        place = given.archive or from_environment(ARCHIVE, str)
        if not place and not given.verify:
            parser.error(f"the archive is missing: give --archive, or set {ARCHIVE}")
        connection = connections.connect(given.url)
        with records.archive_lock(connection):
            spark = session(given.master, jdbc=True, **CONF)
            if given.verify:
                return verify(spark, connection, given, progress)
            return archive(spark, connection, files_for(spark).qualified(str(place)), given, progress)
    except RunFailedError as error:
        print(f"The archive failed: {error}", file=sys.stderr)
    except FAILURES as error:
        print(f"The archive failed: {root_cause(str(error))}", file=sys.stderr)
    except psycopg.Error as error:
        print(f"The archive failed: {connections.first_line(error)}", file=sys.stderr)
    return FAILED


def archive(spark: SparkSession, connection: Connection, root: str, given: Namespace, progress: Progress) -> int:
    """Archive the due days below `root`; a day that fails does not stop the others."""
    files = files_for(spark)
    keep_s = given.keep_s if given.keep_s is not None else from_environment(KEEP_S, int)
    bodies = given.bodies
    if bodies is None:
        bodies = from_environment(BODIES, yes_or_no) is not False
    _own(connection, files, root, adopt=given.adopt)
    finish_redactions(connection, files)
    remove_rubbish(connection, files, root, progress)
    failed = 0
    for day in _wanted(connection, given.day):
        try:
            _archive_day(spark, connection, files, root, day, bodies, given.url, progress)
        except RunFailedError as error:
            failed += 1
            progress.say("archive_failed", f"{day.day} was not archived: {error}", day=day.day)
    remove_rubbish(connection, files, root, progress)
    if keep_s is not None:
        remove_expired(connection, files, root, datetime.now(UTC) - timedelta(seconds=keep_s), progress)
    return FAILED if failed else DONE


def _own(connection: Connection, files: Files, root: str, *, adopt: bool) -> None:
    """Record the database that owns the archive, because files of another database would be removed as garbage.

    Raises RunFailedError if another database owns it.
    """
    place, identity = f"{root}/{OWNER}", records.identity(connection)
    owner = _owner(files, place)
    if owner == identity:
        return
    if owner is not None and not adopt:
        raise RunFailedError(
            f"{root} is the archive of another database ({owner}; this is {identity}). Use a separate directory "
            "or, if this database replaces the other one (a dump, an upgrade), run this once with --adopt."
        )
    if owner is not None:
        audit.record(connection, "archive.adopt", root, former=owner)
    files.make(root)
    files.write_text(place, json.dumps({"database": identity}))
    sync([place])


def _owner(files: Files, place: str) -> str | None:
    """Return the database that owns an archive; None for a new one. Raises RunFailedError if the file is damaged."""
    try:
        return str(json.loads(files.read_text(place))["database"]) if files.exists(place) else None
    except (ValueError, KeyError, TypeError):
        raise RunFailedError(
            f'{place} is damaged: it must be {{"database": "…"}}. Restore it, or remove it if this is its database.'
        ) from None


def _wanted(connection: Connection, asked: Sequence[Any]) -> list[ArchivedDay]:
    """Return the days to archive, oldest first. Raises RunFailedError if a requested day is not stored."""
    here = {day.day: day for day in records.days(connection) if day.state != "gone"}
    for day in asked:
        if day not in here:
            raise RunFailedError(f"{day} is not in the database: it was removed, or it never existed.")
    if asked:
        return [here[day] for day in sorted(set(asked))]
    ready = [day for day in here.values() if day.final or day.state == "archiving"]
    return [day for day in ready if not _is_archived(connection, day)]


def _is_archived(connection: Connection, day: ArchivedDay) -> bool:
    if day.archive is None or day.archive_manifest is None or day.differs or "archive_differs" in day.held:
        return False
    rows = {table: held["rows"] for table, held in day.archive_manifest["tables"].items()}
    return records.counts(connection, day.day) == rows


def _archive_day(
    spark: SparkSession,
    connection: Connection,
    files: Files,
    root: str,
    day: ArchivedDay,
    bodies: bool,
    url: str,
    progress: Progress,
) -> None:
    """Write the archive, read it back, and point the day to it. Raises RunFailedError; then the day does not change."""
    for _ in range(TRIES):
        place = f"{root}/day={day.day}/{uuid4()}"
        try:
            described = _written(spark, files, place, day, bodies, url, progress)
            if _pointed_at(connection, day, place, described):
                rows = sum(held["rows"] for held in described["tables"].values())
                progress.say("archived", f"{day.day} is archived at {place}", day=day.day, archive=place, rows=rows)
                return
        except FAILURES as error:
            raise RunFailedError(root_cause(str(error))) from error
        finally:
            # The attempt is unreferenced; if its removal fails too, the next run removes it.
            _remove_unless_pointed_at(connection, files, place, day)
    raise RunFailedError("rows were added while it was archived, twice; the next run archives it.")


def _pointed_at(connection: Connection, day: ArchivedDay, place: str, described: Mapping[str, Any]) -> bool:
    with connection.transaction():
        pointed = records.point(connection, day.day, place, described)
        if pointed:
            audit.record(connection, "archive.write", day.day, archive=place)
    return pointed


def _written(
    spark: SparkSession,
    files: Files,
    place: str,
    day: ArchivedDay,
    bodies: bool,
    url: str,
    progress: Progress,
) -> Mapping[str, Any]:
    with connections.open_snapshot(url) as snapshot:
        snapshot.lock([day.day])
        written = write_day(spark, snapshot, snapshot.day(day.day), place, bodies=bodies, progress=progress)
    described = read_back(spark, files, place, written, day.day, progress)
    files.write_text(f"{place}/{MANIFEST}", json.dumps(described, indent=1))
    with progress.stage("have it on the disk", day.day):
        listed = [file for held in described["tables"].values() for file in held["files"]]
        paths = [file["path"] for file in [*listed, *described["beside"]]]
        sync([f"{place}/{path}" for path in [*paths, MANIFEST]])
    return described


def _remove_unless_pointed_at(connection: Connection, files: Files, place: str, day: ArchivedDay) -> None:
    try:
        if not connection.closed and records.day_of(connection, day.day).archive != place:
            files.remove(place)
    except (RunFailedError, *FAILURES):
        return


def verify(spark: SparkSession, connection: Connection, given: Namespace, progress: Progress) -> int:
    """Read every archived day, or the requested days, and report differences from the written files."""
    files = files_for(spark)
    archived = [day for day in records.days(connection) if day.archive is not None]
    wrong = _wrong_owners(connection, files, archived, progress)
    for day in [day for day in archived if not given.day or day.day in given.day]:
        with progress.stage("verify", day.day):
            found = _verified(spark, files, day)
        wrong += bool(found)
        for words in found:
            progress.say("archive_wrong", f"{day.day} {day.archive}: {words}", day=day.day, archive=day.archive)
    missing = sorted(set(given.day) - {day.day for day in archived})
    if missing:
        raise RunFailedError(f"{', '.join(map(str, missing))} is not archived.")
    return DIFFERS if wrong else DONE


def _wrong_owners(connection: Connection, files: Files, archived: Sequence[ArchivedDay], progress: Progress) -> int:
    """Report the archives whose file of the owner does not name this database; return their number."""
    wrong = 0
    for root in sorted({day.archive.rsplit("/", 2)[0] for day in archived if day.archive is not None}):
        place, found = f"{root}/{OWNER}", None
        try:
            owner = _owner(files, place)
            if owner != records.identity(connection):
                found = f"{place} {'is missing' if owner is None else f'names another database, {owner}'}"
        except RunFailedError as error:
            found = str(error)
        except FAILURES as error:
            found = f"{place} cannot be read: {root_cause(str(error))}"
        if found is not None:
            wrong += 1
            progress.say("archive_wrong", found, archive=root)
    return wrong


def _verified(spark: SparkSession, files: Files, day: ArchivedDay) -> list[str]:
    assert day.archive is not None
    assert day.archive_manifest is not None
    stored = {name: value for name, value in day.archive_manifest.items() if name != "rubbish"}
    try:
        written = manifest_of(files, day.archive)
    except RunFailedError as error:
        return [str(error)]
    differs = [] if written == stored else [f"{MANIFEST} is not what the database has"]
    return differs + problems(spark, files, day.archive, day.archive_manifest)


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
