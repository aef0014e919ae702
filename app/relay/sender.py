"""Send the messages of one stream: as many calls at once as it allows, as fast as rate limit and breaker allow."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import structlog

from app.clock import Clock
from app.delivery import Delivery, Failed, Outcome
from app.destinations.base import Destination, current_task_cancelled
from app.observability.trace_context import current, log_fields
from app.policy.circuit_breaker import Breaker
from app.policy.rate_limiter import AnyPacer
from app.relay.delivery_results import delivery_of
from app.store.relay.log import Outgoing

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.observability.tracing import Tracing

log = structlog.get_logger(__name__)

# While the breaker is open, a message of the log leaves the retries' turn to a retry for this long: the relay may be
# about to claim one.
CLAIM_WITHIN_S = 1.0


class SenderOwner(Protocol):
    """The stream that a sender delivers for."""

    def may_send(self, now: datetime) -> bool:
        """Return whether messages may be sent at all."""

    def record_outcome(self, message: Outgoing, outcome: Outcome, sent_at: datetime, now: datetime) -> None:
        """Take the outcome of a message that was sent."""

    def sender_idle(self) -> None:
        """Note that nothing is in flight any more."""

    def probe_due(self) -> None:
        """Note that an open breaker allows a probe now."""


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """How a sender sends: at most `limit` calls at once, and nothing before the pacer allows it."""

    subscription: str
    replay: int
    limit: int
    pacer: AnyPacer | None
    clock: Clock
    tracing: "Tracing | None" = None


class Sender:
    """At most `limit` calls of a destination at once, each with as many messages as one call takes.

    Invariants: nothing is sent after `lease_until`. A message is in `ready`, in flight, or its outcome was passed on;
    only `stop` drops messages.
    """

    def __init__(
        self,
        owner: SenderOwner,
        destination: Destination,
        ready: deque[Outgoing],
        breaker: Breaker,
        lease_until: datetime,
        options: SenderOptions,
    ) -> None:
        self.destination, self.ready, self.lease_until, self.pacer = destination, ready, lease_until, options.pacer
        # Messages that were passed to the destination and have no outcome yet.
        self.in_flight = 0
        self._owner, self._breaker = owner, breaker
        self._name, self._replay = options.subscription, str(options.replay) if options.replay else None
        self._limit, self._clock, self._tracing = options.limit, options.clock, options.tracing
        self._slots: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Until when the next probe is left to a retry.
        self._left_until: float | None = None
        self._stopped = False

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._slots

    @property
    def has_free_slot(self) -> bool:
        """Whether one more request may be in flight."""
        return len(self._slots) < self._limit

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight."""
        if self._slots:
            await asyncio.wait(self._slots)

    def stop(self) -> None:
        """Send nothing more, and cancel what is in flight."""
        self._stopped = True
        self.ready.clear()
        for task in self._slots:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def fill(self) -> None:
        """Start as many slots as there are messages for."""
        for _ in range(min(self._limit - len(self._slots), len(self.ready))):
            batch = self._take(self._clock.now())
            if not batch:
                return
            task = asyncio.create_task(self._slot(batch))
            self._slots.add(task)
            task.add_done_callback(self._slot_ended)

    def retry_in(self, wait_s: float) -> None:
        """Fill again after `wait_s` seconds, when rate limit or breaker allow it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._retry)

    def no_retry_due(self) -> None:
        """Note that no retry was claimed: the next probe may be a message of the log."""
        if self._left_until is not None:
            self._left_until = 0.0
            self.fill()

    def _retry(self) -> None:
        self._timer = None
        if self._breaker.open:
            self._owner.probe_due()
        self.fill()

    def _take(self, now: datetime) -> list[Outgoing]:
        """Return the next messages to send, as many as one call takes; empty if none may be sent now."""
        ready = self.ready
        if not ready or self._stopped or now >= self.lease_until or not self._owner.may_send(now):
            return []
        most = min(len(ready), self.destination.batch_max)
        if self._breaker.open:
            most = self._probe_room(now)
        if self.pacer is not None and most:
            most = self._paced(self.pacer, most)
        if most and self._breaker.open:
            self._breaker.probing(now)
            self._left_until = None
        self.in_flight += most
        return [ready.popleft() for _ in range(most)]

    def _probe_room(self, now: datetime) -> int:
        if self.in_flight:
            return 0
        wait_s = self._breaker.wait(now).total_seconds() or self._left_to_retries_s()
        if wait_s:
            self.retry_in(wait_s)
        return int(not wait_s)

    def _left_to_retries_s(self) -> float:
        """Return how long a probe that is due is left to a retry.

        Otherwise one message of the log that always fails would be every probe, and what failed with it would wait.
        """
        if self.ready[0].claim is not None or not self._breaker.prefers_retries(self.ready):
            return 0.0
        at = monotonic()
        if self._left_until is None:
            self._left_until = at + CLAIM_WITHIN_S
            self._owner.probe_due()
        return max(0.0, self._left_until - at)

    def _paced(self, pacer: AnyPacer, most: int) -> int:
        at = monotonic()
        room = pacer.room(at, most)
        if room:
            pacer.sent(at, room)
        else:
            self.retry_in(pacer.wait_s(at))
        return room

    async def _slot(self, batch: list[Outgoing]) -> None:
        """Deliver one batch after another until none is left."""
        clock = self._clock
        at = clock.now()
        if at >= self.lease_until:
            # The process was suspended since these were taken, so another worker may have them by now.
            self.ready.extendleft(reversed(batch))
            self.in_flight -= len(batch)
            return
        while batch:
            deliveries = [delivery_of(self._name, message, self._replay) for message in batch]
            if self._tracing is None:
                outcomes = await self._send(deliveries, at)
            else:
                deliveries, outcomes = await self._traced(self._tracing, deliveries, at)
            now = clock.now()
            self.in_flight -= len(batch)
            for message, delivery, outcome in zip(batch, deliveries, outcomes, strict=True):
                current.set(delivery.trace)
                self._owner.record_outcome(message, outcome, at, now)
            at = clock.now()
            batch = self._take(at)

    async def _traced(
        self, tracing: "Tracing", deliveries: Sequence[Delivery], at: datetime
    ) -> tuple[list[Delivery], Sequence[Outcome]]:
        """Send with a span for each message whose trace is recorded; return the deliveries with their outcomes."""
        attempts = tracing.attempts(deliveries)
        outcomes: Sequence[Outcome] | None = None
        try:
            outcomes = await self._send(attempts.deliveries, at)
        finally:
            attempts.end(outcomes)
        return attempts.deliveries, outcomes

    async def _send(self, deliveries: Sequence[Delivery], at: datetime) -> Sequence[Outcome]:
        # A connection that is opened here serves later messages as well, so its log lines have no trace.
        current.set(None)
        try:
            return await self.destination.deliver(deliveries, at)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and current_task_cancelled():
                raise
            # A defect of Halfnote with these messages: they are tried again as after any failure, and the others go on.
            trace = log_fields(deliveries[0].trace)
            log.error("defect", subscription=self._name, offset=deliveries[0].offset, exc_info=error, **trace)
            return [
                Failed(f"Halfnote failed with {type(error).__name__}; its log has the details", None, None, None, 0)
            ] * len(deliveries)

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        self._slots.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("defect", subscription=self._name, exc_info=error)
        if not self._slots:
            self._owner.sender_idle()
