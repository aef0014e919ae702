"""The circuit breaker of one stream, with its changes that are not recorded yet."""

from collections.abc import Sized
from dataclasses import dataclass
from datetime import datetime

import structlog

from app.delivery import Failed
from app.observability.metrics import Metrics
from app.policy.circuit_breaker import Breaker
from app.policy.delivery_retry import POSTPONED_AT_MOST
from app.store.relay.checkpoints import StoredBreaker
from app.store.relay.log import Outgoing

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """A change at the time `at`: the state from then on, and since when the destination counted as down before.

    `announced`: whether people learn of it. They do not of a destination that only limits its rate. `only_pause`: an
    open breaker has another pause.
    """

    stored: StoredBreaker
    was_opened_at: datetime | None
    at: datetime
    announced: bool = False
    only_pause: bool = False


class BreakerControl:
    """Feeds outcomes to a breaker, and keeps each change until a settle has recorded it.

    Invariants: every change that is announced is logged and counted once, when it happens. A change is dropped only
    after a settle that records it is committed.
    """

    def __init__(self, subscription: str, metrics: Metrics, stored: StoredBreaker) -> None:
        self.breaker = Breaker(stored.opened_at, stored.because, stored.limited_since, stored.paused_until)
        self._subscription, self._metrics = subscription, metrics
        # The last answer that asked for a pause, and the last failure that counted. A call has one outcome for all of
        # its messages.
        self._asking: Failed | None = None
        self._counted: Failed | None = None
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

    def failed(self, message: Outgoing, outcome: Failed, sent_at: datetime, now: datetime) -> bool:
        """Note a failure; return whether it opened the breaker."""
        breaker, number = self.breaker, (message.transaction_id, message.position)
        was_down, asks = breaker.down, self._asks(message, outcome, sent_at, now)
        if asks is None:
            # Messages that are sent again in a smaller call count once: one of them may be at fault. Where none is,
            # as without a connection, each counts: then few messages use up a try before the breaker opens.
            if outcome is self._counted and outcome.retry_after_s is not None:
                return False
            self._counted = outcome
            opened = breaker.failed(number, outcome.error, now, unreachable=outcome.unreachable)
        elif outcome is self._asking:
            return False
        else:
            self._asking = outcome
            opened = breaker.asked_for_pause(number, outcome.error, asks, now)
        if breaker.down and not was_down:
            self._changed(None, now)
        elif opened:
            self._store(now)
            log.info("destination_limits", subscription=self._subscription, error=outcome.error)
        elif breaker.open and asks is not None:
            self._store(now, only_pause=True)
        return opened

    def succeeded(self, now: datetime) -> bool:
        """Note that the destination answered; return whether this closed the breaker."""
        opened_at = self.breaker.opened_at
        closed = self.breaker.succeeded()
        if opened_at is not None:
            self._changed(opened_at, now)
        elif closed:
            self._store(now)
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
        change = "opened" if breaker.down else "closed"
        self._metrics.relay.breakers.labels(name, change).inc()
        log.warning(f"breaker_{change}", subscription=name, **({"because": breaker.because} if breaker.down else {}))
        self._store(now, was_opened_at, announced=True)

    def _store(
        self,
        now: datetime,
        was_opened_at: datetime | None = None,
        *,
        announced: bool = False,
        only_pause: bool = False,
    ) -> None:
        breaker = self.breaker
        stored = StoredBreaker(breaker.opened_at, breaker.because, breaker.limited_since, breaker.paused_until)
        self._changes.append(BreakerChange(stored, was_opened_at, now, announced, only_pause))

    def _asks(self, message: Outgoing, outcome: Failed, sent_at: datetime, now: datetime) -> float | None:
        """Return the seconds of the pause that an answer asks for; None if it is a failure like others.

        So is one about a message that may wait no longer: it uses up a try while the breaker is closed.
        """
        waits = self.open or now < (message.first_at or sent_at) + POSTPONED_AT_MOST
        # Without a status nothing was sent.
        return outcome.retry_after_s if outcome.status is not None and waits else None
