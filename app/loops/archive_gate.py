"""With HALFNOTE_ARCHIVE set, a day's tables are dropped only if the archive holds, row by row, what they hold."""

import structlog

from app.database import Connection
from app.runtime import Runtime
from app.store import archived
from app.store.days import Day

log = structlog.get_logger(__name__)

MISSING = "archive"
DIFFERS = "archive_differs"


async def unarchived(
    runtime: Runtime, connection: Connection, day: Day, *, counted: bool = True, forced: bool = False
) -> list[str]:
    """Return the cause `archive` if the day is not archived, or (`counted`) has other numbers of rows than its archive.

    `forced`: nothing else keeps the day, so that it is said once as an error.
    """
    if runtime.settings.archive is None:
        return []
    holds = await archived.manifest(connection, day.day)
    if holds is not None:
        rows = {table: held.rows for table, held in holds.items()}
        if not counted or rows == await archived.counts(connection, day.day):
            return []
    if forced and day.held != [MISSING]:
        log.error("day_unarchived", day=day.day.isoformat(), archive=day.archive)
    return [MISSING]


async def differs(runtime: Runtime, connection: Connection, day: Day) -> list[str]:
    """Return the cause `archive_differs` if the day's tables, which are detached, are not what is in the archive.

    Reads them whole. It is said as an error, once, by table.
    """
    if runtime.settings.archive is None:
        return []
    holds = await archived.manifest(connection, day.day)
    if holds is None:
        return [MISSING]
    found = await archived.holdings(connection, day.day)
    tables = sorted(table for table in found.keys() | holds.keys() if found.get(table) != holds.get(table))
    if not tables:
        return []
    if day.held != [DIFFERS]:
        log.error("day_archive_differs", day=day.day.isoformat(), archive=day.archive, tables=tables)
    return [DIFFERS]
