"""Pacing: never above the rate in any interval, no loss through late timers, no burst after a pause."""

from hypothesis import given
from hypothesis import strategies as st

from app.policy.rate_limiter import CATCH_UP_S, JointPacer, Pacer

TOLERANCE = 1e-6


@given(
    rate=st.floats(0.5, 5000),
    steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 500)), min_size=1, max_size=100),
)
def test_no_time_span_has_more_deliveries_than_the_rate_allows(rate: float, steps: list[tuple[float, int]]) -> None:
    pacer, at = Pacer(rate), 1000.0
    sent: list[tuple[float, int]] = []
    for rest, wanted in steps:
        at += rest
        room = pacer.room(at, wanted)
        assert (room == 0) == (pacer.wait_s(at) > 0)
        if room:
            pacer.sent(at, room)
            sent.append((at, room))
    for first, (begin, _) in enumerate(sent):
        total = 0
        for end, count in sent[first:]:
            total += count
            assert total <= rate * (end - begin + CATCH_UP_S) + 1 + TOLERANCE


@given(rate=st.floats(1, 5000), late=st.floats(0, CATCH_UP_S / 2))
def test_a_burst_leaves_at_the_rate_though_timers_are_late(rate: float, late: float) -> None:
    pacer, at, sent = Pacer(rate), 0.0, 0
    while at < 10:
        room = pacer.room(at, 30_000)
        pacer.sent(at, room)
        sent += room
        at += pacer.wait_s(at) + late
    assert abs(sent - 10 * rate) <= 0.05 * 10 * rate + 2


@given(
    rates=st.lists(st.floats(0.5, 500), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 500), st.booleans()), min_size=1, max_size=60),
)
def test_several_pacers_together_allow_no_more_than_their_rates(
    rates: list[float], steps: list[tuple[float, int, bool]]
) -> None:
    pacers, at = [Pacer(rate) for rate in rates], 1000.0
    joint = JointPacer(lambda: pacers)
    sent: list[tuple[float, int]] = []
    for rest, wanted, jointly in steps:
        at += rest
        pacer = joint if jointly else pacers[0]
        room = pacer.room(at, wanted)
        assert (room == 0) == (pacer.wait_s(at) > 0)
        if room:
            pacer.sent(at, room)
            sent.append((at, room))
    for first, (begin, _) in enumerate(sent):
        total = 0
        for end, count in sent[first:]:
            total += count
            assert total <= sum(rates) * (end - begin + CATCH_UP_S) + len(rates) + TOLERANCE


def test_pacers_together_allow_what_each_has_left() -> None:
    pacers = [Pacer(10), Pacer(10), Pacer(10)]
    joint = JointPacer(lambda: pacers)
    assert joint.room(0, 100) == 6
    pacers[0].sent(0, 2)
    assert (joint.room(0, 100), joint.wait_s(0)) == (4, 0)
    joint.sent(0, 4)
    assert (joint.room(0, 100), joint.wait_s(0) > 0) == (0, True)
    pacers.clear()
    assert (joint.room(9, 1), joint.wait_s(9)) == (0, CATCH_UP_S)
