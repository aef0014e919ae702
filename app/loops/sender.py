"""The slots of one stream: what is ready to be sent, and the tasks that send it, as fast as pace and breaker allow."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from app.breaker import Breaker
from app.clock import Clock
from app.destinations.base import Delivery, Destination, Failed, Outcome
from app.loops.outcomes import delivery_of
from app.pacing import Pacer
from app.store.relay import Outgoing
from app.trace_context import current, log_fields

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.tracing import Tracing

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Calls:
    """What a sender asks of its stream: whether it may send at all, what to do with an outcome (message, outcome, when
    it was sent, when it ended), and that a slot ended or a probe is due."""

    may_send: Callable[[datetime], bool]
    ended: Callable[[Outgoing, Outcome, datetime, datetime], None]
    rested: Callable[[], None]
    probe_due: Callable[[], None]


class Sender:
    """At most `limit` calls of a destination at once, each with as many messages as one call takes."""

    def __init__(
        self,
        name: str,
        replay: int,
        destination: Destination,
        limit: int,
        pacer: Pacer | None,
        clock: Clock,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.destination = destination
        self.pacer = pacer
        self.lease_until: datetime = clock.now()
        self.ready: deque[Outgoing] = deque()
        # Messages that were handed to the destination and have no outcome yet.
        self.under_way = 0
        self._name, self._replay = name, str(replay) if replay else None
        self._limit, self._clock, self._tracing = limit, clock, tracing
        self._slots: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._stopped = False

    def begin(self, calls: Calls, breaker: Breaker, lease_until: datetime) -> None:
        """Take up the work."""
        self._calls, self._breaker, self.lease_until = calls, breaker, lease_until

    @property
    def resting(self) -> bool:
        """Whether no slot is at work."""
        return not self._slots

    async def rested(self) -> None:
        """Return when nothing is in flight."""
        if self._slots:
            await asyncio.wait(self._slots)

    def stop(self) -> None:
        """Send nothing more, and cut short what is in flight."""
        self._stopped = True
        self.ready.clear()
        for task in self._slots:
            task.cancel()
        if self._later is not None:
            self._later.cancel()

    def fill(self) -> None:
        """Start as many slots as there are messages for."""
        for _ in range(min(self._limit - len(self._slots), len(self.ready))):
            batch = self._take()
            if not batch:
                return
            task = asyncio.create_task(self._slot(batch))
            self._slots.add(task)
            task.add_done_callback(self._slot_ended)

    def look_again(self, wait_s: float) -> None:
        """Fill once more after a while: pace or breaker will allow it then."""
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self._later = None
        if self._breaker.open:
            self._calls.probe_due()
        self.fill()

    def _take(self) -> list[Outgoing]:
        """Return the next messages to send, as many as one call takes; empty if nothing may be sent now."""
        ready, now = self.ready, self._clock.now()
        if not ready or self._stopped or now >= self.lease_until or not self._calls.may_send(now):
            return []
        most = min(len(ready), self.destination.batch_max)
        if self._breaker.open:
            most = self._probe_room(now)
        if self.pacer is not None and most:
            most = self._paced(self.pacer, most)
        if most and self._breaker.open:
            self._breaker.probing(now)
        self.under_way += most
        return [ready.popleft() for _ in range(most)]

    def _probe_room(self, now: datetime) -> int:
        if self.under_way:
            return 0
        wait_s = self._breaker.wait(now).total_seconds()
        if wait_s:
            self.look_again(wait_s)
        return int(not wait_s)

    def _paced(self, pacer: Pacer, most: int) -> int:
        at = monotonic()
        room = pacer.room(at, most)
        if room:
            pacer.sent(at, room)
        else:
            self.look_again(pacer.wait_s(at))
        return room

    async def _slot(self, batch: list[Outgoing]) -> None:
        """Deliver one batch after another while there are any."""
        clock = self._clock
        while batch:
            at = clock.now()
            if at >= self.lease_until:
                # The process slept since these were taken: another may have them by now.
                self.ready.extendleft(reversed(batch))
                self.under_way -= len(batch)
                return
            deliveries = [delivery_of(self._name, message, self._replay) for message in batch]
            if self._tracing is None:
                outcomes = await self._send(deliveries, at)
            else:
                deliveries, outcomes = await self._traced(self._tracing, deliveries, at)
            now = clock.now()
            self.under_way -= len(batch)
            for message, delivery, outcome in zip(batch, deliveries, outcomes, strict=True):
                current.set(delivery.trace)
                self._calls.ended(message, outcome, at, now)
            batch = self._take()

    async def _traced(
        self, tracing: "Tracing", deliveries: Sequence[Delivery], at: datetime
    ) -> tuple[list[Delivery], Sequence[Outcome]]:
        """Send with a span for each message whose trace is recorded; return what was sent, and the outcomes."""
        attempts = tracing.attempts(deliveries)
        outcomes: Sequence[Outcome] | None = None
        try:
            outcomes = await self._send(attempts.deliveries, at)
        finally:
            attempts.end(outcomes)
        return attempts.deliveries, outcomes

    async def _send(self, deliveries: Sequence[Delivery], at: datetime) -> Sequence[Outcome]:
        # A connection that is made on the way is for those after these as well.
        current.set(None)
        try:
            return await self.destination.deliver(deliveries, at)
        except Exception as error:
            # A defect of ours with these messages; the others go on, and they are tried again as after any failure.
            trace = log_fields(deliveries[0].trace)
            log.error("defect", subscription=self._name, offset=deliveries[0].offset, exc_info=error, **trace)
            return [Failed(f"Halfnote made a mistake: {type(error).__name__}", None, None, None, 0)] * len(deliveries)

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        self._slots.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("defect", subscription=self._name, exc_info=error)
        if not self._slots:
            self._calls.rested()
