"""Correct rows that resemble a fault, for each rule. All of them are in one day, which has no finding."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession

from spark.transforms.rules import findings
from tests.spark.frames import Day, born, id_of, message_id, plain_day

SLA_S = 3600.0
HOUR = timedelta(hours=1)


def young_halves(day: Day) -> None:
    # Not swept yet; next check delayed for the longest time allowed; unanswered for as long as its group waits.
    day.half(100, born_at=day.seen_at - HOUR, first_check_at=day.seen_at - HOUR)
    day.half(101)
    day.check_back(101, asked=3, unanswered=3, next_check_at=day.seen_at - 3 * HOUR)
    day.half(102)
    since = day.seen_at - timedelta(days=3) - 3 * HOUR
    day.check_back(102, asked=900, answered=15, unanswered=600, unanswered_since=since, next_check_at=day.seen_at)
    # The longest interval, and the longest immunity.
    day.half(103)
    day.check_back(103, answered=1, asked=1, next_check_at=day.seen_at + timedelta(days=1))
    day.half(104, born_at=day.seen_at - HOUR, first_check_at=day.seen_at + timedelta(days=1))


def operational_message(day: Day) -> None:
    # Of an unregistered group, without a subscription: not a fault of the day.
    day.half(110, producer_group="halfnote", topic="halfnote.delivery.dead")
    day.op(110, source=2)
    day.sent(110, topic="halfnote.delivery.dead")


def many_messages(day: Day) -> None:
    # One flush: equal times.
    day.committed(120, 100)
    day.committed(121, 3, deliver_after_s=0.0)


def waiting_deliveries(day: Day) -> None:
    day.subscribe(10, "wait", lowest=13_000, state="paused")
    for number, fields in (
        (131, {}),
        (132, {"due_at": day.seen_at + HOUR}),
        (133, {"committed_at": day.seen_at - HOUR / 2}),
    ):
        day.half(number, topic="wait", deliver_after_s=60.0)
        day.op(number)
        day.sent(number, topic="wait", **fields)
    # Past its checkpoint: the SLA and the delay keep them.
    day.subscribe(11, "soon")
    later = {"offset": 900_000, "committed_at": day.seen_at - HOUR / 2}
    delayed = {"offset": 900_001, "committed_at": day.seen_at - HOUR / 2, "due_at": day.seen_at + HOUR}
    for number, fields in ((134, later), (135, delayed)):
        day.half(number, topic="soon")
        day.op(number)
        day.sent(number, topic="soon", **fields)
    # The order of times is the order of the log.
    day.rows["outbox"] = [row for row in day.rows["outbox"] if row["transaction_id"] != id_of(133)]
    day.rows["half"] = [row for row in day.rows["half"] if row["transaction_id"] != id_of(133)]
    day.rows["op"] = [row for row in day.rows["op"] if row["transaction_id"] != id_of(133)]


def dealt_with(day: Day) -> None:
    for number, name in ((140, "delivery_retry"), (141, "dead_letter"), (142, "redelivery")):
        day.committed(number)
        day.rows["receipt"].pop()
        day.delivery(name, number)
    # Redelivered and received: two traces of one delivery.
    day.committed(143)
    day.delivery("redelivery", 143)
    # Dropped by a person: no digest.
    day.committed(144)
    day.rows["receipt"][-1] |= {"outcome": "dropped", "digest": None}


def other_subscriptions(day: Day) -> None:
    # Deleted, begun later, changed since, by tag, by header: none of them has to have `order`'s messages.
    day.subscribe(20, "order", deleted_at=born(0))
    day.subscribe(21, "order", started_after=500_000)
    day.subscribe(22, "order", matches_since=day.seen_at - 2 * HOUR)
    day.subscribe(23, "*", filters='{"tags": ["other"]}')
    day.subscribe(24, "ord*", filters='{"headers": {"region": "eu"}}')
    day.committed(150, headers='{"region": "us", "x": "eu"}', tag="created")
    day.committed(151, headers='{"x": "1", "region": "eu"}')
    day.received(151, subscription=24)


def changed_filters(day: Day) -> None:
    # The subscription takes none of these today; it had other topics then, or its delivery under those was late.
    day.subscribe(30, "elsewhere", created_at=born(-86_400), matches_since=born(3600))
    day.committed(160, topic="formerly")
    day.rows["receipt"].pop()
    day.received(160, subscription=30)
    day.committed(161, topic="formerly")
    day.rows["receipt"].pop()
    day.received(161, subscription=30, first_at=born(8000))
    day.committed(162, topic="formerly")
    day.rows["receipt"].pop()
    day.delivery("dead_letter", 162, subscription=30)


def replayed(day: Day) -> None:
    # Before its beginning, by a replay; and one that the live delivery had too.
    day.subscribe(40, "order", started_after=500_000)
    day.committed(170)
    day.received(170, subscription=40, replay=3)
    day.received(170, replay=4)


def formerly_subscribed(day: Day) -> None:
    day.subscribe(50, "gone", deleted_at=born(1000))
    day.committed(180, topic="gone")
    day.rows["receipt"].pop()
    day.subscribe(51, "halves", filters='{"headers": {"a": "b"}}')
    day.committed(181, topic="halves", headers='{"a": "b"}')
    day.rows["receipt"].pop()
    day.received(181, subscription=51)


def decided_after_all(day: Day) -> None:
    day.rolled_back(190)
    day.check_back(190, state=2, parked_at=born(300), answered=20)
    for number in range(1, 16):
        day.attempt(190, "check", number=number, outcome="unknown")
    day.attempt(190, "parked")
    # A person may ask for checks of a parked transaction without a limit.
    for number in range(16, 19):
        day.attempt(190, "check", number=number, outcome="unknown")


def asked_often(day: Day) -> None:
    day.half(200, policy='{"max_checks": 100, "interval_s": 5}')
    day.op(200, 2)
    for number in range(1, 50):
        day.attempt(200, "check", number=number, outcome="unknown")
    # The same check written twice, and unanswered checks.
    day.rolled_back(201)
    for number in (*range(1, 16), 15, 15):
        day.attempt(201, "check", number=number, outcome="unknown")
    for number in range(16, 30):
        day.attempt(201, "check", number=number, outcome="unanswered")
    day.half(202)
    day.check_back(202, asked=15, answered=15, next_check_at=day.seen_at)
    day.attempt(202, "swept")
    day.attempt(202, "delivery", outcome="failed")


def ledgers(day: Day) -> None:
    day.ledger(
        "producer_ledger",
        {"transaction_id": id_of(1).upper(), "verdict": "commit"},
        {"transaction_id": id_of(1), "verdict": "commit"},
        {"transaction_id": id_of(11), "verdict": "rollback"},
        # Of the day before and the day after.
        {"transaction_id": id_of(1, born(-13 * 3600)), "verdict": "commit"},
        {"transaction_id": id_of(1, born(12 * 3600)), "verdict": "commit"},
    )
    received = [row for row in day.rows["receipt"] if row["subscription_id"] == 1 and row["outcome"] == "delivered"]
    names = {f"{row['transaction_id']}-{row['position']}" for row in received}
    # The ledger names one subscription; for one message it names none.
    consumed = [{"message_id": name, "times_seen": 1, "subscription": "mailer-1"} for name in sorted(names)]
    consumed[0]["subscription"] = None
    day.ledger("consumer_ledger", *consumed, {"message_id": id_of(1, born(12 * 3600)) + "-0", "times_seen": 9})
    assert message_id(1) in names


NEAR: tuple[Callable[[Day], None], ...] = (
    young_halves,
    operational_message,
    many_messages,
    waiting_deliveries,
    dealt_with,
    other_subscriptions,
    changed_filters,
    replayed,
    formerly_subscribed,
    decided_after_all,
    asked_often,
    ledgers,
)


@pytest.mark.slow
def test_what_is_next_to_a_fault_is_none(spark: SparkSession) -> None:
    day = plain_day()
    for put in NEAR:
        put(day)
    found = findings(day.frames(spark), sla_s=SLA_S)
    assert sorted((row.kind, row.subject, row.detail) for row in found.collect()) == []
