"""What an outcome leads to, whatever the numbers."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.delivery import Delivered, Failed, Gone, Refused
from app.policy.delivery_retry import (
    DEFAULT_RETRY,
    POSTPONED_AT_MOST,
    Disable,
    MakeDeadLetter,
    Settled,
    TryAgain,
    decide,
)
from app.verdicts import DeadLetterReason, DeliveryOutcome

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)

waits = st.lists(st.floats(0, 2_592_000), max_size=20)
jitters = st.floats(-1, 1)


def failed(retry_after_s: float | None = None) -> Failed:
    return Failed("answered 500", 500, None, retry_after_s, 3)


def test_the_default_is_rocketmqs_consumer_levels() -> None:
    minutes = [60 * minute for minute in range(1, 11)]
    assert list(DEFAULT_RETRY) == [10, 30, *minutes, 1200, 1800, 3600, 7200]
    assert len(DEFAULT_RETRY) == 16


@given(waits, jitters)
def test_a_message_that_always_fails_dies_after_one_try_more_than_there_are_waits(
    retry: list[float], jitter: float
) -> None:
    used = 0
    for wait_s in retry:
        decision = decide(failed(), used=used, first_at=NOW, retry=retry, now=NOW, jitter=jitter)
        assert isinstance(decision, TryAgain)
        assert decision.attempts == used + 1
        least, most = timedelta(seconds=wait_s * 0.9), timedelta(seconds=wait_s * 1.1)
        assert least - timedelta(seconds=1) <= decision.due_at - NOW <= most + timedelta(seconds=1)
        used = decision.attempts
    decision = decide(failed(), used=used, first_at=NOW, retry=retry, now=NOW, jitter=jitter)
    assert decision == MakeDeadLetter(DeadLetterReason.RETRIES_EXHAUSTED, len(retry) + 1, DeliveryOutcome.FAILED)


@given(st.integers(0, 20), st.floats(0, 259_200), st.floats(0, 400_000))
def test_retry_after_uses_up_no_try_within_72_hours_in_all(used: int, wait_s: float, age_s: float) -> None:
    first_at = NOW - timedelta(seconds=age_s)
    decision = decide(failed(wait_s), used=used, first_at=first_at, retry=[1.0] * 20, now=NOW, jitter=0)
    longest = first_at + POSTPONED_AT_MOST
    if longest > NOW:
        due_at = min(NOW + timedelta(seconds=max(1.0, wait_s)), longest)
        assert decision == TryAgain(due_at, used, DeliveryOutcome.POSTPONED)
    elif used < 20:
        assert decision == TryAgain(NOW + timedelta(seconds=1), used + 1, DeliveryOutcome.FAILED)
    else:
        assert decision == MakeDeadLetter(DeadLetterReason.RETRIES_EXHAUSTED, 21, DeliveryOutcome.FAILED)


def test_a_retry_after_beyond_72_hours_is_cut_and_makes_no_dead_letter() -> None:
    first_at = NOW - timedelta(hours=1)
    decision = decide(failed(259_200), used=0, first_at=first_at, retry=[], now=NOW, jitter=0)
    assert decision == TryAgain(NOW + timedelta(hours=71), 0, DeliveryOutcome.POSTPONED)


def test_retry_after_zero_is_no_busy_loop() -> None:
    decision = decide(failed(0), used=0, first_at=NOW, retry=[], now=NOW, jitter=0)
    assert decision == TryAgain(NOW + timedelta(seconds=1), 0, DeliveryOutcome.POSTPONED)


@given(st.integers(0, 20), waits)
def test_success_refusal_and_gone_do_not_depend_on_the_schedule(used: int, retry: list[float]) -> None:
    def given_outcome(outcome: Delivered | Refused | Gone) -> object:
        return decide(outcome, used=used, first_at=NOW, retry=retry, now=NOW, jitter=0)

    assert given_outcome(Delivered(204, 3)) == Settled(used + 1)
    refused = Refused("unknown customer", "answered 422", 422, None, 3)
    assert given_outcome(refused) == MakeDeadLetter("unknown customer", used + 1, DeliveryOutcome.REFUSED)
    assert given_outcome(Gone("answered 410", 410, None, 3)) == Disable("the destination answered 410", used)
