"""A stream's progress, for any order of outcomes: nothing unsettled is passed, and nothing read is lost."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from app.relay.progress import Progress
from app.store.relay.log import Outgoing

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)


def message(offset: int) -> Outgoing:
    at = NOW + timedelta(seconds=offset)
    body = bytes(offset)
    return Outgoing(offset, UUID(int=offset), 0, "order", None, None, None, at, "shop", None, "text/plain", body)


@given(st.data())
def test_the_checkpoint_never_passes_an_unsettled_offset(data: st.DataObject) -> None:
    progress = Progress(0)
    unsettled: set[int] = set()
    reached = 0
    for _ in range(data.draw(st.integers(1, 6))):
        offsets = data.draw(st.sets(st.integers(reached + 1, reached + 12)))
        reached = data.draw(st.integers(max(offsets, default=reached), reached + 15))
        progress.read([message(offset) for offset in sorted(offsets)], reached)
        unsettled |= offsets
        settled = data.draw(st.sets(st.sampled_from(sorted(unsettled)))) if unsettled else set()
        assert progress.target(settled) == min(unsettled - settled, default=reached + 1) - 1
        for offset in settled:
            progress.settled(offset)
        unsettled -= settled
        assert progress.target() == min(unsettled, default=reached + 1) - 1
        assert (len(progress), progress.bytes) == (len(unsettled), sum(unsettled))
        oldest = progress.oldest_at()
        assert oldest == (message(min(unsettled)).committed_at if unsettled else None)


@given(st.data())
def test_the_checkpoint_never_passes_what_was_not_sent(data: st.DataObject) -> None:
    progress = Progress(0)
    offsets = sorted(data.draw(st.sets(st.integers(1, 12), min_size=1)))
    progress.read([message(offset) for offset in offsets], data.draw(st.integers(offsets[-1], 15)))
    fates = {offset: data.draw(st.sampled_from(["unread", "in flight", "settled"])) for offset in offsets}
    for offset in (one for one in reversed(offsets) if fates[one] == "unread"):
        progress.unread(message(offset))
    for offset in data.draw(st.permutations([one for one in offsets if fates[one] == "settled"])):
        progress.settled(offset)
        lowest = min((one for one in offsets if fates[one] != "settled"), default=None)
        assert lowest is None or progress.target() < lowest
    assert all(progress.target() < one for one in offsets if fates[one] != "settled")
    assert progress.bytes == sum(one for one in offsets if fates[one] == "in flight")
    in_flight = {one for one in offsets if fates[one] == "in flight"}
    assert all(progress.target(in_flight) < one for one in offsets if fates[one] == "unread")


def test_what_was_read_and_not_sent_is_read_again() -> None:
    progress = Progress(10)
    progress.read([message(12), message(15), message(18)], 20)
    progress.settled(12)
    for offset in (18, 15):
        progress.unread(message(offset))
    assert (progress.position, progress.target()) == (14, 14)


def test_the_checkpoint_moves_once_a_second_also_if_the_clock_steps_back() -> None:
    progress = Progress(10)
    assert progress.may_move(NOW)
    progress.moved(12, NOW)
    assert not progress.may_move(NOW + timedelta(milliseconds=999))
    assert progress.may_move(NOW + timedelta(seconds=1))
    assert progress.may_move(NOW - timedelta(hours=1))
