"""A day with one fault of each kind: each rule finds its own, and no other rule finds it."""

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertDataFrameEqual

from spark.transforms import rules
from spark.transforms.joined import FEW_SUSPECTS, MOST_BROADCAST, Joined
from spark.transforms.rules import RULES, findings, findings_of, found_in, joined
from tests.spark.frames import DAY, Day, born, digest, expected, finding, id_of, message_id, of_message, plain_day

ROOT = Path(__file__).parent.parent.parent
SLA_S = 3600.0
# The kinds of the contract; a rule that is lost must not go unseen.
KINDS = frozenset(
    """
op_without_half half_stuck half_altered published_differs times_disagree verdict_unproven committed_not_published
published_without_commit published_after_rollback
offset_of_two_messages message_with_two_offsets offsets_contradict_time unrouted undelivered delivery_late
retry_overdue retry_never_due replay_incomplete checkpoint_differs subscription_differs
receipt_without_message receipt_not_matched receipt_wrong delivery_wrong order_broken content_differs
parked checks_beyond_max verdict_refused audit_broken archive_differs ledger_disagrees ledger_not_sent never_consumed
answer_differs consumed_twice consumed_not_sent certificate_differs fewer_than_usual in_two_installations
""".split()  # noqa: SIM905 -- a list of names reads better so
)

Planted = dict[str, Any]


def plant(day: Day) -> Planted:
    """Plant a fault of each kind, on a transaction each (100 and more); return what is to be found, by kind."""
    found: Planted = {}
    of_tables = (_plant_transactions, _plant_messages, _plant_altered, _plant_offsets, _plant_deliveries)
    for plant_one in (*of_tables, _plant_ledgers):
        found |= plant_one(day)
    return found


def _not_this_way(*_: Any) -> Any:
    raise AssertionError("this day goes the other way")


def _already(found: DataFrame, _: Joined) -> DataFrame:
    return found


def _about(kind: str, number: int, **columns: Any) -> Any:
    return finding(kind, id_of(number), transaction_id=id_of(number), **columns)


def _plant_transactions(day: Day) -> Planted:
    day.op(100, 2)
    day.half(101)
    day.committed(102, 3)
    day.rows["outbox"] = [row for row in day.rows["outbox"] if row["offset"] != 10201]
    day.rows["receipt"] = [row for row in day.rows["receipt"] if row["offset"] != 10201]
    day.half(103)
    day.check_back(103, state=2, parked_at=born(200), parked_reason="nobody answers", next_check_at=None)
    day.half(104)
    day.op(104, 2, source=2)
    for number in range(1, 18):
        day.attempt(104, "check", number=number, outcome="unknown")
    day.committed(105, producer_group="billing")
    day.attempt(105, "refused", verdict=2, source=0)
    archived = {"rows": 10, "first_id": id_of(1), "last_id": id_of(10), "digest": "123"}
    day.extra["archive_manifest"] = {"tables": {"half": archived, "op": archived}}
    day.extra["certified"] = [{"table": "op", "ids": "019aa5a", "certified_rows": 3, "found_rows": 2}]
    broken = {"subject": "17", "audit_id": 17, "place": 12, "before_place": 11, "differs": "digest"}
    day.extra["audit_broken"] = [broken]
    fewer = {"day": str(DAY), "kind": "fewer_than_usual", "subject": "topic:order", "detail": {"count": 40}}
    day.extra["absent"] = [fewer]
    day.extra["across"] = {id_of(1): ["eu", "us"], id_of(2): ["us", "asia"]}
    day.extra["found_manifest"] = {"tables": {"half": archived, "op": archived | {"digest": "124"}}}
    return {
        "op_without_half": _about("op_without_half", 100),
        "half_stuck": _about("half_stuck", 101, producer_group="shop"),
        "committed_not_published": _about("committed_not_published", 102, producer_group="shop"),
        "parked": _about("parked", 103, producer_group="shop"),
        "checks_beyond_max": _about("checks_beyond_max", 104, producer_group="shop"),
        "verdict_refused": finding("verdict_refused", "billing", producer_group="billing"),
        "archive_differs": finding("archive_differs", "op"),
        "audit_broken": finding("audit_broken", "17"),
        "fewer_than_usual": finding("fewer_than_usual", "topic:order"),
        "certificate_differs": finding("certificate_differs", "op 019aa5a"),
        "in_two_installations": _about("in_two_installations", 1),
    }


