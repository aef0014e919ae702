"""Closes a day: its row says `archiving`, and from then on the day takes no verdict and no delivery.

The database transaction that closes a day finds every subscription and replay that may begin in it. A request that
starts one shares a lock (`AdvisoryLock.NEW_READERS`) from before it looks where the log begins until its commit. The
close takes this lock alone. So none begins between the last look and the close, and later ones find the day closed.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime

from app.database.connection import Connection
from app.retention.day_dead_letters import announce_buried, bury_log, bury_unreplayed, count, report
from app.retention.day_holders import BEGINNING, route_of, waits
from app.runtime.state import Runtime
from app.store.retention import day_blockers, day_dead_letters, days
from app.store.retention.day_blockers import SubscriptionRoute
from app.store.retention.days import Day
from app.store.retention.index_plans import probe
from app.store.subscriptions import replays
from app.store.subscriptions.new_readers import take_new_readers
from app.store.subscriptions.replays import Replay
from app.store.subscriptions.subscriptions import Subscription, page
from app.verdicts import DayState

EVERY_SUBSCRIPTION = 1_000_000
# How often a forced close goes through the log again because of new messages, before it waits for the next turn.
TRIES = 3
# The cause that keeps a day while a request starts a subscription or a replay.
STARTING = "reader"


async def close_settled(
    runtime: Runtime, connection: Connection, day: Day, looked_at: Sequence[Subscription]
) -> tuple[Day | None, list[str]]:
    """Close a day of which nothing is left for the subscriptions `looked_at`. Return the closed day, or what keeps it.

    New and changed subscriptions are looked at now, and the replays of all.
    """
    known = {route_of(one) for one in looked_at}
    async with connection.transaction():
        late_since = await day_blockers.oldest_writer(connection)
        if not await take_new_readers(connection):
            return None, [STARTING]
        replayed = await day_blockers.replayed(connection)
        causes = []
        for one in await page(connection, "", EVERY_SUBSCRIPTION):
            if route_of(one) not in known and await waits(runtime, connection, day, one, {}):
                causes.append(_undelivered(one))
            if one.subscription_id in replayed and await day_blockers.replaying(connection, day, one):
                causes.append(_replaying(one))
        if causes:
            return None, sorted(causes)
        await days.close_day(connection, day.day, late_since)
    return replace(day, state=DayState.ARCHIVING, changed_at=late_since), []


async def close_by_force(
    runtime: Runtime, connection: Connection, day: Day, now: datetime
) -> tuple[Day | None, list[str]]:
    """Close a day whatever is left in it: log entries that a subscription has not settled become its dead letters, and
    those that a running replay has not read become the replay's.

    Return the closed day, or what keeps it for this turn.
    """
    reached: dict[SubscriptionRoute, int] = {}
    replayed: set[tuple[SubscriptionRoute, int]] = set()
    left: set[str] = set()
    for _ in range(TRIES):
        for one in await page(connection, "", EVERY_SUBSCRIPTION):
            after = reached.get(route_of(one))
            if after is None or _undelivered(one) in left:
                reached[route_of(one)] = await bury_log(runtime, connection, day, one, now, after=after or BEGINNING)
        for one, replay in await _running(connection):
            if (route_of(one), replay.replay_id) not in replayed:
                await bury_unreplayed(runtime, connection, day, one, replay, now)
                replayed.add((route_of(one), replay.replay_id))
        closed, left = await _close_after(runtime, connection, day, reached, replayed, now)
        if closed is not None:
            return closed, []
    return None, sorted(left) or [STARTING]


async def _close_after(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    reached: dict[SubscriptionRoute, int],
    replayed: Collection[tuple[SubscriptionRoute, int]],
    now: datetime,
) -> tuple[Day | None, set[str]]:
    """Go on through the log in one short step for each subscription, and close the day. If a subscription is new, was
    changed, has more or has a new replay, return what keeps the day instead. No message is added to a part that is
    replayed."""
    async with connection.transaction():
        late_since = await day_blockers.oldest_writer(connection)
        if not await take_new_readers(connection):
            return None, set()
        subscriptions = await page(connection, "", EVERY_SUBSCRIPTION)
        left = {_undelivered(one) for one in subscriptions if route_of(one) not in reached}
        for one, found in await _running(connection):
            if (route_of(one), found.replay_id) not in replayed:
                left.add(_replaying(one))
        buried = []
        await probe(connection)
        for one in subscriptions if not left else []:
            step = await day_dead_letters.bury_log(connection, day, one, reached[route_of(one)], None, now)
            reached[route_of(one)] = step.reached
            buried.append((one, step.buried))
            if step.more:
                left.add(_undelivered(one))
        if not left:
            await days.close_day(connection, day.day, late_since)
        written = await announce_buried(connection, buried, now)
    for one, some in buried:
        report(day, one, count(runtime, one, some, written))
    return None if left else replace(day, state=DayState.ARCHIVING, changed_at=late_since), left


def _undelivered(subscription: Subscription) -> str:
    return f"undelivered:{subscription.name}"


def _replaying(subscription: Subscription) -> str:
    return f"replay:{subscription.name}"


async def _running(connection: Connection) -> list[tuple[Subscription, Replay]]:
    """Return the replays that run, each with its subscription."""
    by_id = {one.subscription_id: one for one in await page(connection, "", EVERY_SUBSCRIPTION)}
    found = await replays.running(connection)
    return [(by_id[one.subscription_id], one) for one in found if one.subscription_id in by_id]
