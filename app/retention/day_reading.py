"""Reads a whole day in ranges. Upkeep's statements may take 10 minutes, and a day may take hours.

Each range is read in its own snapshot, because an old one would keep the server from cleaning up all tables. The
results are those of one snapshot: detached tables do not change. The rows of an attached day are never deleted, it
takes no new halves, and an Op stays. So no undecided transaction means that none was left, and a day with as many rows
as its archive, which was read before, had no others when the count began. What comes later is found after the close.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import date

from app.database.connection import Connection
from app.models import DAY_TABLES
from app.store.retention import archive_manifest, day_blockers, partitions
from app.store.retention.archive_manifest import TableDigest
from app.store.retention.day_blockers import DayUndecided
from app.store.retention.day_ranges import (
    ALL_IDS,
    PAGES_AT_ONCE,
    ROWS_AT_ONCE,
    IdRange,
    by_ranges,
    first_range,
    pages,
)
from app.store.retention.days import Day, partition_name
from app.store.retention.index_plans import probe
from app.store.retention.partitions import Manifest


async def counts(connection: Connection, day: date) -> dict[str, int]:
    """Count the rows of the day's tables, attached or not."""
    total = dict.fromkeys(DAY_TABLES, 0)
    async for ids in _ranges(connection, _of_day(day, DAY_TABLES), ALL_IDS):
        async with by_ranges(connection):
            for table, rows in (await archive_manifest.counts(connection, day, ids)).items():
                total[table] += rows
    return total


async def holdings(connection: Connection, day: date) -> dict[str, TableDigest]:
    """Read all rows of the day's tables, attached or not, some pages at a time, and return the digests."""
    return {table: await _holding(connection, day, table) for table in DAY_TABLES}


async def _holding(connection: Connection, day: date, table: str) -> TableDigest:
    parts = []
    count = await pages(connection, partition_name(table, day))
    for first in range(0, max(count, 1), PAGES_AT_ONCE):
        # The last part has no end: the table may have grown.
        end = first + PAGES_AT_ONCE if first + PAGES_AT_ONCE < count else None
        async with by_ranges(connection):
            parts.append(await archive_manifest.holding(connection, day, table, first, end))
    return TableDigest.total(parts)


async def manifest(connection: Connection, day: date) -> Manifest:
    """Count the rows of the day's detached tables, and their contradictions."""
    parts = []
    async for ids in _ranges(connection, _of_day(day, partitions.COMPARED), ALL_IDS):
        async with by_ranges(connection):
            parts.append(await partitions.manifest(connection, day, ids))
    return Manifest.total(parts)


async def undecided_ids(connection: Connection, day: date, at_most: int) -> list[str]:
    """Return the first of a detached day's transactions without a verdict, as `<producer_group>/<transaction_id>`."""
    found: list[str] = []
    async for ids in _ranges(connection, _of_day(day, ("half", "op")), ALL_IDS):
        async with by_ranges(connection):
            found += await partitions.undecided_ids(connection, day, ids, at_most - len(found))
        if len(found) >= at_most:
            break
    return found


async def undecided(connection: Connection, day: Day, *, whole: bool = False) -> DayUndecided:
    """Count the transactions of an attached day without a verdict: those that a sweep found, or (`whole`) all."""
    of_day = IdRange.before(day.low, day.high)
    parts = []
    async for ids in _ranges(connection, ("check_back",), of_day):
        async with connection.transaction():
            await probe(connection)
            parts.append(await day_blockers.swept(connection, ids))
    in_doubt, parked = sum(one.in_doubt for one in parts), sum(one.parked for one in parts)
    if not whole:
        return DayUndecided(in_doubt, parked, None)
    count = 0
    async for ids in _ranges(connection, ("half", "op"), of_day):
        async with by_ranges(connection):
            count += await day_blockers.undecided(connection, ids)
    return DayUndecided(in_doubt, parked, count)


def _of_day(day: date, tables: Sequence[str]) -> list[str]:
    return [partition_name(table, day) for table in tables]


async def _ranges(connection: Connection, relations: Sequence[str], within: IdRange) -> AsyncIterator[IdRange]:
    """Yield the parts of a range of ids, in order, each with about ROWS_AT_ONCE rows of a relation at most."""
    left: IdRange | None = within
    while left is not None:
        async with by_ranges(connection):
            ids = await first_range(connection, relations, left, ROWS_AT_ONCE)
        yield ids
        left = left.after(ids)
