"""What is usual for a day: weekdays, first weeks, new and given-up names, single shares; without Spark."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.frames import Frames
from spark.transforms import volumes as module
from spark.transforms.absence import absent
from spark.transforms.volumes import beyond, cut
from spark.usual import LEAST_USUAL, SHARE, Expected, Usual, is_fewer, is_gone, usual

DAY = date(2026, 11, 20)  # a Friday
SUNDAY = date(2026, 11, 22)


def weekly(day: date, weekday: int = 10_000, weekend: int = 50, *, days: int = 28) -> dict[date, int]:
    """The counts of the days before one, with a low weekend."""
    before = [day - timedelta(days=number) for number in range(1, days + 1)]
    return {one: weekend if one.weekday() >= 5 else weekday for one in before}


def found(day: date, count: int | None, counts: Mapping[date, int], **expected: Any) -> list[str]:
    """Return the subjects of the findings about a topic with these counts."""
    history = {one: {"topic": {"order": number} if number else {}} for one, number in counts.items()}
    f = cast(Frames, SimpleNamespace(day=day, seen_at=datetime(day.year, day.month, day.day, tzinfo=UTC) + TWO_DAYS))
    today = {"topic": {} if count is None else {"order": count}}
    rows = absent(f, today, Expected(history=history, **expected))
    assert rows is not None
    return [row["subject"] for row in rows]


TWO_DAYS = timedelta(days=2)


def test_a_day_with_far_less_is_found_and_a_quiet_weekend_is_not() -> None:
    assert found(DAY, 40, weekly(DAY)) == ["topic:order"]
    assert found(DAY, None, weekly(DAY)) == ["topic:order"]
    assert found(DAY, 2000, weekly(DAY)) == []
    assert found(SUNDAY, 40, weekly(SUNDAY)) == []
    # A Saturday has two Saturdays before it, which are lower than most of the days.
    assert found(SUNDAY, 40, weekly(SUNDAY, days=16)) == []
    assert found(SUNDAY, 40, weekly(SUNDAY, weekend=10_000, days=16)) == ["topic:order"]


def test_the_finding_says_what_is_missing() -> None:
    f = cast(Frames, SimpleNamespace(day=DAY, seen_at=datetime(2026, 11, 21, 1, tzinfo=UTC)))
    history = {one: {"group": {"shop": number}} for one, number in weekly(DAY).items()}
    [row] = absent(f, {"group": {"shop": 40}}, Expected(history=history)) or []
    assert row["producer_group"] == "shop"
    assert row["detail"] == {"count": 40, "usual": 10_000, "days": 4, "share": SHARE, "messages": 9960}


def test_a_day_that_is_not_over_is_not_compared() -> None:
    f = cast(Frames, SimpleNamespace(day=DAY, seen_at=datetime(2026, 11, 20, 23, 59, tzinfo=UTC)))
    assert absent(f, {}, Expected()) is None


@pytest.mark.parametrize("days", [0, 1, 7, 13])
def test_the_first_weeks_have_no_finding(days: int) -> None:
    assert found(DAY, 40, weekly(DAY, days=days)) == []


def test_new_and_rare_and_given_up_names_have_no_finding() -> None:
    # New for two weeks: on the two Fridays before that there was nothing.
    new = {one: count if DAY - one <= timedelta(days=14) else 0 for one, count in weekly(DAY).items()}
    assert found(DAY, 40, new) == []
    assert found(DAY, None, weekly(DAY, LEAST_USUAL - 1)) == []
    # Sent on one day of the four weeks.
    assert found(DAY, None, dict.fromkeys(weekly(DAY), 0) | {DAY - timedelta(days=7): 1_000_000}) == []
    gone = {one: count if DAY - one > timedelta(days=7) else 0 for one, count in weekly(DAY).items()}
    assert found(DAY, None, gone) == []
    assert found(DAY, 1, gone) == ["topic:order"]
    assert found(DAY, None, weekly(DAY), removed=frozenset({"topic:order"})) == []


def test_a_share_turns_it_off_for_all_or_for_one() -> None:
    assert found(DAY, 40, weekly(DAY), share=0.0) == []
    assert found(DAY, 40, weekly(DAY), shares={"topic:order": 0.0}) == []
    assert found(DAY, 40, weekly(DAY), shares={"group:order": 0.0}) == ["topic:order"]
    assert found(DAY, 2000, weekly(DAY), shares={"topic:order": 0.5}) == ["topic:order"]


def test_of_too_many_names_a_missing_one_has_what_the_smallest_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NAMES", 2)
    assert cut({"a": 1, "b": 3, "c": 2}) == {"b": 3, "c": 2}
    assert beyond({"b": 3, "c": 2}) == 2
    assert beyond({"b": 3}) == 0


COUNTS = st.dictionaries(st.integers(-5, 40).map(lambda n: DAY - timedelta(days=n)), st.integers(0, 10**9))


@given(COUNTS)
def test_what_is_usual_lies_within_the_counts_of_the_four_weeks(counts: dict[date, int]) -> None:
    than = usual(DAY, counts)
    known = [count for one, count in counts.items() if 0 < (DAY - one).days <= 28]
    same = [count for one, count in counts.items() if (DAY - one).days in (7, 14, 21, 28)]
    if than is None:
        assert len(same) < 3
        assert not same or len(known) < 14
    else:
        assert min(known) <= than.count <= max(same)
        assert 0 <= than.deviation <= max(known)
        assert usual(DAY, dict(reversed(list(counts.items())))) == than


@given(COUNTS, st.integers(0, 10**9), st.floats(0, 0.99))
def test_only_less_than_the_share_of_a_steady_count_is_found(counts: dict[date, int], count: int, share: float) -> None:
    than = usual(DAY, counts)
    if than is not None and is_fewer(count, than, share):
        assert count < share * than.count
        assert than.count >= LEAST_USUAL
        # Still less is found too, and a smaller share may not find it.
        assert is_fewer(0, than, share)
        assert not is_fewer(count, than, 0.0)


@given(st.lists(st.integers(1000, 1200), min_size=4, max_size=4), st.integers(0, 10**9))
def test_one_odd_week_changes_nothing(weeks: list[int], odd: int) -> None:
    """One of the four same weekdays may have anything: a holiday, an outage, a sale."""
    counts = {DAY - timedelta(days=7 * number): count for number, count in enumerate(weeks, 1)}
    than = usual(DAY, counts | {DAY - timedelta(days=7): odd})
    assert than is not None
    assert is_fewer(10, than, SHARE)
    assert not is_fewer(1000, than, SHARE)


def test_deviations_are_allowed_for() -> None:
    assert is_fewer(150, Usual(1000, 190, 4), SHARE)
    assert not is_fewer(160, Usual(1000, 190, 4), SHARE)
    assert not is_gone(DAY, {DAY: 0}, 1)
