"""What leaves an archive: attempts that nothing points at, what a redaction replaced, days past their retention."""

import json
from datetime import date, datetime
from uuid import UUID

from spark import archive_store, audit
from spark.archive import MANIFEST
from spark.archive_files import ArchiveFiles, name_of
from spark.archive_store import ArchivedDay
from spark.database import Connection
from spark.progress import Progress

DAY = "day="


def finish_redactions(connection: Connection, files: ArchiveFiles) -> None:
    """End the redactions that were interrupted: the pointer moved, but replaced files may still be there."""
    for day in archive_store.days(connection):
        if day.archive_manifest is not None and "rubbish" in day.archive_manifest:
            finish_redaction(connection, files, day)


def finish_redaction(connection: Connection, files: ArchiveFiles, day: ArchivedDay) -> None:
    """Remove the files that a day's redaction replaced, and write its manifest beside the others."""
    assert day.archive_manifest is not None
    described = {name: value for name, value in day.archive_manifest.items() if name != "rubbish"}
    for path in day.archive_manifest["rubbish"]:
        files.remove(f"{day.archive}/{path}")
    files.write_text(f"{day.archive}/{MANIFEST}", json.dumps(described, indent=1))
    files.sync([f"{day.archive}/{MANIFEST}"])
    archive_store.redescribe(connection, day, described)


def remove_rubbish(connection: Connection, files: ArchiveFiles, root: str, progress: Progress) -> None:
    """Remove the attempts that did not come to their end, and those that others took the place of.

    A whole one of a day that is gone, at which no row points, is left: perhaps the database is an old copy of itself.
    """
    here = {day.day: day for day in archive_store.days(connection)}
    for day in archived_days(files, root):
        row = here.get(day)
        for place in attempts(files, root, day):
            if row is not None and row.archive == place:
                continue
            whole = files.exists(f"{place}/{MANIFEST}")
            replaced = row is not None and (row.state != "gone" or row.archive is not None)
            if not whole or replaced:
                files.remove(place)
                progress.say("rubbish_removed", f"{place} was no day's archive and is removed", place=place)


def remove_expired(
    connection: Connection, files: ArchiveFiles, root: str, before: datetime, progress: Progress
) -> None:
    """Remove the archives of the days that are gone from Postgres and ended before `before`."""
    here = {day.day: day for day in archive_store.days(connection)}
    for day in archived_days(files, root):
        row = here.get(day)
        if row is None or row.state != "gone" or row.ended >= before:
            continue
        # First the row: an answer must not name what is not there any more.
        with connection.transaction():
            if row.archive is not None and row.archive.startswith(f"{root}/"):
                archive_store.forget(connection, day)
            audit.record(connection, "archive.expire", day, archive=f"{root}/{DAY}{day}")
        files.remove(f"{root}/{DAY}{day}")
        progress.say("archive_expired", f"The archive of {day} is past its retention and removed", day=day)


def archived_days(files: ArchiveFiles, root: str) -> list[date]:
    """Return the days that an archive has directories of, oldest first."""
    found = []
    for name in files.names(root):
        try:
            found.append(date.fromisoformat(name.removeprefix(DAY)))
        except ValueError:
            continue
    return found


def attempts(files: ArchiveFiles, root: str, day: date) -> list[str]:
    """Return the attempts at a day, as `<root>/day=…/<uuid>`; what has another name is not ours."""
    directory = f"{root}/{DAY}{day}"
    return [f"{directory}/{name}" for name in map(name_of, files.children(directory)) if _is_uuid(name)]


def _is_uuid(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False
