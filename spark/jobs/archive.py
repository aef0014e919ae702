"""Archives settled days as Parquet and verifies them against Postgres, so that upkeep may drop their tables.

    spark-submit spark/jobs/archive.py --database-url postgresql://… --archive s3a://bucket/halfnote
    halfnote archive [--day DAY] [--verify]

Without --day it archives every final day, and every closed day that waits for its archive, unless the day already has
an archive that equals its tables. An archive is replaced only by one that has all its rows; with --day, by what the
tables have. The next run removes an incomplete attempt.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
from pyspark.sql import SparkSession

from spark.archive import records
from spark.archive.addresses import moved_days, record_moved, refuse_moved
from spark.archive.cleanup import (
    DAY,
    expired_days,
    finish_redactions,
    remove_attempt,
    remove_expired,
    remove_rubbish,
)
from spark.archive.files import sync
from spark.archive.layout import MANIFEST, NAMED_AT_MOST, manifest_of, problems
from spark.archive.owner import own, own_roots, wrong_owners
from spark.archive.records import ArchivedDay
from spark.archive.removal import REPLACES, has_all, is_named, lacking
from spark.archive.replacement import refuse_changed, replaced
from spark.archive.writer import read_back, write_day
from spark.engine.filesystem import FAILURES, Files, files_for, name_of, normal
from spark.engine.niceness import stand_behind
from spark.engine.progress import Progress
from spark.engine.session import session
from spark.errors import RunFailedError
from spark.options import archive as options
from spark.options.common import ARCHIVE, BODIES, KEEP_S, from_environment, keep_s, parsed, yes_or_no
from spark.postgres import audit, connections
from spark.postgres.connections import Connection
from spark.sources.failures import root_cause

DONE, FAILED, DIFFERS = 0, 1, 3
# Times in files are whole microseconds, which every reader supports.
CONF = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
# Rows may be added to a day while it is read; then it is read again.
TRIES = 2


@dataclass(frozen=True, slots=True)
class ArchiveRun:
    """What each day of a run needs: the archive at `root`, and whether it gets `bodies`."""

    spark: SparkSession
    connection: Connection
    files: Files
    root: str
    bodies: bool
    url: str
    progress: Progress


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
    kept_s = given.keep_s if given.keep_s is not None else from_environment(KEEP_S, keep_s)
    bodies = given.bodies
    if bodies is None:
        bodies = from_environment(BODIES, yes_or_no) is not False
    _at_its_address(connection, files, root, given)
    unfinished = finish_redactions(connection, files)
    for words in unfinished:
        progress.say("redaction_unfinished", words)
    failed = len(unfinished) + remove_rubbish(connection, files, root, progress, report=False)
    run = ArchiveRun(spark, connection, files, root, bodies, given.url, progress)
    for day in _wanted(connection, given.day):
        try:
            if given.day or not _is_archived(connection, files, day, progress):
                _archive_day(run, day, asked=bool(given.day))
        except (RunFailedError, *FAILURES, psycopg.Error) as error:
            if connection.closed:
                raise
            failed += 1
            progress.say("archive_failed", f"{day.day} was not archived: {root_cause(str(error))}", day=day.day)
    before = None if kept_s is None else records.now(connection) - timedelta(seconds=kept_s)
    earlier = _earlier(connection, files, root, before, progress, clear=given.earlier_locations)
    for place in (root, *earlier):
        failed += remove_rubbish(connection, files, place, progress, report=True)
        if before is not None:
            failed += remove_expired(connection, files, place, before, progress)
    return FAILED if failed else DONE


def _earlier(
    connection: Connection, files: Files, root: str, before: datetime | None, progress: Progress, *, clear: bool
) -> list[str]:
    """Return the locations from before changes of HALFNOTE_ARCHIVE, with `clear`; report what cannot be looked at.

    Only a person can say that they may be cleared: a copy of the database has the same identity, and its own archive.
    Without `clear` this says where days are past their retention.
    """
    known = own_roots(connection, files)
    for place, why in known.unreachable.items():
        progress.say("archive_unreachable", f"The archive at {place} cannot be looked at: {why}", archive=place)
    earlier = [one for one in known.owned if one != normal(root)]
    if clear:
        return earlier
    for place in earlier:
        expired = [] if before is None else expired_days(connection, files, place, before)
        if expired:
            words = (
                f"{len(expired)} days are past their retention at {place}, where archives were written before. If this "
                "database is no copy of another one, run halfnote archive --earlier-locations."
            )
            progress.say("archive_not_cleared", words, archive=place)
    return []


def _at_its_address(connection: Connection, files: Files, root: str, given: Namespace) -> None:
    """Record or compare the archive's owner and address. Raises RunFailedError if it is another archive, or moved."""
    own(connection, files, root, adopt=given.adopt)
    moved = moved_days(connection, files, root)
    if given.moved:
        record_moved(connection, files, moved)
    else:
        refuse_moved(moved, root)


def _wanted(connection: Connection, asked: Sequence[Any]) -> list[ArchivedDay]:
    """Return the days that may have to be archived, oldest first.

    Raises RunFailedError if a requested day is not stored.
    """
    here = {day.day: day for day in records.days(connection) if day.state != "gone"}
    for day in asked:
        if day not in here:
            raise RunFailedError(f"{day} is not in the database: it was removed, or it never existed.")
    if asked:
        return [here[day] for day in sorted(set(asked))]
    # A day that was archived as final may have got rows of a replay that still runs.
    return [day for day in here.values() if day.final or day.state == "archiving" or day.archive is not None]


