"""Wake the consumers that wait for messages: one look serves all that wait at a process."""

from datetime import datetime

from app.database.connection import Connection
from app.pull.pacing import CLAIMED_AT, paced_until_of, pacer_of
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.pull.ordered_claims import count_in_order
from app.store.pull.waiting import Claimable, claimable, removed
from app.verdicts import OnDead, Ordered

# The longest time until a waiting consumer sees what woke no one, such as a resumed subscription.
EVERY_S = 0.5
# Looks follow each other no sooner, however often something is published.
INTERVAL_S = 0.02
# An API process without a worker listens for the publications of others from the first consumer on that waits.
LISTEN_EVERY_S = 1.0
# The most messages that the consumers of a subscription are counted to take.
MOST = 2**31 - 1


async def wake_consumers(runtime: Runtime, now: datetime) -> StepResult:
    """Wake as many consumers as there are messages for, and all of a subscription that is gone."""
    waiting = runtime.waiting_consumers
    limits = {int(subscription): min(most, MOST) for subscription, most in waiting.limits.items()}
    if not limits:
        return StepResult()
    async with runtime.database.keyed() as connection:
        found = await claimable(connection, limits, now)
        others = limits.keys() - {one.subscription_id for one in found}
        gone = await removed(connection, others) if others else []
        counts = [await _count(connection, one, limits[one.subscription_id], now) for one in found]
    for subscription_id in gone:
        waiting.wake(str(subscription_id), limits[subscription_id])
    times = [one.next_at for one in found]
    for one, count in zip(found, counts, strict=True):
        room, paced_until = _room(one, count, now)
        waiting.wake(str(one.subscription_id), room)
        times.append(paced_until)
    next_at = min((at for at in times if at is not None), default=None)
    return StepResult(len(found), within_s=None if next_at is None else max(0.0, (next_at - now).total_seconds()))


async def _count(connection: Connection, found: Claimable, most: int, now: datetime) -> int:
    """Return how many messages can be claimed."""
    due = found.due
    if due and found.ordered is Ordered.KEY:
        hold = found.on_dead is OnDead.HOLD
        due = await count_in_order(connection, found.subscription_id, most, now, hold=hold)
    return due + found.logged


def _room(found: Claimable, count: int, now: datetime) -> tuple[int, datetime | None]:
    """Return how many of `count` messages the rate allows now; if none, also when it allows the next one."""
    if found.rate_per_s is None or not count:
        return count, None
    pacer = pacer_of(found.rate_per_s, found.paced_until, now)
    room = pacer.room(CLAIMED_AT, count)
    return room, None if room else paced_until_of(pacer, now)


class ConsumerListener:
    """Listens for what other processes publish, in an API process, once a consumer has waited there."""

    def __init__(self) -> None:
        self._listens = False

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Listen, or make sure that the process still does."""
        self._listens = self._listens or runtime.waiting_consumers.any_waiting
        if self._listens:
            await runtime.wake_ups.listen()
        return StepResult(int(self._listens))
