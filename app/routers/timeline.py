"""Builds the answer of a transaction from its rows: messages, deliveries and timeline. Pure."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from app.ids import message_id
from app.permissions import Caller
from app.schemas.delivery_cursor import cursor_of
from app.schemas.transactions import DeliveryShown, MessageShown, TimelineEntry, TransactionShown, VerdictShown
from app.store.coordinator.attempts import Attempt
from app.store.coordinator.deliveries import DeliveryRecord
from app.store.coordinator.history import History, Published, Redelivery, StoredMessage
from app.store.coordinator.transactions import state_of
from app.verdicts import AttemptKind, DeliveryState, State

# The order of entries with the same time.
ORDER = (
    "born",
    "swept",
    "check",
    "parked",
    "refused",
    "verdict",
    "published",
    "attempt",
    "delivered",
    "replayed",
    "dead",
    "redelivered",
    "dropped",
    "reissued",
)


def known(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None. An answer leaves out absent optional fields."""
    return {name: value for name, value in fields.items() if value is not None}


def transaction_shown(history: History, caller: Caller) -> TransactionShown:
    """Return the answer of `GET /transactions/{id}`. The context is the producer's content, as a body is."""
    first, record = history.messages[0], history.record
    state = state_of(record.verdict, record.check_back)
    published = {row.position: row for row in history.published}
    context = (
        {} if first.context is None or not caller.reads_bodies else {"context": msgspec.json.decode(first.context)}
    )
    return TransactionShown(
        transaction_id=history.transaction_id,
        producer_group=first.producer_group,
        state=state,
        born_at=first.born_at,
        first_check_at=first.first_check_at,
        messages=[
            MessageShown(**message_fields(history, message, published.get(message.position)))
            for message in history.messages
        ],
        timeline=timeline(history),
        attempts_cursor=None if history.more_below is None else str(history.more_below),
        deliveries_cursor=cursor_of(history.more_after),
        **context,
        **known(
            verdict=_verdict(history),
            next_check_at=record.next_check_at,
            parked_reason=record.parked_reason if state is State.PARKED else None,
            reissued_from=first.reissued_from,
            reissued_as=record.reissued_as,
        ),
    )


def message_fields(history: History, message: StoredMessage, published: Published | None) -> dict[str, Any]:
    """Return the fields of a message. The offset and the deliveries are present only after the commit."""
    return {
        "message_id": message_id(history.transaction_id, message.position),
        "topic": message.topic,
        "key": message.key,
        "tag": message.tag,
        "headers": msgspec.json.decode(message.headers) if message.headers else {},
        "content_type": message.content_type,
        "deliveries": [
            DeliveryShown(**delivery_fields(one)) for one in history.deliveries if one.position == message.position
        ],
        **known(
            deliver_after_s=message.deliver_after_s,
            due_at=published.due_at if published else None,
            offset=published.offset if published else None,
        ),
    }


def delivery_fields(delivery: DeliveryRecord) -> dict[str, Any]:
    """Return the fields of a delivery."""
    return {
        "subscription": delivery.subscription,
        "state": delivery.state,
        "attempts": delivery.attempts,
        **known(
            replay=delivery.replay,
            first_at=delivery.first_at,
            at=delivery.at,
            due_at=delivery.due_at,
            status=delivery.status,
            duration_ms=delivery.duration_ms,
            error=delivery.error,
            reason=delivery.reason,
        ),
    }


def _verdict(history: History) -> VerdictShown | None:
    record = history.record
    if record.verdict is None or record.source is None or record.decided_at is None:
        return None
    return VerdictShown(
        verdict=record.verdict.word,
        source=record.source.word,
        decided_at=record.decided_at,
        **known(actor=record.actor, reason=record.reason),
    )


def timeline(history: History) -> list[TimelineEntry]:
    """Return the events by time. Events with equal times are in causal order."""
    entries = [*_standing_entries(history), *_published_entries(history)]
    entries += [attempt_entry(history.transaction_id, attempt) for attempt in history.attempts]
    entries += [entry for one in history.deliveries if (entry := _settled_entry(history, one)) is not None]
    entries += [entry for redelivery in history.redeliveries for entry in _redelivery_entries(history, redelivery)]
    decided_at = history.record.decided_at

    def place(entry: TimelineEntry) -> tuple[datetime, int]:
        # The commit time is the database's clock. The verdict's time is this process's estimate, off by milliseconds.
        at = max(entry.at, decided_at) if entry.what == "published" and decided_at else entry.at
        return at, ORDER.index(entry.what)

    return sorted(entries, key=place)


