"""PURE: say in one sentence why a subscription has got a message or has not, for a person new to Halfnote."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from app.ids import message_id
from app.store.coordinator.delivery_facts import Blocker, DeliveryFacts
from app.store.coordinator.history import Record, StoredMessage
from app.verdicts import DeadLetterReason, DeliveryReason, DeliveryState

# The part of a stored error that a sentence has.
ERROR_MOST = 200


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a sentence tells besides the facts: since when the subscription is in its state, and the message before."""

    facts: DeliveryFacts
    record: Record
    first: StoredMessage
    state_since: datetime | None = None
    blocker: Blocker | None = None


def moment(at: datetime) -> str:
    """Return a time as a sentence has it."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def sentence_of(reason: DeliveryReason, told: Circumstances) -> str:
    """Return the sentence of a reason."""
    return _SENTENCES[reason](told)


def undecided_sentence(reason: DeliveryReason, record: Record, first: StoredMessage) -> str:
    """Return why no subscription gets a message of a transaction without a commit."""
    group = first.producer_group
    if reason is DeliveryReason.ROLLED_BACK:
        by = record.source.word if record.source is not None else "an unknown source"
        at = f" at {moment(record.decided_at)}" if record.decided_at else ""
        return f"Never sent: the transaction was rolled back by {by}{at}{_because(record.reason)}."
    if reason is DeliveryReason.PARKED:
        return (
            f"Not sent: the transaction is parked{_because(record.parked_reason)}. "
            f"A person must decide it, or the producer group `{group}` must send its end."
        )
    if reason is DeliveryReason.IN_DOUBT:
        asks = f" at {moment(record.next_check_at)}" if record.next_check_at else ""
        return (
            f"Not sent yet: the transaction is in doubt. The producer group `{group}` sent no end; "
            f"Halfnote asks it for the verdict{asks}."
        )
    return (
        f"Not sent yet: the producer group `{group}` has not sent the end of this transaction. "
        f"Halfnote asks for it from {moment(record.next_check_at or first.first_check_at)} on."
    )


def _because(reason: str | None) -> str:
    return f" ({_short(reason)})" if reason else ""


def _short(error: str) -> str:
    return error if len(error) <= ERROR_MOST else f"{error[:ERROR_MOST]}…"


def _tries(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _at(at: datetime | None) -> str:
    return "" if at is None else f" at {moment(at)}"


def _until(at: datetime | None) -> str:
    return "" if at is None else f" until {moment(at)}"


def _since(at: datetime | None) -> str:
    return "" if at is None else f" since {moment(at)}"


def _listed(values: Any) -> str:
    return ", ".join(f"`{one}`" for one in values)


def _delivered(told: Circumstances) -> str:
    facts = told.facts
    status = "" if facts.received_status is None else f", answered {facts.received_status}"
    return f"Delivered{_at(facts.settled_at)}, by attempt {facts.attempts}{status}."


def _dropped(told: Circumstances) -> str:
    return f"Dropped{_at(told.facts.settled_at)}: a person gave up this delivery. It is not sent again."


def _dead(told: Circumstances) -> str:
    facts = told.facts
    if facts.died_because == DeadLetterReason.DAY_LEFT:
        return (
            f"Dead{_since(facts.died_at)}: it was not delivered before its day was removed. A person can redeliver it."
        )
    error = f" The last error: {_short(facts.died_of)}." if facts.died_of else ""
    return f"Dead{_since(facts.died_at)}: given up after {_tries(facts.attempts)}.{error} A person can redeliver it."


def _expired(told: Circumstances) -> str:
    facts = told.facts
    limit, why = "expire_after_s", "it waited longer than the subscription allows"
    if facts.died_because == DeadLetterReason.BACKLOG:
        limit, why = "max_backlog", "more messages waited than the subscription allows"
    return f"Expired{_at(facts.died_at)}: {why} (`{limit}`). It is a dead letter; a person can redeliver it."


def _no_topic_match(told: Circumstances) -> str:
    facts = told.facts
    return f"Not sent: its topic `{facts.topic}` matches none of the subscription's topics ({_listed(facts.topics)})."


def _filtered_by_tag(told: Circumstances) -> str:
    facts = told.facts
    has = "it has no tag" if facts.tag is None else f"its tag is `{facts.tag}`"
    return f"Not sent: {has}, and the subscription takes only the tags {_listed(facts.filters['tags'])}."


def _filtered_by_header(told: Circumstances) -> str:
    wanted: Mapping[str, Any] = told.facts.filters["headers"]
    pairs = _listed(f"{name}: {value}" for name, value in wanted.items())
    return f"Not sent: the subscription takes only messages with the headers {pairs}, and it does not have all of them."


def _undecided(reason: DeliveryReason) -> Callable[[Circumstances], str]:
    return lambda told: undecided_sentence(reason, told.record, told.first)


def _subscription_newer(told: Circumstances) -> str:
    facts = told.facts
    return (
        f"Not sent: the subscription was made{_at(facts.created_at)} to begin after this message "
        f"(committed{_at(facts.committed_at)}). A replay sends it."
    )


def _changed_since(told: Circumstances) -> str:
    return (
        f"Not sent: the subscription takes such messages only since its change{_at(told.facts.matches_since)}, "
        "and it had passed this one before. A replay sends it."
    )


def _no_record(told: Circumstances) -> str:
    return (
        "Unknown: the subscription is past this message, and there is no record of a delivery. "
        "The nightly proof reports this as the finding `undelivered`. A replay sends it."
    )


def _paused(told: Circumstances) -> str:
    return f"Not sent: a person paused the subscription{_since(told.state_since).replace(' since', ' at')}. {_RESUME}"


def _disabled(told: Circumstances) -> str:
    why = _because(told.facts.state_reason)
    since = _since(told.state_since)
    return f"Not sent: the subscription is disabled{since}, as its destination refuses all messages{why}. {_RESUME}"


_RESUME = "It is sent after a resume."


def _no_worker(told: Circumstances) -> str:
    return "Not sent: no worker holds this subscription at the moment. Is a worker process running?"


def _breaker_open(told: Circumstances) -> str:
    facts = told.facts
    why = _because(facts.last_error or facts.opened_because)
    return (
        f"Not sent: the circuit breaker is open{_since(facts.opened_at)}, as the destination fails{why}. "
        "Only single probes go out until it answers; no attempt is used up."
    )


def _behind_key(told: Circumstances) -> str:
    facts, blocker = told.facts, told.blocker
    assert blocker is not None
    before = f"the earlier message {message_id(blocker.transaction_id, blocker.position)} of its key `{facts.key}`"
    if blocker.state is DeliveryState.DEAD:
        return f"Waits behind {before}, which is dead{_because(blocker.error)}. Redeliver or drop that dead letter."
    if blocker.state is DeliveryState.IN_RETRY:
        return f"Waits behind {before}, which is tried again{_at(blocker.due_at)}{_because(blocker.error)}."
    return f"Waits behind {before}, which is not delivered yet."


def _due_later(told: Circumstances) -> str:
    facts = told.facts
    return f"Not sent yet: the producer delayed it. It is due{_at(facts.retry_at or facts.due_at)}."


def _in_flight(told: Circumstances) -> str:
    facts = told.facts
    if facts.pulled:
        until = facts.claimed_until or facts.leased_until
        return f"A consumer has claimed it, for attempt {facts.attempts + 1}, and holds it{_until(until)}."
    return f"Attempt {facts.attempts + 1} is being made now{_because(facts.last_error)}."


def _retrying(told: Circumstances) -> str:
    facts = told.facts
    error = f" The last error: {_short(facts.last_error)}." if facts.last_error else ""
    tries = f"{_tries(facts.attempts)} failed. The next attempt is{_at(facts.retry_at)}"
    return f"Not delivered yet: {tries}.{error}{_paused_until(facts)}"


def _not_yet_sent(told: Circumstances) -> str:
    facts = told.facts
    if facts.pulled:
        return f"Not claimed yet: it waits for a consumer{_since(facts.retry_at or facts.committed_at)}."
    if facts.retry_at is not None:
        return f"Not sent yet: it waits for its turn{_since(facts.retry_at)}.{_paused_until(facts)}"
    behind = (facts.offset or 0) - (facts.checkpoint or 0) - 1
    place = f" {behind} log entries are before it." if behind > 0 else ""
    waits = f"it is committed and waits for its turn{_since(facts.committed_at)}"
    return f"Not sent yet: {waits}.{place}{_paused_until(facts)}"


def _paused_until(facts: DeliveryFacts) -> str:
    if facts.paused_until is None:
        return ""
    return f" The destination asks for pauses; the next message goes out{_at(facts.paused_until)} at the earliest."


_SENTENCES: dict[DeliveryReason, Callable[[Circumstances], str]] = {
    DeliveryReason.DELIVERED: _delivered,
    DeliveryReason.DROPPED: _dropped,
    DeliveryReason.DEAD: _dead,
    DeliveryReason.EXPIRED: _expired,
    DeliveryReason.NO_TOPIC_MATCH: _no_topic_match,
    DeliveryReason.FILTERED_BY_TAG: _filtered_by_tag,
    DeliveryReason.FILTERED_BY_HEADER: _filtered_by_header,
    DeliveryReason.HALF: _undecided(DeliveryReason.HALF),
    DeliveryReason.IN_DOUBT: _undecided(DeliveryReason.IN_DOUBT),
    DeliveryReason.PARKED: _undecided(DeliveryReason.PARKED),
    DeliveryReason.ROLLED_BACK: _undecided(DeliveryReason.ROLLED_BACK),
    DeliveryReason.SUBSCRIPTION_NEWER: _subscription_newer,
    DeliveryReason.CHANGED_SINCE: _changed_since,
    DeliveryReason.NO_RECORD: _no_record,
    DeliveryReason.PAUSED: _paused,
    DeliveryReason.DISABLED: _disabled,
    DeliveryReason.NO_WORKER: _no_worker,
    DeliveryReason.BREAKER_OPEN: _breaker_open,
    DeliveryReason.BEHIND_KEY: _behind_key,
    DeliveryReason.DUE_LATER: _due_later,
    DeliveryReason.IN_FLIGHT: _in_flight,
    DeliveryReason.RETRYING: _retrying,
    DeliveryReason.NOT_YET_SENT: _not_yet_sent,
}
