"""The one interface of every destination: deliveries go in, outcomes come out; nothing here retries or records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias
from uuid import UUID

# Where brokers usually listen, which HALFNOTE_DENY_PORTS does not keep from their own kind.
OWN_PORTS = {
    "rabbitmq": frozenset({5672, 5671}),
    "nats": frozenset({4222}),
    "kafka": frozenset({9092}),
    "redis": frozenset({6379}),
}


@dataclass(frozen=True, slots=True)
class Delivery:
    """A committed message on its way to one subscription. `attempt` counts from 1; `body` is the producer's bytes.

    `replay` is the id of the replay that sends it once more, None for live delivery; `trace` is a context of
    app.trace_context.
    """

    subscription: str
    message_id: str
    transaction_id: UUID
    offset: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    committed_at: datetime
    attempt: int
    replay: str | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """The destination has the message."""

    status: int | None
    duration_ms: int


@dataclass(frozen=True, slots=True)
class Failed:
    """It has not, as far as is known; a later try may help. `retry_after_s`: the destination asked to be left alone.

    `unreachable`: no connection came about, so the message had no part in it.
    """

    error: str
    status: int | None
    response: str | None
    retry_after_s: float | None
    duration_ms: int
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The destination will never take this message; `reason` is what it gave for it."""

    reason: str
    error: str
    status: int | None
    response: str | None
    duration_ms: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The destination wants no message any more."""

    error: str
    status: int | None
    response: str | None
    duration_ms: int


Outcome: TypeAlias = Delivered | Failed | Refused | Gone


class Destination(Protocol):
    """Where a subscription's messages go. Each stream has one of its own, and closes it."""

    @property
    def address(self) -> str:
        """Where it is, as people may read it: no credentials."""

    @property
    def batch_max(self) -> int:
        """How many messages one call of `deliver` may take."""

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Send 1 to `batch_max` messages, in this order, and say what came of each, in the same order.

        Returns within the subscription's timeout. Called many times at once. Connects when it first has to, and again
        after a connection broke. Raises nothing expected: what can't be reached is an outcome.
        """

    async def close(self) -> None:
        """Let go of connections; nothing is under way."""
