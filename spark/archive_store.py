"""What the database says of archived days, and what is done to archives one at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from spark.database import Connection, give_back, partition_name
from spark.errors import RunFailedError
from spark.manifest import TABLES

# 7010 is the proof's, whose reads an archive does not disturb.
ARCHIVE_LOCK = 7011

COLUMNS = "d.day, d.low, d.high, d.state, d.archive, d.archive_manifest, d.held"
# An open finding may be about the archive before this one: then no run has seen it since. Served by finding_open.
DAYS = f"""
select {COLUMNS}, coalesce(r.state = 'final', false) as final, exists (
  select from finding f where f.day = d.day and f.kind = 'archive_differs' and f.resolved_at is null
    and f.last_seen_at > d.archived_at
) as differs
from day d left join reconciliation_day r on r.day = d.day order by d.day
"""  # noqa: S608 -- names of columns
# Who made the archive: a server and a database in it. A dump that was read into another server is another one.
IDENTITY = """
select (select system_identifier::text from pg_control_system()) || '/' || current_database() as identity
"""
# Only if the tables still hold what was archived: they are append-only, so equal numbers are equal rows. One statement
# sees all of them as of one moment.
POINT = """
update day set archive = %(archive)s, archive_manifest = %(manifest)s, archived_at = clock_timestamp()
where day = %(day)s and state <> 'gone' and {counts}
"""
# By primary key; the manifest that was read is still the one.
REDESCRIBE = """
update day set archive_manifest = %(manifest)s
where day = %(day)s and archive = %(archive)s and archive_manifest = %(before)s
"""
FORGET = "update day set archive = null, archive_manifest = null, archived_at = null where day = %s and state = 'gone'"


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """A day's row: half-open id range; state open, archiving or gone; where it is archived with what manifest; what
    holds it; whether the proof calls it final; and whether it found that the archive differs."""

    day: date
    low: UUID
    high: UUID
    state: str
    archive: str | None
    archive_manifest: Mapping[str, Any] | None
    held: Sequence[str]
    final: bool
    differs: bool

    @property
    def ended(self) -> datetime:
        """When the UTC day ended."""
        return datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC) + timedelta(days=1)


@contextmanager
def archive_lock(connection: Connection) -> Iterator[None]:
    """Be the only one who changes archives of this database; RunFailedError if another is at it.

    The lock belongs to the session: it ends with the connection, which is closed, however the program ends.
    """
    row = connection.execute("select pg_try_advisory_lock(%s) as taken", [ARCHIVE_LOCK]).fetchone()
    if row is None or not row["taken"]:
        connection.close()
        raise RunFailedError("Another archive, restore or redact is at it. Wait for its end, or end it.")
    try:
        yield
    finally:
        give_back(connection)


def days(connection: Connection) -> list[ArchivedDay]:
    """Return every day on record, oldest first."""
    return [ArchivedDay(**row) for row in connection.execute(DAYS).fetchall()]


def day_of(connection: Connection, day: date) -> ArchivedDay:
    """Return one of them. Raises RunFailedError if it is not on record."""
    for found in days(connection):
        if found.day == day:
            return found
    raise RunFailedError(f"There never was a day {day} here.")


def identity(connection: Connection) -> str:
    """Return what no other database has: the server's identifier and the database's name."""
    row = connection.execute(IDENTITY).fetchone()
    assert row is not None
    return str(row["identity"])


def counts(connection: Connection, day: date) -> dict[str, int]:
    """Count the rows of the day's tables, attached or not, in one snapshot."""
    parts = ", ".join(f"(select count(*) from {partition_name(table, day)}) as {table}" for table in TABLES)  # noqa: S608
    row = connection.execute(f"select {parts}").fetchone()
    assert row is not None
    return dict(row)


def point(connection: Connection, day: date, place: str, described: Mapping[str, Any]) -> bool:
    """Make an attempt the day's archive; False if the day has other numbers of rows by now."""
    same = " and ".join(f"(select count(*) from {partition_name(table, day)}) = %({table})s" for table in TABLES)  # noqa: S608
    rows = {table: described["tables"][table]["rows"] for table in TABLES}
    given = {"archive": place, "manifest": Jsonb(described), "day": day, **rows}
    return connection.execute(POINT.format(counts=same), given).rowcount == 1


def manifest_in(day: ArchivedDay) -> Mapping[str, Any]:
    """Return the manifest of a day that is archived."""
    assert day.archive_manifest is not None
    return day.archive_manifest


def redescribe(connection: Connection, day: ArchivedDay, described: Mapping[str, Any]) -> ArchivedDay:
    """Put another manifest in the place of the one that was read; return the day with it.

    Raises RunFailedError if it is another by now.
    """
    given = {
        "manifest": Jsonb(described),
        "before": Jsonb(day.archive_manifest),
        "day": day.day,
        "archive": day.archive,
    }
    if connection.execute(REDESCRIBE, given).rowcount != 1:
        raise RunFailedError(f"The archive of {day.day} changed meanwhile.")
    return replace(day, archive_manifest=described)


def forget(connection: Connection, day: date) -> None:
    """Have a gone day's archive known no more, before it is removed."""
    connection.execute(FORGET, [day])
