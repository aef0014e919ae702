"""When upkeep tries a day again that failed."""

from datetime import UTC, datetime, timedelta

from app.policy.day_failures import DayFailure, failed

AT = datetime(2026, 1, 5, tzinfo=UTC)
TURN = timedelta(minutes=1)
NO_TIME = timedelta(0)


def test_the_rest_grows_to_ten_turns() -> None:
    failure: DayFailure | None = None
    began, rests = AT, []
    for _ in range(7):
        failure = failed(failure, began, NO_TIME, TURN, ["failed"])
        rests.append((failure.retry_at - began) / TURN)
        began = failure.retry_at
    assert rests == [0.5, 1.5, 3.5, 7.5, 9.5, 9.5, 9.5]
    assert failure is not None
    assert (failure.number, failure.since) == (7, AT)


def test_the_rest_is_as_long_as_the_try() -> None:
    hour = timedelta(hours=1)
    failure = failed(None, AT, hour, TURN, [])
    assert (failure.began, failure.retry_at) == (AT, AT + 2 * hour)


def test_a_day_rests_until_its_time() -> None:
    failure = failed(None, AT, NO_TIME, TURN, ["failed"])
    assert failure.rests(AT, ["failed"])
    assert failure.rests(failure.retry_at - timedelta(microseconds=1), ["failed"])
    assert not failure.rests(failure.retry_at, ["failed"])
    # A person has removed the cause.
    assert not failure.rests(AT, [])
    # The clock went back.
    assert not failure.rests(AT - timedelta(seconds=1), ["failed"])
