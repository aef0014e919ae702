"""Looks for what holds a day: undecided transactions, undelivered messages, replays.

A day can be held for weeks, with a look each minute. So a worker keeps up to where it has found the day's log settled,
and the next look begins there. Before a day is closed, all of it is looked at.
"""

from collections.abc import Sequence
from datetime import datetime

from app.database.connection import Connection
from app.retention import day_reading
from app.retention.heartbeat import beat
from app.runtime.state import Runtime
from app.store.retention import day_blockers
from app.store.retention.day_blockers import SubscriptionRoute
from app.store.retention.days import Day
from app.store.retention.index_plans import probe
from app.store.subscriptions.subscriptions import Subscription

# Before the first offset.
BEGINNING = 0


def route_of(subscription: Subscription) -> SubscriptionRoute:
    """Return what decides which messages a subscription takes."""
    return subscription.subscription_id, repr((subscription.topics, subscription.filters))


async def undecided(connection: Connection, day: Day, written_until: datetime, *, whole: bool) -> list[str]:
    """Return what holds a day because of its verdicts: in_doubt, parked, or an open database transaction.

    Halves of the day were written before `written_until`. `whole`: count those too that no sweep has found.
    """
    if day.decided and not whole:
        return []
    found = await day_reading.undecided(connection, day, whole=whole)
    if not (whole or found.count or await day_blockers.writers_since_before(connection, written_until)):
        found = await day_reading.undecided(connection, day, whole=True)
    causes = ["parked"] if found.parked else []
    if found.count > found.parked:
        causes.append("in_doubt")
    if not causes and not day.decided:
        # No undecided transaction is visible, but an open database transaction may still write one.
        causes.append("reader")
    return causes


async def undelivered(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    subscriptions: Sequence[Subscription],
    settled_to: dict[SubscriptionRoute, int] | None = None,
) -> list[str]:
    """Return what holds a day because of its messages: undelivered:<subscription>, replay:<subscription>.

    `settled_to`: up to where the day's log is settled, by subscription and route; it is updated. What is settled stays
    so, and offsets become visible in order.
    """
    settled_to = {} if settled_to is None else settled_to
    causes = []
    for one in subscriptions:
        if await waits(runtime, connection, day, one, settled_to):
            causes.append(f"undelivered:{one.name}")
        if await day_blockers.replaying(connection, day, one):
            causes.append(f"replay:{one.name}")
    return sorted(causes)


async def waits(
    runtime: Runtime,
    connection: Connection,
    day: Day,
    subscription: Subscription,
    settled_to: dict[SubscriptionRoute, int],
) -> bool:
    """Return whether the day holds a message that waits for the subscription; `settled_to` as in `undelivered`."""
    if await day_blockers.retries_wait(connection, day, subscription):
        return True
    route, more = route_of(subscription), True
    while more:
        async with connection.transaction():
            await probe(connection)
            look = await day_blockers.waiting(connection, day, subscription, settled_to.get(route, BEGINNING))
        if look.waits:
            return True
        settled_to[route], more = look.reached, look.more
        beat(runtime)
    return False