def _standing_entries(history: History) -> Iterator[TimelineEntry]:
    first, record = history.messages[0], history.record
    yield TimelineEntry(at=first.born_at, what="born", **known(reissued_from=first.reissued_from))
    verdict = _verdict(history)
    if verdict is not None:
        details = verdict.model_dump(exclude_unset=True, exclude={"decided_at"})
        yield TimelineEntry(at=verdict.decided_at, what="verdict", **details)
    if record.reissued_at is not None:
        yield TimelineEntry(
            at=record.reissued_at,
            what="reissued",
            **known(reissued_as=record.reissued_as, actor=record.reissued_by, reason=record.reissue_reason),
        )


def _published_entries(history: History) -> Iterator[TimelineEntry]:
    for row in history.published:
        yield TimelineEntry(
            at=row.committed_at,
            what="published",
            message_id=message_id(history.transaction_id, row.position),
            offset=row.offset,
        )


def attempt_entry(transaction_id: UUID, attempt: Attempt) -> TimelineEntry:
    """Return the timeline entry of an attempt, a sweep or a parking."""
    answered = known(
        outcome=attempt.outcome,
        status=attempt.status,
        duration_ms=attempt.duration_ms,
        error=attempt.error,
        response=attempt.response,
    )
    if attempt.kind == AttemptKind.SWEPT:
        return TimelineEntry(at=attempt.at, what="swept")
    if attempt.kind == AttemptKind.PARKED:
        # The reason for parking is in the error column.
        return TimelineEntry(at=attempt.at, what="parked", **known(reason=attempt.error))
    if attempt.kind == AttemptKind.REFUSED:
        # The group that sent the End is in the URL column.
        return TimelineEntry(
            at=attempt.at, what="refused", **_given(attempt), **known(producer_group=attempt.destination)
        )
    if attempt.kind == AttemptKind.CHECK:
        details = known(check=attempt.number, url=attempt.destination)
        return TimelineEntry(at=attempt.at, what="check", **details, **_given(attempt), **answered)
    details = known(
        message_id=None if attempt.position is None else message_id(transaction_id, attempt.position),
        subscription=attempt.subscription,
        attempt=attempt.number,
        replay=attempt.replay,
        url=attempt.destination,
    )
    repeated = attempt.times is not None and attempt.times > 1
    again = known(times=attempt.times, last_at=attempt.last_at) if repeated else {}
    return TimelineEntry(at=attempt.at, what="attempt", **details, **answered, **again)


def _given(attempt: Attempt) -> dict[str, Any]:
    return known(
        verdict=None if attempt.verdict is None else attempt.verdict.word,
        source=None if attempt.source is None else attempt.source.word,
    )


def _settled_entry(history: History, delivery: DeliveryRecord) -> TimelineEntry | None:
    # A dropped dead letter has its own entry, which names the person.
    if delivery.at is None or delivery.state is DeliveryState.DROPPED:
        return None
    arrived = "delivered" if delivery.replay is None else "replayed"
    return TimelineEntry(
        at=delivery.at,
        what="dead" if delivery.state is DeliveryState.DEAD else arrived,
        message_id=message_id(history.transaction_id, delivery.position),
        subscription=delivery.subscription,
        attempts=delivery.attempts,
        **known(
            replay=delivery.replay,
            status=delivery.status,
            duration_ms=delivery.duration_ms,
            error=delivery.error,
            reason=delivery.reason,
        ),
    )


def _redelivery_entries(history: History, redelivery: Redelivery) -> Iterator[TimelineEntry]:
    """Yield the action of a person, and before it the death, whose own row is gone."""
    which: dict[str, Any] = {
        "message_id": message_id(history.transaction_id, redelivery.position),
        **known(subscription=redelivery.subscription, replay=redelivery.replay),
    }
    yield TimelineEntry(
        at=redelivery.died_at, what="dead", attempts=redelivery.attempts, reason=redelivery.died_because, **which
    )
    yield TimelineEntry(
        at=redelivery.at, what=redelivery.what, **which, **known(actor=redelivery.actor, reason=redelivery.reason)
    )
