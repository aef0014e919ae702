"""PURE: what is recorded of a message that a consumer acknowledged, gave back, refused, or did not settle in time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias
from uuid import UUID

from app.delivery import Failed, Refused
from app.policy.delivery_retry import Disable, MakeDeadLetter, Settled, TryAgain, decide
from app.store.pull.claims import DURATION_MOST_MS, HeldMessage
from app.store.pull.held_retries import Ctid
from app.store.pull.settles import HeldSettlement
from app.store.relay.results import DEAD, DELIVERED, RETRY

NOT_IN_TIME = "the consumer did not settle it in time"

Refusal: TypeAlias = Failed | Refused


@dataclass(frozen=True, slots=True)
class Held:
    """A message that a consumer holds. `at`: the ctid of its locked row; None: it was taken from its claim.

    `used`: tries used up before this one. `first_at`: when the first one began.
    """

    at: Ctid | None
    subscription_id: int
    replay: int
    transaction_id: UUID
    position: int
    offset: int
    topic: str
    key: str | None
    waits_from: datetime
    used: int
    first_at: datetime


def acknowledged(held: Held, handle: HeldMessage, now: datetime) -> HeldSettlement:
    """Return the receipt of a message. The duration is the time for which the consumer held it."""
    settlement = _settlement(held)
    settlement.duration_ms = min(DURATION_MOST_MS, max(0, (now - handle.at) // timedelta(milliseconds=1)))
    settlement.digest = handle.digest
    return settlement


def failed(error: str, *, postponed_s: float | None = None) -> Failed:
    """Return the outcome of a message that the consumer did not take.

    `postponed_s`: it was not begun, and is postponed by so many seconds, as by Retry-After.
    """
    return Failed(error=error, status=None, response=None, retry_after_s=postponed_s, duration_ms=0)


def refused(
    held: Held, outcome: Refusal, retry: Sequence[float], now: datetime, *, retry_after_s: float | None = None
) -> HeldSettlement:
    """Return the record of an attempt that failed, and of what policy decided.

    `retry_after_s` replaces the wait of the schedule, not its number of tries.
    """
    jitter = random.uniform(-1, 1)  # noqa: S311
    decision = decide(outcome, used=held.used, first_at=held.first_at, retry=retry, now=now, jitter=jitter)
    settlement = _settlement(held)
    settlement.attempts, settlement.error = decision.attempts, outcome.error
    match decision:
        case TryAgain(due_at=due_at, what=what):
            settlement.result, settlement.what = RETRY, what
            settlement.due_at = due_at if retry_after_s is None else now + timedelta(seconds=retry_after_s)
        case MakeDeadLetter(reason=reason, what=what):
            settlement.result, settlement.what, settlement.reason = DEAD, what, reason
        case Settled() | Disable():
            raise AssertionError("only a delivery settles, and only a destination that is gone disables")
    return settlement


def _settlement(held: Held) -> HeldSettlement:
    return HeldSettlement(
        at=held.at,
        subscription_id=held.subscription_id,
        replay=held.replay,
        transaction_id=held.transaction_id,
        position=held.position,
        offset=held.offset,
        topic=held.topic,
        key=held.key,
        waits_from=held.waits_from,
        result=DELIVERED,
        attempts=held.used + 1,
        first_at=held.first_at,
    )