def _plant_messages(day: Day) -> Planted:
    day.sent(110)
    day.received(110)
    day.half(111)
    day.op(111, 2)
    day.sent(111)
    day.received(111)
    day.committed(112)
    day.rows["receipt"][-1]["digest"] = digest("something else")
    day.committed(113, topic="odrer")
    day.rows["receipt"].pop()
    return {
        "published_without_commit": of_message("published_without_commit", 110),
        "published_after_rollback": of_message("published_after_rollback", 111, producer_group="shop"),
        "content_differs": of_message("content_differs", 112),
        "unrouted": finding("unrouted", "odrer"),
    }


def _plant_altered(day: Day) -> Planted:
    day.committed(119)
    altered = {"transaction_id": id_of(119), "producer_group": "shop", "digest": None, "computed": "7d1a54"}
    day.extra["altered"] = [altered]
    day.committed(195)
    differing = {"transaction_id": id_of(195), "position": 0, "producer_group": "shop", "differs": "key"}
    day.extra["differing"] = [differing | {"times": "", "offset": offset} for offset in (19501, 19500)]
    day.committed(196)
    untimely = {"transaction_id": id_of(196), "position": 0, "producer_group": "shop", "differs": "", "offset": 19600}
    day.extra["differing"].append(untimely | {"times": "decided_at before born_at"})
    day.committed(199)
    unproven = {"transaction_id": id_of(199), "producer_group": "shop", "verdict": 1, "source": 1, "answers": 0}
    day.extra["without_evidence"] = [unproven | {"differs": "answer"}]
    day.committed(197)
    wrong = {"transaction_id": id_of(197), "position": 0, "subscription_id": 1, "offset": 1, "differs": "offset"}
    day.extra["wrong_receipt"] = [wrong | {"replay": replay} for replay in (7, 0)]
    day.committed(194)
    of_delivery = {"transaction_id": id_of(194), "position": 0, "subscription_id": 1, "offset": 1, "what": "retry"}
    day.extra["wrong_delivery"] = [of_delivery | {"replay": replay, "differs": "due_at"} for replay in (7, 0)]
    of_subscription = {"name": "changed", "checkpoint": ""}
    day.extra["differing_subscription"] = [
        of_subscription | {"subscription_id": number, "differs": "topics"} for number in (98, 99)
    ]
    day.committed(198)
    early = {"transaction_id": id_of(198), "position": 0, "subscription_id": 1, "replay": 0, "offset": 19800}
    early |= {"before_offset": 19700, "first_at": "2026-11-20T12:00:00Z", "before_at": "2026-11-20T12:00:06Z"}
    day.extra["out_of_order"] = [early]
    return {
        "half_altered": _about("half_altered", 119, producer_group="shop"),
        "published_differs": of_message("published_differs", 195, producer_group="shop"),
        "times_disagree": of_message("times_disagree", 196, producer_group="shop"),
        "verdict_unproven": _about("verdict_unproven", 199, producer_group="shop"),
        "receipt_wrong": finding(
            "receipt_wrong", f"{message_id(197)}:1", transaction_id=id_of(197), position=0, subscription_id=1
        ),
        "delivery_wrong": finding(
            "delivery_wrong", f"{message_id(194)}:1", transaction_id=id_of(194), position=0, subscription_id=1
        ),
        "subscription_differs": finding("subscription_differs", "changed", subscription_id=99),
        "order_broken": finding(
            "order_broken", f"{message_id(198)}:1", transaction_id=id_of(198), position=0, subscription_id=1
        ),
    }


def _plant_offsets(day: Day) -> Planted:
    for number in range(120, 126):
        day.committed(number)
    by_offset = {row["offset"]: row for row in day.rows["outbox"]}
    by_offset[12100]["offset"] = 12000
    by_offset[12100]["committed_at"] = by_offset[12000]["committed_at"]
    day.sent(123, offset=12301)
    by_offset[12500]["committed_at"] = born(0)
    return {
        "offset_of_two_messages": finding("offset_of_two_messages", "12000"),
        "message_with_two_offsets": of_message("message_with_two_offsets", 123, producer_group="shop"),
        "offsets_contradict_time": finding("offsets_contradict_time", "12500"),
    }


