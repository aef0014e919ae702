"""Count the messages of topics without a subscription, and show the lag of paused and disabled subscriptions.

One process at a time counts, and stores the count with the offset that it reached. So no message is counted twice or
left out, however processes end. All workers show the stored count. Only topics are compared: a message that the tags or
headers of every subscription exclude counts as routed.
"""

from datetime import datetime, timedelta

from app.runtime.loop_runner import StepResult
from app.runtime.single_lease import SingleLease
from app.runtime.state import Runtime
from app.store.relay.leases import LeaseKind
from app.store.relay.unrouted import Inactive, count, counted, inactive, subscribed_topics, topics_after
from app.topic_patterns import TopicPatterns, is_reserved

EVERY_S = 5.0
NAME = LeaseKind.ROUTING
LEASE = timedelta(seconds=15)
SPAN = 20_000


class Routing:
    """Counts while this process holds the lease."""

    def __init__(self) -> None:
        self._lease = SingleLease(NAME, LEASE)

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Count the messages since the last turn; more is waiting if a whole span was read."""
        relay = runtime.metrics.relay
        # A plan that was made while a day was empty would read the whole day in each turn, and sort it.
        async with runtime.database.keyed() as connection:
            before = await counted(connection)
            if not await self._lease.held(connection, runtime.owner, now):
                relay.unrouted.set(before.unrouted)
                relay.show_lags("routing", {})
                return StepResult()
            topics, reached = await topics_after(connection, before.offset, SPAN)
            unrouted, total = 0, None
            if topics:
                unrouted = unrouted_of(topics, await subscribed_topics(connection))
                total = await count(connection, before.offset, reached, unrouted)
            found = await inactive(connection)
        # None: nothing is new, or another process has counted it, and the next turn shows its count.
        relay.unrouted.set(before.unrouted if total is None else total)
        relay.show_lags("routing", {one.name: (_age_s(one, now), one.behind) for one in found})
        return StepResult(0 if total is None else unrouted, sum(topics.values()) >= SPAN)

    async def drain(self, runtime: Runtime) -> None:
        """Release the lease."""
        await self._lease.release(runtime)


def _age_s(subscription: Inactive, now: datetime) -> float:
    return max(0.0, (now - (subscription.oldest_at or now)).total_seconds())


def unrouted_of(counts: dict[str, int], subscribed: TopicPatterns) -> int:
    """Return how many messages, counted by topic, are of a topic that no subscription's pattern matches.

    Operational messages do not count: they may go without a subscription.
    """
    return sum(n for topic, n in counts.items() if not is_reserved(topic) and not subscribed.match(topic))
