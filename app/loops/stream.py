"""One shard of a subscription, or a replay, in its holder's hands: a window that slides while deliveries are under way.

Invariants: at most `max_in_flight` requests at once; the checkpoint never passes an unsettled offset; nothing is sent
after the lease's end; with `ordered: key` the next message of a key goes only when the receipt of the former one is
committed, so that even what a crash sends twice comes in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import structlog

from app.breaker import Breaker
from app.clock import Clock
from app.delivery_policy import Disable, decide
from app.destinations.base import Delivered, Destination, Failed, Outcome, Refused
from app.loops.keys import Admission, Keys
from app.loops.outcomes import jitter, log_failure, note_of, settlement_of, taken_from
from app.loops.progress import Progress
from app.loops.rates import Rates
from app.loops.sender import Calls, Sender
from app.loops.unsettled import Unsettled
from app.pacing import Pacer
from app.store.delivery_retries import Claimant
from app.store.leases import Lease
from app.store.places import Place, Shard
from app.store.relay import NEWEST, Outgoing, Reader, Wanted, wants
from app.store.settling import Batch, Settlement
from app.store.subscriptions import Subscription
from app.telemetry import Metrics

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.tracing import Tracing

log = structlog.get_logger(__name__)

# How many messages one window brings: enough to keep every slot busy until the next.
WINDOW_LEAST, WINDOW_MOST = 64, 2000
# How many outcomes may wait for their settle before nothing more is sent, and how many messages may be in memory, in
# times of what is under way at once.
UNSETTLED_LEAST, UNSETTLED_TIMES, MEMORY_TIMES = 256, 2, 8


@dataclass(frozen=True, slots=True)
class Holder:
    """What every stream of a process shares: clock, metrics and spans, and how to call for the relay's next turn."""

    clock: Clock
    metrics: Metrics
    ring: Callable[[], None]
    tracing: "Tracing | None" = None


@dataclass(frozen=True, slots=True)
class Part:
    """What a stream delivers: a shard of a subscription under its lease, or a replay under that of shard 0.

    A replay ends at the offset `until`, and takes of the subscription's messages only those `wanted`.
    """

    subscription: Subscription
    shard: Shard
    lease: Lease
    until: int = NEWEST
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """A breaker that opened (`opened_at`, `because`) or, with None, closed (open since `was_opened_at`) at a time."""

    opened_at: datetime | None
    because: str | None
    was_opened_at: datetime | None
    at: datetime


