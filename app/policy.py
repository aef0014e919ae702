"""When to ask a producer again, and what to do when asking comes to an end. Pure: values in, decisions out.

RocketMQ's defaults: the first check 6 s after birth, then every 30 s, 15 checks.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from app.schemas import CheckPolicy
from app.verdicts import Source, Verdict

# An unanswered check is repeated later and later, up to this; then every time.
LONGEST_BACKOFF_S = 600
# How long `Retry-After` may hold a group: longer is taken for a mistake, because a held group is not asked at all.
LONGEST_HOLD_S = 3600


@dataclass(frozen=True, slots=True)
class AskingPolicy:
    """How a transaction is asked about; durations in seconds."""

    interval_s: int = 30
    max_checks: int = 15
    on_exhausted: Literal["rollback", "park"] = "rollback"
    unanswered_park_s: int = 259_200


@dataclass(frozen=True, slots=True)
class Counts:
    """What is known of a transaction in doubt before a check comes back. Only answered checks count as checks."""

    answered: int
    unanswered: int = 0
    unanswered_since: datetime | None = None
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The producer answered; `verdict` None: it does not know yet."""

    verdict: Verdict | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody answered. `congested`: the group is asked too much; `hold_s`: how long it wants to be left alone."""

    error: str
    congested: bool = False
    hold_s: float | None = None


Brought: TypeAlias = Answered | Unanswered


@dataclass(frozen=True, slots=True)
class Settle:
    """Record the verdict, as given by `source`."""

    verdict: Verdict
    source: Source
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CheckAgain:
    """Ask again at `at`."""

    at: datetime


@dataclass(frozen=True, slots=True)
class Park:
    """Leave the transaction to its producer and to people; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaveParked:
    """A check that a person asked brought no verdict: the transaction stays parked, as it was."""


Decision: TypeAlias = Settle | CheckAgain | Park | LeaveParked


def with_override(group: AskingPolicy, override: CheckPolicy | None) -> AskingPolicy:
    """Return the group's policy with what the transaction's own `check` says in its place."""
    if override is None:
        return group
    return AskingPolicy(
        int(override.interval_s or group.interval_s),
        int(override.max_checks or group.max_checks),
        override.on_exhausted or group.on_exhausted,
        group.unanswered_park_s,
    )


def before_check(policy: AskingPolicy, counts: Counts) -> Decision | None:
    """Return what to do instead of asking, or None: ask.

    The last answer may have come by `/end` after its check was over, so nothing may be left to ask.
    """
    if counts.parked or counts.answered < policy.max_checks:
        return None
    return _exhausted(policy)


def after_check(policy: AskingPolicy, counts: Counts, brought: Brought, now: datetime) -> Decision:
    """Return what a check's result leads to. `counts` are from before this check.

    A producer's verdict always stands; a parked transaction is decided by nothing else.
    """
    if isinstance(brought, Answered) and brought.verdict is not None:
        return Settle(brought.verdict, Source.CHECK, brought.reason)
    if counts.parked:
        return LeaveParked()
    if isinstance(brought, Unanswered):
        return _unanswered(policy, counts, brought, now)
    if counts.answered + 1 >= policy.max_checks:
        return _exhausted(policy)
    return CheckAgain(now + timedelta(seconds=policy.interval_s))


def backoff_s(interval_s: int, unanswered: int) -> int:
    """Return how long to wait after the `unanswered`-th check in a row (from 1) without an answer."""
    doubled: int = interval_s << min(unanswered - 1, 20)
    return max(interval_s, min(LONGEST_BACKOFF_S, doubled))


def held_s(brought: Brought) -> float:
    """Return for how many seconds a check's result holds its whole group: 0 for most."""
    asked = brought.hold_s if isinstance(brought, Unanswered) else None
    return min(asked or 0.0, LONGEST_HOLD_S)


def _unanswered(policy: AskingPolicy, counts: Counts, brought: Unanswered, now: datetime) -> Decision:
    since = counts.unanswered_since or now
    deadline = since + timedelta(seconds=policy.unanswered_park_s)
    if now >= deadline:
        return Park(f"no check was answered since {since:%Y-%m-%dT%H:%M:%SZ}: {brought.error}")
    wait = timedelta(seconds=max(backoff_s(policy.interval_s, counts.unanswered + 1), held_s(brought)))
    # Not past the deadline: whoever waits for the parking waits for it no longer than the policy says.
    return CheckAgain(min(now + wait, deadline))


def _exhausted(policy: AskingPolicy) -> Decision:
    reason = f"{policy.max_checks} checks were answered `unknown`"
    if policy.on_exhausted == "park":
        return Park(reason)
    return Settle(Verdict.ROLLBACK, Source.POLICY, reason)
