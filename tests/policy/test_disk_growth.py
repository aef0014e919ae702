"""When the disk is full, at the growth of the last hours."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.policy.disk_growth import LONGEST, SHORTEST, DiskGrowth

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)


@given(st.integers(1, 10**9), st.integers(0, 10**13), st.timedeltas(SHORTEST, LONGEST))
def test_steady_growth_fills_the_free_bytes(per_hour: int, free: int, after: timedelta) -> None:
    growth, hours = DiskGrowth(), after / timedelta(hours=1)
    assert growth.hours_to_full(10**9, free, NOW) is None
    found = growth.hours_to_full(10**9 + per_hour, free, NOW + after)
    assert found is not None
    assert abs(found - free * hours / per_hour) <= 1e-9 * max(1.0, found)


@given(st.integers(0, 10**9), st.timedeltas(timedelta(seconds=1), LONGEST))
def test_it_is_unknown_while_nothing_grows_or_too_little_is_measured(smaller: int, after: timedelta) -> None:
    growth = DiskGrowth()
    growth.hours_to_full(10**9, 1, NOW)
    assert growth.hours_to_full(10**9 - smaller, 1, NOW + after) is None
    if after < SHORTEST:
        assert growth.hours_to_full(10**10, 1, NOW + after + timedelta(microseconds=1)) is None


def test_growth_of_long_ago_does_not_count() -> None:
    growth = DiskGrowth()
    growth.hours_to_full(0, 100, NOW)
    growth.hours_to_full(1000, 100, NOW + timedelta(hours=1))
    assert growth.hours_to_full(1000, 100, NOW + timedelta(hours=7)) is None


def test_a_clock_that_steps_back_begins_anew() -> None:
    growth = DiskGrowth()
    growth.hours_to_full(0, 100, NOW)
    assert growth.hours_to_full(1000, 100, NOW - timedelta(hours=1)) is None
    assert growth.hours_to_full(1100, 100, NOW) == 1.0
