"""Removes one day, step by step. An interrupted step continues where it stopped.

The steps: close the day (its row says `archiving`), wait until no database transaction is left that saw it open, prove
that it is over, detach its tables, count their rows, compare them with the archive if there must be one, drop them
together, delete the row. No step takes a lock that blocks a request.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import structlog

from app.database.connection import Connection
from app.migrate import LOCK_TIMEOUT_MS
from app.retention import archive_check, day_holders, day_reading
from app.retention.day_closing import EVERY_SUBSCRIPTION, close_by_force, close_settled
from app.retention.day_dead_letters import bury_log, bury_retries, drop_confirmed
from app.retention.heartbeat import beat
from app.runtime.state import Runtime
from app.store.retention import day_blockers, day_dead_letters, days, partitions
from app.store.retention.day_changes import DayLook, changes
from app.store.retention.days import Day
from app.store.subscriptions.subscriptions import page
from app.verdicts import DayState

log = structlog.get_logger(__name__)

# The cause that keeps a day whose tables contradict each other.
CONTRADICTS = "manifest"
# The allowed difference between the clocks of the database and the service when their times are compared.
CLOCKS_APART = timedelta(minutes=1)
OLDER_SNAPSHOTS_WAITS = 20
OLDER_SNAPSHOTS_REST_S = 0.1
NAMED_AT_MOST = 20
# What keeps a day until a person or an archive changes it. The day is read whole to find it.
KEPT_UNTIL_CHANGED = {archive_check.MISSING, archive_check.DIFFERS, CONTRADICTS}
# A day that did not change is read again after this, in case the server lost its counts of changes.
LOOK_AGAIN_AFTER = timedelta(hours=1)

# Errors that end a wait for other sessions.
IN_THE_WAY = (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError)


async def remove_day(
    runtime: Runtime, connection: Connection, day: Day, written_until: datetime, now: datetime, *, forced: bool
) -> list[str]:
    """Take the next steps of a day's removal. Return the causes that keep it, sorted; none if it is removed.

    Halves of the day were written before `written_until`.
    `forced`: remove the day even if transactions are undecided or messages undelivered, but never without a required
    archive. `connection` is not in a database transaction.
    """
    if day.state is DayState.OPEN:
        closed, causes = await _close(runtime, connection, day, forced, written_until, now)
        if closed is None:
            return causes
        day = closed
    return await _looked_at(
        runtime,
        connection,
        day,
        now,
        lambda: _remove_closed(runtime, connection, day, written_until, now, forced=forced),
        forced=forced,
    )


async def _looked_at(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    now: datetime,
    look: Callable[[], Awaitable[list[str]]],
    *,
    forced: bool,
) -> list[str]:
    """Return the causes that `look` finds, or those of the last look if the day has not changed since.

    A person who removes a cause from the day's row has it looked at.
    """
    seen, known = (await changes(connection, day.day), forced), runtime.day_looks.get(day.day)
    is_recent = known is not None and known.seen == seen and abs(now - known.at) < LOOK_AGAIN_AFTER
    if known is not None and is_recent and set(known.causes) <= set(day.held):
        return list(known.causes)
    runtime.day_looks.pop(day.day, None)
    causes = await look()
    if causes and KEPT_UNTIL_CHANGED.issuperset(causes):
        runtime.day_looks[day.day] = DayLook(seen, now, tuple(causes))
    return causes


async def _remove_closed(
    runtime: Runtime, connection: Connection, day: Day, written_until: datetime, now: datetime, *, forced: bool
) -> list[str]:
    """Take the next steps of a closed day's removal, as `remove_day` does."""
    standings = [await partitions.standing(connection, table, day.day) for table in partitions.DETACHED]
    # A day whose detaching has begun was proved to be over after this wait.
    if set(standings) == {"attached"}:
        if not await _older_snapshots_ended(runtime, connection, day):
            return ["reader"]
        causes = await _prove(runtime, connection, day, forced, written_until, now)
        causes = causes or await archive_check.unarchived(runtime, connection, day, forced=forced)
        if causes:
            return causes
    # A day that was closed by force may be undecided, even if the longest retention has been raised since.
    return await _detach(connection, day) or await _drop(runtime, connection, day, forced or not day.decided, now)


