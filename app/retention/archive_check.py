"""With HALFNOTE_ARCHIVE set, a day's tables are dropped only if the archive has exactly the same rows.

So is a day that has an archive or was held for one, whatever the setting of this process: a rollback to a release
without an archive, or a process with other settings, must not drop what waits for it.
"""

import structlog

from app.database.connection import Connection
from app.retention import day_reading
from app.runtime.state import Runtime
from app.store.retention import archive_manifest
from app.store.retention.days import Day

log = structlog.get_logger(__name__)

MISSING = "archive"
DIFFERS = "archive_differs"


async def unarchived(
    runtime: Runtime, connection: Connection, day: Day, *, counted: bool = True, forced: bool = False
) -> list[str]:
    """Return the cause `archive` if the day is not archived, or (`counted`) has other row counts than its archive.

    `forced`: no other cause keeps the day, so the cause is logged once as an error.
    """
    if not _waits_for_archive(runtime, day):
        return []
    holds = await archive_manifest.manifest(connection, day.day)
    if holds is not None:
        rows = {table: held.rows for table, held in holds.items()}
        if not counted or rows == await day_reading.counts(connection, day.day):
            return []
    if forced and day.held != [MISSING]:
        log.error("day_unarchived", day=day.day.isoformat(), archive=day.archive)
    return [MISSING]


async def differs(runtime: Runtime, connection: Connection, day: Day) -> list[str]:
    """Return the cause `archive_differs` if the day's detached tables differ from the archive.

    Reads the tables whole. Logs one error per table.
    """
    if not _waits_for_archive(runtime, day):
        return []
    holds = await archive_manifest.manifest(connection, day.day)
    if holds is None:
        return [MISSING]
    found = await day_reading.holdings(connection, day.day)
    tables = sorted(table for table in found.keys() | holds.keys() if found.get(table) != holds.get(table))
    if not tables:
        return []
    if day.held != [DIFFERS]:
        log.error("day_archive_differs", day=day.day.isoformat(), archive=day.archive, tables=tables)
    return [DIFFERS]


def _waits_for_archive(runtime: Runtime, day: Day) -> bool:
    held_for = {MISSING, DIFFERS}.intersection(day.held)
    return runtime.settings.archive is not None or day.archive is not None or bool(held_for)
