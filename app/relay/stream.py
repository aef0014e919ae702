"""One shard of a subscription, or one replay, while a worker holds its lease: read, send, settle."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from app.destinations.base import Destination
from app.policy.rate_limiter import AnyPacer
from app.relay.breaker_control import BreakerControl
from app.relay.claimed_retries import ClaimedRetries
from app.relay.expiry import Expiry, expiry_of
from app.relay.key_order import KeyOrder
from app.relay.outcomes import StreamOutcomes
from app.relay.send_queue import SendQueue
from app.relay.sender import Sender, SenderOptions
from app.relay.stream_source import StreamContext, StreamSource
from app.relay.window import MEMORY_TIMES, UNSETTLED_BYTES, Window
from app.store.relay.checkpoints import StartPosition
from app.store.relay.log import NEWEST, Outgoing, takes
from app.store.relay.results import NOTE, Batch
from app.store.relay.retries import Claimant
from app.verdicts import DeadLetterReason, OnDead, Ordered

# How far a stream reads on in the log, in entries after the first message that is not settled, while messages wait
# without their bodies: the next holder reads that part again.
AHEAD_MOST = 1_000_000
# How often messages without bodies are looked through for those that have waited too long.
LOOK_THROUGH_EVERY = timedelta(seconds=1)


class Stream:
    """A stream of messages from the log to one destination. The relay reads and settles for it; its sender delivers.

    Its parts have invariants of their own: `window` (what was read and is not settled), `queue` (what may be sent, in
    the order of keys), `breaker`, `sender` (what is in flight), and `outcomes` (what is not recorded).

    Invariants: once `closing`, nothing new is read or sent. Once `lost`, nothing is sent or recorded. Once the
    subscription is disabled, nothing is read or sent.
    """

    def __init__(
        self,
        context: StreamContext,
        source: StreamSource,
        destination: Destination,
        lease_until: datetime,
        start: StartPosition,
        pacer: AnyPacer | None,
    ) -> None:
        subscription = source.subscription
        self.source, self.subscription, self.lease = source, subscription, source.lease
        self._limit = subscription.max_in_flight
        self._at_once = self._limit * max(1, destination.batch_max)
        self._hold_dead = subscription.on_dead is OnDead.HOLD
        ordered = subscription.ordered is Ordered.KEY
        keys = KeyOrder(start.stored, reached=start.offset, hold_dead=self._hold_dead, dead=start.dead)
        self.queue = SendQueue(keys if ordered else None)
        self.window = Window(source, start.offset, start.settled_to, self._at_once)
        # So many messages that wait for their keys keep their bodies, once the memory is full; the rest of the memory
        # is for messages of other keys.
        self._waiting_most = MEMORY_TIMES * self.window.capacity // 2, UNSETTLED_BYTES // 2
        self.expiry = expiry_of(source, self.window)
        self._looked_through_at: datetime | None = None
        self._claimed = ClaimedRetries()
        # When its retries were claimed in vain, and for how long no regular claim follows.
        self._claim_rest: tuple[datetime, timedelta] | None = None
        self.breaker = BreakerControl(subscription.name, context.metrics, start.breaker)
        replay = source.shard.replay
        self.outcomes = StreamOutcomes(
            context,
            subscription,
            self.window,
            self.queue,
            self.breaker,
            self.expiry,
            self._at_once,
            is_replay=bool(replay),
        )
        options = SenderOptions(subscription.name, replay, self._limit, pacer, context.clock, context.tracing)
        self.sender = Sender(self.outcomes, destination, self.queue.ready, self.breaker.breaker, lease_until, options)
        self.outcomes.sender = self.sender

    # What the relay asks

    @property
    def closing(self) -> bool:
        """Whether nothing new is read or sent."""
        return self.outcomes.closing

    @property
    def lost(self) -> bool:
        """Whether the lease is over."""
        return self.outcomes.lost

    @property
    def position(self) -> int:
        """The offset up to which the log was read."""
        return self.window.position

    @property
    def settled_to(self) -> int:
        """The offset up to which everything is settled or in retry; the stored checkpoint follows it."""
        return self.window.settled_to

    @property
    def ended(self) -> bool:
        """Whether a closing stream has nothing left to wait for or to record."""
        return self.closing and self.sender.idle and not (len(self.outcomes.buffer) or self.window.checkpoint_lags())

    @property
    def _reads(self) -> bool:
        return not (self.closing or self.lost or self.outcomes.disabled_reason is not None)

    def wants_messages(self, head: int) -> bool:
        """Return whether the log, whose last offset is `head`, has something to read and the stream has room for it."""
        if not self._reads or self.queue.full:
            return False
        if self.queue.deferred and self.position - self.settled_to > AHEAD_MOST:
            return False
        stock = self.outcomes.stock if self.breaker.open else self._at_once
        return self.window.is_behind(head) and len(self.queue.ready) < stock and self.outcomes.has_room

    def claimant(self, head: int, now: datetime) -> Claimant | None:
        """Return how many retries the stream can take: half of its slots, so that new messages have the others.

        With an open breaker: one, when a probe is due and it is the retries' turn. None if there is no room, or a claim
        in vain was not long ago. In the order of keys, the messages of one key use one slot, and those after the
        stream's position are left: earlier ones may be still in the log only. At the end of the log, whose last offset
        is `head`, none can be: retries may be after it, if the log of their day is gone, or a person ended their replay
        before them.
        """
        if not (self._reads and self.outcomes.sends) or self._rests_from_claims(now):
            return None
        most, rate = (self._limit + 1) // 2, self.subscription.rate_per_s
        if self.breaker.open:
            most = self.breaker.probe_room(self.queue.ready, self.sender.in_flight, now)
        elif rate is not None:
            most = min(most, max(1, int(rate)))
        used = self.outcomes.unsettled_retries
        if used and self.queue.ordered:
            used = self._claimed.keys
        room, shard = most - used, self.source.shard
        if room <= 0 or not self.outcomes.has_retry_room:
            return None
        return Claimant(
            lease=self.lease,
            subscription_id=shard.subscription_id,
            replay=shard.replay,
            shards=shard.divided_by,
            shard=shard.remainder,
            room=room,
            ordered=self.queue.ordered,
            hold=self._hold_dead,
            reached=self.position if self.window.is_behind(head) else NEWEST,
        )

    def _rests_from_claims(self, now: datetime) -> bool:
        if self._claim_rest is None or self.outcomes.reclaim:
            return False
        at, rest = self._claim_rest
        return abs(now - at) < rest

    def wants_settle(self, now: datetime) -> bool:
        """Return whether there are outcomes to record or a checkpoint to move."""
        buffer = self.outcomes.buffer
        if self.lost or buffer.settling:
            return False
        return buffer.has_unsettled or self.breaker.has_changes or self._checkpoint_due(now)

    def rests(self, head: int) -> bool:
        """Return whether the stream has nothing to do before it is woken, or the log grows beyond `head`."""
        outcomes, window = self.outcomes, self.window
        return not (
            outcomes.closing
            or outcomes.lost
            or outcomes.reclaim
            or outcomes.unsettled_retries
            or len(outcomes.buffer)
            or self.expiry is not None
            or self.breaker.open
            or self.breaker.has_changes
            or window.unsettled
            or window.checkpoint_lags()
            or window.is_behind(head)
        )

    def settle_due(self, now: datetime) -> bool:
        """Return whether the relay should settle in this turn, and not wait for more outcomes."""
        buffer = self.outcomes.buffer
        if self.lost or buffer.settling:
            return False
        ends = self.closing and buffer.has_unsettled
        return buffer.due or ends or self.breaker.has_changes or self._checkpoint_due(now)

    def needs_turn(self, head: int, now: datetime) -> bool:
        """Return whether the relay should take its next turn now: outcomes wait for it, or there is more to read."""
        if self.lost:
            return False
        return (
            self.outcomes.buffer.due
            or self.wants_messages(head)
            or (self.closing and self.wants_settle(now))
            or (self.expiry is not None and self.expiry.more)
            or bool(self.bodies_to_read())
        )

    def bodies_to_read(self) -> list[Outgoing]:
        """Return the messages without bodies whose bodies are needed now; `bodies_read` must follow."""
        if not (self._reads and self.queue.deferred):
            return []
        return self.queue.bodies_to_read(*self._waiting_most, ahead=self.outcomes.has_room)

    # What the relay does

    def accept_window(self, messages: Sequence[Outgoing], reached: int | None, now: datetime) -> None:
        """Take the messages of one read, up to the capacity; the log was read up to `reached`."""
        if self.closing or self.lost:
            return
        accepted, expiry = self.window.accept(messages, reached), self.expiry
        if expiry is not None:
            expiry.read(len(accepted))
        for message in accepted:
            if message.due_at is not None and message.due_at > now:
                self.outcomes.delay(message, now)
            elif not self.queue.admit(message):
                self.outcomes.put_back([message])
        self.queue.reach(self.position)
        if expiry is not None and expiry.may_expire(now):
            self._expire_unsent(expiry, now)
        self._fill()

    def bodies_read(self, messages: Sequence[Outgoing], now: datetime) -> None:
        """Take messages with the bodies that were read. Meanwhile some may have waited too long."""
        if self.closing or self.lost:
            return
        self.queue.bodies_read(messages)
        if self.expiry is not None and self.expiry.may_expire(now):
            self._expire_unsent(self.expiry, now)
        self._fill()

    def accept_handed(self, messages: Sequence[Outgoing], now: datetime) -> bool:
        """Take what follows the stream's position in messages that were committed just now, with offsets in sequence.

        Return whether nothing is left to read up to the last of them. A stream does not take messages beyond a gap,
        because there may be messages in it that are not known here; nor if only the database can choose its messages.
        """
        last = messages[-1].offset
        if not (self._reads and self.window.is_behind(last)):
            return True
        position = self.position
        if not (self.window.shares_reads and messages[0].offset <= position + 1 and self.wants_messages(last)):
            return False
        route = self.window.route
        new = messages if messages[0].offset > position else [m for m in messages if m.offset > position]
        self.accept_window([message for message in new if takes(route, message)], last, now)
        return self.position >= last

    def retry(self, claimed: Sequence[Outgoing], until: datetime, now: datetime) -> None:
        """Take messages that were claimed from delivery_retry until a time; they go before new ones."""
        # There was something to claim, and there may be more.
        self._claim_rest = None
        messages = self._claimed.take(claimed, until, now)
        self.outcomes.unsettled_retries += len(messages)
        self.outcomes.unsettled_retry_bytes += sum(len(message.body) for message in messages)
        if self.queue.ordered and len(self.outcomes.buffer):
            messages = self._behind_no_retry(messages, now)
        self.queue.admit_retries(messages)
        self.sender.fill()

    def rest_claims(self, rest: timedelta, now: datetime) -> None:
        """Note that a claim at `now` passed the stream's rows in vain: no regular one follows before `rest` is over."""
        self._claim_rest = now, rest

    def _behind_no_retry(self, claimed: Sequence[Outgoing], now: datetime) -> list[Outgoing]:
        """Give back claimed messages whose key has a retry before them that is not recorded; return the others.

        The claim did not see that retry: a delayed message can be due in this moment.
        """
        lowest = self.outcomes.buffer.first_retries(now)
        early = [m for m in claimed if m.key is not None and lowest.get(m.key, m.offset) < m.offset]
        for message in early:
            self.queue.returned(message)
        self.outcomes.put_back(early)
        return [message for message in claimed if message not in early] if early else list(claimed)

    def expire(
        self, claimed: Sequence[tuple[Outgoing, DeadLetterReason, str | None]], until: datetime, now: datetime
    ) -> None:
        """Queue dead letters for retries that were claimed until a time, but not for those that are being sent."""
        new = {message.offset for message in self._claimed.take((message for message, _, _ in claimed), until, now)}
        self.outcomes.unsettled_retries += len(new)
        for message, reason, error in claimed:
            if message.offset in new:
                self.outcomes.expire(message, reason, now, queued=False, error=error)

    def expire_unsent(self, now: datetime) -> None:
        """Queue dead letters for messages in memory that must not wait any longer. What is being sent is finished."""
        if self.expiry is not None:
            self._expire_unsent(self.expiry, now)

    def renewed(self, until: datetime) -> None:
        """Note that the lease was extended."""
        self.sender.lease_until = until
        self.sender.fill()

    def close(self) -> None:
        """Take no more. What is in flight is finished and settled; what is not sent goes back."""
        if self.closing:
            return
        self.outcomes.closing = True
        for message in self.queue.remove_all():
            if message.claim is None:
                self.window.unread(message)
            else:
                self.outcomes.put_back([message])
        self.outcomes.buffer.request_turn()

    def drop(self) -> None:
        """Stop at once, because the lease is over: its next holder sends what has no receipt."""
        self.outcomes.drop()
        self.sender.stop()

    async def close_destination(self) -> None:
        """Close the destination once nothing is in flight."""
        await self.sender.wait_idle()
        await self.sender.destination.close()

    def batch(self, now: datetime) -> Batch:
        """Return what is to be recorded; `recorded` or `unrecorded` must follow."""
        settlements = self.outcomes.begin_settle()
        target = self.window.checkpoint_after({s.message.offset for s in settlements if s.result is not NOTE})
        shard = self.source.shard
        return Batch(
            lease=self.lease,
            subscription_id=shard.subscription_id,
            replay=shard.replay,
            shards=shard.shards,
            shard=shard.shard,
            target=target if self.closing or self.window.checkpoint_may_move(now) else None,
            matches_since=self.subscription.matches_since,
            address=self.sender.destination.address,
            settlements=settlements,
            since=self.source.since,
        )

    def recorded(self, target: int | None, now: datetime) -> None:
        """Note that the batch is committed, with the checkpoint at `target` (None: not moved).

        If the topics or filters have changed, the stored checkpoint stayed, and this stream is about to be closed. It
        may end all the same: the next one starts at the stored checkpoint.
        """
        self._claimed.settled(self.outcomes.buffer.settling)
        self.outcomes.recorded()
        if target is not None:
            self.window.checkpoint_moved(target, now)
        if self.expiry is not None and not self.closing and self.expiry.may_expire(now):
            # The next messages of keys are ready now.
            self._expire_unsent(self.expiry, now)
        self._fill()

    def unrecorded(self) -> None:
        """Note that the settle of the batch failed, or may have failed: the same outcomes are settled once more."""
        self.outcomes.unrecorded()

    def _fill(self) -> None:
        """Start slots. If some stay free because memory is full of messages that wait for keys, drop such bodies."""
        self.sender.fill()
        free = not self.queue.ready and self.sender.has_free_slot
        if free and not (self.breaker.open or self.outcomes.has_room):
            self.queue.defer(*self._waiting_most)

    def _expire_unsent(self, expiry: Expiry, now: datetime) -> None:
        """Queue dead letters for messages in memory that must not wait any longer.

        A message behind another of its key is left out during a settle, and before one that is repeated: its dead
        letter would be recorded later than the outcome of that message, and the next one of the key could pass it.
        """
        # Asked first: a look that leaves them out must not put off the next one.
        through = not self.outcomes.buffer.records_earlier and (expiry.has_surplus or self._may_look_through(now))
        unsent = self.queue.unsent(waiting=through)
        reasons = expiry.expired(unsent, now)
        if not reasons:
            return
        ready = self.queue.remove(reasons)
        for message in unsent:
            if message.offset in reasons:
                self.outcomes.expire(
                    message,
                    reasons[message.offset],
                    now,
                    queued=message.offset in ready,
                    error=message.last_error,
                )

    def _may_look_through(self, now: datetime) -> bool:
        """Return whether to look through what waits for keys: not after each message, if thousands wait."""
        at = self._looked_through_at
        if self.queue.deferred and at is not None and abs(now - at) < LOOK_THROUGH_EVERY:
            return False
        self._looked_through_at = now
        return True

    def _checkpoint_due(self, now: datetime) -> bool:
        return (self.closing or self.window.checkpoint_may_move(now)) and self.window.checkpoint_lags()
