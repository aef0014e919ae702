"""Take the outcomes of one stream's messages from the sender to the committed settle."""

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter

from app.delivery import Delivered, Failed, Outcome, Refused
from app.policy.delivery_retry import Disable, decide
from app.relay.breaker_control import BreakerControl
from app.relay.delivery_results import ages_s, jitter, log_failure, note_of, returned, settlement_of, taken_from
from app.relay.expiry import Expiry
from app.relay.send_queue import SendQueue
from app.relay.sender import Sender
from app.relay.settle_buffer import RECEIPT_WITHIN_S, SETTLE_WITHIN_S, SettleBuffer
from app.relay.stream_source import StreamContext
from app.relay.throughput import Rates
from app.relay.window import UNSETTLED_BYTES, WINDOW_LEAST, Window
from app.store.relay.log import Outgoing
from app.store.relay.results import DEAD, DELIVERED, NOTE, RETRY, Settlement
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import DeadLetterReason, SubscriptionState

# Nothing more is sent while this many outcomes wait for their settle: at least the first, else the second times what
# is sent at once.
UNSETTLED_LEAST, UNSETTLED_TIMES = 256, 2


class StreamOutcomes:
    """Turns outcomes into settlements, buffers them for the relay's settle, and releases their messages after it.

    It is the owner of the stream's sender. The stream sets `sender`, because each of both needs the other.

    Invariants: every message that leaves the queue or the sender gets a settlement or goes back to the queue. A message
    leaves the window or frees its key only after its settle is committed, so even what a crash sends twice comes in the
    order of its key. Once `lost`, nothing is recorded. Once `disabled_reason` is set, nothing is sent.
    """

    sender: Sender

    def __init__(
        self,
        context: StreamContext,
        subscription: Subscription,
        window: Window,
        queue: SendQueue,
        breaker: BreakerControl,
        expiry: Expiry | None,
        messages_at_once: int,
        *,
        is_replay: bool,
    ) -> None:
        self.closing = self.lost = False
        # Whether the subscription delivers; a paused one with limits only lets messages expire.
        self.sends = subscription.state is SubscriptionState.ACTIVE
        # Whether retries may be claimed before they are next due for a look.
        self.reclaim = False
        self.disabled_reason: str | None = None
        self.rates = Rates()
        self.buffer = SettleBuffer(context.request_turn)
        # Messages from delivery_retry that are not settled.
        self.unsettled_retries = 0
        # Bytes of their bodies.
        self.unsettled_retry_bytes = 0
        self._context, self._subscription = context, subscription
        self._window, self._queue, self._breaker, self._expiry = window, queue, breaker, expiry
        # While the breaker is open no more are read: so many that one is found that is well beyond those that failed.
        self.stock = max(messages_at_once, WINDOW_LEAST)
        self._unsettled_most = max(UNSETTLED_LEAST, UNSETTLED_TIMES * messages_at_once)
        self._settle_at = max(1, subscription.max_in_flight // 2)
        metrics = context.metrics.relay
        self._seconds = metrics.delivery_seconds.labels(subscription.name)
        self._delivered = metrics.deliveries.labels(subscription.name, DELIVERED)
        # What the metrics do not show yet: the durations of attempts, and how many of them delivered.
        self._new_durations_s: list[float] = []
        self._newly_delivered = 0
        # A replay sends messages that were committed long ago, so their age says nothing.
        self._commit_to_received = None if is_replay else metrics.commit_to_received.labels(subscription.name)

    @property
    def has_retry_room(self) -> bool:
        """Whether memory has room for the bodies of one more claim from delivery_retry."""
        return self.unsettled_retry_bytes < UNSETTLED_BYTES

    @property
    def has_room(self) -> bool:
        """Whether memory has room for one more read of the log."""
        return self._window.has_room(self._queue.deferred, self._queue.deferred_bytes)

    # What the sender asks (SenderOwner)

    def may_send(self, now: datetime) -> bool:
        """Return whether messages may be sent: not if the stream ends, or too many outcomes are not recorded."""
        if self.closing or self.disabled_reason is not None:
            return False
        return self.sends and len(self.buffer) < self._unsettled_most

    def sender_idle(self) -> None:
        """Ask for a turn if the stream ends, because nothing more is coming."""
        if self.closing:
            self.buffer.request_turn()

    def probe_due(self) -> None:
        """Ask for a turn: the next probe may be a retry."""
        self.reclaim = True
        self._context.request_turn()

    def record_outcome(self, message: Outgoing, outcome: Outcome, sent_at: datetime, now: datetime) -> None:
        """Queue what follows from an outcome, and pass it to the breaker."""
        self._new_durations_s.append(outcome.duration_ms / 1000)
        if type(outcome) is Delivered:
            self._destination_answered(now)
            self.rates.delivered += 1
            self._newly_delivered += 1
            self._finish(taken_from(message, outcome, sent_at))
            return
        self.rates.failed += 1
        if isinstance(outcome, Failed):
            was_open = self._breaker.open
            if self._breaker.failed(message, outcome, sent_at, now):
                self._breaker_opened(now)
            if was_open:
                self._probe_failed(message, outcome, sent_at, now)
                return
        elif isinstance(outcome, Refused):
            # The failure is this message's alone.
            if outcome.asked:
                self._destination_answered(now)
            elif self._breaker.breaker.probed_nothing():
                self.probe_due()
        self._failed(message, outcome, sent_at, now)

    # What the stream does with messages that are not sent

    def delay(self, message: Outgoing, now: datetime) -> None:
        """Queue a message of the log as a retry that is due at the producer's time."""
        if self._expiry is not None:
            self._expiry.leaving.add(message.offset)
        self._finish(Settlement(message, RETRY, 0, now, due_at=message.due_at))

    def put_back(self, messages: Sequence[Outgoing]) -> None:
        """Queue messages that were not sent as retries that are due already."""
        now = self._context.clock.now()
        for message in messages:
            self._finish(returned(message, now))

    def expire(
        self,
        message: Outgoing,
        reason: DeadLetterReason,
        now: datetime,
        *,
        queued: bool,
        error: str | None = None,
    ) -> None:
        """Queue a dead letter for a message that waited too long; `queued`: the next of its key waits for it."""
        self._finish(
            Settlement(message, DEAD, message.used, now, message.first_at, error=error, reason=reason, queued=queued)
        )

    # The settle

    def begin_settle(self) -> list[Settlement]:
        """Return the outcomes to record; `recorded` or `unrecorded` must follow."""
        self._show_metrics()
        self._breaker.begin_settle()
        return self.buffer.begin_settle()

    def recorded(self) -> None:
        """Release the messages whose outcomes are recorded."""
        settled = self.buffer.recorded()
        if self._expiry is not None:
            # First those that expired behind another message of their key: with `hold` they stop the next one.
            settled.sort(key=attrgetter("queued"))
        for settlement in settled:
            self._release(settlement)
        self._breaker.recorded()
        if self._commit_to_received is not None:
            self._commit_to_received.observe_all(ages_s(settled))

    def unrecorded(self) -> None:
        """Note that the settle failed, or may have failed: the same outcomes are settled once more."""
        self.buffer.restore()

    def drop(self) -> None:
        """Record nothing more, because the lease is over."""
        self.lost = True
        self._show_metrics()
        self.buffer.discard()

    def _show_metrics(self) -> None:
        """Add the new attempts to the metrics: together, because one call for each would take longer."""
        self._seconds.observe_all(self._new_durations_s)
        self._delivered.inc(self._newly_delivered)
        self._new_durations_s, self._newly_delivered = [], 0

    def _failed(self, message: Outgoing, outcome: Outcome, sent_at: datetime, now: datetime) -> None:
        decision = decide(
            outcome,
            used=message.used,
            first_at=message.first_at or sent_at,
            retry=self._subscription.retry,
            now=now,
            jitter=jitter(),
        )
        if isinstance(decision, Disable):
            self.disabled_reason = decision.reason
        settlement = settlement_of(message, outcome, decision, sent_at, now)
        self._report_failure(settlement)
        self._finish(settlement)
        if settlement.result is RETRY:
            self.put_back(self._queue.postponed(message))

    def _probe_failed(self, message: Outgoing, outcome: Failed, sent_at: datetime, now: datetime) -> None:
        """While the breaker is open a failure uses up no try; another message makes the next probe."""
        note, is_new = note_of(message, outcome, sent_at), message.claim is None
        crowded = len(self._queue.ready) + 1 >= self.stock
        if is_new and not (self.closing or crowded) and self.has_room:
            self._queue.ready.append(message)
        else:
            # Kept in memory, large or many messages would leave no room for one that succeeds. This one is due now, so
            # it comes after the others that are due.
            note.result, note.due_at, note.first_at = RETRY, now, message.first_at or sent_at
            self.put_back(self._queue.postponed(message))
            if is_new and crowded:
                # All of them may fail, and nothing behind them is read.
                for other in self._queue.remove_first(len(self._queue.ready) // 2):
                    self.put_back([other, *self._queue.postponed(other)])
        self._report_failure(note)
        self._finish(note)

    def _report_failure(self, settlement: Settlement) -> None:
        name = self._subscription.name
        self._context.metrics.relay.deliveries.labels(name, settlement.what or settlement.result).inc()
        log_failure(name, settlement)

    def _destination_answered(self, now: datetime) -> None:
        if self._breaker.succeeded(now):
            self.reclaim = True
            self.buffer.request_turn()

    def _breaker_opened(self, now: datetime) -> None:
        # Claimed messages would wait for long; each probe claims one for itself.
        for message in self._queue.remove_claimed():
            self.put_back([message, *self._queue.postponed(message)])
        self.sender.retry_in(self._breaker.breaker.wait(now).total_seconds())
        self.buffer.request_turn()

    def _finish(self, settlement: Settlement) -> None:
        """Queue an outcome for the next settle: an urgent one if messages wait for it, or nothing else is coming.

        The receipt of a first delivery is not urgent, even if nothing else is coming.
        """
        if self.lost:
            return
        within_s = SETTLE_WITHIN_S
        if self.closing or self._queue.ordered or len(self.buffer.finished) + 1 >= self._settle_at:
            within_s = 0.0
        elif settlement.result is DELIVERED and settlement.message.claim is None:
            within_s = RECEIPT_WITHIN_S
        elif self.sender.in_flight <= 1 and not self._queue.ready:
            within_s = 0.0
        self.buffer.add(settlement, within_s)

    def _release(self, settlement: Settlement) -> None:
        """Forget a message whose outcome is recorded, and queue the next of its key."""
        message, result = settlement.message, settlement.result
        if result is NOTE:
            return
        if message.claim is None:
            self._window.settled(message.offset)
            if self._expiry is not None:
                self._expiry.leaving.discard(message.offset)
        else:
            self.unsettled_retries -= 1
            self.unsettled_retry_bytes -= len(message.body)
        if result is RETRY:
            return
        if result is DEAD and settlement.what is None:
            self._context.metrics.relay.expired.labels(self._subscription.name, settlement.reason).inc()
        if settlement.queued:
            back, next_is_stored = self._queue.settled(message, dead=result is DEAD)
        else:
            back, next_is_stored = self._queue.expired(message)
        self.put_back(back)
        if next_is_stored:
            # The next of its key may be claimed now, before the next regular claim.
            self.reclaim = True
            self.buffer.request_turn()
