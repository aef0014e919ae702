"""The file `halfnote.json` of an archive: it names the database whose rows decide what is needed there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from spark.archive import records
from spark.archive.addresses import root_of, roots
from spark.archive.files import sync
from spark.archive.records import ArchivedDay
from spark.engine.filesystem import FAILURES, Files, is_below, normal
from spark.engine.progress import Progress
from spark.errors import RunFailedError
from spark.postgres import audit
from spark.postgres.connections import Connection
from spark.sources.failures import root_cause

OWNER = "halfnote.json"


def own(connection: Connection, files: Files, root: str, *, adopt: bool) -> None:
    """Record the database that owns the archive, because files of another database would be removed as garbage.

    Raises RunFailedError if another database owns it, or if the database has archives there and the file is missing.
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
    days = [day for day in records.days(connection) if day.archive is not None and is_below(day.archive, root)]
    if owner is None and days and not adopt:
        raise RunFailedError(
            f"{place} is missing, and the database has {len(days)} days archived there. Is the archive mounted? If "
            "the file alone was lost, or the archive is gone for good, run this once with --adopt."
        )
    if owner is not None or days:
        audit.record(connection, "archive.adopt", root, former=owner)
    files.make(root)
    files.write_text(place, json.dumps({"database": identity}))
    sync([place])


@dataclass(frozen=True, slots=True)
class OwnRoots:
    """The locations at which a database has or had archives and which it owns, and those that cannot be looked at.

    `unreachable`: why, by location. A location that no day has its archive at, and which is empty or belongs to another
    database now, is in neither.
    """

    owned: list[str]
    unreachable: dict[str, str]


def own_roots(connection: Connection, files: Files) -> OwnRoots:
    """Look at every location that the database names, also those from before a change of HALFNOTE_ARCHIVE."""
    found, identity = OwnRoots([], {}), records.identity(connection)
    needed = {normal(root_of(day.archive)) for day in records.days(connection) if day.archive is not None}
    for root in roots(connection):
        try:
            owner = _owner(files, f"{root}/{OWNER}")
        except RunFailedError as error:
            found.unreachable[root] = str(error)
        except FAILURES as error:
            found.unreachable[root] = root_cause(str(error))
        else:
            if owner == identity:
                found.owned.append(root)
            elif root in needed:
                missing = f"{OWNER} is missing. Is it mounted?"
                found.unreachable[root] = missing if owner is None else f"it belongs to another database ({owner})."
    return found


def is_same_storage(files: Files, one: str, other: str) -> bool:
    """Return whether two locations lead to the same directory, as over a link or a second mount."""
    probe = f"probe-{uuid4()}"
    files.write_text(f"{one}/{probe}", "")
    try:
        return files.exists(f"{other}/{probe}")
    finally:
        files.remove(f"{one}/{probe}")


def wrong_owners(connection: Connection, files: Files, archived: Sequence[ArchivedDay], progress: Progress) -> int:
    """Report the archives whose file of the owner does not name this database; return their number."""
    wrong = 0
    for root in sorted({root_of(day.archive) for day in archived if day.archive is not None}):
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


def _owner(files: Files, place: str) -> str | None:
    """Return the database that owns an archive; None for a new one. Raises RunFailedError if the file is damaged."""
    try:
        return str(json.loads(files.read_text(place))["database"]) if files.exists(place) else None
    except (ValueError, KeyError, TypeError):
        raise RunFailedError(
            f'{place} is damaged: it must be {{"database": "…"}}. Restore it, or remove it if this is its database.'
        ) from None
