"""When a producer is asked again, and what the end of asking means: rules held over all counts and answers."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.policy.check_schedule import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    LONGEST_HOLD_S,
    Answered,
    AskingPolicy,
    CheckAgain,
    CheckHistory,
    LeaveParked,
    Park,
    Settle,
    Unanswered,
    after_check,
    backoff_s,
    before_check,
    held_s,
    with_override,
)
from app.verdicts import OnExhausted, Source, Verdict

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)

policies = st.builds(
    AskingPolicy,
    interval_s=st.integers(1, 86_400),
    max_checks=st.integers(1, 1000),
    on_exhausted=st.sampled_from(OnExhausted),
    unanswered_park_s=st.integers(60, 2_592_000),
)
verdicts = st.sampled_from(list(Verdict))
answers = st.builds(Answered, st.none() | verdicts, st.none() | st.text(max_size=20))
no_answers = st.builds(
    Unanswered, st.text(max_size=20), st.booleans(), st.none() | st.floats(0, 400_000, allow_nan=False)
)


@st.composite
def counts_of(draw: st.DrawFn, *, parked: bool | None = None) -> CheckHistory:
    unanswered = draw(st.integers(0, 2000))
    age = timedelta(seconds=draw(st.integers(0, 3_000_000)))
    is_parked = draw(st.booleans()) if parked is None else parked
    return CheckHistory(draw(st.integers(0, 1100)), unanswered, NOW - age if unanswered else None, is_parked)


@given(policies, counts_of(), verdicts, st.none() | st.text(max_size=20))
def test_a_producers_verdict_always_stands(
    policy: AskingPolicy, counts: CheckHistory, verdict: Verdict, reason: str | None
) -> None:
    decision = after_check(policy, counts, Answered(verdict, reason), NOW)
    assert decision == Settle(verdict, Source.CHECK, reason)


@given(policies, counts_of(parked=True), answers | no_answers)
def test_policy_never_decides_a_parked_one(
    policy: AskingPolicy, counts: CheckHistory, brought: Answered | Unanswered
) -> None:
    assert before_check(policy, counts) is None
    decision = after_check(policy, counts, brought, NOW)
    if isinstance(decision, Settle):
        assert decision.source is Source.CHECK
        assert isinstance(brought, Answered)
        assert decision.verdict == brought.verdict
    else:
        assert decision == LeaveParked()


@given(policies, counts_of(parked=False), no_answers)
def test_no_answer_never_decides_and_never_counts(
    policy: AskingPolicy, counts: CheckHistory, brought: Unanswered
) -> None:
    decision = after_check(policy, counts, brought, NOW)
    since = counts.unanswered_since or NOW
    deadline = since + timedelta(seconds=policy.unanswered_park_s)
    if isinstance(decision, Park):
        assert deadline <= NOW
    else:
        assert isinstance(decision, CheckAgain)
        assert NOW < decision.at <= deadline
        wait_s = (decision.at - NOW).total_seconds()
        assert wait_s <= max(LONGEST_BACKOFF_S, policy.interval_s, LONGEST_HOLD_S)
        shortest = policy.interval_s if brought.congested else min(FIRST_BACKOFF_S, policy.interval_s)
        assert decision.at == deadline or wait_s >= max(shortest, held_s(brought)) - 1e-5


@given(policies, counts_of(parked=False))
def test_unknown_is_asked_again_until_max_checks(policy: AskingPolicy, counts: CheckHistory) -> None:
    decision = after_check(policy, counts, Answered(None), NOW)
    if counts.answered + 1 < policy.max_checks:
        assert decision == CheckAgain(NOW + timedelta(seconds=policy.interval_s))
    elif policy.on_exhausted is OnExhausted.PARK:
        assert isinstance(decision, Park)
    else:
        assert isinstance(decision, Settle)
        assert (decision.verdict, decision.source) == (Verdict.ROLLBACK, Source.POLICY)


@given(policies, counts_of(parked=False))
def test_nothing_is_asked_once_enough_was_answered(policy: AskingPolicy, counts: CheckHistory) -> None:
    instead = before_check(policy, counts)
    assert (instead is None) == (counts.answered < policy.max_checks)
    if instead is not None:
        assert instead == after_check(policy, counts, Answered(None), NOW)


@given(policies)
def test_policy_alone_never_commits(policy: AskingPolicy) -> None:
    for answered in (0, policy.max_checks - 1, policy.max_checks, policy.max_checks + 1):
        decision = after_check(policy, CheckHistory(answered), Answered(None), NOW)
        assert not (isinstance(decision, Settle) and decision.verdict is Verdict.COMMIT)


@given(st.integers(1, 86_400), st.integers(1, 3000))
def test_backoff_grows_up_to_ten_minutes(interval_s: int, unanswered: int) -> None:
    wait = backoff_s(interval_s, unanswered)
    assert min(FIRST_BACKOFF_S, interval_s) <= wait <= max(interval_s, LONGEST_BACKOFF_S)
    assert wait <= backoff_s(interval_s, unanswered + 1) <= max(2 * wait, interval_s)


def test_backoff_of_the_defaults() -> None:
    assert [backoff_s(30, n) for n in range(1, 12)] == [2, 4, 8, 16, 30, 60, 120, 240, 480, 600, 600]


def test_backoff_of_short_and_long_intervals() -> None:
    assert [backoff_s(1, n) for n in range(1, 5)] == [1, 2, 4, 8]
    assert [backoff_s(2, n) for n in range(1, 5)] == [2, 4, 8, 16]
    assert [backoff_s(3, n) for n in range(1, 5)] == [2, 3, 6, 12]
    assert [backoff_s(1000, n) for n in (1, 9, 10, 11, 1000)] == [2, 512, 1000, 1000, 1000]


def test_three_days_without_an_answer_park() -> None:
    since = NOW - timedelta(seconds=259_200)
    assert isinstance(after_check(AskingPolicy(), CheckHistory(3, 400, since), Unanswered("refused"), NOW), Park)
    a_moment_less = since + timedelta(seconds=1)
    assert isinstance(
        after_check(AskingPolicy(), CheckHistory(3, 400, a_moment_less), Unanswered("refused"), NOW), CheckAgain
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({}, AskingPolicy(30, 15, OnExhausted.ROLLBACK, 60)),
        ({"interval_s": 1}, AskingPolicy(1, 15, OnExhausted.ROLLBACK, 60)),
        ({"max_checks": 2, "on_exhausted": OnExhausted.PARK}, AskingPolicy(30, 2, OnExhausted.PARK, 60)),
    ],
)
def test_a_transactions_own_policy_goes_first(override: dict[str, Any], expected: AskingPolicy) -> None:
    assert with_override(AskingPolicy(30, 15, OnExhausted.ROLLBACK, 60), **override) == expected
