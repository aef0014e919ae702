"""PURE: limit how many messages a second consumers claim, by a time that all processes share in the database."""

from datetime import datetime, timedelta

from app.policy.rate_limiter import Pacer

# The time of a claim, for its rate limiter: small numbers keep microseconds.
CLAIMED_AT = 0.0
# How far the clocks of two processes may differ.
SKEW_S = 1.0


def pacer_of(rate_per_s: float, paced_until: datetime | None, now: datetime) -> Pacer:
    """Return the rate limiter of a claim at `now`; `paced_until`: when the next message may be claimed.

    That is at most one message ahead of the last claim. A later time is from before a clock step, and holds no more.
    """
    if paced_until is None:
        return Pacer(rate_per_s)
    ahead_s = (paced_until - now).total_seconds()
    return Pacer(rate_per_s, CLAIMED_AT if ahead_s > 1 / rate_per_s + SKEW_S else ahead_s)


def paced_until_of(pacer: Pacer, now: datetime) -> datetime:
    """Return when the next message may be claimed, after a claim at `now`."""
    return now + timedelta(seconds=pacer.next_at - CLAIMED_AT)