def _plant_deliveries(day: Day) -> Planted:
    day.subscribe(2, "billing.*")
    day.committed(130)
    day.rows["receipt"].pop()
    day.rolled_back(131)
    day.received(131)
    day.committed(132)
    day.received(132, subscription=2)
    for number, topic in ((133, "late"), (134, "retried")):
        day.half(number, topic=topic)
        day.op(number)
        day.sent(number, topic=topic)
    day.subscribe(3, "late", lowest=0)
    day.subscribe(4, "retried")
    day.delivery("delivery_retry", 134, subscription=4, due_at=day.seen_at - timedelta(seconds=SLA_S + 1))
    day.subscribe(5, "nothing")
    day.rows["checkpoint"].pop()
    day.subscribe(6, "nothing")
    far = {
        "subscription_id": 6,
        "name": "mailer-6",
        "retries": 2,
        "last": message_id(1),
        "due_at": "2099-01-01T00:00:00Z",
    }
    day.extra["never_due"] = [far]
    day.subscribe(7, "nothing")
    short = {
        "subscription_id": 7,
        "replay_id": 3,
        "name": "mailer-7",
        "messages": 2,
        "first": message_id(1),
        "offset": 1,
    }
    day.extra["replay_incomplete"] = [short]
    of_subscriptions = {"delivery_late": 3, "retry_overdue": 4, "checkpoint_differs": 5, "retry_never_due": 6}
    kinds = {"undelivered": (130, 1), "receipt_without_message": (131, 1), "receipt_not_matched": (132, 2)}
    return {
        kind: of_message(kind, number, subscription_id=to) | {"subject": f"{message_id(number)}:{to}"}
        for kind, (number, to) in kinds.items()
    } | {
        "replay_incomplete": finding("replay_incomplete", "mailer-7:3", subscription_id=7),
        **{kind: finding(kind, f"mailer-{to}", subscription_id=to) for kind, to in of_subscriptions.items()},
    }


def _plant_ledgers(day: Day) -> Planted:
    for number in (140, 142, 143, 145):
        day.committed(number)
    day.ledger(
        "producer_ledger",
        {"transaction_id": id_of(1), "verdict": "commit"},
        {"transaction_id": id_of(11), "verdict": "rollback"},
        {"transaction_id": id_of(140), "verdict": "rollback"},
        {"transaction_id": id_of(141), "verdict": "commit"},
    )
    consumed = {(row["transaction_id"], row["position"]) for row in day.rows["receipt"]} - {(id_of(142), 0)}
    sent = {(row["transaction_id"], row["position"]) for row in day.rows["outbox"]}
    day.ledger(
        "consumer_ledger",
        *(
            {"message_id": f"{one}-{position}", "times_seen": 1, "answered": [204 if one == id_of(145) else 200]}
            for one, position in sorted(consumed & sent)
        ),
        {"message_id": message_id(143), "times_seen": 1},
        {"message_id": message_id(144), "times_seen": 1},
    )
    return {
        "ledger_disagrees": _about("ledger_disagrees", 140, producer_group="shop"),
        "ledger_not_sent": _about("ledger_not_sent", 141),
        "never_consumed": of_message("never_consumed", 142),
        "answer_differs": of_message("answer_differs", 145, subscription_id=1) | {"subject": f"{message_id(145)}:1"},
        "consumed_twice": of_message("consumed_twice", 143),
        "consumed_not_sent": of_message("consumed_not_sent", 144),
    }


@pytest.fixture(scope="module")
def planted() -> tuple[Day, Planted]:
    """A day with a fault of each kind, and the findings by kind."""
    day = plain_day()
    return day, plant(day)


@pytest.fixture(scope="module")
def planted_joins(spark: SparkSession, planted: tuple[Day, Planted]) -> Joined:
    """What the rules read of that day."""
    return joined(planted[0].frames(spark), SLA_S)


