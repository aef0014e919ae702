"""How long the embedded Postgres rests before it is restarted again."""

import pytest

from app.policy.server_restarts import LONGEST_WAIT_OF_STARTED_S, LONGEST_WAIT_S, wait_s


def waits(*, started: bool) -> list[float]:
    found = [0.0]
    for _ in range(8):
        found.append(wait_s(found[-1], started=started))
    return found[1:]


def test_a_server_that_cannot_start_is_restarted_ever_more_rarely() -> None:
    assert waits(started=False) == [1.5, 3, 6, 12, 24, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]


def test_a_server_that_starts_and_dies_again_rests_shortly() -> None:
    assert waits(started=True) == [1.5, 3, *[LONGEST_WAIT_OF_STARTED_S] * 6]


@pytest.mark.parametrize("before_s", [0.0, 1.5, LONGEST_WAIT_S])
def test_a_start_ends_the_long_waits_of_failures(before_s: float) -> None:
    assert wait_s(before_s, started=True) <= LONGEST_WAIT_OF_STARTED_S
