"""More faults of each kind than test_rules_planted.py has: the rules find each of them and nothing else."""

import io
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.engine.progress import Progress
from spark.proof.prove_day import ReadDay, prove
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
    """A redelivery without a receipt is a fault, unless it is from before the day took receipts."""
    day.extra["receipts_since"] = born(1000)
    for number, columns in ((150, {}), (151, {"at": born(999)}), (152, {"what": "dropped"}), (153, {})):
        day.committed(number)
        if number != 153:
            day.rows["receipt"].pop()
        day.delivery("redelivery", number, **({"at": born(1000)} | columns))
    return {("undelivered", f"{message_id(150)}:1")}


def _consumed_by_another(day: Day) -> Found:
    """A consumer's ledger has a message that was never sent to its subscription; any trace of a delivery is enough."""
    day.subscribe(30, "elsewhere", name="points")
    day.subscribe(31, "*", name="behind", state="paused", lowest=0, filters='{"tags": ["behind"]}')
    for number in range(170, 177):
        day.committed(number, tag="behind" if number == 176 else None)
        day.ledger("consumer_ledger", {"message_id": message_id(number), "times_seen": 1, "subscription": "points"})
    day.received(171, subscription=30, replay=7)
    for number, name, replay in ((172, "delivery_retry", 7), (173, "dead_letter", 7), (174, "redelivery", 7)):
        day.delivery(name, number, subscription=30, replay=replay)
    # From an unknown consumer, and from one whose delivery may be in flight.
    consumer = day.extra["consumer_ledger"]
    consumer[5]["subscription"] = None
    consumer[6]["subscription"] = "behind"
    # Some have only a replay's trace, so no other rule finds them; the first has no trace.
    return {("consumed_not_sent", message_id(170))}


def _answered_otherwise(day: Day) -> Found:
    """A receipt has a status that its consumer never answered; a try before it, or another one, may have others."""
    name = "answering"
    day.subscribe(32, "answered", name=name)
    for number, status, answered, by in (
        (200, 204, [200], name),
        (201, 200, [200, 503], name),
        (202, 202, [200], None),
        (203, 204, [200], "points"),
        (204, None, [200], name),
        (205, 204, [], name),
    ):
        day.op(number)
        day.half(number, topic="answered")
        day.sent(number, topic="answered")
        day.received(number, subscription=32, status=status)
        seen = {"message_id": message_id(number), "times_seen": 1, "subscription": by, "answered": answered}
        day.ledger("consumer_ledger", seen)
    # For 203, so that only the answer is judged.
    day.delivery("delivery_retry", 203, subscription=30, replay=7)
    day.ledger("consumer_ledger", {"message_id": message_id(203), "times_seen": 1, "subscription": name})
    return {("answer_differs", f"{message_id(number)}:32") for number in (200, 202)}


def _ended_otherwise(day: Day) -> Found:
    """The time or the reason of a verdict is not what its producer was answered and had said; or a rollback is gone."""
    at = born(210)
    for number, verdict, said in (
        (210, 2, {"end_decided_at": at + timedelta(seconds=1)}),
        (211, 2, {"end_decided_at": at + timedelta(milliseconds=999)}),
        (212, 1, {"end_reason": "sold out"}),
        (213, 2, {"end_reason": ""}),
        (214, 2, {"end_reason": None, "end_decided_at": None}),
        (215, 1, {"end_decided_at": at, "end_reason": ""}),
        (218, 2, {"end_reason": "sold out"}),
    ):
        if verdict == 1:
            day.committed(number)
        else:
            day.rolled_back(number)
        day.rows["op"][-1] |= {"decided_at": at, "reason": "late" if number in (213, 214) else None}
        words = {1: "commit", 2: "rollback"}
        day.ledger("producer_ledger", {"transaction_id": id_of(number), "verdict": words[verdict]} | said)
    # The reason of another one's verdict is not the producer's.
    day.rows["op"][-1] |= {"source": 2, "reason": "15 checks were answered `unknown`"}
    for number, answered in ((216, at), (217, None)):
        day.ledger(
            "producer_ledger",
            {"transaction_id": id_of(number), "verdict": "rollback", "end_decided_at": answered},
        )
    return {("ledger_disagrees", id_of(number)) for number in (210, 212, 213, 216)}


