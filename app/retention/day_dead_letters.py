"""Makes dead letters of what a day's removal cuts short, in short database transactions of one subscription each.

The relay skips a closed day and moves its checkpoint past it. So the log is gone through before the day is closed, and
the database transaction that closes it adds only what came since (`day_closing.py`). Retries stay where they are until
the day is closed: from then on no worker claims or settles them, so no lock on them makes a worker wait.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import structlog

from app.announcements import dead_letter
from app.database.connection import Connection
from app.ids import message_id
from app.retention.day_holders import BEGINNING
from app.retention.heartbeat import beat
from app.runtime.state import Runtime
from app.store.relay.announcements import Announcement, announce
from app.store.retention import day_dead_letters as store
from app.store.retention.day_dead_letters import Buried, RowPlace
from app.store.retention.days import Day
from app.store.retention.index_plans import probe
from app.store.subscriptions.replays import Replay
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import DeadLetterReason

log = structlog.get_logger(__name__)


async def bury_log(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    subscription: Subscription,
    now: datetime,
    *,
    after: int = BEGINNING,
    late_after: int | None = None,
) -> int:
    """Make dead letters of the day's log entries after an offset that the subscription has not settled.

    Entries after the offset `late_after` count even below the checkpoint. Return the last offset that was read.
    """
    reached, messages, more = after, 0, True
    while more:
        async with connection.transaction():
            await probe(connection)
            step = await store.bury_log(connection, day, subscription, reached, late_after, now)
            written = await announce_buried(connection, [(subscription, step.buried)], now)
        reached, more = step.reached, step.more
        messages += count(runtime, subscription, step.buried, written)
    report(day, subscription, messages)
    return reached


async def bury_unreplayed(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    subscription: Subscription,
    replay: Replay,
    now: datetime,
    *,
    after: int = BEGINNING,
) -> int:
    """Make dead letters of what a running replay has not read of the day's log, as `bury_log` does."""
    reached, messages, more = after, 0, True
    while more:
        async with connection.transaction():
            await probe(connection)
            step = await store.bury_unreplayed(connection, day, subscription, replay, reached, now)
            written = await announce_buried(connection, [(subscription, step.buried)], now, replay=replay.replay_id)
        reached, more = step.reached, step.more
        messages += count(runtime, subscription, step.buried, written)
    report(day, subscription, messages, replay=replay.replay_id)
    return reached


async def bury_retries(
    runtime: Runtime, connection: Connection, day: Day, subscription: Subscription, now: datetime
) -> None:
    """Make dead letters of a closed day's retries, of replays too."""
    messages = 0
    for replay in await store.replays_of_retries(connection, subscription):
        place: RowPlace | None = RowPlace.before(day, replay)
        while place is not None:
            async with connection.transaction():
                await probe(connection)
                step = await store.bury_retries(connection, day, subscription, place, now)
                written = await announce_buried(connection, [(subscription, step.buried)], now, replay=replay)
            place = step.place
            messages += count(runtime, subscription, step.buried, written)
    report(day, subscription, messages)


async def drop_confirmed(runtime: Runtime, connection: Connection, day: Day, subscription: Subscription) -> None:
    """Delete the day's dead letters whose delivery was confirmed while they were written."""
    for replay in await store.replays_of_dead_letters(connection, subscription):
        place: RowPlace | None = RowPlace.before(day, replay)
        while place is not None:
            async with connection.transaction():
                await probe(connection)
                place = await store.drop_confirmed(connection, day, subscription, place)
            beat(runtime)


async def announce_buried(
    connection: Connection, buried: Sequence[tuple[Subscription, Buried | None]], now: datetime, *, replay: int = 0
) -> int:
    """Announce dead letters, as the last statement of the database transaction that made them; return the number."""
    news = [_announcement(subscription, one, replay, now) for subscription, one in buried if one is not None]
    return await announce(connection, [one for one in news if one is not None], now)


def count(runtime: Runtime, subscription: Subscription, buried: Buried | None, written: int) -> int:
    """Count a committed step, wake the relay if it wrote an announcement, and return the number of messages."""
    beat(runtime)
    if written:
        runtime.wake_ups.published()
    if buried is None:
        return 0
    runtime.metrics.retention.left_undelivered.labels(subscription.name).inc(buried.messages)
    return buried.messages


def report(day: Day, subscription: Subscription, messages: int, *, replay: int = 0) -> None:
    """Log how many messages became dead letters, if any did."""
    if messages and replay:
        log.error(
            "day_left_unreplayed",
            day=day.day.isoformat(),
            subscription=subscription.name,
            replay=replay,
            messages=messages,
        )
    elif messages:
        log.error("day_left_undelivered", day=day.day.isoformat(), subscription=subscription.name, messages=messages)


def _announcement(subscription: Subscription, buried: Buried, replay: int, now: datetime) -> Announcement | None:
    announcement = dead_letter(
        subscription.name,
        message_id=message_id(buried.transaction_id, buried.position),
        topic=buried.topic,
        key=buried.key,
        reason=DeadLetterReason.DAY_LEFT,
        error=buried.error,
        attempts=buried.attempts,
        replay=replay,
        at=now,
    )
    return None if announcement is None else replace(announcement, stands_for=buried.announced)
