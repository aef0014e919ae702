"""Removes attempts that are not needed, files that a redaction replaced, and days past their retention."""

import json
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any
from uuid import UUID

from spark.archive import records
from spark.archive.files import sync
from spark.archive.layout import MANIFEST, NAMED_AT_MOST, wrong_lengths
from spark.archive.records import ArchivedDay, manifest_in
from spark.archive.removal import Fate, fate, found_manifest, is_named, is_whole
from spark.engine.filesystem import FAILURES, Files, is_below, name_of
from spark.engine.progress import Progress
from spark.errors import RunFailedError
from spark.postgres import audit
from spark.postgres.connections import Connection
from spark.sources.failures import root_cause

DAY = "day="


def finish_redactions(connection: Connection, files: Files) -> list[str]:
    """Finish redactions whose pointer moved while replaced files may still exist. Return failures as texts."""
    failures = []
    for day in records.days(connection):
        if day.archive_manifest is not None and "rubbish" in day.archive_manifest:
            try:
                finish_redaction(connection, files, day)
            except (RunFailedError, *FAILURES) as error:
                failures.append(f"A redaction of {day.day} is not finished: {root_cause(str(error))}")
    return failures


def finish_redaction(connection: Connection, files: Files, day: ArchivedDay) -> None:
    """Remove the files that a day's redaction replaced, and write its manifest beside the others.

    Raises RunFailedError if the archive is not there, because its files would be taken for removed, or if it lacks
    halves.
    """
    stored = manifest_in(day)
    if not files.exists(f"{day.archive}/{MANIFEST}"):
        raise RunFailedError(f"{day.archive}/{MANIFEST} does not exist. Is the archive mounted?")
    refuse_without_halves(files, day)
    # manifest.json names the new files before the old ones leave, and both while both may be there.
    write_manifest(files, day, stored)
    for path in stored["rubbish"]:
        files.remove(f"{day.archive}/{path}")
    described = {name: value for name, value in stored.items() if name != "rubbish"}
    write_manifest(files, day, described)
    records.redescribe(connection, day, described)


def refuse_without_halves(files: Files, day: ArchivedDay) -> None:
    """Raise RunFailedError if a file of halves that the day's row names is missing, or has another length.

    A database that went back to a time during a redaction names the file that was replaced, and calls the other one
    rubbish, which is then the only copy. Other tables are not compared: a redaction replaces none of their files, and
    their damage must not keep a body.
    """
    missing = wrong_lengths(files, str(day.archive), manifest_in(day)["tables"]["half"]["files"])
    if missing:
        raise RunFailedError(
            f"{day.archive} has not what the database names: {'; '.join(missing[:NAMED_AT_MOST])}. Nothing is removed. "
            "If the database went back to an earlier time, a later redaction may have replaced the file: "
            'docs/archive.md, "A redaction that the database does not know". If not, restore the file from the '
            "storage's versions or backups, then run this again."
        )


def write_manifest(files: Files, day: ArchivedDay, described: Mapping[str, Any]) -> None:
    """Write another manifest.json of a day's archive, to the disk."""
    place = f"{day.archive}/{MANIFEST}"
    files.write_text(place, json.dumps(described, indent=1))
    sync([place])


def remove_rubbish(connection: Connection, files: Files, root: str, progress: Progress, *, report: bool) -> int:
    """Remove the attempts that `fate` lets go; return how many could not be removed.

    `report`: name the complete attempts that stay although no row names them.
    """
    here = {day.day: day for day in records.days(connection)}
    failed = 0
    for day in archived_days(files, root):
        row = here.get(day)
        others = [place for place in attempts(files, root, day) if row is None or not is_named(row, name_of(place))]
        whole = bool(others) and row is not None and _names_whole(files, row)
        for place in others:
            try:
                found = fate(name_of(place), found_manifest(files, place), row, named_is_whole=whole)
                if found is Fate.REMOVED:
                    remove_attempt(files, place)
                    progress.say("rubbish_removed", f"{place} is not the archive of a day and is removed", place=place)
                elif found is Fate.REPORTED and report:
                    progress.say(
                        "attempt_kept",
                        f"{place} is complete, no row names it, and it may have the only copy of rows. "
                        'It stays: docs/archive.md, "What is removed".',
                        day=day,
                        place=place,
                    )
            except FAILURES as error:
                failed += 1
                progress.say("not_removed", f"{place} could not be removed: {root_cause(str(error))}", place=place)
    return failed


def remove_attempt(files: Files, place: str) -> None:
    """Remove an attempt, its manifest first, so that an interrupted removal leaves an incomplete attempt."""
    files.remove(f"{place}/{MANIFEST}")
    files.remove(place)


def remove_expired(connection: Connection, files: Files, root: str, before: datetime, progress: Progress) -> int:
    """Remove the archives of the days that are gone from Postgres and ended before `before`.

    Return how many could not be removed; the next run tries again.
    """
    failed = 0
    for row in expired_days(connection, files, root, before):
        day = row.day
        # The row changes first, because an answer must not name a removed archive.
        with connection.transaction():
            if row.archive is not None and is_below(row.archive, root):
                records.forget(connection, day)
            audit.record(connection, "archive.expire", day, archive=f"{root}/{DAY}{day}")
        try:
            files.remove(f"{root}/{DAY}{day}")
            progress.say("archive_expired", f"The archive of {day} is past its retention and removed", day=day)
        except FAILURES as error:
            failed += 1
            progress.say("not_removed", f"The archive of {day} could not be removed: {root_cause(str(error))}", day=day)
    return failed


def expired_days(connection: Connection, files: Files, root: str, before: datetime) -> list[ArchivedDay]:
    """Return the days with directories in an archive that are gone from Postgres and ended before `before`."""
    here = {day.day: day for day in records.days(connection)}
    found = [here[day] for day in archived_days(files, root) if day in here]
    return [row for row in found if row.state == "gone" and row.ended < before]


def archived_days(files: Files, root: str) -> list[date]:
    """Return the days that have directories in an archive, oldest first."""
    found = []
    for name in files.names(root):
        try:
            found.append(date.fromisoformat(name.removeprefix(DAY)))
        except ValueError:
            continue
    return found


def attempts(files: Files, root: str, day: date) -> list[str]:
    """Return the attempts of a day, as `<root>/day=…/<uuid>`; files with other names are not ours."""
    directory = f"{root}/{DAY}{day}"
    return [f"{directory}/{name}" for name in map(name_of, files.children(directory)) if _is_uuid(name)]


def _names_whole(files: Files, row: ArchivedDay) -> bool:
    return (
        row.archive is not None
        and row.archive_manifest is not None
        and is_whole(files, row.archive, row.archive_manifest)
    )


def _is_uuid(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False
