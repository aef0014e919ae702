"""PURE: when to send the next check to a producer, and what to do when checks are exhausted.

The defaults are RocketMQ's: the first check 6 s after birth, then every 30 s, 15 checks.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil, log2
from typing import TypeAlias

from app.verdicts import OnExhausted, Source, Verdict

# The wait after the first unanswered check: a producer that restarts is asked soon. It doubles each time, first up to
# the check interval and then on from there.
FIRST_BACKOFF_S = 2
# Up to this.
LONGEST_BACKOFF_S = 600
# The longest that `Retry-After` may hold a group, because a held group gets no checks at all.
LONGEST_HOLD_S = 3600


@dataclass(frozen=True, slots=True)
class AskingPolicy:
    """How a transaction is checked; durations in seconds."""

    interval_s: int = 30
    max_checks: int = 15
    on_exhausted: OnExhausted = OnExhausted.ROLLBACK
    unanswered_park_s: int = 259_200


@dataclass(frozen=True, slots=True)
class CheckHistory:
    """The earlier checks of a transaction in doubt. Unanswered checks do not count toward `max_checks`."""

    answered: int
    unanswered: int = 0
    unanswered_since: datetime | None = None
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The producer answered; `verdict` None: `unknown`."""

    verdict: Verdict | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No URL answered. `congested`: the group gets too many checks; `hold_s`: the pause that it asked for."""

    error: str
    congested: bool = False
    hold_s: float | None = None


CheckResult: TypeAlias = Answered | Unanswered


@dataclass(frozen=True, slots=True)
class Settle:
    """Record the verdict with its source."""

    verdict: Verdict
    source: Source
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CheckAgain:
    """Send the next check at `at`."""

    at: datetime


@dataclass(frozen=True, slots=True)
class Park:
    """Park the transaction because of `reason`: its producer's End or a person decides it."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaveParked:
    """Leave a parked transaction parked: the check that a person asked for result no verdict."""


Decision: TypeAlias = Settle | CheckAgain | Park | LeaveParked


def with_override(
    group: AskingPolicy,
    *,
    interval_s: float | None = None,
    max_checks: float | None = None,
    on_exhausted: OnExhausted | None = None,
) -> AskingPolicy:
    """Return the group's policy with the values of the transaction's own `check` where it has any."""
    return AskingPolicy(
        int(interval_s or group.interval_s),
        int(max_checks or group.max_checks),
        on_exhausted or group.on_exhausted,
        group.unanswered_park_s,
    )


def before_check(policy: AskingPolicy, history: CheckHistory) -> Decision | None:
    """Return the decision that replaces the check, or None: send the check.

    The last answer may have come by `/end` after its check ended, so no check may be left.
    """
    if history.parked or history.answered < policy.max_checks:
        return None
    return _exhausted(policy)


def after_check(policy: AskingPolicy, history: CheckHistory, result: CheckResult, now: datetime) -> Decision:
    """Return the decision on a check's result. `history` is from before this check.

    A producer's verdict always stands; a parked transaction is decided by nothing else.
    """
    if isinstance(result, Answered) and result.verdict is not None:
        return Settle(result.verdict, Source.CHECK, result.reason)
    if history.parked:
        return LeaveParked()
    if isinstance(result, Unanswered):
        return _unanswered(policy, history, result, now)
    if history.answered + 1 >= policy.max_checks:
        return _exhausted(policy)
    return CheckAgain(now + timedelta(seconds=policy.interval_s))


def backoff_s(interval_s: int, unanswered: int) -> int:
    """Return how long to wait after the `unanswered`-th check in a row (from 1) without an answer.

    2, 4, 8 s and so on while that is less than the interval; then the interval, doubled each time, up to the longest.
    """
    early = max(0, ceil(log2(interval_s / FIRST_BACKOFF_S)))
    if unanswered <= early:
        return FIRST_BACKOFF_S << (unanswered - 1)
    doubled: int = interval_s << min(unanswered - 1 - early, 20)
    return max(interval_s, min(LONGEST_BACKOFF_S, doubled))


def held_s(result: CheckResult) -> float:
    """Return how many seconds a check's result holds its whole group; 0 for most."""
    hold_s = result.hold_s if isinstance(result, Unanswered) else None
    return min(hold_s or 0.0, LONGEST_HOLD_S)


def _unanswered(policy: AskingPolicy, history: CheckHistory, result: Unanswered, now: datetime) -> Decision:
    since = history.unanswered_since or now
    deadline = since + timedelta(seconds=policy.unanswered_park_s)
    if now >= deadline:
        return Park(f"no check was answered since {since:%Y-%m-%dT%H:%M:%SZ}: {result.error}")
    usual_s = backoff_s(policy.interval_s, history.unanswered + 1)
    # A producer that gets too many checks is not asked sooner than its interval.
    wait = timedelta(seconds=max(usual_s, policy.interval_s if result.congested else 0, held_s(result)))
    # Not past the deadline, so that the transaction is parked when the policy says.
    return CheckAgain(min(now + wait, deadline))


def _exhausted(policy: AskingPolicy) -> Decision:
    reason = f"{policy.max_checks} checks were answered `unknown`"
    if policy.on_exhausted is OnExhausted.PARK:
        return Park(reason)
    return Settle(Verdict.ROLLBACK, Source.POLICY, reason)