def _offset_of_an_earlier_day(day: Day) -> Found:
    """A run over the day finds a message of an earlier day at the same offset."""
    day.committed(180)
    earlier = {"transaction_id": id_of(1, born(-86_400)), "position": 0, "offset": 18_000}
    day.extra["same_offset"] = [earlier]
    return {("offset_of_two_messages", "18000")}


def _said_by_nobody(day: Day) -> Found:
    """Committed here, and the producer's complete ledger does not have it; by a person too, but for a reissue."""
    day.extra["producer_ledger_complete"] = True
    said = {row["transaction_id"] for row in day.extra["producer_ledger"]}
    committed = sorted({row["transaction_id"] for row in day.rows["op"] if row["verdict"] == 1} - said)
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
    """A topic without a subscription, added to a subscription after its checkpoint had passed the messages."""
    day.subscribe(10, "late", matches_since=born(200), lowest=13_050)
    day.committed(130, topic="late")
    # One message is still to come; the other was delivered under the former topics.
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


def _waiting_for_longer_than_policy(day: Day) -> Found:
    """In check_back, not asked when it was due; asked, without an answer, for longer than its group waits; and with a
    next or first check that is later than any policy says."""
    day.half(191)
    day.check_back(191, next_check_at=day.seen_at - timedelta(hours=4))
    day.half(192)
    since = day.seen_at - timedelta(days=3, hours=4)
    day.check_back(192, unanswered=500, unanswered_since=since, next_check_at=day.seen_at)
    day.half(193)
    day.check_back(193, next_check_at=day.seen_at + timedelta(days=365))
    day.half(194, first_check_at=born(194) + timedelta(days=365))
    return {("half_stuck", id_of(number)) for number in (191, 192, 193, 194)}


PLANTED: tuple[Callable[[Day], Found], ...] = (
    _halves_in_part,
    _two_verdicts,
    _added_too_late,
    _received_by_the_deleted,
    _redelivered_and_lost,
    _consumed_by_another,
    _offset_of_an_earlier_day,
    _waiting_for_longer_than_policy,
    _answered_otherwise,
    _ended_otherwise,
    # The last one: its ledger holds what the others commit.
    _said_by_nobody,
)


@pytest.mark.slow
def test_other_faults_of_a_kind_are_found_and_nothing_else(spark: SparkSession) -> None:
    _prove_others(spark, counted=True)


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_they_are_found_in_a_large_day_too(spark: SparkSession) -> None:
    _prove_others(spark, counted=False)


def _prove_others(spark: SparkSession, *, counted: bool) -> None:
    day = plain_day()
    wanted: Found = set().union(*(put(day) for put in PLANTED))
    found = findings(day.frames(spark, counted=counted), sla_s=SLA_S).select("kind", "subject").collect()
    assert sorted(tuple(row) for row in found) == sorted(wanted)


def test_checkpoints_are_judged_on_a_day_without_rows(spark: SparkSession, tmp_path: Path) -> None:
    """One is beyond the log, one has no row, and one is as it must be."""
    day = Day()
    for number in (1, 2, 3):
        day.subscribe(number)
    day.rows["checkpoint"].pop(1)
    impossible = {"subscription_id": 1, "name": "mailer-1", "differs": "", "checkpoint": "offset or shard"}
    day.extra["differing_subscription"] = [impossible]
    read = ReadDay(day.frames(spark), {})
    proved = prove(spark, read, str(tmp_path), Progress(stream=io.StringIO()), sla_s=SLA_S, margin_s=3600)
    found = sorted((row.kind, row.subject) for row in proved.findings.collect())
    assert found == [("checkpoint_differs", "mailer-1"), ("checkpoint_differs", "mailer-2")]
