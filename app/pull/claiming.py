"""Hand out messages of a subscription to a consumer that asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from uuid import UUID

from app.clock import Clock
from app.database.connection import Connection
from app.pull.handles import handle_of
from app.pull.pacing import CLAIMED_AT, paced_until_of, pacer_of
from app.store.pull import ordered_claims
from app.store.pull.claims import HeldMessage, NewClaim, claim_new, look, pace, paced_until
from app.store.pull.held_retries import StoredClaim, claim_stored
from app.store.relay.log import SPAN, Outgoing
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import OnDead, Ordered, SubscriptionState

# A claim reads this many log entries for each message that it has room for, and at least SPAN_LEAST. While it finds
# none that the subscription takes, it reads SPAN entries at a time, this many times.
SPAN_TIMES, SPAN_LEAST, SPANS_AT_ONCE = 2, 64, 25


@dataclass(slots=True)
class HandedOut:
    """A message for a consumer, with its receipt handle. `replay` 0: the live delivery. Not changed once it is made."""

    message: Outgoing
    replay: int
    handle: str


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """What a claim got. `more`: there may be more to claim now. `until`: the messages are the consumer's until then."""

    messages: Sequence[HandedOut]
    more: bool
    until: datetime


async def claim(
    connection: Connection, clock: Clock, subscription: Subscription, at_most: int, invisible: timedelta
) -> ClaimedBatch:
    """Claim up to `at_most` messages: retries and delayed messages that are due, or else new ones from the log.

    Not both, so that one statement claims all and none is claimed for an answer that fails. With a rate, only as many
    as it allows now.
    """
    if subscription.state is not SubscriptionState.ACTIVE:
        return ClaimedBatch([], False, clock.now() + invisible)
    if subscription.rate_per_s is None:
        return await _claim(connection, clock, subscription, at_most, invisible)
    async with connection.transaction():
        until = await paced_until(connection, subscription.subscription_id)
        now = clock.now()
        pacer = pacer_of(subscription.rate_per_s, until, now)
        room = pacer.room(CLAIMED_AT, at_most)
        if room == 0:
            return ClaimedBatch([], False, now + invisible)
        claimed = await _claim(connection, clock, subscription, room, invisible)
        if claimed.messages:
            pacer.sent(CLAIMED_AT, len(claimed.messages))
            await pace(connection, subscription.subscription_id, paced_until_of(pacer, now))
    return claimed


async def _claim(
    connection: Connection, clock: Clock, subscription: Subscription, at_most: int, invisible: timedelta
) -> ClaimedBatch:
    nothing = ClaimedBatch([], False, clock.now() + invisible)
    found = await look(connection, subscription.subscription_id, clock.now())
    if found is None:
        return nothing
    if found.stored:
        stored, now = await _claim_stored(connection, clock, subscription, at_most, invisible)
        if stored:
            messages = [_handed_out(one.message, one.replay, 0, found.handle_key, subscription, now) for one in stored]
            return ClaimedBatch(messages, True, now + invisible)
    span = max(SPAN_LEAST, SPAN_TIMES * at_most)
    for _ in range(SPANS_AT_ONCE if found.logged else 0):
        new, now = await _claim_new(connection, clock, subscription, at_most, span, invisible)
        if new.claim_id is not None:
            key = found.handle_key
            messages = [
                _handed_out(message, 0, place, key, subscription, now, epoch=new.claim_id)
                for place, message in enumerate(new.messages, 1)
            ]
            return ClaimedBatch(messages, new.more, now + invisible)
        if not new.more:
            return nothing
        span = max(span, SPAN)
    return ClaimedBatch([], found.logged, clock.now() + invisible)


async def _claim_stored(
    connection: Connection, clock: Clock, subscription: Subscription, at_most: int, invisible: timedelta
) -> tuple[list[StoredClaim], datetime]:
    """Claim rows of delivery_retry; return them with the time of the claim."""
    subscription_id = subscription.subscription_id
    if subscription.ordered is Ordered.NONE:
        now = clock.now()
        return await claim_stored(connection, subscription_id, at_most, now + invisible, now), now
    async with connection.transaction():
        await ordered_claims.lock(connection, subscription_id)
        # After the lock, so that no message is claimed before the receipt of the one before it.
        now = clock.now()
        hold = subscription.on_dead is OnDead.HOLD
        stored = await ordered_claims.claim_stored_in_order(
            connection, subscription_id, at_most, now + invisible, now, hold=hold
        )
    return stored, now


async def _claim_new(
    connection: Connection, clock: Clock, subscription: Subscription, at_most: int, span: int, invisible: timedelta
) -> tuple[NewClaim, datetime]:
    """Claim messages of the log; return them with the time of the claim."""
    if subscription.ordered is Ordered.NONE:
        now = clock.now()
        return await claim_new(connection, subscription, at_most, span, now + invisible, now), now
    async with connection.transaction():
        await ordered_claims.lock(connection, subscription.subscription_id)
        now = clock.now()
        new = await ordered_claims.claim_new_in_order(connection, subscription, at_most, span, now + invisible, now)
    return new, now


def _handed_out(
    message: Outgoing,
    replay: int,
    place: int,
    key: UUID,
    subscription: Subscription,
    now: datetime,
    epoch: int | None = None,
) -> HandedOut:
    """Return a message with its handle. `place`: its number in the claim `epoch`; 0: it is a row of delivery_retry.

    The digest is of the bytes that are handed out, not the half's stored one, because the proof compares both.
    """
    epoch = message.claim if epoch is None else epoch
    assert epoch is not None
    claimed = HeldMessage(
        subscription.subscription_id,
        replay,
        epoch,
        place,
        message.used + 1,
        message.transaction_id,
        message.position,
        message.offset,
        now,
        sha256(message.body).digest(),
    )
    return HandedOut(message, replay, handle_of(claimed, key))
