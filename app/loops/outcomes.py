"""What becomes of one message: what a destination is given of it, and what is recorded of the outcome."""

import random
from datetime import datetime
from hashlib import sha256

import msgspec
import structlog

from app.delivery_policy import DeadLetter, Decision, Disable, TryAgain
from app.destinations.base import Delivered, Delivery, Failed, Outcome
from app.ids import message_id
from app.store.relay import Outgoing
from app.store.settling import Settlement

log = structlog.get_logger(__name__)

_headers = msgspec.json.Decoder(dict[str, str]).decode


def jitter() -> float:
    """Return a number from -1 to 1."""
    return random.uniform(-1, 1)  # noqa: S311


def delivery_of(subscription: str, message: Outgoing, replay: str | None) -> Delivery:
    """Return what a destination is given of a stored message."""
    return Delivery(
        subscription,
        message_id(message.transaction_id, message.position),
        message.transaction_id,
        message.offset,
        message.producer_group,
        message.topic,
        message.key,
        message.tag,
        _headers(message.headers) if message.headers else {},
        message.content_type,
        message.body,
        message.committed_at,
        message.used + 1,
        replay,
        message.traceparent,
    )


def taken_from(message: Outgoing, outcome: Delivered, at: datetime) -> Settlement:
    """Return the receipt of a message that was sent at a time.

    Its digest is of the bytes that `delivery_of` handed over, whatever the half's column says: the proof compares both.
    """
    return Settlement(
        message,
        "delivered",
        message.used + 1,
        at,
        message.first_at or at,
        status=outcome.status,
        duration_ms=outcome.duration_ms,
        digest=sha256(message.body).digest(),
    )


def note_of(message: Outgoing, outcome: Failed, at: datetime) -> Settlement:
    """Return the record of a failed try that counts for nothing."""
    return Settlement(
        message,
        "note",
        message.used,
        at,
        message.first_at,
        what="probe",
        status=outcome.status,
        duration_ms=outcome.duration_ms,
        error=outcome.error,
        response=outcome.response,
    )


def settlement_of(message: Outgoing, outcome: Outcome, decision: Decision, at: datetime, now: datetime) -> Settlement:
    """Return what is to be recorded of a failure and what policy made of it."""
    assert not isinstance(outcome, Delivered)
    told = Settlement(
        message,
        "retry",
        decision.attempts,
        at,
        message.first_at or at,
        status=outcome.status,
        duration_ms=outcome.duration_ms,
        error=outcome.error,
        response=outcome.response,
    )
    match decision:
        case TryAgain():
            told.due_at, told.what = decision.due_at, decision.what
        case Disable():
            # Due at once: it goes out when the subscription is resumed.
            told.due_at, told.what = now, "gone"
        case DeadLetter():
            told.result, told.what, told.reason = "dead", decision.what, decision.reason
    return told


def log_failure(subscription: str, settlement: Settlement) -> None:
    """Write the one log line of an attempt that did not deliver."""
    message = settlement.message
    log.info(
        "delivery_dead" if settlement.result == "dead" else "delivery_failed",
        subscription=subscription,
        message_id=message_id(message.transaction_id, message.position),
        offset=message.offset,
        outcome=settlement.what,
        attempt=message.used + 1,
        status=settlement.status,
        error=settlement.error,
        duration_ms=settlement.duration_ms,
        due_at=settlement.due_at.isoformat() if settlement.due_at else None,
    )
