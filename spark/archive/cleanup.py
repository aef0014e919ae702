"""Removes unreferenced attempts, files that a redaction replaced, and days past their retention from an archive."""

import json
from datetime import date, datetime
from uuid import UUID

from spark.archive import records
from spark.archive.files import sync
from spark.archive.layout import MANIFEST
from spark.archive.records import ArchivedDay
from spark.engine.filesystem import Files, name_of
from spark.engine.progress import Progress
from spark.postgres import audit
from spark.postgres.connections import Connection

DAY = "day="


def finish_redactions(connection: Connection, files: Files) -> None:
    """Finish interrupted redactions: the pointer moved, but replaced files may still exist."""
    for day in records.days(connection):
        if day.archive_manifest is not None and "rubbish" in day.archive_manifest:
            finish_redaction(connection, files, day)


def finish_redaction(connection: Connection, files: Files, day: ArchivedDay) -> None:
    """Remove the files that a day's redaction replaced, and write its manifest beside the others."""
    assert day.archive_manifest is not None
    described = {name: value for name, value in day.archive_manifest.items() if name != "rubbish"}
    for path in day.archive_manifest["rubbish"]:
        files.remove(f"{day.archive}/{path}")
    files.write_text(f"{day.archive}/{MANIFEST}", json.dumps(described, indent=1))
    sync([f"{day.archive}/{MANIFEST}"])
    records.redescribe(connection, day, described)


def remove_rubbish(connection: Connection, files: Files, root: str, progress: Progress) -> None:
    """Remove incomplete and replaced attempts.

    A complete attempt of a gone day stays even if no row points to it, because the database may be an older copy.
    """
    here = {day.day: day for day in records.days(connection)}
    for day in archived_days(files, root):
        row = here.get(day)
        for place in attempts(files, root, day):
            if row is not None and row.archive == place:
                continue
            whole = files.exists(f"{place}/{MANIFEST}")
            replaced = row is not None and (row.state != "gone" or row.archive is not None)
            if not whole or replaced:
                files.remove(place)
                progress.say("rubbish_removed", f"{place} is not the archive of a day and is removed", place=place)


def remove_expired(connection: Connection, files: Files, root: str, before: datetime, progress: Progress) -> None:
    """Remove the archives of the days that are gone from Postgres and ended before `before`."""
    here = {day.day: day for day in records.days(connection)}
    for day in archived_days(files, root):
        row = here.get(day)
        if row is None or row.state != "gone" or row.ended >= before:
            continue
        # The row changes first, because an answer must not name a removed archive.
        with connection.transaction():
            if row.archive is not None and row.archive.startswith(f"{root}/"):
                records.forget(connection, day)
            audit.record(connection, "archive.expire", day, archive=f"{root}/{DAY}{day}")
        files.remove(f"{root}/{DAY}{day}")
        progress.say("archive_expired", f"The archive of {day} is past its retention and removed", day=day)


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


def _is_uuid(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False
