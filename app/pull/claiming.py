"""Hand out messages of a subscription to a consumer that asks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from uuid import UUID

from app.clock import Clock
from app.database.connection import Connection
from app.pull.handles import at_of, handles_of
from app.pull.pacing import CLAIMED_AT, paced_until_of, pacer_of
from app.store.pull import ordered_claims
from app.store.pull.claims import (
    NewClaim,
    PulledSubscription,
    claim_new,
    claim_next,
    is_unchanged,
    look,
    pace,
    paced_until,
)
from app.store.pull.held_retries import StoredClaim, claim_stored
from app.store.relay.log import SPAN, Outgoing
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import Ordered, SubscriptionState

# A claim reads this many log entries for each message that it has room for, and at least SPAN_LEAST. While it finds
# none that it can hand out, it reads SPAN entries at a time, this many times.
SPAN_TIMES, SPAN_LEAST, SPANS_AT_ONCE = 2, 64, 25
# It reads on no more after so many delayed messages, and messages of keys that are out, each of which it stores.
PUT_OFF_AT_ONCE = 10_000


@dataclass(slots=True)
class HandedOut:
    """A message for a consumer, with its receipt handle. `replay` 0: the live delivery. Not changed once it is made."""

    message: Outgoing
    replay: int
    handle: str


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """What a claim got. `more`: there may be more to claim now. `until`: the messages are the consumer's until then.

    `goes_on`: the messages are of the log, and there is more in it.
    """

    messages: Sequence[HandedOut]
    more: bool
    until: datetime
    goes_on: bool = False


async def claim(
    connection: Connection, clock: Clock, pulled: PulledSubscription, at_most: int, invisible: timedelta
) -> ClaimedBatch:
    """Claim up to `at_most` messages: retries and delayed messages that are due, or else new ones from the log.

    Not both, so that one statement claims all and none is claimed for an answer that fails. With a rate, only as many
    as it allows now. If the subscription was changed since it was read, nothing new, and there may be more.
    """
    subscription = pulled.subscription
    if subscription.state is not SubscriptionState.ACTIVE:
        return ClaimedBatch([], False, clock.now() + invisible)
    if subscription.rate_per_s is None:
        return await _claim(connection, clock, pulled, at_most, invisible)
    async with connection.transaction():
        until = await paced_until(connection, subscription.subscription_id)
        now = clock.now()
        pacer = pacer_of(subscription.rate_per_s, until, now)
        room = pacer.room(CLAIMED_AT, at_most)
        if room == 0:
            return ClaimedBatch([], False, now + invisible)
        claimed = await _claim(connection, clock, pulled, room, invisible)
        if claimed.messages:
            pacer.sent(CLAIMED_AT, len(claimed.messages))
            await pace(connection, subscription.subscription_id, paced_until_of(pacer, now))
    return claimed


async def claim_more(
    connection: Connection, clock: Clock, pulled: PulledSubscription, at_most: int, invisible: timedelta
) -> ClaimedBatch | None:
    """Claim what follows in the log in one statement; None if `claim` must look, as after a change or for a retry.

    For an active subscription without an order or a rate.
    """
    subscription = pulled.subscription
    if (
        subscription.state is not SubscriptionState.ACTIVE
        or subscription.ordered is not Ordered.NONE
        or subscription.rate_per_s is not None
    ):
        return None
    now = clock.now()
    new = await claim_next(connection, pulled, at_most, _span(at_most), now + invisible, now)
    if new.claim_id is None:
        return None
    return _of_claim(new, pulled.handle_key, subscription, invisible)


def _span(at_most: int) -> int:
    return max(SPAN_LEAST, SPAN_TIMES * at_most)


async def _claim(
    connection: Connection, clock: Clock, pulled: PulledSubscription, at_most: int, invisible: timedelta
) -> ClaimedBatch:
    subscription = pulled.subscription
    nothing = ClaimedBatch([], False, clock.now() + invisible)
    found = await look(connection, subscription.subscription_id, clock.now())
    if found is None:
        return nothing
    if found.stored:
        stored, now = await _claim_stored(connection, clock, pulled, at_most, invisible)
        if stored:
            messages = _of_rows(stored, found.handle_key, subscription, now)
            return ClaimedBatch(messages, True, now + invisible)
        if not await is_unchanged(connection, pulled):
            return replace(nothing, more=True)
    span, put_off = _span(at_most), 0
    for turn in range(SPANS_AT_ONCE if found.logged else 0):
        new = await _claim_new(connection, clock, pulled, at_most, span, invisible, further=turn > 0)
        if new.claim_id is not None:
            return _of_claim(new, found.handle_key, subscription, invisible)
        put_off += new.put_off
        if new.refused or put_off >= PUT_OFF_AT_ONCE:
            break
        if not new.more:
            return nothing
        span = max(span, SPAN)
    return ClaimedBatch([], found.logged, clock.now() + invisible)


async def _claim_stored(
    connection: Connection, clock: Clock, pulled: PulledSubscription, at_most: int, invisible: timedelta
) -> tuple[list[StoredClaim], datetime]:
    """Claim rows of delivery_retry; return them with the time of the claim."""
    if pulled.subscription.ordered is Ordered.NONE:
        now = clock.now()
        return await claim_stored(connection, pulled, at_most, now + invisible, now), now
    async with connection.transaction():
        await ordered_claims.lock(connection, pulled.subscription.subscription_id)
        # After the lock, so that no message is claimed before the receipt of the one before it.
        now = clock.now()
        stored = await ordered_claims.claim_stored_in_order(connection, pulled, at_most, now + invisible, now)
    return stored, now


async def _claim_new(
    connection: Connection,
    clock: Clock,
    pulled: PulledSubscription,
    at_most: int,
    span: int,
    invisible: timedelta,
    *,
    further: bool,
) -> NewClaim:
    """Claim messages of the log."""
    if pulled.subscription.ordered is Ordered.NONE:
        now = clock.now()
        return await claim_new(connection, pulled, at_most, span, now + invisible, now, further=further)
    async with connection.transaction():
        await ordered_claims.lock(connection, pulled.subscription.subscription_id)
        now = clock.now()
        until = now + invisible
        return await ordered_claims.claim_new_in_order(connection, pulled, at_most, span, until, now, further=further)


def _handed_out(
    messages: Sequence[Outgoing],
    claimed: Iterable[tuple[int, int, int]],
    key: UUID,
    subscription: Subscription,
    now: datetime,
) -> list[HandedOut]:
    """Return messages with their handles. `claimed`: for each its replay, and the number of its claim and its place.

    The digest is of the bytes that are handed out, not the half's stored one, because the proof compares both.
    """
    at, claimed = at_of(now), list(claimed)
    packed = [
        (
            replay,
            claim_id,
            place,
            one.used + 1,
            one.position,
            one.offset,
            at,
            one.transaction_id.bytes,
            sha256(one.body).digest(),
        )
        for one, (replay, claim_id, place) in zip(messages, claimed, strict=True)
    ]
    handles = handles_of(packed, subscription.subscription_id, key)
    return [HandedOut(one, of[0], handle) for one, of, handle in zip(messages, claimed, handles, strict=True)]


def _of_claim(new: NewClaim, key: UUID, subscription: Subscription, invisible: timedelta) -> ClaimedBatch:
    claim_id = new.claim_id
    assert claim_id is not None
    places = range(1, len(new.messages) + 1)
    claimed = [(0, claim_id, place) for place in places]
    messages = _handed_out(new.messages, claimed, key, subscription, new.claimed_at)
    return ClaimedBatch(messages, new.more, new.claimed_at + invisible, goes_on=new.more)


def _of_rows(stored: Sequence[StoredClaim], key: UUID, subscription: Subscription, now: datetime) -> list[HandedOut]:
    """The place is 0: they are rows of delivery_retry, each with an epoch of its own."""
    claimed = [(one.replay, one.message.claim or 0, 0) for one in stored]
    return _handed_out([one.message for one in stored], claimed, key, subscription, now)
