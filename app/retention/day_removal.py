"""Removes one day, step by step. An interrupted step continues where it stopped.

The steps: close the day (its row says `archiving`), wait until no database transaction is left that saw it open, prove
that it is over, detach its tables, count their rows, compare them with the archive if there must be one, drop them
together, delete the row. No step takes a lock that blocks a request.
"""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import asyncpg
import structlog

from app.announcements import dead_letter
from app.database.connection import Connection
from app.ids import message_id
from app.migrate import LOCK_TIMEOUT_MS
from app.retention import archive_check
from app.runtime.state import Runtime
from app.store.relay.announcements import Announcement, announce
from app.store.retention import day_blockers, days, partitions
from app.store.retention.days import Day
from app.store.subscriptions.subscriptions import Subscription, page
from app.verdicts import DayState, DeadLetterReason

log = structlog.get_logger(__name__)

# The allowed difference between the clocks of the database and the service when their times are compared.
CLOCKS_APART = timedelta(minutes=1)
OLDER_SNAPSHOTS_WAITS = 20
OLDER_SNAPSHOTS_REST_S = 0.1
NAMED_AT_MOST = 20
EVERY_SUBSCRIPTION = 1_000_000

# Errors that end a wait for other sessions.
IN_THE_WAY = (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError)


async def remove_day(runtime: Runtime, connection: Connection, day: Day, now: datetime, *, forced: bool) -> list[str]:
    """Take the next steps of a day's removal. Return the causes that keep it, sorted; none if it is removed.

    `forced`: remove the day even if transactions are undecided or messages undelivered, but never without a required
    archive. `connection` is not in a database transaction.
    """
    subscriptions = await page(connection, "", EVERY_SUBSCRIPTION)
    if day.state is DayState.OPEN:
        causes = [] if forced else await _holding(connection, day, subscriptions, whole=False)
        if not forced:
            causes += await archive_check.unarchived(runtime, connection, day, counted=not causes)
        if causes:
            return sorted(causes)
        day = await _close(runtime, connection, day, subscriptions if forced else [], now)
    if not await _older_snapshots_ended(connection, day):
        return ["reader"]
    standings = [await partitions.standing(connection, table, day.day) for table in partitions.DETACHED]
    if set(standings) == {"attached"}:
        causes = await _prove(runtime, connection, day, subscriptions, forced, now)
        causes = causes or await archive_check.unarchived(runtime, connection, day, forced=forced)
        if causes:
            return causes
    return await _detach(connection, day) or await _drop(runtime, connection, day, forced, now)


async def _holding(connection: Connection, day: Day, subscriptions: list[Subscription], *, whole: bool) -> list[str]:
    """Return the causes that keep a day: in_doubt, parked, undelivered:<subscription>, replay:<subscription>, or an
    open database transaction."""
    causes = []
    if whole or not day.decided:
        found = await day_blockers.undecided(connection, day, whole=whole)
        if found.parked:
            causes.append("parked")
        if found.count > found.parked:
            causes.append("in_doubt")
        if not causes and not day.decided:
            # No undecided transaction is visible, but an open database transaction may still write one.
            causes.append("reader")
    for subscription in subscriptions:
        if await day_blockers.undelivered(connection, day, subscription):
            causes.append(f"undelivered:{subscription.name}")
        if await day_blockers.replaying(connection, day, subscription):
            causes.append(f"replay:{subscription.name}")
    return sorted(causes)


async def _close(
    runtime: Runtime, connection: Connection, day: Day, undelivered_of: list[Subscription], now: datetime
) -> Day:
    """Accept no more verdicts for the day. Undelivered messages become dead letters in the same database transaction,
    because the relay skips a closed day."""
    async with connection.transaction():
        late_since = now + timedelta(days=1)
        news = [await dead_letter_rest(runtime, connection, day, one, late_since, now) for one in undelivered_of]
        await days.close_day(connection, day.day, now)
        written = await announce(connection, [one for one in news if one is not None], now)
    if written:
        runtime.wake_ups.published()
    return replace(day, state=DayState.ARCHIVING, changed_at=now)


async def _older_snapshots_ended(connection: Connection, day: Day) -> bool:
    for _ in range(OLDER_SNAPSHOTS_WAITS):
        if await day_blockers.older_snapshots(connection, day.day) == 0:
            return True
        await asyncio.sleep(OLDER_SNAPSHOTS_REST_S)
    return False


async def _prove(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    subscriptions: list[Subscription],
    forced: bool,
    now: datetime,
) -> list[str]:
    """Check again: the day can no longer change. A day that is not over is opened again, unless it must be removed."""
    if forced:
        # Verdicts may have arrived until the day was closed, and the relay may have skipped their messages.
        late_since = day.changed_at - CLOCKS_APART
        async with connection.transaction():
            news = [await dead_letter_rest(runtime, connection, day, one, late_since, now) for one in subscriptions]
            written = await announce(connection, [one for one in news if one is not None], now)
        if written:
            runtime.wake_ups.published()
        await day_blockers.drop_confirmed(connection, day)
    else:
        causes = await _holding(connection, day, subscriptions, whole=True)
        if causes:
            await days.reopen_day(connection, day.day, now)
            return causes
    while await day_blockers.keep_bodies(connection, day) == day_blockers.BODIES_AT_ONCE:
        pass
    return []


async def dead_letter_rest(
    runtime: Runtime, connection: Connection, day: Day, subscription: Subscription, late_since: datetime, now: datetime
) -> Announcement | None:
    """Make dead letters of the messages that a subscription has not settled. Return their announcements."""
    if await day_blockers.replaying(connection, day, subscription):
        log.error("day_left_unreplayed", day=day.day.isoformat(), subscription=subscription.name)
    buried = await day_blockers.bury(connection, day, subscription, late_since, now)
    if buried is None:
        return None
    runtime.metrics.retention.left_undelivered.labels(subscription.name).inc(buried.messages)
    log.error("day_left_undelivered", day=day.day.isoformat(), subscription=subscription.name, messages=buried.messages)
    announcement = dead_letter(
        subscription.name,
        message_id=message_id(buried.transaction_id, buried.position),
        topic=buried.topic,
        key=buried.key,
        reason=DeadLetterReason.DAY_LEFT,
        error=buried.error,
        attempts=buried.attempts,
        at=now,
    )
    return None if announcement is None else replace(announcement, stands_for=buried.announced)


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
    found = await partitions.manifest(connection, day.day)
    if not found.sound or (found.undecided and not forced):
        log.error("day_unsound", day=day.day.isoformat(), manifest=str(found))
        return ["manifest"]
    causes = await archive_check.differs(runtime, connection, day)
    if causes:
        return causes
    if found.undecided:
        named = await partitions.undecided_ids(connection, day.day, NAMED_AT_MOST)
        log.error("day_left_undecided", day=day.day.isoformat(), transactions=found.undecided, some=named)
    try:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
            await partitions.drop(connection, day.day)
            await days.set_gone(connection, day.day, now)
    except IN_THE_WAY:
        return ["reader"]
    runtime.metrics.retention.left_undecided.inc(found.undecided)
    log.info("day_left", day=day.day.isoformat(), halves=found.halves, ops=found.ops, published=found.published)
    return []
