"""PURE: operational messages, one function each: topic, what the rate limit counts by, and the body as documented.

Each returns None if Halfnote would announce its own messages: a dead letter on a reserved topic, or the state of a
subscription that takes only reserved topics. The bodies' shapes are in docs/operational-messages.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.delivery import storable
from app.finding_kinds import docs_of
from app.store.proof.findings import AnnouncedFindings
from app.store.relay.announcements import Announcement
from app.topic_patterns import is_reserved

PARKED = "halfnote.transaction.parked"
ROLLED_BACK = "halfnote.transaction.rolled_back_by_policy"
DEAD = "halfnote.delivery.dead"
DISABLED = "halfnote.subscription.disabled"
EXPIRING = "halfnote.subscription.expiring"
BREAKER_OPENED = "halfnote.subscription.breaker_opened"
BREAKER_CLOSED = "halfnote.subscription.breaker_closed"
FINDING = "halfnote.finding"

# Errors and reasons from outside are announced up to this many characters.
TEXT_MAX = 2000


@dataclass(frozen=True, slots=True)
class UndecidedTransaction:
    """A transaction that policy parked or rolled back: `topic` and `key` are its first message's, `messages` is their
    number, `checks` is how many times its producer was asked."""

    transaction_id: UUID
    producer_group: str
    topic: str
    key: str | None
    messages: int
    born_at: datetime
    checks: int


def parked(transaction: UndecidedTransaction, *, reason: str | None, at: datetime) -> Announcement:
    """Return the announcement that policy parked a transaction, with the reason."""
    return _of_transaction(PARKED, transaction, reason, at)


def rolled_back(transaction: UndecidedTransaction, *, reason: str | None, at: datetime) -> Announcement:
    """Return the announcement that policy rolled a transaction back, with the reason."""
    return _of_transaction(ROLLED_BACK, transaction, reason, at)


def dead_letter(
    subscription: str,
    *,
    message_id: str,
    topic: str,
    key: str | None,
    reason: str,
    error: str | None,
    attempts: int,
    at: datetime,
    status: int | None = None,
    replay: int = 0,
) -> Announcement | None:
    """Announce that a message became a dead letter of a subscription; None if its topic is reserved.

    `reason`, `error`, `status` and `attempts` are the dead letter's; `replay` 0 is the live delivery.
    """
    if is_reserved(topic):
        return None
    fields = {"message_id": message_id, "topic": topic, "key": key, "attempts": attempts, "reason": _clean(reason)}
    fields |= {"error": _clean(error), "status": status, "replay": replay or None}
    return _of_subscription(DEAD, subscription, at, fields)


def disabled(subscription: str, topics: Sequence[str], *, reason: str, at: datetime) -> Announcement | None:
    """Announce that a destination's answer disabled a subscription; None if it takes only reserved topics."""
    if only_reserved(topics):
        return None
    return _of_subscription(DISABLED, subscription, at, {"reason": _clean(reason)})


def expiring(
    subscription: str,
    topics: Sequence[str],
    *,
    state: str,
    oldest_s: float,
    backlog: int,
    expire_after_s: float | None,
    max_backlog: int | None,
    at: datetime,
) -> Announcement | None:
    """Announce that messages approach a limit of their subscription; None if it takes only reserved topics.

    `oldest_s`: the age of the oldest one that waits; `backlog`: how many wait, counted if there is a `max_backlog`.
    """
    if only_reserved(topics):
        return None
    fields = {"state": state, "oldest_s": round(oldest_s, 3), "backlog": None if max_backlog is None else backlog}
    fields |= {"expire_after_s": expire_after_s, "max_backlog": max_backlog}
    return _of_subscription(EXPIRING, subscription, at, fields)


def breaker_opened(subscription: str, topics: Sequence[str], *, because: str, at: datetime) -> Announcement | None:
    """Announce that a subscription's breaker opened; None if it takes only reserved topics."""
    if only_reserved(topics):
        return None
    return _of_subscription(BREAKER_OPENED, subscription, at, {"because": _clean(because)})


def breaker_closed(
    subscription: str, topics: Sequence[str], *, opened_at: datetime | None, at: datetime
) -> Announcement | None:
    """Announce that a subscription's breaker closed, open since `opened_at` (None: unknown); None if it takes only
    reserved topics."""
    if only_reserved(topics):
        return None
    open_s = None if opened_at is None else max(0.0, round((at - opened_at).total_seconds(), 3))
    return _of_subscription(BREAKER_CLOSED, subscription, at, {"opened_at": opened_at, "open_s": open_s})


def findings(found: AnnouncedFindings, *, at: datetime) -> Announcement:
    """Announce the findings of one day and kind; `count` is how many are open now."""
    body = {"type": FINDING, "at": at, "day": found.day, "kind": found.kind, "count": found.open}
    body |= {"examples": [_clean(subject) for subject in found.examples]}
    body |= {"first_run": found.first_run, "last_run": found.last_run, "docs": docs_of(found.kind)}
    return Announcement(FINDING, f"{found.day} {found.kind}", found.kind, body, stands_for=found.new)


def only_reserved(topics: Iterable[str]) -> bool:
    """Return whether all topics of a subscription, names or patterns, are reserved."""
    return all(map(is_reserved, topics))


def _of_transaction(topic: str, transaction: UndecidedTransaction, reason: str | None, at: datetime) -> Announcement:
    body = {"type": topic, "at": at, **asdict(transaction), "reason": _clean(reason)}
    return Announcement(topic, transaction.producer_group, transaction.producer_group, body)


def _of_subscription(topic: str, subscription: str, at: datetime, fields: dict[str, Any]) -> Announcement:
    body = {"type": topic, "at": at, "subscription": subscription, **fields}
    return Announcement(topic, subscription, subscription, body)


def _clean(text: str | None) -> str | None:
    """Return text that any JSON reader accepts: bounded, without NUL and lone surrogates."""
    if text is None:
        return None
    return storable(text[:TEXT_MAX])
