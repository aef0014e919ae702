"""Redelivers and drops dead letters, newest first, in database transactions of a bounded size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from app.database.connection import Connection
from app.store.subscriptions.dead_letters import (
    LOWEST,
    OWN_PLANS,
    DeadLetterCursor,
    DeadLetterSearch,
    DeadLetterSummary,
    count_dead_letters,
    list_dead_letters,
    window_floor,
)
from app.store.subscriptions.redeliveries import AT_ONCE, Deed, Key, Moved, act_on_named, act_on_window

# The longest time that a dry run searches.
LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Acted:
    """The result of a request: the dead letters that left the table; for ids, how many were not found; for a filter,
    how many still match it (counted up to dead_letters.COUNTED_MOST)."""

    moved: list[Moved]
    not_found: int = 0
    left: int = 0


async def act_on(connection: Connection, keys: Sequence[Key], deed: Deed, now: datetime) -> Acted:
    """Redeliver or drop these dead letters. Repeating the request changes nothing: they are then not found."""
    distinct = list(dict.fromkeys(keys))
    moved = await act_on_named(connection, distinct, deed, now)
    return Acted(moved, not_found=len(distinct) - len(moved))


async def act_on_all(
    connection: Connection, wanted: DeadLetterSearch, at_most: int, deed: Deed, now: datetime
) -> Acted:
    """Redeliver or drop the newest `at_most` dead letters that match a filter.

    A message that dies again meanwhile is newer than the rows read, so one request redelivers nothing twice.
    """
    moved: list[Moved] = []
    below: DeadLetterCursor | None = wanted.below
    while below is not None and len(moved) < at_most:
        window = replace(wanted, below=below)
        async with connection.transaction(readonly=True):
            await connection.execute(OWN_PLANS)
            floor = await window_floor(connection, window)
        limit = min(AT_ONCE, at_most - len(moved))
        batch = await act_on_window(connection, window, floor or LOWEST, deed, limit, now)
        moved += batch
        below = batch[-1].place if len(batch) == limit else floor
    return Acted(moved, left=await _left(connection, wanted))


async def would_act_on(
    connection: Connection, wanted: DeadLetterSearch, at_most: int
) -> tuple[list[DeadLetterSummary], int]:
    """Return the newest `at_most` dead letters that match a filter, and how many match it.

    What dies after the newest was read is not counted.
    """
    found, rest = await list_dead_letters(connection, wanted, at_most, scan_s=LOOK_S)
    if not found:
        # Without a rest, all of the range was read.
        return found, 0 if rest is None else await _left(connection, wanted)
    above = DeadLetterCursor(found[0].place.died_at + timedelta(microseconds=1))
    below = min(wanted.below, above, key=lambda place: place.columns)
    return found, await _left(connection, replace(wanted, below=below))


async def _left(connection: Connection, wanted: DeadLetterSearch) -> int:
    async with connection.transaction(readonly=True):
        return await count_dead_letters(connection, wanted)
