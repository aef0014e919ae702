"""The circuit breaker opens at once if no connection is possible, and never because of one message."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.policy.circuit_breaker import (
    FIRST_PROBE,
    LIMITS_AT_MOST,
    LONGEST_PROBE,
    LONGEST_RETRY_AFTER,
    MESSAGES,
    UNREACHABLE,
    Breaker,
)

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)


def fail(breaker: Breaker, message: object, **fields: object) -> bool:
    return breaker.failed(message, "answered 500", NOW, **{"unreachable": False, **fields})  # type: ignore[arg-type]


@given(st.lists(st.one_of(st.integers(0, 9), st.none()), max_size=60))
def test_it_opens_exactly_when_enough_different_messages_failed_in_a_row(outcomes: list[int | None]) -> None:
    breaker, failed = Breaker(), set[int]()
    for message in outcomes:
        if message is None:
            breaker.succeeded()
            failed.clear()
        else:
            failed.add(message)
            assert fail(breaker, message) == (len(failed) == MESSAGES)
        if len(failed) == MESSAGES:
            assert breaker.open
            assert breaker.because == f"{MESSAGES} different messages failed in a row: answered 500"
            return
        assert not breaker.open


def test_one_poison_message_never_opens_it() -> None:
    breaker = Breaker()
    assert not any(fail(breaker, 1) for _ in range(1000))


def test_connections_that_fail_in_a_row_open_it_whatever_the_message() -> None:
    breaker = Breaker()
    for _ in range(UNREACHABLE - 1):
        assert not fail(breaker, 1, unreachable=True)
    # It was reached once more: the count begins again.
    assert not fail(breaker, 1)
    assert [fail(breaker, 1, unreachable=True) for _ in range(UNREACHABLE)] == [False] * (UNREACHABLE - 1) + [True]
    assert breaker.because == "no connection: answered 500"


def test_the_cause_says_once_that_there_is_no_connection() -> None:
    breaker, error = Breaker(), "no connection to shop.example:443: Connection refused"
    for _ in range(UNREACHABLE):
        breaker.failed(1, error, NOW, unreachable=True)
    assert breaker.because == error


def test_probes_go_out_less_and_less_often_and_a_success_closes_it() -> None:
    breaker = Breaker(NOW, "down")
    at, rests = NOW, []
    assert breaker.wait(at) == timedelta(0)
    for _ in range(10):
        breaker.probing(at)
        rests.append(breaker.wait(at))
        fail(breaker, 1)
        at += rests[-1]
        assert breaker.wait(at) == timedelta(0)
    assert rests[0] == 2 * FIRST_PROBE
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_PROBE
    assert breaker.succeeded()
    assert not breaker.open
    assert not breaker.succeeded()


def test_a_probe_that_was_not_sent_makes_way_for_another_at_once() -> None:
    breaker = Breaker()
    assert not breaker.probed_nothing()
    for _ in range(UNREACHABLE):
        fail(breaker, 1, unreachable=True)
    # What was in flight when it opened was no probe.
    assert not breaker.probed_nothing()
    assert breaker.wait(NOW) == FIRST_PROBE
    at = NOW + FIRST_PROBE
    for _ in range(3):
        breaker.probing(at)
        assert breaker.wait(at) == 2 * FIRST_PROBE
        assert breaker.probed_nothing()
        assert not breaker.probed_nothing()
        assert breaker.wait(at) == timedelta(0)
    assert breaker.open
    breaker.probing(at)
    breaker.succeeded()
    assert not breaker.probed_nothing()


def test_the_destination_may_ask_for_a_longer_rest_but_not_for_any() -> None:
    breaker = Breaker(NOW, "down")
    breaker.probing(NOW)
    assert not ask(breaker, 1)
    assert breaker.wait(NOW) == timedelta(seconds=120)
    assert not ask(breaker, 1, 1e6)
    assert breaker.wait(NOW) == LONGEST_RETRY_AFTER
    # The failure of a message that was in flight does not make the pause shorter.
    fail(breaker, 1)
    assert breaker.wait(NOW) == LONGEST_RETRY_AFTER
    assert breaker.wait(NOW + LONGEST_RETRY_AFTER) == timedelta(0)


def ask(breaker: Breaker, message: object, retry_after_s: float = 120.0, now: datetime = NOW) -> bool:
    return breaker.asked_for_pause(message, "answered 429", retry_after_s, now)


def test_a_destination_that_only_asks_for_pauses_is_probed_after_each_and_does_not_count_as_down() -> None:
    breaker = Breaker()
    assert [ask(breaker, message) for message in (1, 1, 2, 3, 4, 4, 5)] == [False] * 6 + [True]
    assert (breaker.open, breaker.down, breaker.limited_since) == (True, False, NOW)
    assert breaker.wait(NOW) == timedelta(seconds=120)
    at = NOW + timedelta(seconds=120)
    assert breaker.wait(at) == timedelta(0)
    breaker.probing(at)
    assert not ask(breaker, 6, 1e6, at)
    assert breaker.wait(at) == LONGEST_RETRY_AFTER
    assert breaker.succeeded()
    assert not breaker.open
    assert (breaker.limited_since, breaker.paused_until) == (None, None)
    assert not any(ask(breaker, message) for message in range(MESSAGES - 1))


def test_a_pause_that_another_process_stored_is_kept_but_not_behind_a_clock_that_stepped_back() -> None:
    breaker = Breaker(None, None, NOW, NOW + timedelta(seconds=200))
    assert breaker.wait(NOW) == timedelta(seconds=200)
    assert breaker.wait(NOW - timedelta(hours=1)) == timedelta(0)


def test_a_destination_that_asks_for_pauses_forever_counts_as_down() -> None:
    breaker = Breaker()
    assert [ask(breaker, message) for message in range(MESSAGES)][-1]
    assert not ask(breaker, 1, now=NOW + LIMITS_AT_MOST - timedelta(seconds=1))
    assert not breaker.down
    # It was open before.
    assert not ask(breaker, 1, now=NOW + LIMITS_AT_MOST)
    assert breaker.down
    assert breaker.because == "no message was taken since 08:00 UTC: answered 429"
    assert breaker.wait(NOW + LIMITS_AT_MOST) == timedelta(seconds=120)


def test_a_destination_that_asks_for_pauses_and_then_fails_counts_as_down() -> None:
    breaker = Breaker()
    assert [ask(breaker, message) for message in range(MESSAGES)][-1]
    assert not any(fail(breaker, message) for message in range(MESSAGES - 1))
    assert not breaker.down
    assert not fail(breaker, MESSAGES)
    assert breaker.down


def test_pauses_and_failures_in_a_row_open_it_together() -> None:
    breaker = Breaker()
    assert not any(fail(breaker, message) for message in range(MESSAGES - 1))
    assert not ask(breaker, 0)
    assert ask(breaker, MESSAGES)
    assert not breaker.down
    fail(breaker, MESSAGES)
    assert breaker.down


def test_a_clock_that_stepped_back_puts_no_probe_off() -> None:
    breaker = Breaker(NOW, "down")
    breaker.probing(NOW)
    assert breaker.wait(NOW - timedelta(hours=1)) == timedelta(0)


def test_probes_take_turns_between_retries_and_the_log() -> None:
    breaker, preferred = Breaker(NOW, "down"), []
    for _ in range(4):
        preferred.append(breaker.prefers_retries([1]))
        breaker.probing(NOW)
    assert preferred == [False, True, False, True]
    assert breaker.prefers_retries([])