class Stream:
    """Messages of one part; the relay reads for it and settles what it has, its sender delivers."""

    def __init__(
        self, holder: Holder, part: Part, destination: Destination, until: datetime, place: Place, pacer: Pacer | None
    ) -> None:
        subscription = part.subscription
        self.part, self.subscription, self.lease = part, subscription, part.lease
        self.closing = self.lost = False
        # Whether retries may be claimed before the next look at them is due.
        self.reclaim = False
        self.gone: str | None = None
        self.breaker = Breaker(place.opened_at, place.because)
        self.breaker_changes: list[BreakerChange] = []
        self.changes_told = 0
        self.rates = Rates()
        self.route = subscription.route
        hold = subscription.on_dead == "hold"
        self.keys = Keys(place.stored, hold_dead=hold, dead=place.dead) if subscription.ordered == "key" else None
        self._holder = holder
        self._progress = Progress(place.offset)
        self._settled_to = place.settled_to
        self._unsettled = Unsettled(holder.ring)
        self._retrying = 0
        self._limit = subscription.max_in_flight
        self._at_once = self._limit * max(1, destination.batch_max)
        self._seconds = holder.metrics.delivery_seconds.labels(subscription.name)
        self._delivered = holder.metrics.deliveries.labels(subscription.name, "delivered")
        sent_by = (subscription.name, part.shard.replay, destination, self._limit)
        self.sender = Sender(*sent_by, pacer, holder.clock, holder.tracing)
        self.sender.begin(Calls(self._may_send, self._ended, self._rested, self._probe_due), self.breaker, until)

    @property
    def position(self) -> int:
        """How far the log was read."""
        return self._progress.position

    @property
    def settled_to(self) -> int:
        """The offset up to which everything is settled or in retry; the stored checkpoint follows it."""
        return self._progress.target()

    @property
    def reader(self) -> Reader:
        """What it reads of the log."""
        shard = self.part.shard
        return Reader(
            shard.subscription_id,
            shard.replay,
            self.route,
            *shard.part,
            self._settled_to,
            self.part.until,
        )

    @property
    def shares_reads(self) -> bool:
        """Whether a window read for others at the same position serves it as well."""
        plain = self.part.shard.shards == 1 and not self.part.shard.replay and self.route.headers is None
        return plain and self.position >= self._settled_to

    @property
    def capacity(self) -> int:
        """How many messages a window should bring."""
        return max(WINDOW_LEAST, min(WINDOW_MOST, 4 * self._at_once))

    @property
    def ended(self) -> bool:
        """Whether a closing stream has nothing left to wait for or to write."""
        return self.closing and self.sender.resting and not (len(self._unsettled) or self._target_ahead())

    def hungry(self, head: int) -> bool:
        """Tell whether the log has something to read for it and it has room."""
        if self.closing or self.lost or self.gone is not None or (self.keys is not None and self.keys.full):
            return False
        # An open breaker looks for a message that is well beyond those that failed.
        stock = max(self._at_once, WINDOW_LEAST) if self.breaker.open else self._at_once
        roomy = len(self.sender.ready) < stock and len(self._progress) < MEMORY_TIMES * self.capacity
        return min(head, self.part.until) > self.position and roomy

    def claimant(self, now: datetime) -> Claimant | None:
        """Return how many messages to be retried it can take: half of its slots, so that new ones are not starved.

        With an open breaker: one, when a probe is due and it is the retries' turn.
        """
        if self.closing or self.lost or self.gone is not None:
            return None
        most, subscription, shard = (self._limit + 1) // 2, self.subscription, self.part.shard
        if self.breaker.open:
            due = not self.sender.under_way and not self.breaker.wait(now)
            most = int(due and self.breaker.prefers_retries(self.sender.ready))
        elif subscription.rate_per_s is not None:
            most = min(most, max(1, int(subscription.rate_per_s)))
        room = most - self._retrying
        if room <= 0:
            return None
        ordered, hold = self.keys is not None, subscription.on_dead == "hold"
        return Claimant(shard.subscription_id, shard.replay, *shard.part, room, ordered, hold)

    def wants_settle(self, now: datetime) -> bool:
        """Tell whether there are outcomes to record or a checkpoint to move."""
        if self.lost or self._unsettled.settling:
            return False
        return bool(self._unsettled.finished or self.breaker_changes) or self._checkpoint_due(now)

    def needs_turn(self, head: int, now: datetime) -> bool:
        """Tell whether the relay should not rest: it was called, or there is something to read."""
        if self.lost:
            return False
        return self._unsettled.ringing or self.hungry(head) or (self.closing and self.wants_settle(now))

    def feed(self, messages: Sequence[Outgoing], reached: int | None, now: datetime) -> None:
        """Take what a window brought, up to the capacity."""
        if self.closing or self.lost:
            return
        if len(messages) > self.capacity:
            messages = messages[: self.capacity]
            reached = messages[-1].offset
        if self.part.wanted is not None:
            messages = [message for message in messages if wants(self.part.wanted, message)]
        self._progress.read(messages, reached)
        for message in messages:
            if message.due_at is not None and message.due_at > now:
                self._finish(Settlement(message, "retry", 0, now, due_at=message.due_at))
            else:
                self._admit(message, now)
        self.sender.fill()

    def retry(self, messages: Sequence[Outgoing], now: datetime) -> None:
        """Take messages that were claimed from delivery_retry; they go before new ones."""
        self._retrying += len(messages)
        waiting = list(self.sender.ready)
        self.sender.ready.clear()
        for message in messages:
            self._admit(message, now)
        self.sender.ready.extend(waiting)
        self.sender.fill()

    def renewed(self, until: datetime) -> None:
        """Note that the lease was prolonged."""
        self.sender.lease_until = until
        self.sender.fill()

    def close(self) -> None:
        """Take no more; what is in flight is finished and settled, what is not sent goes back."""
        if self.closing:
            return
        self.closing = True
        unsent = [*self.sender.ready, *(self.keys.clear() if self.keys is not None else [])]
        self.sender.ready.clear()
        for message in sorted(unsent, key=lambda message: message.offset, reverse=True):
            if message.claim is None:
                self._progress.unread(message)
            else:
                self._put_back([message])
        self._unsettled.ring()

    def drop(self) -> None:
        """Let go of everything at once: the lease is given back, or another's, which will send what has no receipt."""
        self.lost = True
        self.sender.stop()
        self._unsettled.drop()

    async def ends(self) -> None:
        """Close the destination once nothing is under way."""
        await self.sender.rested()
        await self.sender.destination.close()

    def batch(self, now: datetime) -> Batch:
        """Hand out what is to be recorded; `recorded` or `unrecorded` says what became of it."""
        settlements = self._unsettled.hand_out()
        self.changes_told = len(self.breaker_changes)
        target = self._progress.target({s.message.offset for s in settlements if s.result != "note"})
        move = target > self._progress.checkpoint and (self.closing or self._progress.may_move(now))
        shard = self.part.shard
        return Batch(
            self.lease,
            shard.subscription_id,
            shard.replay,
            shard.shards,
            shard.shard,
            target if move else None,
            self.sender.destination.address,
            settlements,
        )

    def recorded(self, target: int | None, now: datetime) -> None:
        """Note that what `batch` handed out is committed, with the checkpoint at `target` (None: left alone)."""
        for settlement in self._unsettled.settled():
            self._forget(settlement)
        if target is not None:
            self._progress.moved(target, now)
        self.breaker_changes = self.breaker_changes[self.changes_told :]
        self.sender.fill()

    def unrecorded(self) -> None:
        """Note that it is not known whether it is."""
        self._unsettled.again()

    def lag(self, head: int, now: datetime) -> tuple[float, int]:
        """Return how far behind the log's head it is: the age of the oldest unsettled message in seconds, and entries
        not read (of any topic) with messages not settled."""
        oldest = self._progress.oldest_at() or now
        return max(0.0, (now - oldest).total_seconds()), max(0, head - self.position) + len(self._progress)

    def _target_ahead(self) -> bool:
        return self._progress.target() > self._progress.checkpoint

    def _checkpoint_due(self, now: datetime) -> bool:
        return (self.closing or self._progress.may_move(now)) and self._target_ahead()

    def _may_send(self, now: datetime) -> bool:
        return self.gone is None and len(self._unsettled) < max(UNSETTLED_LEAST, UNSETTLED_TIMES * self._at_once)

    def _rested(self) -> None:
        if self._unsettled.finished or self.closing:
            self._unsettled.ring()

    def _probe_due(self) -> None:
        # Perhaps a retry makes the probe.
        self.reclaim = True
        self._holder.ring()

    def _admit(self, message: Outgoing, now: datetime) -> None:
        admission = Admission.GO if self.keys is None else self.keys.admit(message)
        if admission is Admission.GO:
            self.sender.ready.append(message)
        elif admission is Admission.HOLD:
            self._put_back([message])

    def _forget(self, settlement: Settlement) -> None:
        message, result = settlement.message, settlement.result
        if result == "note":
            return
        if message.claim is None:
            self._progress.settled(message.offset)
        else:
            self._retrying -= 1
        if self.keys is None or result == "retry":
            return
        following, back = self.keys.over(message, dead=result == "dead")
        self._put_back(back)
        if following is not None:
            self.sender.ready.append(following)
        elif message.claim is not None and self.keys.has_stored(message.key):
            # The next of its key may be claimed now; no need to wait for the next look.
            self.reclaim = True
            self._unsettled.ring()

    def _put_back(self, messages: Sequence[Outgoing]) -> None:
        """Put messages that were not sent into delivery_retry, or back there.

        They are due already, at a time in the past whatever the clocks of other workers say: so they keep later
        messages of their key back.
        """
        now = self._holder.clock.now()
        for message in messages:
            due_at = min(message.committed_at, now)
            self._finish(Settlement(message, "retry", message.used, now, message.first_at, due_at=due_at))

    def _put_off(self, message: Outgoing) -> None:
        """Note that a message is tried again later; the others of its key go back with it."""
        if self.keys is not None:
            self._put_back(self.keys.put_off(message))

    def _ended(self, message: Outgoing, outcome: Outcome, at: datetime, now: datetime) -> None:
        self._seconds.observe(outcome.duration_ms / 1000)
        if type(outcome) is Delivered:
            self._reachable(now)
            self.rates.delivered += 1
            self._delivered.inc()
            self._finish(taken_from(message, outcome, at))
            return
        self.rates.failed += 1
        if isinstance(outcome, Failed):
            charged = not self.breaker.open
            self._blame(message, outcome, now)
            if not charged:
                self._uncharged(message, outcome, at, now)
                return
        elif isinstance(outcome, Refused):
            # It answered, and this message alone is to blame.
            self._reachable(now)
        self._failed(message, outcome, at, now)

    def _failed(self, message: Outgoing, outcome: Outcome, at: datetime, now: datetime) -> None:
        decision = decide(
            outcome,
            used=message.used,
            first_at=message.first_at or at,
            retry=self.subscription.retry,
            now=now,
            jitter=jitter(),
        )
        if isinstance(decision, Disable):
            self.gone = decision.reason
        settlement = settlement_of(message, outcome, decision, at, now)
        self._note_failure(settlement)
        self._finish(settlement)
        if settlement.result == "retry":
            self._put_off(message)

    def _uncharged(self, message: Outgoing, outcome: Failed, at: datetime, now: datetime) -> None:
        """While the breaker is open a failure uses up no try; another message makes the next probe."""
        note = note_of(message, outcome, at)
        if message.claim is None and not self.closing:
            self.sender.ready.append(message)
        else:
            # It goes back, behind the others that are due.
            note.result, note.due_at, note.first_at = "retry", now, message.first_at or at
            self._put_off(message)
        self._note_failure(note)
        self._finish(note)

    def _note_failure(self, settlement: Settlement) -> None:
        name = self.subscription.name
        self._holder.metrics.deliveries.labels(name, settlement.what or settlement.result).inc()
        log_failure(name, settlement)

    def _blame(self, message: Outgoing, outcome: Failed, now: datetime) -> None:
        if self.breaker.failed(
            (message.transaction_id, message.position),
            outcome.error,
            now,
            unreachable=outcome.unreachable,
            retry_after_s=outcome.retry_after_s,
        ):
            self._breaker_changed(None, now)

    def _reachable(self, now: datetime) -> None:
        opened_at = self.breaker.opened_at
        if self.breaker.succeeded():
            self._breaker_changed(opened_at, now)

    def _breaker_changed(self, opened_at: datetime | None, now: datetime) -> None:
        breaker, name = self.breaker, self.subscription.name
        what = "opened" if breaker.open else "closed"
        self._holder.metrics.breakers.labels(name, what).inc()
        log.warning(f"breaker_{what}", subscription=name, **({"because": breaker.because} if breaker.open else {}))
        self.breaker_changes.append(BreakerChange(breaker.opened_at, breaker.because, opened_at, now))
        if breaker.open:
            # What was claimed would wait for long; the probes claim for themselves.
            ready = list(self.sender.ready)
            self.sender.ready.clear()
            self.sender.ready.extend(message for message in ready if message.claim is None)
            for message in ready:
                if message.claim is not None:
                    self._put_back([message])
                    self._put_off(message)
            self.sender.look_again(breaker.wait(now).total_seconds())
        else:
            self.reclaim = True
        self._unsettled.ring()

    def _finish(self, settlement: Settlement) -> None:
        """Queue an outcome for the next settle; at once if nothing else is coming, or others wait for it."""
        if self.lost:
            return
        enough = len(self._unsettled.finished) + 1 >= max(1, self._limit // 2)
        last = self.sender.under_way <= 1 and not self.sender.ready
        self._unsettled.add(settlement, urgent=enough or last or self.keys is not None)
