"""Explain for each message of a transaction, and each subscription, why it was delivered or was not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple
from uuid import UUID

from app.database.connection import Connection
from app.ids import message_id
from app.operations.delivery_reasons.reasons import NOT_TAKEN, may_wait_for_key, reason_of, state_reason
from app.operations.delivery_reasons.sentences import Circumstances, sentence_of, undecided_sentence
from app.store.coordinator.delivery_facts import (
    Blocker,
    DeliveryFacts,
    count_subscriptions,
    read_blockers,
    read_facts,
    states_since,
)
from app.store.coordinator.history import Record, StoredMessage, read_messages, read_record
from app.store.coordinator.transactions import state_of
from app.verdicts import DeliveryReason, State, SubscriptionState

# The most subscriptions that are listed for a message although they do not take its topic.
UNMATCHED_MOST = 20
# The most deliveries that are explained in one answer.
EXPLAINED_MAX = 1000
# About how many pairs of a message and a subscription are read for one answer, whether they concern each other or not.
PAIRS_MOST = 5000
# The most subscriptions that the sentence of a message names.
NAMED_MOST = 20


class WhyPlace(NamedTuple):
    """The place of a delivery in the explanations of a transaction: behind the first `skip` ones of a message."""

    position: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Explained:
    """Why one subscription has got a message or has not.

    `at`: when it was delivered, died, expired or was dropped, or since when the reason holds. `next_at`: when it is
    tried next. `behind`: the message that it waits for.
    """

    subscription: str
    reason: DeliveryReason
    sentence: str
    attempts: int
    at: datetime | None
    next_at: datetime | None
    error: str | None
    behind: str | None


@dataclass(frozen=True, slots=True)
class ExplainedMessage:
    """Why a message was delivered or was not: as a whole, and by each subscription. Those that matter come first.

    `left_out` counts subscriptions that are not listed because they do not take the topic.
    """

    message_id: str
    topic: str
    key: str | None
    tag: str | None
    offset: int | None
    reason: DeliveryReason
    sentence: str
    subscriptions: list[Explained]
    left_out: int


@dataclass(frozen=True, slots=True)
class ExplainedTransaction:
    """Why the messages of a transaction were delivered or were not. `more`: where the others begin, None: nowhere."""

    transaction_id: UUID
    producer_group: str
    state: State
    messages: list[ExplainedMessage]
    more: WhyPlace | None


async def explain(
    connection: Connection,
    transaction_id: UUID,
    now: datetime,
    *,
    position: int | None = None,
    subscription: str | None = None,
    start: WhyPlace = WhyPlace(),  # noqa: B008 -- it cannot be changed
) -> ExplainedTransaction | None:
    """Explain the deliveries of a transaction from one snapshot, from a place on; None if there is no such half.

    `position` and `subscription` explain one message, and one subscription. At most EXPLAINED_MAX are explained.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        stored = await read_messages(connection, transaction_id)
        if not stored:
            return None
        record = await read_record(connection, transaction_id)
        state = state_of(record.verdict, record.check_back)
        first = start.position if position is None else position
        last = first
        if position is None:
            pairs = await count_subscriptions(connection, subscription)
            last += max(1, PAIRS_MOST // max(1, pairs)) - 1
        told = await _circumstances(connection, transaction_id, (first, last), subscription, record, stored[0], now)
        by_position = {
            number: await _explained(connection, list(found), state, now)
            for number, found in groupby(told, key=lambda one: one.facts.position)
        }
        facts_of = {one.facts.position: one.facts for one in told}
    messages = {
        one.position: _message(
            transaction_id, one, facts_of.get(one.position), by_position.get(one.position, []), state, record
        )
        for one in stored[first : last + 1]
    }
    shown, more = _page(messages, start)
    if more is None and position is None and last + 1 < len(stored):
        more = WhyPlace(last + 1)
    return ExplainedTransaction(transaction_id, stored[0].producer_group, state, shown, more)


def _page(messages: Mapping[int, ExplainedMessage], start: WhyPlace) -> tuple[list[ExplainedMessage], WhyPlace | None]:
    """Return the messages with EXPLAINED_MAX explanations from a place on, and the place of the next one."""
    shown: list[ExplainedMessage] = []
    room = EXPLAINED_MAX
    for position, message in messages.items():
        skip = start.skip if position == start.position else 0
        rest = message.subscriptions[skip:]
        if room or not rest:
            shown.append(replace(message, subscriptions=rest[:room]))
        if len(rest) > room:
            return shown, WhyPlace(position, skip + room)
        room -= len(rest)
    return shown, None


async def _circumstances(
    connection: Connection,
    transaction_id: UUID,
    positions: tuple[int, int],
    subscription: str | None,
    record: Record,
    first: StoredMessage,
    now: datetime,
) -> list[Circumstances]:
    facts = await read_facts(connection, transaction_id, positions, subscription, UNMATCHED_MOST, now)
    stopped = {one.subscription_id for one in facts if one.state is not SubscriptionState.ACTIVE}
    since = await states_since(connection, sorted(stopped))
    return [Circumstances(one, record, first, since.get(one.subscription_id)) for one in facts]


async def _explained(
    connection: Connection, told: Sequence[Circumstances], state: State, now: datetime
) -> list[Explained]:
    """Explain the deliveries of one message."""
    reasons = [reason_of(one.facts, state, now) for one in told]
    waiting = [one.facts for one, reason in zip(told, reasons, strict=True) if may_wait_for_key(one.facts, reason)]
    blockers = await read_blockers(connection, waiting, now)
    return [
        _delivery(one, reason, now)
        if (blocker := blockers.get(one.facts.subscription_id)) is None
        else _delivery(replace(one, blocker=blocker), DeliveryReason.BEHIND_KEY, now)
        for one, reason in zip(told, reasons, strict=True)
    ]


def _delivery(told: Circumstances, reason: DeliveryReason, now: datetime) -> Explained:
    facts = told.facts
    times = {
        DeliveryReason.BREAKER_OPEN: facts.opened_at,
        DeliveryReason.PAUSED: told.state_since,
        DeliveryReason.DISABLED: told.state_since,
        DeliveryReason.SUBSCRIPTION_NEWER: facts.created_at,
        DeliveryReason.CHANGED_SINCE: facts.matches_since,
    }
    return Explained(
        subscription=facts.subscription,
        reason=reason,
        sentence=sentence_of(reason, told),
        attempts=facts.attempts,
        at=facts.settled_at or facts.died_at or times.get(reason),
        next_at=_next_at(told, reason, now),
        error=facts.died_of or facts.last_error,
        behind=_behind(told.blocker),
    )


def _next_at(told: Circumstances, reason: DeliveryReason, now: datetime) -> datetime | None:
    """Return the next due time: of the retry, of the delayed message, or of the check of a transaction in doubt."""
    facts = told.facts
    if reason is DeliveryReason.IN_DOUBT:
        return told.record.next_check_at
    if facts.retry_at is not None:
        return facts.retry_at
    waits = facts.received is None and facts.died_because is None and reason not in NOT_TAKEN
    return facts.due_at if waits and facts.due_at is not None and facts.due_at > now else None


def _behind(blocker: Blocker | None) -> str | None:
    return None if blocker is None else message_id(blocker.transaction_id, blocker.position)


def _message(
    transaction_id: UUID,
    stored: StoredMessage,
    facts: DeliveryFacts | None,
    explained: Sequence[Explained],
    state: State,
    record: Record,
) -> ExplainedMessage:
    unmatched = [one for one in explained if one.reason is DeliveryReason.NO_TOPIC_MATCH]
    unconcerned = 0 if facts is None else facts.unconcerned
    matched = [one for one in explained if one.reason is not DeliveryReason.NO_TOPIC_MATCH]
    reason, sentence = _whole(stored, matched, unconcerned, state, record)
    # The subscriptions that take it, then those that filter it, then those of other topics.
    listed = sorted(matched, key=lambda one: (one.reason in NOT_TAKEN, attrgetter("subscription")(one)))
    return ExplainedMessage(
        message_id=message_id(transaction_id, stored.position),
        topic=stored.topic,
        key=stored.key,
        tag=stored.tag,
        offset=None if facts is None else facts.offset,
        reason=reason,
        sentence=sentence,
        subscriptions=listed + unmatched,
        left_out=unconcerned - len(unmatched),
    )


def _whole(
    stored: StoredMessage, matched: Sequence[Explained], unmatched: int, state: State, record: Record
) -> tuple[DeliveryReason, str]:
    undecided = state_reason(state)
    if undecided is not None:
        return undecided, undecided_sentence(undecided, record, stored)
    taken = [one for one in matched if one.reason not in NOT_TAKEN]
    if not taken:
        if matched:
            names = _named(matched)
            have = "has its topic, but does" if len(matched) == 1 else "have its topic, but do"
            return DeliveryReason.NO_SUBSCRIPTION, f"No subscription takes it: {names} {have} not take this message."
        of = f"none of the {unmatched} subscriptions has" if unmatched else "no subscription has"
        return (
            DeliveryReason.NO_SUBSCRIPTION,
            f"No subscription takes it: {of} a topic that matches `{stored.topic}`.",
        )
    missing = [one for one in taken if one.reason is not DeliveryReason.DELIVERED]
    if not missing:
        return DeliveryReason.DELIVERED, f"Delivered to every subscription that takes it ({len(taken)})."
    received = f"Delivered to {len(taken) - len(missing)} of {len(taken)} subscriptions"
    return missing[0].reason, f"{received}; not to {_named(missing)}."


def _named(subscriptions: Sequence[Explained]) -> str:
    names = ", ".join(f"`{one.subscription}`" for one in subscriptions[:NAMED_MOST])
    more = len(subscriptions) - NAMED_MOST
    return names if more <= 0 else f"{names} and {more} more"
