"""Redelivers and drops dead letters, newest first, in database transactions of a bounded size.

A filter that few dead letters match may lead through millions of them. So each step takes a connection of its own, for
a short time, and an act ends in time for its answer: it says what was done, and where the next request goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic

import structlog

from app.database.connection import Connection, PoolShare
from app.database.errors import problem_of
from app.database.standby_wait import uncanceled_waits
from app.database.windowed_read import count_windows
from app.store.subscriptions.dead_letters import (
    COUNTED_MOST,
    HIGHEST,
    LOWEST,
    OWN_PLANS,
    DeadLetterCursor,
    DeadLetterSearch,
    DeadLetterSummary,
    count_window,
    list_dead_letters,
    window_floor,
)
from app.store.subscriptions.redeliveries import AT_ONCE, Deed, Key, Moved, act_on_named, act_on_window

log = structlog.get_logger(__name__)

# An act by a filter begins no step after this time. The command line waits a minute for an answer.
ACT_S = 30
# The longest time that a dry run searches, and that it or an act counts.
LOOK_S = 10


@dataclass(frozen=True, slots=True)
class Acted:
    """The result of a request: the dead letters that left the table; for ids, how many were not found; for a filter,
    how many still match it (counted up to dead_letters.COUNTED_MOST, for LOOK_S), and whether these are all.

    `below`: the act ended at this place; None: it went through the whole range.
    """

    moved: list[Moved]
    not_found: int = 0
    left: int = 0
    left_exact: bool = True
    below: DeadLetterCursor | None = None


async def act_on(
    connection: Connection, keys: Sequence[Key], deed: Deed, now: datetime, *, died_before: datetime = HIGHEST.died_at
) -> Acted:
    """Redeliver or drop these dead letters. Repeating the request changes nothing: they are then not found."""
    distinct = list(dict.fromkeys(keys))
    moved = await act_on_named(connection, distinct, died_before, deed, now)
    return Acted(moved, not_found=len(distinct) - len(moved))


async def act_on_all(pool: PoolShare, wanted: DeadLetterSearch, at_most: int, deed: Deed, now: datetime) -> Acted:
    """Redeliver or drop the newest `at_most` dead letters that match a filter, until ACT_S is over.

    A message that dies again meanwhile is newer than the rows read, so one request redelivers nothing twice. If the
    database fails after a part was done, that part is returned; the step that failed may be done as well.
    """
    moved: list[Moved] = []
    until = monotonic() + ACT_S
    below: DeadLetterCursor | None = wanted.below
    while below is not None and len(moved) < at_most and (below == wanted.below or monotonic() < until):
        limit = min(AT_ONCE, at_most - len(moved))
        try:
            batch, below = await _step(pool, replace(wanted, below=below), limit, deed, now)
        except Exception as error:
            if not moved or not _is_of_database(error):
                raise
            log.warning("dead_letters_act_ended", done=len(moved), error=repr(error))
            return Acted(moved, left_exact=False, below=below)
        moved += batch
    try:
        left, exact = await _left(pool, wanted)
    except Exception as error:
        if not moved or not _is_of_database(error):
            raise
        log.warning("dead_letters_not_counted", done=len(moved), error=repr(error))
        left, exact = 0, False
    return Acted(moved, left=left, left_exact=exact, below=below)


async def would_act_on(
    pool: PoolShare, wanted: DeadLetterSearch, at_most: int
) -> tuple[list[DeadLetterSummary], int, bool]:
    """Return the newest `at_most` dead letters that match a filter, how many match it, and whether these are all.

    What dies after the newest was read is not counted.
    """
    async with pool.connection() as connection:
        found, rest = await list_dead_letters(connection, wanted, at_most, scan_s=LOOK_S)
    if not found and rest is None:
        return found, 0, True
    if found:
        above = DeadLetterCursor(found[0].place.died_at + timedelta(microseconds=1))
        wanted = replace(wanted, below=min(wanted.below, above, key=lambda place: place.columns))
    left, exact = await _left(pool, wanted)
    return found, left if exact else max(left, len(found)), exact


async def _step(
    pool: PoolShare, window: DeadLetterSearch, limit: int, deed: Deed, now: datetime
) -> tuple[list[Moved], DeadLetterCursor | None]:
    """Act on up to `limit` of the next window; return these, and the place below which the next one begins."""
    async with pool.connection() as connection:
        async with connection.transaction(readonly=True):
            await connection.execute(OWN_PLANS)
            floor = await window_floor(connection, window)
        with uncanceled_waits(connection):
            batch = await act_on_window(connection, window, floor or LOWEST, deed, limit, now)
    return batch, batch[-1].place if len(batch) == limit else floor


async def _left(pool: PoolShare, wanted: DeadLetterSearch) -> tuple[int, bool]:
    async def count(below: DeadLetterCursor, at_most: int) -> tuple[int, DeadLetterCursor | None]:
        async with pool.connection() as connection, connection.transaction(readonly=True):
            await connection.execute(OWN_PLANS)
            return await count_window(connection, replace(wanted, below=below), at_most)

    return await count_windows(count, wanted.below, COUNTED_MOST, LOOK_S)


def _is_of_database(error: Exception) -> bool:
    """Return whether the database was away, full or busy, rather than a statement of ours wrong."""
    return problem_of(error).status > 500
