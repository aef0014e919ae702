"""Watches the log for messages that nobody subscribed to, and shows the lag of subscriptions that rest.

One process does it at a time, so that the counts of replicas add up. It reads topics alone, by the index, and judges by
topics alone: a message that every subscription's tags or headers leave out counts as routed.
"""

from datetime import datetime, timedelta

from app.announcing import RESERVED
from app.database import Connection
from app.loops.runner import Turned
from app.runtime import Runtime
from app.store.leases import Lease, claim, release, renew
from app.store.relay import log_head
from app.store.routing import Resting, resting, subscribed_topics, topics_after

EVERY_S = 5.0
NAME = "routing"
LEASE = timedelta(seconds=15)
SPAN = 20_000


class Routing:
    """Where this process's count of the log stands, while it holds the lease."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._position = 0

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Count what the log has gained since the last turn; more is waiting if a whole span was read."""
        async with runtime.database.connection() as connection:
            if not await self._held(connection, runtime.owner, now):
                runtime.metrics.show_lags("routing", {})
                return Turned()
            counts, self._position = await topics_after(connection, self._position, SPAN)
            unrouted = unrouted_of(counts, await subscribed_topics(connection)) if counts else 0
            found = await resting(connection)
        runtime.metrics.unrouted.inc(unrouted)
        runtime.metrics.show_lags("routing", {one.name: (_age_s(one, now), one.behind) for one in found})
        return Turned(unrouted, sum(counts.values()) >= SPAN)

    async def drain(self, runtime: Runtime) -> None:
        """Give the lease back."""
        if self._lease is not None:
            async with runtime.database.connection() as connection:
                await release(connection, {NAME: self._lease.epoch}, runtime.owner, runtime.clock.now())

    async def _held(self, connection: Connection, owner: str, now: datetime) -> bool:
        """Keep or take the lease; a new holder counts from the log's head on."""
        until = now + LEASE
        if self._lease is not None and await renew(connection, {NAME: self._lease.epoch}, owner, until):
            return True
        self._lease = next(iter(await claim(connection, [NAME], owner, until, 1, now)), None)
        if self._lease is not None:
            self._position = await log_head(connection)
        return self._lease is not None


def _age_s(subscription: Resting, now: datetime) -> float:
    return max(0.0, (now - (subscription.oldest_at or now)).total_seconds())


def unrouted_of(counts: dict[str, int], subscribed: list[str]) -> int:
    """Return how many messages, counted by topic, are of a topic that no subscription names or begins.

    Operational messages are Halfnote's own: nobody need take them.
    """
    exact = {topic for topic in subscribed if not topic.endswith("*")}
    prefixes = tuple(topic[:-1] for topic in subscribed if topic.endswith("*"))
    own = {topic for topic in counts if topic.startswith(RESERVED)}
    return sum(count for topic, count in counts.items() if topic not in exact | own and not topic.startswith(prefixes))
