"""The circuit breaker of one stream, with its changes that are not recorded yet."""

from collections.abc import Sized
from dataclasses import dataclass
from datetime import datetime

import structlog

from app.delivery import Failed
from app.observability.metrics import Metrics
from app.policy.circuit_breaker import Breaker
from app.store.relay.log import Outgoing

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """A change at the time `at`: the breaker opened (`opened_at`, `because`), or closed after `was_opened_at`."""

    opened_at: datetime | None
    because: str | None
    was_opened_at: datetime | None
    at: datetime


class BreakerControl:
    """Feeds outcomes to a breaker, and keeps each change until a settle has recorded it.

    Invariants: every change is logged and counted once, when it happens. A change is dropped only after a settle that
    records it is committed.
    """

    def __init__(self, subscription: str, metrics: Metrics, opened_at: datetime | None, because: str | None) -> None:
        self.breaker = Breaker(opened_at, because)
        self._subscription, self._metrics = subscription, metrics
        self._changes: list[BreakerChange] = []
        self._settling = 0

    @property
    def open(self) -> bool:
        """Whether only probes may be sent."""
        return self.breaker.open

    @property
    def has_changes(self) -> bool:
        """Whether a change is not recorded yet."""
        return bool(self._changes)

    @property
    def settling(self) -> list[BreakerChange]:
        """The changes that the current settle records, oldest first."""
        return self._changes[: self._settling]

    def probe_room(self, ready: Sized, in_flight: int, now: datetime) -> int:
        """Return how many retries an open breaker may claim: one if a probe is due and it is the retries' turn."""
        due = not in_flight and not self.breaker.wait(now)
        return int(due and self.breaker.prefers_retries(ready))

    def failed(self, message: Outgoing, outcome: Failed, now: datetime) -> bool:
        """Note a failure; return whether it opened the breaker."""
        opened = self.breaker.failed(
            (message.transaction_id, message.position),
            outcome.error,
            now,
            unreachable=outcome.unreachable,
            retry_after_s=outcome.retry_after_s,
        )
        if opened:
            self._changed(None, now)
        return opened

    def succeeded(self, now: datetime) -> bool:
        """Note that the destination answered; return whether this closed the breaker."""
        opened_at = self.breaker.opened_at
        closed = self.breaker.succeeded()
        if closed:
            self._changed(opened_at, now)
        return closed

    def begin_settle(self) -> None:
        """Pass all changes to a settle; `recorded` follows if it is committed."""
        self._settling = len(self._changes)

    def recorded(self) -> None:
        """Drop the changes that the settle recorded."""
        self._changes = self._changes[self._settling :]
        self._settling = 0

    def _changed(self, was_opened_at: datetime | None, now: datetime) -> None:
        breaker, name = self.breaker, self._subscription
        change = "opened" if breaker.open else "closed"
        self._metrics.relay.breakers.labels(name, change).inc()
        log.warning(f"breaker_{change}", subscription=name, **({"because": breaker.because} if breaker.open else {}))
        self._changes.append(BreakerChange(breaker.opened_at, breaker.because, was_opened_at, now))
