"""Redelivering and dropping dead letters, few or many: in database transactions of a bounded size, newest first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from app.database import Connection
from app.store.dead_letters import (
    LOWEST,
    OWN_PLANS,
    DeadLetterSummary,
    Filter,
    Place,
    count_dead_letters,
    list_dead_letters,
    window_floor,
)
from app.store.redeliveries import AT_ONCE, Deed, Key, Moved, act_on_named, act_on_window

# How long a dry run looks for what it would take.
LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Acted:
    """What came of a request: the dead letters that are gone from the table now; of those named, how many were not
    there; of a filter, how many still meet it (counted up to dead_letters.COUNTED_MOST)."""

    moved: list[Moved]
    not_found: int = 0
    left: int = 0


async def act_on(connection: Connection, keys: Sequence[Key], deed: Deed, now: datetime) -> Acted:
    """Redeliver or drop these dead letters. To ask for the same again does nothing more: they are not found then."""
    distinct = list(dict.fromkeys(keys))
    moved = await act_on_named(connection, distinct, deed, now)
    return Acted(moved, not_found=len(distinct) - len(moved))


async def act_on_all(connection: Connection, wanted: Filter, at_most: int, deed: Deed, now: datetime) -> Acted:
    """Redeliver or drop the newest `at_most` dead letters that meet a filter.

    What dies again meanwhile is newer than what is looked at, so that nothing is redelivered twice by one request.
    """
    moved: list[Moved] = []
    below: Place | None = wanted.below
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


async def would_act_on(connection: Connection, wanted: Filter, at_most: int) -> tuple[list[DeadLetterSummary], int]:
    """Return the newest `at_most` dead letters that meet a filter, and how many meet it."""
    found, _ = await list_dead_letters(connection, wanted, at_most, scan_s=LOOK_S)
    return found, await _left(connection, wanted)


async def _left(connection: Connection, wanted: Filter) -> int:
    async with connection.transaction(readonly=True):
        return await count_dead_letters(connection, wanted)
