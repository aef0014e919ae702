"""What stands open now, for `GET /stats` and for the figures by the minute."""

from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.store.admin.figures import (
    DeadLetters,
    OpenBreakers,
    SubscriptionStates,
    Undecided,
    count_dead_letters,
    first_open_breakers,
    subscription_states,
    undecided_by_state,
)
from app.store.admin.gauges import database_size
from app.store.admin.minutes import Standing
from app.store.relay.lag import subscription_lag
from app.store.relay.laggards import laggards
from app.store.subscriptions import subscriptions
from app.verdicts import CheckBackState

# The log entries after the checkpoint for which a lag is counted.
LAG_LOOKS_AT = 10_000


@dataclass(frozen=True, slots=True)
class OldestLag:
    """The lag of the active subscription whose oldest waiting message is the oldest (`exact` False: at least)."""

    subscription: str
    messages: int
    exact: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class OpenNow:
    """What stands open at a moment. `lag` is None if no message waits."""

    in_doubt: Undecided
    parked: Undecided
    dead_letters: DeadLetters
    breakers: OpenBreakers
    subscriptions: SubscriptionStates
    lag: OldestLag | None
    database_bytes: int

    def figures(self) -> Standing:
        """Return the numbers alone."""
        return Standing(
            in_doubt=self.in_doubt.count,
            parked=self.parked.count,
            dead_letters=self.dead_letters.count,
            open_breakers=self.breakers.count,
            lag_messages=0 if self.lag is None else self.lag.messages,
            lag_s=0.0 if self.lag is None else self.lag.seconds,
            database_bytes=self.database_bytes,
        )


async def open_now(connection: Connection, now: datetime) -> OpenNow:
    """Measure what stands open. The time is bounded: large counts are rough, and few subscriptions are looked at."""
    undecided = await undecided_by_state(connection)
    return OpenNow(
        in_doubt=undecided[CheckBackState.IN_DOUBT],
        parked=undecided[CheckBackState.PARKED],
        dead_letters=await count_dead_letters(connection),
        breakers=await first_open_breakers(connection),
        subscriptions=await subscription_states(connection),
        lag=await oldest_lag(connection, now),
        database_bytes=await database_size(connection),
    )


async def oldest_lag(connection: Connection, now: datetime) -> OldestLag | None:
    """Return the lag of the subscription with the oldest waiting message; None if none waits."""
    oldest, oldest_at = None, now
    for one in await laggards(connection):
        # A lag takes longer than everything else here, so those that cannot be the oldest are not measured.
        if oldest is not None and one.waits_since >= oldest_at:
            break
        subscription = await subscriptions.one(connection, one.name)
        if subscription is None:
            continue
        lag = await subscription_lag(connection, subscription, LAG_LOOKS_AT, now)
        if lag.oldest_at is not None and (oldest is None or lag.oldest_at < oldest_at):
            oldest_at = lag.oldest_at
            age_s = max(0.0, (now - oldest_at).total_seconds())
            oldest = OldestLag(one.name, lag.waiting, lag.looked_at < LAG_LOOKS_AT, age_s)
    return oldest
