"""Other faults of a kind than the one that test_rules_planted.py has: each is found, and nothing else."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession

from spark.transforms.rules import findings
from tests.spark.frames import Day, born, id_of, message_id, plain_day

SLA_S = 3600.0
Found = set[tuple[str, str]]


def _halves_in_part(day: Day) -> Found:
    """Rolled back, without the first message; committed, and the one in the middle is nowhere."""
    day.half(100, 1)
    day.op(100, 2)
    day.committed(101, 3)
    for name in ("half", "outbox", "receipt"):
        day.rows[name] = [row for row in day.rows[name] if (row["transaction_id"], row["position"]) != (id_of(101), 1)]
    return {("op_without_half", id_of(100)), ("op_without_half", id_of(101))}


def _two_verdicts(day: Day) -> Found:
    """The first one stands: what is rolled back later stays committed, for all other rules."""
    day.committed(110)
    day.op(110, 2, decided_at=born(120))
    day.rolled_back(111)
    day.op(111, 2, source=3)
    return {("op_without_half", id_of(110)), ("op_without_half", id_of(111))}


def _redelivered_and_lost(day: Day) -> Found:
    """A person sent it once more, and no trace is left of that; before the day took receipts that may be so."""
    day.extra["receipts_since"] = born(1000)
    for number, told in ((150, {}), (151, {"at": born(999)}), (152, {"what": "dropped"}), (153, {})):
        day.committed(number)
        if number != 153:
            day.rows["receipt"].pop()
        day.delivery("redelivery", number, **({"at": born(1000)} | told))
    return {("undelivered", f"{message_id(150)}:1")}


def _consumed_by_another(day: Day) -> Found:
    """By its ledger a consumer has a message that was never sent to its subscription; any trace of one would do."""
    day.subscribe(30, "elsewhere", name="points")
    day.subscribe(31, "*", name="behind", lowest=0, filters='{"tags": ["behind"]}')
    for number in range(170, 177):
        day.committed(number, tag="behind" if number == 176 else None)
        day.ledger("consumer_ledger", {"message_id": message_id(number), "times_seen": 1, "subscription": "points"})
    day.received(171, subscription=30, replay=7)
    for number, name, replay in ((172, "delivery_retry", 7), (173, "dead_letter", 7), (174, "redelivery", 7)):
        day.delivery(name, number, subscription=30, replay=replay)
    # Told by nobody's name, and by one to whom it may be under way.
    consumer = day.extra["consumer_ledger"]
    consumer[5]["subscription"] = None
    consumer[6]["subscription"] = "behind"
    # Some are replays alone, so that nothing else is found of them; the first has nothing.
    return {("consumed_not_sent", message_id(170))}


def _offset_of_an_earlier_day(day: Day) -> Found:
    """Whoever reads the day has found a message of an earlier one at the same offset."""
    day.committed(180)
    earlier = {"transaction_id": id_of(1, born(-86_400)), "position": 0, "offset": 18_000}
    day.extra["same_offset"] = [earlier]
    return {("offset_of_two_messages", "18000")}


def _said_by_nobody(day: Day) -> Found:
    """Committed here, and the producer's complete ledger does not have it; by a person too, but for a reissue."""
    day.extra["producer_ledger_complete"] = True
    committed = sorted({row["transaction_id"] for row in day.rows["op"] if row["verdict"] == 1})
    day.ledger("producer_ledger", *({"transaction_id": one, "verdict": "commit"} for one in committed))
    for number in (120, 121, 122, 124):
        day.committed(number)
    day.rows["op"][-3] |= {"source": 3}
    day.rows["op"][-2] |= {"source": 3, "decided_at": born(122)}
    # Just committed: the ledger may be older.
    day.rows["op"][-1] |= {"decided_at": day.seen_at - timedelta(seconds=SLA_S / 2)}
    # Of a group of which the ledger has nothing that day; it may be another producer's.
    day.committed(123, producer_group="billing")
    return {("ledger_disagrees", id_of(120)), ("ledger_disagrees", id_of(121))}


def _added_too_late(day: Day) -> Found:
    """A topic that nobody took, and that a subscription was given when it had passed the messages."""
    day.subscribe(10, "late", matches_since=born(200), lowest=13_050)
    day.committed(130, topic="late")
    # It comes to this one yet, and this one it has got as things were then.
    day.committed(131, topic="late")
    day.subscribe(11, "since", matches_since=born(200))
    day.committed(132, topic="since")
    day.rows["receipt"] = [row for row in day.rows["receipt"] if row["offset"] not in (13_000, 13_100, 13_200)]
    day.received(132, subscription=11)
    return {("unrouted", "late")}


def _received_by_the_deleted(day: Day) -> Found:
    """Committed long after the subscription was deleted, and sent to it; the minute in which workers learn is over."""
    day.subscribe(20, "order", deleted_at=born(60))
    day.subscribe(21, "order", deleted_at=born(100), filters='{"headers": {"region": "eu"}}')
    # The plain day's, which went out before.
    for number in range(1, 11):
        day.received(number, subscription=20)
    day.committed(119)
    day.received(119, subscription=20)
    for number in (140, 162):
        day.committed(number, headers='{"region": "eu"}')
        day.received(number, subscription=21)
    day.received(140, subscription=20)
    return {("receipt_not_matched", f"{message_id(140)}:20"), ("receipt_not_matched", f"{message_id(162)}:21")}


PLANTED: tuple[Callable[[Day], Found], ...] = (
    _halves_in_part,
    _two_verdicts,
    _added_too_late,
    _received_by_the_deleted,
    _redelivered_and_lost,
    _consumed_by_another,
    _offset_of_an_earlier_day,
    # The last: what the others commit, the ledger has.
    _said_by_nobody,
)


@pytest.mark.parametrize("counted", [True, False], ids=["whole", "screened"])
def test_other_faults_of_a_kind_are_found_and_nothing_else(spark: SparkSession, counted: bool) -> None:
    day = plain_day()
    wanted: Found = set().union(*(put(day) for put in PLANTED))
    found = findings(day.frames(spark, counted=counted), sla_s=SLA_S).select("kind", "subject").collect()
    assert sorted(tuple(row) for row in found) == sorted(wanted)
