"""The days that a run reads, and the time when a day is over."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.day_selection import MOST_TOUCHED, Candidate, Seen, aged, days_to_run, reason, state_after, telling_day

DAY = date(2026, 10, 25)
END = datetime(2026, 10, 26, tzinfo=UTC)
MARGIN_S = 3600.0
OVER = END + timedelta(hours=73)
HELD = {"half": 3, "archive": None}


def unread(day: date) -> dict[str, Any]:
    raise AssertionError("nothing needs to be counted")


def seen(**changes: Any) -> Seen:
    return Seen(**{"state": "provisional", "open": False, "findings": 0, "signature": HELD, **changes})


@pytest.mark.parametrize(
    ("known", "archive", "now", "why"),
    [
        (None, None, END, "new"),
        (None, None, OVER, "new"),
        (seen(open=True), None, END, "open"),
        (seen(findings=1), None, END, "findings"),
        (seen(), None, OVER, "due"),
        (seen(open=True), None, OVER, "open"),
        (seen(state="final"), None, OVER, None),
        # Its findings stay until a run is given the day.
        (seen(state="final", findings=2), None, OVER, None),
        (seen(state="final"), "there", OVER, "archived"),
        (seen(state="final", signature=HELD | {"archive": "there"}), "there", OVER, None),
        (seen(state="final", signature=HELD | {"archive": "elsewhere"}), "there", OVER, "archived"),
    ],
)
def test_why_a_day_is_run(known: Seen | None, archive: str | None, now: datetime, why: str | None) -> None:
    assert reason(Candidate(DAY, archive, known), now, MARGIN_S, unread) == why


def test_a_final_day_over_which_a_replay_began_is_read_again() -> None:
    final = seen(state="final", signature=HELD | {"archive": "there"})
    assert reason(Candidate(DAY, "there", final, touched=True), OVER, MARGIN_S, unread) == "touched"
    assert reason(Candidate(DAY, "elsewhere", final, touched=True), OVER, MARGIN_S, unread) == "archived"


def test_a_run_reads_a_part_of_the_days_that_were_replayed_beside_all_others() -> None:
    final = seen(state="final", signature=HELD | {"archive": None})
    replayed = [Candidate(DAY - timedelta(days=n), None, final, touched=True) for n in range(1, 30)]
    chosen = days_to_run([Candidate(DAY, None, None), *replayed], OVER, MARGIN_S, unread)
    assert list(chosen) == [DAY - timedelta(days=n) for n in range(29, 29 - MOST_TOUCHED, -1)] + [DAY]


def test_a_day_that_is_neither_open_nor_over_is_run_if_it_changed() -> None:
    candidate, soon = Candidate(DAY, None, seen()), OVER - timedelta(microseconds=1)
    assert reason(candidate, soon, MARGIN_S, lambda day: dict(HELD)) is None
    assert reason(candidate, soon, MARGIN_S, lambda day: HELD | {"half": 4}) == "changed"


def test_a_day_is_read_again_after_its_end_though_nothing_changed() -> None:
    during = Candidate(DAY, None, seen(seen_at=END - timedelta(hours=22)))
    assert reason(during, END + timedelta(hours=1), MARGIN_S, unread) == "over"
    assert reason(during, END - timedelta(hours=1), MARGIN_S, lambda day: dict(HELD)) is None
    after = Candidate(DAY, None, seen(seen_at=END))
    assert reason(after, END + timedelta(hours=1), MARGIN_S, lambda day: dict(HELD)) is None


def test_a_day_is_over_72_hours_and_the_margin_after_its_end() -> None:
    assert aged(DAY, OVER, MARGIN_S)
    assert not aged(DAY, OVER - timedelta(microseconds=1), MARGIN_S)
    assert aged(DAY, OVER.astimezone(), MARGIN_S)


@given(st.datetimes(timezones=st.just(UTC)), st.integers(0, 2), st.integers(0, 2))
def test_only_what_is_over_decided_and_settled_is_final(now: datetime, undecided: int, unsettled: int) -> None:
    state = state_after(DAY, now, MARGIN_S, undecided=undecided, unsettled=unsettled)
    assert (state == "final") == (now >= OVER and undecided == unsettled == 0)


known_days = st.builds(
    seen,
    state=st.sampled_from(["provisional", "final"]),
    open=st.booleans(),
    findings=st.integers(0, 1),
    signature=st.sampled_from([HELD, HELD | {"half": 4}]),
)
candidates = st.builds(
    Candidate,
    day=st.dates(DAY - timedelta(days=9), DAY + timedelta(days=9)),
    archive=st.none(),
    seen=st.none() | known_days,
)


@given(st.lists(candidates, unique_by=lambda candidate: candidate.day), st.datetimes(timezones=st.just(UTC)))
def test_a_missed_night_heals(days: list[Candidate], now: datetime) -> None:
    """A run reads every day that no run saw and every open day, however old; it reads no future and no final day."""
    chosen = days_to_run(days, now, MARGIN_S, lambda day: HELD)
    assert list(chosen) == sorted(chosen)
    for candidate in days:
        begun = candidate.day <= now.date()
        if candidate.seen is None or (candidate.seen.state == "provisional" and candidate.seen.open):
            assert (candidate.day in chosen) == begun
        elif candidate.seen.state == "final":
            assert candidate.day not in chosen


@given(st.lists(candidates, unique_by=lambda candidate: candidate.day, min_size=1))
def test_a_run_that_finds_nothing_open_is_not_repeated_before_the_day_is_due(days: list[Candidate]) -> None:
    """After a run nothing is left to run, until the day changes or is old enough to be final."""
    now = END + timedelta(days=20)
    after = [
        Candidate(
            candidate.day,
            None,
            seen(state=state_after(candidate.day, now, MARGIN_S, undecided=0, unsettled=0)),
        )
        for candidate in days
    ]
    assert days_to_run(after, now, MARGIN_S, lambda day: HELD) == {}


def test_who_asks_for_days_gets_these_and_no_others() -> None:
    here = [Candidate(DAY - timedelta(days=ago), None, None) for ago in range(3)]
    before = DAY - timedelta(days=1)
    final = [*here, Candidate(DAY - timedelta(days=9), None, seen(state="final"))]
    assert days_to_run(here, END, MARGIN_S, unread, [before]) == {before: "asked"}
    assert days_to_run(final, END, MARGIN_S, unread, [final[-1].day]) == {final[-1].day: "asked"}
    with pytest.raises(KeyError):
        days_to_run(here, END, MARGIN_S, unread, [DAY - timedelta(days=4)])


def test_yesterday_tells_what_is_of_no_day_or_another_if_it_is_removed() -> None:
    before, yesterday, today = (date(2026, 10, number) for number in (20, 25, 26))
    now = END + timedelta(hours=3)
    assert telling_day([before, yesterday, today], [before, yesterday, today], now) == yesterday
    # A run of named days leaves it to the nightly one.
    assert telling_day([before, yesterday, today], [before], now) == yesterday
    assert telling_day([before, today], [before, today], now) == before
    # One that is final is not read.
    assert telling_day([before, today], [today], now) == today
    assert telling_day([today], [], now) == today
