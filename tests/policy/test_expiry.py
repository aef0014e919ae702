"""Which messages have waited too long, whatever the numbers."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.policy.expiry import WaitingLimits

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
ages = st.timedeltas(timedelta(days=-1), timedelta(days=100))
limits = st.builds(
    WaitingLimits,
    st.none() | st.timedeltas(timedelta(minutes=1), timedelta(days=45)),
    st.none() | st.integers(100, 2**53),
)


@given(limits, ages, st.integers(0, 2**53))
def test_what_may_not_wait_uses_more_than_its_limit(limits: WaitingLimits, age: timedelta, backlog: int) -> None:
    used = limits.used(NOW - age, backlog, NOW)
    beyond = limits.too_old(NOW - age, NOW) or limits.excess(backlog) > 0
    assert beyond == (used > 1)
    assert used >= 0


@given(limits, ages, ages)
def test_a_message_never_expires_before_an_older_one(limits: WaitingLimits, one: timedelta, other: timedelta) -> None:
    older, younger = max(one, other), min(one, other)
    assert limits.too_old(NOW - older, NOW) or not limits.too_old(NOW - younger, NOW)


@given(ages, st.integers(0, 2**53))
def test_without_limits_nothing_expires(age: timedelta, backlog: int) -> None:
    none = WaitingLimits()
    assert not none
    assert not none.too_old(NOW - age, NOW)
    assert (none.excess(backlog), none.used(NOW - age, backlog, NOW)) == (0, 0.0)


@given(st.integers(100, 2**53), st.integers(0, 2**53))
def test_the_excess_leaves_as_many_as_may_wait(most: int, backlog: int) -> None:
    assert backlog - WaitingLimits(max_backlog=most).excess(backlog) == min(most, backlog)
