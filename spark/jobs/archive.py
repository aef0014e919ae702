"""Takes settled days to Parquet, checked against what Postgres has, so that upkeep may drop their tables.

    spark-submit spark/jobs/archive.py --database-url postgresql://… --archive s3a://bucket/halfnote
    halfnote archive [--day DAY] [--verify]

Without --day: every day that the proof calls final, and every closed one that waits for its archive, unless its archive
is still what its tables hold. An attempt that did not come to its end is removed by the next run.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
from pyspark.sql import SparkSession

from spark import archive_options, archive_store, audit, database
from spark.archive import JAVA_FAILED, MANIFEST, manifest_of, problems
from spark.archive_files import ArchiveFiles
from spark.archive_rubbish import finish_redactions, remove_expired, remove_rubbish
from spark.archive_store import ArchivedDay
from spark.archive_writing import read_back, write_day
from spark.database import Connection
from spark.errors import RunFailedError
from spark.niceness import stand_behind
from spark.progress import Progress
from spark.session import session
from spark.sources import root_cause

DONE, FAILED, DIFFERS = 0, 1, 3
OWNER = "halfnote.json"
# Times in files are whole microseconds, which every reader knows.
CONF = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
# Something may come to a day while it is read; then it is read once more.
TRIES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 done, 1 it failed, 2 wrong usage, 3 an archive is not what was written (--verify)."""
    options = _parser()
    given = archive_options.parsed(options, argv)
    progress = Progress()
    try:
        place = given.archive or archive_options.from_environment(archive_options.ARCHIVE, str)
        if not place and not given.verify:
            options.error(f"say where to: --archive, or {archive_options.ARCHIVE}")
        connection = database.connect(given.url)
        with archive_store.archive_lock(connection):
            spark = session(given.master, **CONF)
            if given.verify:
                return verify(spark, connection, given, progress)
            return archive(spark, connection, ArchiveFiles(spark).qualified(str(place)), given, progress)
    except RunFailedError as error:
        print(f"The archive failed: {error}", file=sys.stderr)
    except JAVA_FAILED as error:
        print(f"The archive failed: {root_cause(str(error))}", file=sys.stderr)
    except (psycopg.Error, OSError) as error:
        print(f"The archive failed: {database.first_line(error)}", file=sys.stderr)
    return FAILED


def _parser() -> ArgumentParser:
    options = archive_options.parser("halfnote archive", "Takes settled days to Parquet.")
    options.add_argument("--archive", metavar="URL", help=f"where to; default: {archive_options.ARCHIVE}")
    options.add_argument(
        "--day", type=archive_options.day, action="append", default=[], help="this day, final or not; repeatable"
    )
    bodies = options.add_mutually_exclusive_group()
    bodies.add_argument("--bodies", action="store_true", default=None, help="with the messages' bodies (the default)")
    bodies.add_argument(
        "--no-bodies", dest="bodies", action="store_false", help=f"only their digests; also {archive_options.BODIES}"
    )
    options.add_argument(
        "--keep-s", type=int, metavar="S", help=f"remove days that ended longer ago; default: {archive_options.KEEP_S}"
    )
    options.add_argument("--adopt", action="store_true", help="take over the archive of another database")
    options.add_argument("--verify", action="store_true", help="write nothing; read archived days whole and check them")
    return options


def archive(spark: SparkSession, connection: Connection, root: str, given: Namespace, progress: Progress) -> int:
    """Archive what is to be archived below `root`; a day that fails does not keep the others."""
    files = ArchiveFiles(spark)
    keep_s = given.keep_s if given.keep_s is not None else archive_options.from_environment(archive_options.KEEP_S, int)
    bodies = given.bodies
    if bodies is None:
        bodies = archive_options.from_environment(archive_options.BODIES, archive_options.yes_or_no) is not False
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


def _own(connection: Connection, files: ArchiveFiles, root: str, *, adopt: bool) -> None:
    """Write down whose archive it is: rubbish is told by this database's rows, and another's would look like it.

    Raises RunFailedError if it is another database's.
    """
    place, identity = f"{root}/{OWNER}", archive_store.identity(connection)
    owner = json.loads(files.read_text(place))["database"] if files.exists(place) else None
    if owner == identity:
        return
    if owner is not None and not adopt:
        raise RunFailedError(
            f"{root} is the archive of another database ({owner}; this is {identity}). Name a directory of its "
            "own, or, if this database took the other's place (a dump, an upgrade), run this once with --adopt."
        )
    if owner is not None:
        audit.record(connection, "archive.adopt", root, former=owner)
    files.make(root)
    files.write_text(place, json.dumps({"database": identity}))
    files.sync([place])


