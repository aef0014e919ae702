"""Turn a stored message into a delivery, and an outcome into what is recorded of it."""

import random
from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256

import msgspec
import structlog

from app.delivery import Delivered, Delivery, Failed, Outcome
from app.ids import message_id
from app.policy.delivery_retry import Decision, Disable, MakeDeadLetter, TryAgain
from app.store.relay.log import Outgoing
from app.store.relay.results import DEAD, DELIVERED, NOTE, RETRY, Settlement
from app.verdicts import DeliveryOutcome

log = structlog.get_logger(__name__)

_headers = msgspec.json.Decoder(dict[str, str]).decode


def jitter() -> float:
    """Return a number from -1 to 1."""
    return random.uniform(-1, 1)  # noqa: S311


def delivery_of(subscription: str, message: Outgoing, replay: str | None) -> Delivery:
    """Return the delivery of a stored message to a subscription, live (`replay` None) or for a replay."""
    return Delivery(
        subscription=subscription,
        message_id=message_id(message.transaction_id, message.position),
        transaction_id=message.transaction_id,
        offset=message.offset,
        producer_group=message.producer_group,
        topic=message.topic,
        key=message.key,
        tag=message.tag,
        headers=_headers(message.headers) if message.headers else {},
        content_type=message.content_type,
        body=message.body,
        committed_at=message.committed_at,
        attempt=message.used + 1,
        replay=replay,
        trace=message.traceparent,
    )


def taken_from(message: Outgoing, outcome: Delivered, at: datetime) -> Settlement:
    """Return the receipt of a message that was sent at `at`.

    Its digest is of the bytes that were sent, not the half's stored digest, because the proof compares both.
    """
    return Settlement(
        message,
        DELIVERED,
        message.used + 1,
        at,
        message.first_at or at,
        status=outcome.status,
        duration_ms=outcome.duration_ms,
        digest=sha256(message.body).digest(),
    )


def returned(message: Outgoing, now: datetime) -> Settlement:
    """Return the record of a message that goes to delivery_retry without being sent.

    It is due already, at a time in the past for the clocks of all workers, so it keeps later messages of its key back.
    """
    due_at = min(message.committed_at, now)
    return Settlement(message, RETRY, message.used, now, message.first_at, due_at=due_at)


def note_of(message: Outgoing, outcome: Failed, at: datetime) -> Settlement:
    """Return the record of a failed probe, which uses up no try."""
    return Settlement(
        message,
        NOTE,
        message.used,
        at,
        message.first_at,
        what=DeliveryOutcome.PROBE,
        status=outcome.status,
        duration_ms=outcome.duration_ms,
        error=outcome.error,
        response=outcome.response,
    )


def settlement_of(message: Outgoing, outcome: Outcome, decision: Decision, at: datetime, now: datetime) -> Settlement:
    """Return the record of a failed attempt and of what policy decided on it."""
    assert not isinstance(outcome, Delivered)
    settlement = Settlement(
        message,
        RETRY,
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
            settlement.due_at, settlement.what = decision.due_at, decision.what
        case Disable():
            # Due at once, so that it is sent when the subscription is resumed.
            settlement.due_at, settlement.what = now, DeliveryOutcome.GONE
        case MakeDeadLetter():
            settlement.result, settlement.what, settlement.reason = DEAD, decision.what, decision.reason
    return settlement


def ages_s(settlements: Iterable[Settlement]) -> list[float]:
    """Return how old each delivered message was when its receiver had answered: the seconds since its commit.

    The age of a delayed message counts from its due time.
    """
    return [
        max(0.0, (one.at - (one.message.due_at or one.message.committed_at)).total_seconds() + one.duration_ms / 1000)
        for one in settlements
        if one.result is DELIVERED and one.duration_ms is not None
    ]


def log_failure(subscription: str, settlement: Settlement) -> None:
    """Write the one log line of an attempt that did not deliver."""
    message = settlement.message
    log.info(
        "delivery_dead" if settlement.result is DEAD else "delivery_failed",
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
