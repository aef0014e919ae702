"""PURE: decide what follows from a delivery's outcome: settled, retry, dead letter, or a disabled subscription."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from app.delivery import Delivered, Failed, Gone, Outcome, Refused
from app.verdicts import DeadLetterReason, DeliveryOutcome

# RocketMQ's consumer levels without the first two: 10 s, 30 s, 1 to 10 min by minutes, 20 min, 30 min, 1 h, 2 h.
DEFAULT_RETRY = (10.0, 30.0, *(60.0 * minute for minute in range(1, 11)), 1200.0, 1800.0, 3600.0, 7200.0)
JITTER = 0.1
# How long `Retry-After` may postpone a message without using up a try, counted from its first attempt.
POSTPONED_AT_MOST = timedelta(hours=72)
# `Retry-After: 0` must not make a busy loop.
SHORTEST_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Settled:
    """Delivered, with the `attempts`-th try."""

    attempts: int


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Retry at `due_at`; `attempts` tries are used up. `what` is the outcome in the attempt's record."""

    due_at: datetime
    attempts: int
    what: DeliveryOutcome


@dataclass(frozen=True, slots=True)
class MakeDeadLetter:
    """No retry unless a person redelivers it, because of `reason`. `what` is the outcome in the attempt's record."""

    reason: str
    attempts: int
    what: DeliveryOutcome


@dataclass(frozen=True, slots=True)
class Disable:
    """The subscription is disabled because of `reason`; the message waits in it and uses up no try."""

    reason: str
    attempts: int


Decision: TypeAlias = Settled | TryAgain | MakeDeadLetter | Disable


def decide(
    outcome: Outcome, *, used: int, first_at: datetime, retry: Sequence[float], now: datetime, jitter: float
) -> Decision:
    """Return what follows from an outcome.

    `used`: tries used up before this one; `first_at`: when the first began; `retry`: seconds to wait after each failed
    try, so `len(retry) + 1` tries in all; `jitter`: -1 to 1, spreads the waits by 10 % either way.
    """
    match outcome:
        case Delivered():
            return Settled(used + 1)
        case Gone():
            return Disable(f"the destination {outcome.error}", used)
        case Refused():
            return MakeDeadLetter(outcome.reason, used + 1, DeliveryOutcome.REFUSED)
        case Failed():
            wait_s = outcome.retry_after_s
            if wait_s is not None:
                # A longer wait is cut, so that the message is sent once more before its attempts count again.
                due_at = min(now + timedelta(seconds=max(SHORTEST_WAIT_S, wait_s)), first_at + POSTPONED_AT_MOST)
                if due_at > now:
                    return TryAgain(due_at, used, DeliveryOutcome.POSTPONED)
            if used >= len(retry):
                return MakeDeadLetter(DeadLetterReason.RETRIES_EXHAUSTED, used + 1, DeliveryOutcome.FAILED)
            due_at = now + timedelta(seconds=retry[used] * (1 + JITTER * jitter))
            return TryAgain(due_at, used + 1, DeliveryOutcome.FAILED)