def _wanted(connection: Connection, asked: Sequence[Any]) -> list[ArchivedDay]:
    """Return the days to archive, oldest first. Raises RunFailedError if one that was asked for is not here."""
    here = {day.day: day for day in archive_store.days(connection) if day.state != "gone"}
    for day in asked:
        if day not in here:
            raise RunFailedError(f"{day} is not in the database: it has left, or never was.")
    if asked:
        return [here[day] for day in sorted(set(asked))]
    ready = [day for day in here.values() if day.final or day.state == "archiving"]
    return [day for day in ready if not _is_archived(connection, day)]


def _is_archived(connection: Connection, day: ArchivedDay) -> bool:
    if day.archive is None or day.archive_manifest is None or day.differs or "archive_differs" in day.held:
        return False
    rows = {table: held["rows"] for table, held in day.archive_manifest["tables"].items()}
    return archive_store.counts(connection, day.day) == rows


def _archive_day(
    spark: SparkSession,
    connection: Connection,
    files: ArchiveFiles,
    root: str,
    day: ArchivedDay,
    bodies: bool,
    url: str,
    progress: Progress,
) -> None:
    """Write, read back, and point the day's row at it. Raises RunFailedError; then nothing points at it."""
    for _ in range(TRIES):
        place = f"{root}/day={day.day}/{uuid4()}"
        try:
            described = _written(spark, files, place, day, bodies, url, progress)
            if _pointed_at(connection, day, place, described):
                rows = sum(held["rows"] for held in described["tables"].values())
                progress.say("archived", f"{day.day} is archived at {place}", day=day.day, archive=place, rows=rows)
                return
        except JAVA_FAILED as error:
            raise RunFailedError(root_cause(str(error))) from error
        finally:
            # What nothing points at by now is rubbish; if this fails too, the next run removes it.
            _remove_unless_pointed_at(connection, files, place, day)
    raise RunFailedError("rows came while it was archived, twice; it is archived by the next run.")


def _pointed_at(connection: Connection, day: ArchivedDay, place: str, described: Mapping[str, Any]) -> bool:
    with connection.transaction():
        pointed = archive_store.point(connection, day.day, place, described)
        if pointed:
            audit.record(connection, "archive.write", day.day, archive=place)
    return pointed


def _written(
    spark: SparkSession,
    files: ArchiveFiles,
    place: str,
    day: ArchivedDay,
    bodies: bool,
    url: str,
    progress: Progress,
) -> Mapping[str, Any]:
    with database.open_snapshot(url) as snapshot:
        snapshot.lock([day.day])
        written = write_day(spark, snapshot, snapshot.day(day.day), place, bodies=bodies, progress=progress)
    described = read_back(spark, files, place, written, day.day, progress)
    files.write_text(f"{place}/{MANIFEST}", json.dumps(described, indent=1))
    with progress.stage("have it on the disk", day.day):
        listed = [file["path"] for held in described["tables"].values() for file in held["files"]]
        files.sync([f"{place}/{path}" for path in [*listed, MANIFEST]])
    return described


def _remove_unless_pointed_at(connection: Connection, files: ArchiveFiles, place: str, day: ArchivedDay) -> None:
    try:
        if not connection.closed and archive_store.day_of(connection, day.day).archive != place:
            files.remove(place)
    except (RunFailedError, *JAVA_FAILED):
        return


def verify(spark: SparkSession, connection: Connection, given: Namespace, progress: Progress) -> int:
    """Read every archived day, or those that were asked for, and say what is not as it was written."""
    files = ArchiveFiles(spark)
    archived = [day for day in archive_store.days(connection) if day.archive is not None]
    wrong = 0
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


def _verified(spark: SparkSession, files: ArchiveFiles, day: ArchivedDay) -> list[str]:
    assert day.archive is not None
    assert day.archive_manifest is not None
    stored = {name: value for name, value in day.archive_manifest.items() if name != "rubbish"}
    try:
        written = manifest_of(files, day.archive)
    except RunFailedError as error:
        return [str(error)]
    differs = [] if written == stored else [f"{MANIFEST} is not what the database has"]
    return differs + problems(spark, files, day.archive, stored)


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
