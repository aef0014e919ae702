"""The picture of a transaction's timeline: its lanes, and what a crowded one leaves out."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from app.console.timeline_picture import CHECKS, LANE, LANES_MOST, MARKS_MOST, PRODUCER, TOP, picture_of
from app.schemas.transactions import TimelineEntry, TransactionShown
from app.verdicts import State

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
ID = UUID("01a21590-a3dd-7f80-8469-601323c632dc")


def transaction(*deliveries: TimelineEntry) -> TransactionShown:
    timeline = [
        TimelineEntry(at=AT, what="born"),
        TimelineEntry(at=AT + timedelta(seconds=6), what="check", check=1, outcome="commit"),
        TimelineEntry(at=AT + timedelta(seconds=6), what="verdict", verdict="commit", source="check"),
        *deliveries,
    ]
    return TransactionShown(
        transaction_id=ID,
        producer_group="shop",
        state=State.COMMITTED,
        born_at=AT,
        first_check_at=AT,
        messages=[],
        timeline=timeline,
        attempts_cursor=None,
        deliveries_cursor=None,
    )


def delivery(n: int, what: str) -> TimelineEntry:
    at = AT + timedelta(seconds=7, milliseconds=n)
    return TimelineEntry.model_validate({"at": at, "what": what, "subscription": f"s{n:03}", "message_id": f"{ID}-0"})


def test_lanes_are_the_producer_the_checks_and_each_delivery_by_time() -> None:
    picture = picture_of(transaction(delivery(0, "delivered"), delivery(1, "dead"), delivery(2, "delivered")))
    assert [lane.name for lane in picture.lanes] == [PRODUCER, CHECKS, "s000", "s001", "s002"]
    assert [lane.tone for lane in picture.lanes[2:]] == ["good", "bad", "good"]
    assert (picture.left_out, picture.lanes_left_out) == (0, 0)


def test_a_crowded_picture_keeps_the_deliveries_that_are_not_done() -> None:
    what = ["dead" if n % 50 == 49 else "delivered" for n in range(100)]
    picture = picture_of(transaction(*(delivery(n, one) for n, one in enumerate(what))))
    assert len(picture.lanes) == LANES_MOST
    assert [lane.name for lane in picture.lanes[:5]] == [PRODUCER, CHECKS, "s049", "s099", "s000"]
    assert picture.lanes_left_out == 102 - LANES_MOST
    assert picture.height == TOP + LANE * LANES_MOST + 8


def test_of_thousands_of_events_the_latest_are_shown() -> None:
    picture = picture_of(transaction(*(delivery(n % 3, "attempt") for n in range(MARKS_MOST))))
    assert [lane.name for lane in picture.lanes] == ["s000", "s001", "s002"]
    assert sum(len(lane.marks) for lane in picture.lanes) == MARKS_MOST
    assert picture.left_out == 3
