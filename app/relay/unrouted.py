"""Count the messages of topics without a subscription, and show the lag of paused and disabled subscriptions.

One process does it at a time, so that the counts of replicas add up. It reads and compares topics only: a message that
the tags or headers of every subscription exclude counts as routed.
"""

from datetime import datetime, timedelta

from app.database.connection import Connection
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.relay.leases import Lease, LeaseKind, claim, release, renew
from app.store.relay.log import log_head
from app.store.relay.unrouted import Inactive, inactive, subscribed_topics, topics_after
from app.topic_patterns import TopicPatterns, is_reserved

EVERY_S = 5.0
NAME = LeaseKind.ROUTING
LEASE = timedelta(seconds=15)
SPAN = 20_000


class Routing:
    """The position of the count in the log, while this process holds the lease."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._position = 0

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Count the messages since the last turn; more is waiting if a whole span was read."""
        async with runtime.database.connection() as connection:
            if not await self._held(connection, runtime.owner, now):
                runtime.metrics.relay.show_lags("routing", {})
                return StepResult()
            counts, self._position = await topics_after(connection, self._position, SPAN)
            unrouted = unrouted_of(counts, await subscribed_topics(connection)) if counts else 0
            found = await inactive(connection)
        runtime.metrics.relay.unrouted.inc(unrouted)
        runtime.metrics.relay.show_lags("routing", {one.name: (_age_s(one, now), one.behind) for one in found})
        return StepResult(unrouted, sum(counts.values()) >= SPAN)

    async def drain(self, runtime: Runtime) -> None:
        """Release the lease."""
        if self._lease is not None:
            async with runtime.database.connection() as connection:
                await release(connection, {NAME: self._lease.epoch}, runtime.owner, runtime.clock.now())

    async def _held(self, connection: Connection, owner: str, now: datetime) -> bool:
        """Renew or take the lease; a new holder counts from the log's head."""
        until = now + LEASE
        if self._lease is not None and await renew(connection, {NAME: self._lease.epoch}, owner, until):
            return True
        self._lease = next(iter(await claim(connection, [NAME], owner, until, 1, now)), None)
        if self._lease is not None:
            self._position = await log_head(connection)
        return self._lease is not None


def _age_s(subscription: Inactive, now: datetime) -> float:
    return max(0.0, (now - (subscription.oldest_at or now)).total_seconds())


def unrouted_of(counts: dict[str, int], subscribed: TopicPatterns) -> int:
    """Return how many messages, counted by topic, are of a topic that no subscription's pattern matches.

    Operational messages do not count: they may go without a subscription.
    """
    return sum(n for topic, n in counts.items() if not is_reserved(topic) and not subscribed.match(topic))