async def _close(
    runtime: Runtime, connection: Connection, day: Day, forced: bool, written_until: datetime, now: datetime
) -> tuple[Day | None, list[str]]:
    """Return the closed day, or None and what keeps it open."""
    if forced:
        runtime.day_settled_to.pop(day.day, None)
        return await close_by_force(runtime, connection, day, now)
    subscriptions = await page(connection, "", EVERY_SUBSCRIPTION)
    known = runtime.day_settled_to.setdefault(day.day, {})
    looked_before = bool(known)
    causes = await day_holders.undecided(connection, day, written_until, whole=False)
    causes += await day_holders.undelivered(runtime, connection, day, subscriptions, known)
    if causes:
        causes += await archive_check.unarchived(runtime, connection, day, counted=False)
    else:
        causes = await _looked_at(
            runtime, connection, day, now, lambda: archive_check.unarchived(runtime, connection, day), forced=False
        )
    if not causes and looked_before:
        # After a failover the database may lack receipts that this worker has seen.
        causes = await day_holders.undelivered(runtime, connection, day, subscriptions)
    if causes:
        return None, sorted(causes)
    runtime.day_settled_to.pop(day.day)
    return await close_settled(runtime, connection, day, subscriptions)


async def _older_snapshots_ended(runtime: Runtime, connection: Connection, day: Day) -> bool:
    """Wait for the database transactions that may have seen the closed day open; False if some go on."""
    for _ in range(OLDER_SNAPSHOTS_WAITS):
        # Kept for the next turns, which must not wait for database transactions that began after the close.
        readers = await day_blockers.readers(connection, day.day, runtime.day_readers.get(day.day))
        runtime.day_readers[day.day] = readers
        if not readers.open and await day_blockers.older_snapshots(connection, day.day) == 0:
            return True
        await asyncio.sleep(OLDER_SNAPSHOTS_REST_S)
    return False


async def _prove(
    runtime: Runtime, connection: Connection, day: Day, forced: bool, written_until: datetime, now: datetime
) -> list[str]:
    """Check again: the day can no longer change. A day that is not over is opened again, unless it must be removed."""
    subscriptions = await page(connection, "", EVERY_SUBSCRIPTION)
    causes: list[str] = []
    if not forced:
        causes = await day_holders.undecided(connection, day, written_until, whole=True)
        causes += await day_holders.undelivered(runtime, connection, day, subscriptions)
    if forced or (causes and not day.decided):
        # The day was closed by force. Verdicts may have arrived until then, and the relay skipped their messages.
        late_after = await day_dead_letters.last_before(connection, day, day.changed_at - CLOCKS_APART)
        for one in subscriptions:
            await bury_log(runtime, connection, day, one, now, late_after=late_after)
    if forced:
        for one in subscriptions:
            await bury_retries(runtime, connection, day, one, now)
    for one in subscriptions:
        # Even if the longest retention has been raised since a forced close made dead letters.
        await drop_confirmed(runtime, connection, day, one)
    if causes:
        await days.reopen_day(connection, day.day, now)
        return sorted(causes)
    # Twice: a dead letter that changed during its step was left out.
    for _ in range(2):
        since: UUID | None = day.low
        while since is not None:
            since = await day_dead_letters.keep_bodies(connection, day, since)
            beat(runtime)
    return []


async def _detach(connection: Connection, day: Day) -> list[str]:
    for table in partitions.DETACHED:
        standing = await partitions.standing(connection, table, day.day)
        if standing in ("detached", "dropped"):
            continue
        try:
            await partitions.detach(connection, table, day.day, finalize=standing == "detaching")
        except IN_THE_WAY:
            return ["reader"]
    return []


async def _drop(runtime: Runtime, connection: Connection, day: Day, forced: bool, now: datetime) -> list[str]:
    """Count the rows of the detached tables, compare them with the archive, and drop the tables together.

    A day that contradicts itself or its archive stays.
    """
    found = await day_reading.manifest(connection, day.day)
    if not found.sound or (found.undecided and not forced):
        log.error("day_unsound", day=day.day.isoformat(), manifest=str(found))
        return [CONTRADICTS]
    causes = await archive_check.differs(runtime, connection, day)
    if causes:
        return causes
    if found.undecided:
        named = await day_reading.undecided_ids(connection, day.day, NAMED_AT_MOST)
        log.error("day_left_undecided", day=day.day.isoformat(), transactions=found.undecided, some=named)
    try:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
            await partitions.drop(connection, day.day)
            await days.set_gone(connection, day.day, now)
    except IN_THE_WAY:
        return ["reader"]
    runtime.day_readers.pop(day.day, None)
    runtime.metrics.retention.left_undecided.inc(found.undecided)
    log.info("day_left", day=day.day.isoformat(), halves=found.halves, ops=found.ops, published=found.published)
    return []
