"""Deliveries are judged by the history of subscriptions, and a loss is found whatever checkpoints and rows say.

Each case has a subscription and a topic of its own, with ten messages that it received; all cases are in one day.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark.transforms.rules import findings
from tests.spark.frames import Day, born, id_of, message_id, plain_day

SLA_S = 3600.0
HOUR = timedelta(hours=1)
Found = set[tuple[str, str]]


@dataclass
class Case:
    """Subscription `number` of the day; its messages are numbered from `number * 20` on."""

    day: Day
    number: int

    def __post_init__(self) -> None:
        self.day.subscribe(self.number, self.topic)
        for message in range(10):
            self.message(message)

    @property
    def topic(self) -> str:
        return f"topic-{self.number}"

    @property
    def name(self) -> str:
        return f"mailer-{self.number}"

    def message(self, message: int, **columns: Any) -> None:
        self.day.committed(self.number * 20 + message, topic=self.topic, **columns)
        self.day.rows["receipt"][-1]["subscription_id"] = self.number

    def lose(self, *messages: int) -> None:
        lost = {self.offset(message) for message in messages}
        self.day.rows["receipt"] = [row for row in self.day.rows["receipt"] if row["offset"] not in lost]

    def lose_all(self) -> None:
        self.lose(*range(10))

    def offset(self, message: int) -> int:
        return (self.number * 20 + message) * 100

    def undelivered(self, message: int) -> tuple[str, str]:
        return "undelivered", f"{message_id(self.number * 20 + message)}:{self.number}"

    def checkpoints(self, *offsets: int) -> None:
        """Replace the checkpoint: one row for each shard."""
        rows = self.day.rows["checkpoint"]
        rows[:] = [row for row in rows if row["subscription_id"] != self.number]
        for shard, offset in enumerate(offsets):
            row = {"subscription_id": self.number, "shards": len(offsets), "shard": shard, "offset": offset}
            rows.append(row)

    def versions(self, *versions: dict[str, Any]) -> None:
        row = {"subscription_id": self.number, "name": self.name, "topics": [self.topic], "state": "active"}
        row |= {"ordered": "none", "shards": 1, "started_after": 0, "at": born(-86_400)}
        made = (row | {"version_id": self.number * 10 + place} | one for place, one in enumerate(versions))
        self.day.rows["subscription_version"].extend(made)

    def retry(self, message: int, **columns: Any) -> None:
        late = {"due_at": self.day.seen_at - 2 * HOUR, "topic": self.topic}
        self.day.delivery("delivery_retry", self.number * 20 + message, 0, self.number, **(late | columns))

    def ready(self, message: int, at: datetime) -> None:
        row = {
            "transaction_id": id_of(self.number * 20 + message),
            "position": 0,
            "subscription_id": self.number,
            "replay": 0,
            "offset": self.offset(message),
            "ready_at": at,
        }
        self.day.extra.setdefault("ready_retry", []).append(row)


def all_receipts_and_the_checkpoint(case: Case) -> Found:
    case.lose_all()
    case.checkpoints()
    return {("delivery_late", case.name), ("checkpoint_differs", case.name)}


def all_receipts(case: Case) -> Found:
    case.lose_all()
    return {case.undelivered(message) for message in range(10)}


def all_receipts_and_the_checkpoint_set_back(case: Case) -> Found:
    case.lose_all()
    case.checkpoints(0)
    return {("delivery_late", case.name)}


def a_receipt_above_a_checkpoint_set_back(case: Case) -> Found:
    case.lose(4)
    case.checkpoints(0)
    return {("delivery_late", case.name)}


def a_receipt_of_a_subscription_whose_row_hides_it(case: Case) -> Found:
    # Deleted, paused, of other topics and begun later, all by hand.
    case.versions({})
    row = case.day.rows["subscription"][-1]
    row |= {"deleted_at": born(0), "matches_since": case.day.seen_at, "state": "paused"}
    row |= {"topics": ["other"], "started_after": 900_000}
    case.lose(4)
    return {case.undelivered(4)}


def the_row_of_a_subscription(case: Case) -> Found:
    case.versions({})
    case.day.rows["subscription"].pop()
    case.lose(4)
    return {case.undelivered(4)}


def a_shard_of_a_checkpoint(case: Case) -> Found:
    case.versions({"shards": 3})
    case.checkpoints(1_000_000, 1_000_000, 1_000_000)
    case.day.rows["checkpoint"].pop()
    return {("checkpoint_differs", case.name)}


def two_layouts_of_a_checkpoint(case: Case) -> Found:
    row = {"subscription_id": case.number, "shards": 2, "shard": 1, "offset": 1_000_000}
    case.day.rows["checkpoint"].append(row)
    return {("checkpoint_differs", case.name)}


def a_message_with_the_wanted_headers(case: Case) -> Found:
    case.versions({"filters": '{"headers": {"region": "eu"}}'})
    case.lose_all()
    case.checkpoints(0)
    # Taken by another one.
    case.day.subscribe(100, case.topic)
    for message in range(10):
        case.day.received(case.number * 20 + message, subscription=100)
    case.message(10, headers='{"region": "us"}')
    case.day.rows["receipt"][-1]["subscription_id"] = 100
    case.message(11, headers='{"region": "eu"}')
    case.day.rows["receipt"][-1]["subscription_id"] = 100
    return {("delivery_late", case.name)}


def a_retry_of_a_key_that_others_wait_for(case: Case) -> Found:
    case.versions({"ordered": "key"})
    case.lose(4, 5)
    case.retry(4, key="k")
    case.ready(4, born(0))
    case.retry(5, key="k")
    return {("retry_overdue", case.name)}


def a_retry_that_is_the_next_one_of_its_key(case: Case) -> Found:
    # A redelivered dead letter, or a delayed message.
    case.versions({"ordered": "key"})
    case.lose(5)
    case.retry(5, key="k", attempts=0)
    case.ready(5, born(0))
    return {("retry_overdue", case.name)}


def two_subscriptions_with_one_name_that_are_late(case: Case) -> Found:
    # The history lacks the deletion of the first.
    case.lose_all()
    case.checkpoints(0)
    case.day.subscribe(103, case.topic, name=case.name, lowest=0)
    return {("delivery_late", case.name)}


def retries_of_two_subscriptions_with_one_name(case: Case) -> Found:
    case.day.subscribe(104, case.topic, name=case.name, started_after=900_000)
    case.lose(5)
    case.retry(5)
    case.day.delivery("delivery_retry", case.number * 20 + 4, 0, 104, topic=case.topic, due_at=born(0))
    return {("retry_overdue", case.name)}


def checkpoints_of_two_subscriptions_with_one_name(case: Case) -> Found:
    case.checkpoints()
    case.day.subscribe(105, case.topic, name=case.name, started_after=900_000)
    case.day.rows["checkpoint"].pop()
    return {("checkpoint_differs", case.name)}


def delayed_messages_that_were_passed_and_wait_nowhere(case: Case) -> Found:
    case.lose(4, 5)
    for row in case.day.rows["outbox"]:
        if row["offset"] in (case.offset(4), case.offset(5)):
            row["due_at"] = case.day.seen_at + 9 * HOUR
    case.retry(5, due_at=case.day.seen_at + 9 * HOUR, attempts=0)
    return {case.undelivered(4)}


# Next to those: the cases from here on have no finding of a lost delivery.
def others_of_a_key_that_wait(case: Case) -> Found:
    case.versions({"ordered": "key"})
    case.lose(5)
    case.retry(5, key="k", attempts=0)
    return set()


def the_next_one_of_a_key_whose_last_one_was_settled_late(case: Case) -> Found:
    case.versions({"ordered": "key"})
    case.lose(5)
    case.retry(5, key="k", attempts=0)
    case.ready(5, case.day.seen_at - HOUR / 2)
    return set()


def a_retry_that_is_late_within_the_sla(case: Case) -> Found:
    case.lose(5)
    case.retry(5, due_at=case.day.seen_at - HOUR / 2)
    return set()


def a_pause(case: Case) -> Found:
    # The messages in flight are sent again after it.
    case.versions({}, {"state": "paused", "at": born(3600)})
    case.checkpoints(case.offset(3))
    case.lose(4, 8, 9)
    case.retry(8)
    return set()


def a_pause_that_has_just_ended(case: Case) -> Found:
    resumed = case.day.seen_at - HOUR / 2
    case.versions({}, {"state": "paused", "at": born(3600)}, {"at": resumed})
    case.checkpoints(case.offset(3))
    case.lose(4, 8, 9)
    case.retry(8)
    return set()


def messages_in_flight_at_a_crash_with_no_worker_since(case: Case) -> Found:
    # Later messages were received long ago. So it is with what a consumer holds, and behind an open breaker.
    case.checkpoints(case.offset(3))
    case.lose(4, 6, 9)
    return {("delivery_late", case.name)}


def messages_in_flight_after_a_backlog(case: Case) -> Found:
    case.checkpoints(case.offset(3))
    for row in case.day.rows["receipt"][-10:]:
        row["settled_at"] = case.day.seen_at - HOUR / 2
    case.lose(4)
    # It is late: one finding for the subscription.
    return {("delivery_late", case.name)}


def a_shard_that_is_behind_the_others(case: Case) -> Found:
    case.versions({"shards": 2})
    case.checkpoints(case.offset(3), 1_000_000)
    return set()


def other_topics_since(case: Case) -> Found:
    case.versions({}, {"topics": [case.topic, "more"], "at": born(3600)})
    case.lose(4)
    case.day.subscribe(101, case.topic, started_after=case.offset(4) - 1, deleted_at=born(5000))
    return set()


def deleted_since(case: Case) -> Found:
    case.versions({}, {"deleted_at": born(5000), "at": born(5000)})
    case.checkpoints()
    case.lose(4)
    return set()


def just_created(case: Case) -> Found:
    case.day.subscribe(102, case.topic, started_after=900_000, matches_since=case.day.seen_at - HOUR / 2)
    case.day.rows["checkpoint"].pop()
    return set()


CASES: tuple[Callable[[Case], Found], ...] = (
    all_receipts_and_the_checkpoint,
    all_receipts,
    all_receipts_and_the_checkpoint_set_back,
    a_receipt_above_a_checkpoint_set_back,
    a_receipt_of_a_subscription_whose_row_hides_it,
    the_row_of_a_subscription,
    a_shard_of_a_checkpoint,
    two_layouts_of_a_checkpoint,
    a_message_with_the_wanted_headers,
    a_retry_of_a_key_that_others_wait_for,
    a_retry_that_is_the_next_one_of_its_key,
    two_subscriptions_with_one_name_that_are_late,
    retries_of_two_subscriptions_with_one_name,
    checkpoints_of_two_subscriptions_with_one_name,
    delayed_messages_that_were_passed_and_wait_nowhere,
    others_of_a_key_that_wait,
    the_next_one_of_a_key_whose_last_one_was_settled_late,
    a_retry_that_is_late_within_the_sla,
    a_pause,
    a_pause_that_has_just_ended,
    messages_in_flight_at_a_crash_with_no_worker_since,
    messages_in_flight_after_a_backlog,
    a_shard_that_is_behind_the_others,
    other_topics_since,
    deleted_since,
    just_created,
)


@pytest.mark.slow
def test_a_delivery_is_judged_by_what_cannot_change(spark: SparkSession) -> None:
    _judge(spark, counted=True)


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_so_it_is_in_a_large_day(spark: SparkSession) -> None:
    _judge(spark, counted=False)


def _judge(spark: SparkSession, *, counted: bool) -> None:
    day = plain_day()
    wanted: Found = set().union(*(change(Case(day, number)) for number, change in enumerate(CASES, 10)))
    found = findings(day.frames(spark, counted=counted), sla_s=SLA_S).collect()
    assert sorted((row.kind, row.subject) for row in found) == sorted(wanted)
    [first] = [row for row in found if (row.kind, row.subject) == ("delivery_late", "mailer-10")]
    assert f'"messages":10,"first":"{message_id(200)}","offset":20000' in first.detail