def _is_archived(connection: Connection, files: Files, day: ArchivedDay, progress: Progress) -> bool:
    """Return whether a day has an archive that is there, and has as many rows as its tables, or needs none any more.

    The lengths of its files are compared, not their bytes.
    """
    if day.archive is None or day.archive_manifest is None or day.differs or "archive_differs" in day.held:
        return False
    rows = {table: held["rows"] for table, held in day.archive_manifest["tables"].items()}
    try:
        same = records.counts(connection, day.day) == rows
    except psycopg.errors.UndefinedTable:
        # Upkeep has removed the day, which its archive equals.
        return records.day_of(connection, day.day).state == "gone"
    if not same:
        return False
    missing = lacking(files, day.archive, day.archive_manifest)
    if missing:
        words = f"{day.day} has to be archived again, {day.archive} is not whole: {'; '.join(missing[:NAMED_AT_MOST])}"
        progress.say("archive_not_whole", words, day=day.day, archive=day.archive)
    return not missing


def _archive_day(run: ArchiveRun, day: ArchivedDay, *, asked: bool) -> None:
    """Write the archive, read it back, and point the day to it. Raises RunFailedError; then the day does not change."""
    if not asked:
        refuse_changed(run.connection, day)
    for _ in range(TRIES):
        place = f"{run.root}/{DAY}{day.day}/{uuid4()}"
        try:
            described = _written(run, place, day, asked=asked)
            if _pointed_at(run.connection, day, place, described):
                rows = sum(held["rows"] for held in described["tables"].values())
                run.progress.say("archived", f"{day.day} is archived at {place}", day=day.day, archive=place, rows=rows)
                return
        finally:
            # The attempt is unreferenced; if its removal fails too, the next run removes it.
            _discard_unless_pointed_at(run.connection, run.files, place, day)
    raise RunFailedError("rows were added while it was archived, twice; the next run archives it.")


def _pointed_at(connection: Connection, day: ArchivedDay, place: str, described: Mapping[str, Any]) -> bool:
    """Make an attempt the day's archive; False if rows were added. Raises RunFailedError if the day was removed."""
    try:
        with connection.transaction():
            pointed = records.point(connection, day.day, place, described)
            if pointed:
                audit.record(connection, "archive.write", day.day, archive=place, former=day.archive)
    except psycopg.errors.UndefinedTable:
        # Upkeep has removed the day, by its former archive, which may be the damaged one.
        pointed = False
        if day.archive_manifest is not None and has_all(described, day.archive_manifest):
            with connection.transaction():
                pointed = records.repoint(connection, day, place, described)
                if pointed:
                    audit.record(connection, "archive.write", day.day, archive=place, former=day.archive)
        if not pointed:
            raise RunFailedError(
                f"it was removed from Postgres meanwhile, and {place} is not what its archive {day.archive} has. "
                "Both stay. Compare them, and remove what is not needed."
            ) from None
    return pointed


def _written(run: ArchiveRun, place: str, day: ArchivedDay, *, asked: bool) -> Mapping[str, Any]:
    with connections.open_snapshot(run.url) as snapshot:
        snapshot.lock([day.day])
        found = snapshot.day(day.day)
        written = write_day(run.spark, snapshot, found, place, bodies=run.bodies, progress=run.progress)
    described = read_back(run.spark, run.files, place, written, day.day, run.progress)
    names = replaced(run.spark, run.files, run.root, day, place, described, asked=asked)
    described = {**described, REPLACES: names}
    run.files.write_text(f"{place}/{MANIFEST}", json.dumps(described, indent=1))
    with run.progress.stage("have it on the disk", day.day):
        listed = [file for held in described["tables"].values() for file in held["files"]]
        paths = [file["path"] for file in [*listed, *described["beside"]]]
        sync([f"{place}/{path}" for path in [*paths, MANIFEST]])
    return described


def _discard_unless_pointed_at(connection: Connection, files: Files, place: str, day: ArchivedDay) -> None:
    """Remove an attempt that does not count. A complete one stays if the day's tables are gone."""
    try:
        if connection.closed:
            return
        row = records.day_of(connection, day.day)
        if not is_named(row, name_of(place)) and (row.state != "gone" or not files.exists(f"{place}/{MANIFEST}")):
            remove_attempt(files, place)
    except (RunFailedError, *FAILURES, psycopg.Error):
        return


def verify(spark: SparkSession, connection: Connection, given: Namespace, progress: Progress) -> int:
    """Read every archived day, or the requested days, and report differences from the written files."""
    files = files_for(spark)
    archived = [day for day in records.days(connection) if day.archive is not None]
    wrong = wrong_owners(connection, files, archived, progress)
    for day in [day for day in archived if not given.day or day.day in given.day]:
        with progress.stage("verify", day.day):
            found = _verified(spark, files, day)
        wrong += bool(found)
        for words in found:
            progress.say("archive_wrong", f"{day.day} {day.archive}: {words}", day=day.day, archive=day.archive)
        if "rubbish" in records.manifest_in(day):
            words = f"A redaction of {day.day} is not finished: run halfnote archive, or halfnote redact again."
            progress.say("redaction_unfinished", words, day=day.day)
    missing = sorted(set(given.day) - {day.day for day in archived})
    if missing:
        raise RunFailedError(f"{', '.join(map(str, missing))} is not archived.")
    return DIFFERS if wrong else DONE


def _verified(spark: SparkSession, files: Files, day: ArchivedDay) -> list[str]:
    assert day.archive is not None
    assert day.archive_manifest is not None
    try:
        written = manifest_of(files, day.archive)
    except RunFailedError as error:
        return [str(error)]
    # During a redaction it may be the one before; the run that finishes the redaction writes it again.
    same = "rubbish" in day.archive_manifest or written == day.archive_manifest
    differs = [] if same else [f"{MANIFEST} is not what the database has"]
    return differs + problems(spark, files, day.archive, day.archive_manifest)


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