def _found(spark: SparkSession, day: Day, *, counted: bool) -> DataFrame:
    """Return what one run of the rules finds, without its details.

    Of what is not counted the rules see what Spark's search for suspects has left, as of a large day.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "screened" if counted else "_in_one_partition", _not_this_way)
        return findings(day.frames(spark, counted=counted), sla_s=SLA_S).drop("detail")


@pytest.fixture(scope="module")
def found_by_rules(
    spark: SparkSession, planted: tuple[Day, Planted], tmp_path_factory: pytest.TempPathFactory
) -> DataFrame:
    """What one run of all rules finds, after the search for suspects in files."""
    place = tmp_path_factory.mktemp("day")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "screened", _not_this_way)
        return findings_of(joined(planted[0].in_files(spark, place / "read"), SLA_S, place)).drop("detail")


@pytest.fixture(scope="module")
def found_by_kind(found_by_rules: DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The same, by kind."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in found_by_rules.collect():
        by_kind.setdefault(row["kind"], []).append(row.asDict())
    return by_kind


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_has_one_finding(
    planted: tuple[Day, Planted], found_by_kind: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    [found] = found_by_kind[kind]
    assert found == dict.fromkeys(found) | planted[1][kind]


def test_each_fault_is_found_and_nothing_else(
    spark: SparkSession, planted: tuple[Day, Planted], found_by_rules: DataFrame
) -> None:
    assertDataFrameEqual(found_by_rules, expected(spark, list(planted[1].values())))


@pytest.mark.slow
def test_they_are_found_in_a_small_day(spark: SparkSession, planted: tuple[Day, Planted]) -> None:
    day, found = planted
    assertDataFrameEqual(_found(spark, day, counted=True), expected(spark, list(found.values())))


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_they_are_found_in_a_large_day(spark: SparkSession, planted: tuple[Day, Planted]) -> None:
    day, found = planted
    assertDataFrameEqual(_found(spark, day, counted=False), expected(spark, list(found.values())))


@pytest.fixture(scope="module")
def found_alone(planted_joins: Joined) -> dict[str, DataFrame]:
    """What each rule finds without the others, by its kind."""
    return {kind: found_in(planted_joins, KINDS - {kind}).localCheckpoint() for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rule_alone_finds_its_own_fault_and_no_other(
    spark: SparkSession, planted: tuple[Day, Planted], found_alone: dict[str, DataFrame], kind: str
) -> None:
    assertDataFrameEqual(found_alone[kind].drop("detail"), expected(spark, [planted[1][kind]]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rule_switched_off_leaves_the_others(
    planted: tuple[Day, Planted],
    planted_joins: Joined,
    found_alone: dict[str, DataFrame],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    # Each rule is a function of the joins, so what it found alone is what it finds here; planning them all takes long.
    known = [replace(rule, find=partial(_already, found_alone[rule.kind])) for rule in RULES]
    monkeypatch.setattr(rules, "RULES", tuple(known))
    actual = findings_of(planted_joins, frozenset({kind})).select("kind", "subject").collect()
    left = [(name, row["subject"]) for name, row in planted[1].items() if name != kind]
    assert sorted(tuple(row) for row in actual) == sorted(left)


@pytest.mark.parametrize("suspects", [FEW_SUSPECTS, FEW_SUSPECTS + 1, MOST_BROADCAST + 1])
def test_content_that_differs_is_found_among_any_number_of_suspects(planted_joins: Joined, suspects: int) -> None:
    kinds = KINDS - {"content_differs"}
    [found] = found_in(replace(planted_joins, suspects=suspects), kinds).collect()
    listed = {one["source"]: one["digest"] for one in json.loads(found["detail"])["digests"]}
    assert found["subject"] == message_id(112)
    assert listed == {"half": digest("112-0").hex(), "receipt:1": digest("something else").hex()}


def test_every_kind_has_its_rule_its_page_and_a_fault(planted: tuple[Day, Planted]) -> None:
    assert sorted(rule.kind for rule in RULES) == sorted(KINDS) == sorted(planted[1])
    assert all((ROOT / rule.page).is_file() for rule in RULES)
    assert {page.stem for page in (ROOT / "docs" / "findings").glob("*.md")} - {"README"} == KINDS


@pytest.mark.slow
def test_a_day_in_order_has_no_finding(spark: SparkSession) -> None:
    day = plain_day()
    day.ledger("producer_ledger", *({"transaction_id": id_of(n), "verdict": "commit"} for n in range(1, 11)))
    day.ledger("consumer_ledger", *({"message_id": message_id(n), "times_seen": 1} for n in range(1, 11)))
    assert findings(day.frames(spark), sla_s=SLA_S).collect() == []
