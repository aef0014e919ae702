"""PURE: decide why a subscription has got a message or has not, from what is stored about both."""

from datetime import datetime

from app.store.coordinator.delivery_facts import DeliveryFacts
from app.verdicts import DeadLetterReason, DeliveryReason, DeliveryState, Ordered, State, SubscriptionState

# The subscription does not take the message.
NOT_TAKEN = frozenset(
    {
        DeliveryReason.NO_TOPIC_MATCH,
        DeliveryReason.FILTERED_BY_TAG,
        DeliveryReason.FILTERED_BY_HEADER,
        DeliveryReason.SUBSCRIPTION_NEWER,
        DeliveryReason.CHANGED_SINCE,
    }
)
_STATES = {
    State.HALF: DeliveryReason.HALF,
    State.IN_DOUBT: DeliveryReason.IN_DOUBT,
    State.PARKED: DeliveryReason.PARKED,
    State.ROLLED_BACK: DeliveryReason.ROLLED_BACK,
}
_EXPIRED = frozenset({DeadLetterReason.EXPIRED, DeadLetterReason.BACKLOG})


def state_reason(state: State) -> DeliveryReason | None:
    """Return the reason that keeps all messages of a transaction in this state; None if it is committed."""
    return _STATES.get(state)


def reason_of(facts: DeliveryFacts, state: State, now: datetime) -> DeliveryReason:
    """Return the reason, except that an earlier message of the key is before this one (`may_wait_for_key`).

    The first one counts of: what has happened, whether a consumer holds the message, what the subscription takes, and
    what keeps the message.
    """
    settled = _settled(facts)
    if settled is not None:
        return settled
    if _consumer_holds(facts, now):
        return DeliveryReason.IN_FLIGHT
    if facts.retry_at is None:
        passed = _passed(facts, state)
        if passed is not None:
            return passed
    return _kept(facts, now)


def may_wait_for_key(facts: DeliveryFacts, reason: DeliveryReason) -> bool:
    """Return whether an earlier message of the key can be what this message waits for."""
    ordered = facts.ordered is Ordered.KEY and facts.key is not None
    return ordered and reason in (DeliveryReason.NOT_YET_SENT, DeliveryReason.RETRYING)


def _settled(facts: DeliveryFacts) -> DeliveryReason | None:
    if facts.received is not None:
        dropped = facts.received is DeliveryState.DROPPED
        return DeliveryReason.DROPPED if dropped else DeliveryReason.DELIVERED
    if facts.died_because is not None:
        return DeliveryReason.EXPIRED if facts.died_because in _EXPIRED else DeliveryReason.DEAD
    return None


def _passed(facts: DeliveryFacts, state: State) -> DeliveryReason | None:
    """Return why the subscription does not take a message that it has no row of; None if it takes it."""
    if not facts.takes_topic:
        return DeliveryReason.NO_TOPIC_MATCH
    if not facts.takes_tag:
        return DeliveryReason.FILTERED_BY_TAG
    if not facts.takes_headers:
        return DeliveryReason.FILTERED_BY_HEADER
    if facts.offset is None or facts.committed_at is None:
        return state_reason(state) or DeliveryReason.NO_RECORD
    if facts.offset <= facts.started_after:
        return DeliveryReason.SUBSCRIPTION_NEWER
    if facts.checkpoint is None or facts.offset <= facts.checkpoint:
        changed = facts.matches_since > facts.committed_at
        return DeliveryReason.CHANGED_SINCE if changed else DeliveryReason.NO_RECORD
    return None


def _consumer_holds(facts: DeliveryFacts, now: datetime) -> bool:
    """Return whether a consumer has the message; that lasts through changes of the subscription."""
    held_until = facts.claimed_until or facts.leased_until
    return facts.pulled and held_until is not None and held_until > now


def _kept(facts: DeliveryFacts, now: datetime) -> DeliveryReason:
    if facts.state is SubscriptionState.PAUSED:
        return DeliveryReason.PAUSED
    if facts.state is SubscriptionState.DISABLED:
        return DeliveryReason.DISABLED
    due_at = facts.due_at if facts.retry_at is None else facts.retry_at
    if facts.tried_at is None and due_at is not None and due_at > now:
        return DeliveryReason.DUE_LATER
    if not facts.pulled and facts.holder is None:
        return DeliveryReason.NO_WORKER
    if facts.opened_at is not None:
        return DeliveryReason.BREAKER_OPEN
    if facts.leased_until is not None and facts.leased_until > now:
        return DeliveryReason.IN_FLIGHT
    return DeliveryReason.NOT_YET_SENT if facts.tried_at is None else DeliveryReason.RETRYING
