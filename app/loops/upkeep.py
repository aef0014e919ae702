"""Upkeep: days are there before they are needed, and leave when everything in them is over."""

from datetime import UTC, datetime, time, timedelta

import structlog

from app.config import Settings
from app.database import Connection
from app.loops.leave import take_leave
from app.loops.runner import Turned
from app.migrate import ensure_days
from app.runtime import Runtime
from app.store import announcements, audit, days, leaving, leftovers, redeliveries
from app.store.days import Day

log = structlog.get_logger(__name__)

EVERY_S = 60.0
# A half of a day may come until an id of it is refused as too old, and be written a little later.
WRITTEN_LATER = timedelta(minutes=10)
# Longer ago than a step could be behind with clearing what a gone day left.
GONE_LATELY = timedelta(days=2)
# How long the rate limit of an operational message's cause is kept after it was last announced.
ANNOUNCED_KEPT = timedelta(days=45)
# Nobody waits behind upkeep's own waits; they end so that a stop need not wait for them.
SESSION = "set lock_timeout = '2s'; set statement_timeout = '10min'"


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Make the days to come, write down which are decided, and let those leave that may; one replica at a time."""
    # A session of its own: it holds the lock, and keeps neither that nor its settings when it ends.
    connection = await runtime.database.dedicated()
    try:
        if not await days.take_upkeep(connection):
            return Turned()
        await connection.execute(SESSION)
        made = await ensure_days(connection, now, days_ahead=runtime.settings.days_ahead)
        await mark_decided(connection, runtime.settings, now)
        gone = await let_leave(runtime, connection, now)
        await clear_leftovers(connection, now)
        await clear_audit(connection, now - timedelta(seconds=runtime.settings.audit_keep_s))
        return Turned(done=len(made) + gone)
    finally:
        await connection.close(timeout=5)


def ended(day: Day) -> datetime:
    """Return when the UTC day ends."""
    return datetime.combine(day.day, time(), UTC) + timedelta(days=1)


async def mark_decided(connection: Connection, settings: Settings, now: datetime) -> None:
    """Write down which past days have an op for every half, so that nobody need look for undecided ones again.

    Only once no database transaction is open that began while halves of the day could come: a commit that hangs is
    invisible and would be missed.
    """
    for day in await days.days(connection):
        last_written = ended(day) + timedelta(seconds=settings.id_skew_s) + WRITTEN_LATER
        if day.state != "open" or day.decided or now < last_written:
            continue
        if await leaving.writers_since_before(connection, last_written):
            continue
        if (await leaving.undecided(connection, day)).count == 0:
            await days.set_decided(connection, day.day, now)


async def let_leave(runtime: Runtime, connection: Connection, now: datetime) -> int:
    """Take each day whose retention is over as far as it can go; write down what holds the others. Return how many
    left."""
    left = 0
    keep = timedelta(seconds=runtime.settings.retention_s)
    longest = timedelta(seconds=runtime.settings.max_retention_s)
    for day in await days.days(connection):
        if day.state == "gone" or now < ended(day) + keep:
            continue
        causes = await take_leave(runtime, connection, day, now, forced=now >= ended(day) + longest)
        if causes != day.held:
            await days.set_held(connection, day.day, causes)
        if causes and causes != day.held:
            log.warning("day_held", day=day.day.isoformat(), causes=causes)
        left += not causes
    return left


async def clear_leftovers(connection: Connection, now: datetime) -> None:
    """Delete what gone days, deleted subscriptions and old announcements left in the small tables."""
    for table in leftovers.OF_GONE_DAYS:
        while await leftovers.clear_gone_days(connection, table, now - GONE_LATELY) == leftovers.AT_ONCE:
            pass
    for table in leftovers.OF_DELETED_SUBSCRIPTIONS:
        while await leftovers.clear_deleted_subscriptions(connection, table) == leftovers.AT_ONCE:
            pass
    while await leftovers.clear_cancelled_replays(connection, now) == leftovers.AT_ONCE:
        pass
    await leftovers.revive_replays(connection)
    await leftovers.clear_leases(connection, now)
    while await redeliveries.forget(connection, now) == redeliveries.FORGOTTEN_AT_ONCE:
        pass
    await announcements.forget(connection, now - ANNOUNCED_KEPT)


async def clear_audit(connection: Connection, before: datetime) -> None:
    """Delete what people did longer ago than it is kept."""
    while await audit.forget(connection, before) == audit.FORGOTTEN_AT_ONCE:
        pass
