"""What a stream is made for: a shard of a subscription or a replay, and what it shares with other streams."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from app.clock import Clock
from app.observability.metrics import Metrics
from app.store.relay.checkpoints import Shard
from app.store.relay.leases import Lease
from app.store.relay.log import NEWEST, ReplayFilter
from app.store.subscriptions.subscriptions import Subscription

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.observability.tracing import Tracing


@dataclass(frozen=True, slots=True)
class StreamContext:
    """What all streams of a process share: clock, metrics, tracing, and how to ask for the relay's next turn."""

    clock: Clock
    metrics: Metrics
    request_turn: Callable[[], None]
    tracing: "Tracing | None" = None


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A shard of a subscription under its lease, or a replay under the lease of shard 0.

    A replay ends at the offset `until`, and takes of the subscription's messages only those `wanted`. It was started at
    the time `since`.
    """

    subscription: Subscription
    shard: Shard
    lease: Lease
    until: int = NEWEST
    wanted: ReplayFilter | None = None
    since: datetime | None = None
