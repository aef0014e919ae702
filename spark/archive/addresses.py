"""Finds archives at other addresses than the present one: earlier ones, and those that were moved or copied."""

from dataclasses import dataclass

from spark.archive import records
from spark.archive.records import ArchivedDay
from spark.archive.removal import is_whole
from spark.engine.filesystem import Files, is_below, normal
from spark.errors import RunFailedError
from spark.postgres import audit
from spark.postgres.connections import Connection

# The addresses of attempts that days have, or had by the audit; few rows of it are about archives.
PLACES = """
select archive as place from day where archive is not null
union
select p.place from audit a cross join lateral (values (a.detail ->> 'archive'), (a.detail ->> 'former')) p (place)
where a.what in ('archive.write', 'archive.move') and p.place is not null
"""


def roots(connection: Connection) -> list[str]:
    """Return the locations at which the database has archives, or had them as far as the audit is kept."""
    return sorted({normal(root_of(row["place"])) for row in connection.execute(PLACES).fetchall()})


def root_of(place: str) -> str:
    """Return the location of the archive that has an attempt `<root>/day=…/<uuid>`."""
    return place.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True)
class Moved:
    """A day whose archive is below another root than its row says."""

    day: ArchivedDay
    place: str


def moved_days(connection: Connection, files: Files, root: str) -> list[Moved]:
    """Return the days whose attempts, by day and name, are below `root`, while their rows name other places."""
    found = []
    for day in records.days(connection):
        if day.archive is None or is_below(day.archive, root):
            continue
        place = "/".join([root, *day.archive.rsplit("/", 2)[1:]])
        if files.exists(place):
            found.append(Moved(day, place))
    return found


def refuse_moved(found: list[Moved], root: str) -> None:
    """Raise RunFailedError if there are archives that were moved or copied."""
    if found:
        first = found[0].day
        raise RunFailedError(
            f"{root} has the archives of {len(found)} days that the database has at other addresses: that of "
            f"{first.day} at {first.archive}. If the archive was moved, run this once with --moved. If {root} is a "
            "copy, set HALFNOTE_ARCHIVE to the archive itself, or to an empty directory."
        )


def record_moved(connection: Connection, files: Files, found: list[Moved]) -> None:
    """Record the new addresses of moved archives in one database transaction, with the audit.

    Raises RunFailedError if an archive is not complete at its new address; then no address changes.
    """
    broken = [one.place for one in found if not is_whole(files, one.place, one.day.archive_manifest or {"tables": {}})]
    if broken:
        raise RunFailedError(
            f"{len(broken)} of {len(found)} archives are not at the new address as they were written, the first is "
            f"{broken[0]}. Finish the copy, then run this again. No address was changed."
        )
    with connection.transaction():
        for one in found:
            records.readdress(connection, one.day, one.place)
            audit.record(connection, "archive.move", one.day.day, archive=one.place, former=one.day.archive)
