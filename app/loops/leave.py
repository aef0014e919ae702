"""One day's leave, step by step; a step that was interrupted goes on where it was.

Closed (its row says `archiving`), nobody left who saw it open, proved to be over, its tables detached, counted,
compared with its archive where there is to be one, dropped together, gone. Nothing here takes a lock that a request
would wait behind.
"""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import asyncpg
import structlog

from app.announcing import dead_letter
from app.database import Connection
from app.ids import message_id
from app.loops import archive_gate
from app.migrate import LOCK_TIMEOUT_MS
from app.runtime import Runtime
from app.store import days, leaving, partitions
from app.store.announcements import Announcement, announce
from app.store.days import Day
from app.store.subscriptions import Subscription, page

log = structlog.get_logger(__name__)

# How far the clocks of database and service may be apart when times of both are compared.
CLOCKS_APART = timedelta(minutes=1)
OLDER_SNAPSHOTS_WAITS = 20
OLDER_SNAPSHOTS_REST_S = 0.1
NAMED_AT_MOST = 20
EVERY_SUBSCRIPTION = 1_000_000

# Why a wait for others was given up.
IN_THE_WAY = (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError)


async def take_leave(runtime: Runtime, connection: Connection, day: Day, now: datetime, *, forced: bool) -> list[str]:
    """Take one day towards its end; return what keeps it, sorted, or nothing if it is gone.

    `forced`: it leaves whatever is undecided or undelivered in it, but never without its archive where there is to be
    one. `connection` is not in a database transaction.
    """
    subscriptions = await page(connection, "", EVERY_SUBSCRIPTION)
    if day.state == "open":
        causes = [] if forced else await _holding(connection, day, subscriptions, whole=False)
        if not forced:
            causes += await archive_gate.unarchived(runtime, connection, day, counted=not causes)
        if causes:
            return sorted(causes)
        day = await _close(runtime, connection, day, subscriptions if forced else [], now)
    if not await _older_snapshots_ended(connection, day):
        return ["reader"]
    standings = [await partitions.standing(connection, table, day.day) for table in partitions.DETACHED]
    if set(standings) == {"attached"}:
        causes = await _prove(runtime, connection, day, subscriptions, forced, now)
        causes = causes or await archive_gate.unarchived(runtime, connection, day, forced=forced)
        if causes:
            return causes
    return await _detach(connection, day) or await _drop(runtime, connection, day, forced, now)


async def _holding(connection: Connection, day: Day, subscriptions: list[Subscription], *, whole: bool) -> list[str]:
    """Return what of a day is not over: in_doubt, parked, undelivered:<subscription>, replay:<subscription>, or a
    reader that hides it."""
    causes = []
    if whole or not day.decided:
        found = await leaving.undecided(connection, day, whole=whole)
        if found.parked:
            causes.append("parked")
        if found.count > found.parked:
            causes.append("in_doubt")
        if not causes and not day.decided:
            # Nothing is seen to be undecided, but somebody may still be writing what nobody sees.
            causes.append("reader")
    for subscription in subscriptions:
        if await leaving.undelivered(connection, day, subscription):
            causes.append(f"undelivered:{subscription.name}")
        if await leaving.replaying(connection, day, subscription):
            causes.append(f"replay:{subscription.name}")
    return sorted(causes)


async def _close(
    runtime: Runtime, connection: Connection, day: Day, undelivered_of: list[Subscription], now: datetime
) -> Day:
    """Take no more verdicts for the day. What is still undelivered is buried in the same database transaction, because
    the relay passes over a closed day."""
    async with connection.transaction():
        late_since = now + timedelta(days=1)
        news = [await _bury(runtime, connection, day, one, late_since, now) for one in undelivered_of]
        await days.close_day(connection, day.day, now)
        written = await announce(connection, [one for one in news if one is not None], now)
    if written:
        runtime.wake_ups.published()
    return replace(day, state="archiving", changed_at=now)


async def _older_snapshots_ended(connection: Connection, day: Day) -> bool:
    for _ in range(OLDER_SNAPSHOTS_WAITS):
        if await leaving.older_snapshots(connection, day.day) == 0:
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
    """Look once more, now that nothing can change: a day that is not over is opened again, unless it must leave."""
    if forced:
        # Verdicts may have come until the day was closed, and the relay may have passed over their messages.
        late_since = day.changed_at - CLOCKS_APART
        async with connection.transaction():
            news = [await _bury(runtime, connection, day, one, late_since, now) for one in subscriptions]
            written = await announce(connection, [one for one in news if one is not None], now)
        if written:
            runtime.wake_ups.published()
        await leaving.unbury(connection, day)
    else:
        causes = await _holding(connection, day, subscriptions, whole=True)
        if causes:
            await days.reopen_day(connection, day.day, now)
            return causes
    await leaving.keep_bodies(connection, day)
    return []


async def _bury(
    runtime: Runtime, connection: Connection, day: Day, subscription: Subscription, late_since: datetime, now: datetime
) -> Announcement | None:
    """Make dead letters of what a subscription has not settled; return the news of it."""
    if await leaving.replaying(connection, day, subscription):
        log.error("day_left_unreplayed", day=day.day.isoformat(), subscription=subscription.name)
    buried = await leaving.bury(connection, day, subscription, late_since, now)
    if buried is None:
        return None
    runtime.metrics.left_undelivered.labels(subscription.name).inc(buried.messages)
    log.error("day_left_undelivered", day=day.day.isoformat(), subscription=subscription.name, messages=buried.messages)
    told = dead_letter(
        subscription.name,
        message_id=message_id(buried.transaction_id, buried.position),
        topic=buried.topic,
        key=buried.key,
        reason="day_left",
        error=buried.error,
        attempts=buried.attempts,
        at=now,
    )
    return None if told is None else replace(told, stands_for=buried.told)


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
    """Count what the detached tables hold, compare it with the archive, and drop them together; a day that contradicts
    itself or its archive stays."""
    found = await partitions.manifest(connection, day.day)
    if not found.sound or (found.undecided and not forced):
        log.error("day_unsound", day=day.day.isoformat(), manifest=str(found))
        return ["manifest"]
    causes = await archive_gate.differs(runtime, connection, day)
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
    runtime.metrics.left_undecided.inc(found.undecided)
    log.info("day_left", day=day.day.isoformat(), halves=found.halves, ops=found.ops, published=found.published)
    return []
