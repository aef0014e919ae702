"""The database's records of archived days, and the lock that lets one program at a time change archives."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from psycopg.types.json import Jsonb

from spark.errors import RunFailedError
from spark.manifest import TABLES
from spark.postgres.connections import Connection, give_back, partition_name

# 7010 is the proof's lock; an archive does not disturb the proof's reads.
ARCHIVE_LOCK = 7011

COLUMNS = "d.day, d.low, d.high, d.state, d.archive, d.archive_manifest, d.held"
# An open finding counts only if a run has seen it since this archive was written; an older finding may be about the
# previous archive. Served by finding_open.
DAYS = f"""
select {COLUMNS}, coalesce(r.state = 'final', false) as final, exists (
  select from finding f where f.day = d.day and f.kind = 'archive_differs' and f.resolved_at is null
    and f.last_seen_at > d.archived_at
) as differs
from day d left join reconciliation_day r on r.day = d.day order by d.day
"""  # noqa: S608 -- names of columns
# The archive's owner: a server and a database in it. A dump restored on another server is another owner.
IDENTITY = """
select (select system_identifier::text from pg_control_system()) || '/' || current_database() as identity
"""
# Only if the tables still hold the archived rows. They are append-only, so equal counts mean equal rows. One statement
# reads all counts in one snapshot.
POINT = """
update day set archive = %(archive)s, archive_manifest = %(manifest)s, archived_at = clock_timestamp()
where day = %(day)s and state <> 'gone' and {counts}
"""
# Primary key. The condition holds only if the manifest did not change since it was read.
REDESCRIBE = """
update day set archive_manifest = %(manifest)s
where day = %(day)s and archive = %(archive)s and archive_manifest = %(before)s
"""
# After the day's tables were dropped; the caller has compared the two attempts.
REPOINT = """
update day set archive = %(archive)s, archive_manifest = %(manifest)s, archived_at = clock_timestamp()
where day = %(day)s and state = 'gone' and archive = %(former)s and archive_manifest = %(before)s
"""
READDRESS = "update day set archive = %(archive)s where day = %(day)s and archive = %(former)s"
FORGET = "update day set archive = null, archive_manifest = null, archived_at = null where day = %s and state = 'gone'"


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """A day's row: half-open id range, state (open, archiving, gone), archive with manifest, and causes that hold it.

    It also has the results of the proof: whether the day is final, and whether its archive differs.
    """

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
    """Hold the lock on this database's archives; RunFailedError if another program has it.

    The lock belongs to the session. It ends with the connection, even if the program is killed.
    """
    row = connection.execute("select pg_try_advisory_lock(%s) as taken", [ARCHIVE_LOCK]).fetchone()
    if row is None or not row["taken"]:
        connection.close()
        raise RunFailedError("Another archive, restore or redact is running. Wait until it ends, or stop it.")
    try:
        yield
    finally:
        give_back(connection)


def days(connection: Connection) -> list[ArchivedDay]:
    """Return every day on record, oldest first."""
    return [ArchivedDay(**row) for row in connection.execute(DAYS).fetchall()]


def day_of(connection: Connection, day: date) -> ArchivedDay:
    """Return one day. Raises RunFailedError if it is not on record."""
    for found in days(connection):
        if found.day == day:
            return found
    raise RunFailedError(f"The database has no record of the day {day}.")


def now(connection: Connection) -> datetime:
    """Return the time of the database's clock."""
    row = connection.execute("select clock_timestamp() as now").fetchone()
    assert row is not None
    return cast(datetime, row["now"])


def identity(connection: Connection) -> str:
    """Return the database's unique identity: the server's identifier and the database's name."""
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
    """Make an attempt the day's archive; False if the day's row counts changed."""
    same = " and ".join(f"(select count(*) from {partition_name(table, day)}) = %({table})s" for table in TABLES)  # noqa: S608
    rows = {table: described["tables"][table]["rows"] for table in TABLES}
    given = {"archive": place, "manifest": Jsonb(described), "day": day, **rows}
    return connection.execute(POINT.format(counts=same), given).rowcount == 1


def repoint(connection: Connection, day: ArchivedDay, place: str, described: Mapping[str, Any]) -> bool:
    """Make another attempt the archive of a day whose tables were dropped; False if its row is not as it was read."""
    given = {"archive": place, "manifest": Jsonb(described), "day": day.day}
    given |= {"former": day.archive, "before": Jsonb(day.archive_manifest)}
    return connection.execute(REPOINT, given).rowcount == 1


def readdress(connection: Connection, day: ArchivedDay, place: str) -> None:
    """Record another address of the same attempt. Raises RunFailedError if the row is not as it was read."""
    given = {"archive": place, "day": day.day, "former": day.archive}
    if connection.execute(READDRESS, given).rowcount != 1:
        raise RunFailedError(f"The archive of {day.day} changed meanwhile.")


def manifest_in(day: ArchivedDay) -> Mapping[str, Any]:
    """Return the manifest of a day that is archived."""
    assert day.archive_manifest is not None
    return day.archive_manifest


def redescribe(connection: Connection, day: ArchivedDay, described: Mapping[str, Any]) -> ArchivedDay:
    """Replace the manifest that was read; return the day with the new one.

    Raises RunFailedError if the manifest changed meanwhile.
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
    """Clear a gone day's pointer to its archive, before the archive is removed."""
    connection.execute(FORGET, [day])
