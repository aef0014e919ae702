"""Rows that the joins leave out as not suspect have no findings: with and without them the result is the same."""

import json
import random
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertDataFrameEqual

from spark.schemas import ARCHIVE, OUTBOX
from spark.transforms import ledgers, rules
from spark.transforms.figures import figures_and_volumes, figures_of_counts
from spark.transforms.offsets import breaks, disorder
from spark.transforms.outcomes import outcomes
from spark.transforms.routes import takers
from spark.transforms.rules import findings, findings_of
from spark.transforms.screen import log_order, row_groups
from spark.transforms.screen.row_groups import RowGroup, arrow_schema
from spark.transforms.suspects import named, screened
from tests.spark.conftest import frame
from tests.spark.frames import Day, born, digest, id_of, message_id, plain_day

SLA_S = 3600.0
TOPICS = ("order", "order.new", "billing.paid", "nobody", "halfnote.delivery.dead")


def random_day(chance: random.Random, transactions: int, *, damaged: bool = True) -> Day:
    """A day of transactions with one to three messages and six subscriptions; a third is damaged at random."""
    day = plain_day()
    day.subscribe(2, "order*", filters='{"tags": ["red", "blue"]}')
    day.subscribe(3, "*", filters='{"headers": {"region": "eu"}}')
    day.subscribe(4, "billing.*", started_after=30_000, matches_since=born(400), created_at=born(0))
    day.subscribe(5, "order.new", deleted_at=born(500), lowest=0)
    for number in range(100, 100 + transactions):
        _transaction(day, chance, number)
    for _ in range(transactions // 3 if damaged else 0):
        _spoil(day, chance)
    for number in chance.sample(range(100, 100 + transactions), transactions // 10):
        day.check_back(number, state=chance.choice((1, 2)))
    for number in chance.sample(range(100, 100 + transactions), transactions // 4):
        table = chance.choice(("delivery_retry", "delivery_retry", "dead_letter", "redelivery"))
        of = {"subscription": chance.randrange(1, 7), "replay": chance.choice((0, 0, 1))}
        day.delivery(table, number, chance.randrange(2), **of)
    for number in range(100, 100 + transactions, 40):
        _asked(day, chance, number)
        day.attempt(number + 1, "refused")
    spoken = chance.sample(range(100, 100 + transactions), transactions // 2)
    verdicts = (
        {
            "transaction_id": id_of(n),
            "verdict": chance.choice(("commit", "rollback")),
            "end_decided_at": chance.choice((None, born(n + 1), born(n + 1), born(n + 3600))),
            "end_reason": chance.choice((None, "", "", "late")),
        }
        for n in spoken
    )
    day.ledger("producer_ledger", *verdicts)
    names = (None, "mailer-1", "mailer-3")
    seen = (
        {
            "message_id": message_id(n, chance.randrange(2)),
            "times_seen": 1,
            "subscription": chance.choice(names),
            "answered": chance.choice(([], [200], [204], [200, 503])),
        }
        for n in chance.choices(spoken, k=transactions // 2)
    )
    day.ledger("consumer_ledger", *seen)
    return day


def _transaction(day: Day, chance: random.Random, number: int) -> None:
    verdict = chance.choice((1, 1, 1, 1, 2, None))
    if verdict is not None:
        day.op(number, verdict)
    for position in range(chance.choice((1, 1, 2, 3))):
        topic = chance.choice(TOPICS)
        fields = {"topic": topic, "tag": chance.choice((None, "red", "green"))}
        headers = chance.choice((None, *HEADERS))
        day.half(number, position, headers=headers, **fields)
        if verdict != 1:
            continue
        day.sent(number, position, **fields)
        for subscription in _takers(fields, headers, number):
            day.received(number, position, subscription)


def _asked(day: Day, chance: random.Random, number: int) -> None:
    """Asked more often than some policies want, and than others do not."""
    most = chance.choice((None, 3, 40))
    for half in day.rows["half"]:
        if half["transaction_id"] == id_of(number) and half["position"] == 0 and most is not None:
            half["policy"] = json.dumps({"max_checks": most})
    for check in range(1, chance.choice((3, 5, 18)) + 1):
        day.attempt(number, "check", number=check, outcome="unknown")


# Also written otherwise than Postgres writes it.
HEADERS = (
    '{"region": "eu"}',
    '{"region": "us"}',
    '{"a": "eu", "region": "us"}',
    r'{"region": "\u0065u"}',
    '{"a":"1","region":"eu"}',
)


def _takers(fields: dict[str, Any], headers: str | None, number: int) -> list[int]:
    topic, tag = fields["topic"], fields["tag"]
    takes = {
        1: topic == "order",
        2: topic.startswith("order") and tag == "red",
        3: not topic.startswith("halfnote.") and json.loads(headers or "{}").get("region") == "eu",
        4: topic.startswith("billing.") and number * 100 > 30_000,
    }
    return [subscription for subscription, so in takes.items() if so]


def _spoil(day: Day, chance: random.Random) -> None:
    """Lose, double or change a row."""
    table = chance.choice(("half", "op", "outbox", "receipt", "receipt"))
    rows = day.rows[table]
    index = chance.randrange(len(rows))
    changed = dict(rows[index])
    match table, chance.randrange(3):
        case _, 0:
            del rows[index]
            return
        case "half", _:
            rows[index] = changed | {"body_digest": digest(str(chance.random()))}
        case "op", _:
            rows[index] = changed | {"verdict": 3 - changed["verdict"]}
        case "outbox", 1:
            rows.append(changed | {"offset": changed["offset"] + 50})
        case "outbox", _:
            rows[index] = changed | {"committed_at": changed["committed_at"] - timedelta(seconds=30)}
        case "receipt", 1:
            rows[index] = changed | {"subscription_id": chance.randrange(1, 8)}
        case "receipt", _:
            replay = chance.randrange(2)
            rows[index] = changed | {"transaction_id": id_of(chance.randrange(100, 400)), "replay": replay}


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_what_a_search_in_files_leaves_out_has_no_finding(
    spark: SparkSession, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "ROWS_AT_ONCE", 150)
    monkeypatch.setattr(row_groups, "SAMPLE_OF", 3)
    monkeypatch.setattr(log_order, "SPAN", 5000)
    day = random_day(random.Random(seed), 300)
    _archive(day)
    j = rules.joined(day.in_files(spark, tmp_path / "read"), SLA_S, tmp_path / "search")
    assert len(list((tmp_path / "search/search/spans").iterdir())) > 10
    assertDataFrameEqual(findings_of(j), findings(day.frames(spark), sla_s=SLA_S))
    assert j.counts is not None
    counted = {tuple(row)[:-1]: row["count"] for row in outcomes(day.frames(spark)).collect()}
    assert counted == j.counts.outcomes
    # Of 315 transactions, a third is damaged, and the small tables and ledgers name many of the others.
    assert 200 < j.suspects < 290


def test_the_search_divides_a_day_at_the_beginnings_of_files() -> None:
    """The files of all tables begin at the same ids. No file is there, so no sample of their ids is read."""
    rows = {"half": 250_000, "op": 200_000, "receipt": 240_000}
    groups = {
        name: [RowGroup(f"{name}-{file}", 0, count, f"{file:02}", f"{file:02}~") for file in range(12)]
        for name, count in rows.items()
    }
    ranges = row_groups.ranges_of(groups)
    borders = ["01", "03", "04", "06", "07", "09", "10"]
    assert ranges == list(zip(["", *borders], [*borders, "~"], strict=True))
    # No row group is read twice.
    for of_table in groups.values():
        assert all(sum(group.high >= low and group.low < high for low, high in ranges) == 1 for group in of_table)
    # Files that overlap are sampled.
    groups["half"] = [replace(group, high="~") for group in groups["half"]]
    with pytest.raises(FileNotFoundError):
        row_groups.ranges_of(groups)


def _archive(day: Day) -> None:
    """An archive with one digest changed."""
    rows = [{name: half[name] for name in ARCHIVE.names} for half in day.rows["half"]]
    day.extra["archive"] = [rows[0] | {"body_digest": digest("changed")}, *rows[1:]]


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_a_search_in_files_counts_what_spark_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "ROWS_AT_ONCE", 150)
    monkeypatch.setattr(row_groups, "SAMPLE_OF", 3)
    day = random_day(random.Random(9), 200, damaged=False)
    day.check_back(1, state=2)
    day.half(900)
    day.check_back(900, state=2)
    day.half(901, born_at=born(-90_000))
    day.received(100, subscription=3, outcome="dropped", attempts=40)
    day.delivery("dead_letter", 101)
    f = day.in_files(spark, tmp_path / "read")
    j = rules.joined(f, SLA_S, tmp_path / "search")
    assert j.counts is not None
    assert figures_of_counts(j.whole, j.counts) == figures_and_volumes(j.whole)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_what_is_left_out_has_no_finding(spark: SparkSession, seed: int) -> None:
    day = random_day(random.Random(seed), 300)
    j = rules.joined(day.frames(spark, counted=False), SLA_S)
    found = findings_of(j)
    # Of a small day nothing is left out.
    assertDataFrameEqual(found, findings(day.frames(spark), sla_s=SLA_S))
    assert j.outcomes is not None
    assertDataFrameEqual(j.outcomes, outcomes(day.frames(spark)))
    kinds = {row.kind for row in found.select("kind").distinct().collect()}
    # What the frames cannot hold by chance is left out: parked, archives.
    assert kinds >= {"checks_beyond_max", "verdict_refused"}
    assert len(kinds) >= 17, kinds


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_hardly_anything_of_a_day_in_order_is_suspect(spark: SparkSession, tmp_path: Path) -> None:
    day = plain_day()
    day.subscribe(2, "order", filters='{"headers": {"region": "eu"}}')
    day.subscribe(3, "order", started_after=0, lowest=500)
    for number in range(100, 160):
        eu = number % 3 == 0
        day.committed(number, 2, headers='{"region": "eu"}' if eu else None)
        for position in range(2) if eu else ():
            day.received(number, position, subscription=2)
    for number in range(1, 6):
        day.received(number, subscription=3)
    f = ledgers.of_day(day.frames(spark))
    known = screened(f, SLA_S, takers(f, f.outbox.select("topic").distinct()))
    assert known.where("suspect is not null").collect() == []
    in_files = rules.joined(day.in_files(spark, tmp_path / "read"), SLA_S, tmp_path / "search")
    assert in_files.suspects == 0
    assert {row.outcome for row in known.collect()} == {"committed", "rolled_back"}
    assert named(f).collect() == []


@pytest.mark.usefixtures("adaptive")
def test_what_was_redelivered_or_is_left_of_a_check_is_no_suspect(spark: SparkSession, tmp_path: Path) -> None:
    day = plain_day()
    day.extra["receipts_since"] = born(0)
    for number in range(1, 7):
        day.delivery("redelivery", number)
    day.delivery("redelivery", 7, what="dropped")
    day.check_back(7, answered=15)
    day.check_back(11, state=2)
    # Three suspects beside them: redelivered, and no receipt; asked too often; parked, and nothing else is there.
    day.rows["receipt"] = [row for row in day.rows["receipt"] if row["transaction_id"] not in (id_of(7), id_of(3))]
    day.check_back(8, answered=16)
    day.check_back(950, state=2)
    j = rules.joined(day.in_files(spark, tmp_path / "read"), SLA_S, tmp_path / "search")
    found = {(row.kind, row.subject) for row in findings_of(j).collect()}
    wanted = {("undelivered", f"{message_id(3)}:1"), ("checks_beyond_max", id_of(8)), ("parked", id_of(950))}
    assert (j.suspects, found) == (3, wanted)


@pytest.mark.usefixtures("adaptive")
def test_answered_checks_are_counted_by_distinct_numbers(spark: SparkSession, tmp_path: Path) -> None:
    """By transaction: its own limit, the numbers of its answers, and whether these are too many."""
    cases: tuple[tuple[int | None, list[int], bool], ...] = (
        (None, [99], False),
        (None, [*range(1, 9), *range(1, 9)], False),
        (None, list(range(1, 17)), True),
        # Damaged: as many answers, and none above the limit.
        (None, list(range(-4, 12)), True),
        (3, [-2, -1, 0, 1], True),
        (3, [-2, -1, 0], False),
        (40, list(range(1, 17)), False),
        # Damaged: more than the largest number of Python's floats.
        (10**400, list(range(1, 17)), False),
        # Damaged: below the range of an integer.
        (-(10**30), [1], True),
    )
    day = plain_day()
    for number, (own, numbers, _) in enumerate(cases, start=100):
        day.committed(number, policy=None if own is None else json.dumps({"max_checks": own}))
        for check in numbers:
            day.attempt(number, "check", number=check, outcome="unknown")
    wanted = {id_of(number) for number, (_, _, beyond) in enumerate(cases, start=100) if beyond}
    j = rules.joined(day.in_files(spark, tmp_path / "read"), SLA_S, tmp_path / "search")
    # Those within their limits are not judged in full.
    assert j.suspects == len(wanted)
    for one in (j, rules.joined(day.frames(spark, counted=False), SLA_S)):
        assert {(row.kind, row.subject) for row in findings_of(one).collect()} == {
            ("checks_beyond_max", subject) for subject in wanted
        }


@pytest.mark.usefixtures("adaptive")
def test_what_is_reported_by_name_makes_no_suspect(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of suspects and of all others, in several ranges, refused ends and untaken messages are counted together."""
    monkeypatch.setattr(row_groups, "ROWS_AT_ONCE", 60)
    monkeypatch.setattr(row_groups, "SAMPLE_OF", 3)
    day = plain_day()
    for number in range(100, 130):
        day.committed(number, 2, topic="nobody")
        day.rows["receipt"] = [row for row in day.rows["receipt"] if row["transaction_id"] != id_of(number)]
        for _ in range(number % 3):
            day.attempt(number, "refused")
    # Suspects beside them: the first one of each finding lacks a message, and the last one its half.
    day.rows["outbox"] = [row for row in day.rows["outbox"] if row["transaction_id"] != id_of(101)] + [
        row for row in day.rows["outbox"] if row["transaction_id"] == id_of(101) and row["position"] == 1
    ]
    day.rows["half"] = [row for row in day.rows["half"] if row["transaction_id"] != id_of(128)]
    j = rules.joined(day.in_files(spark, tmp_path / "read"), SLA_S, tmp_path / "search")
    assert j.suspects == 2
    assert len(list((tmp_path / "search/search/refused").iterdir())) > 1
    assert len(list((tmp_path / "search/search/untaken").iterdir())) > 1
    found = findings_of(j)
    assertDataFrameEqual(found, findings(day.frames(spark), sla_s=SLA_S))
    detail = {row.kind: json.loads(row.detail) for row in found.collect()}
    assert detail["unrouted"]["messages"] == 59
    group = day.rows["half"][0]["producer_group"]
    refused = [row for row in found.collect() if row.kind == "verdict_refused"]
    assert {row.subject for row in refused} == {group, "unknown"}
    most = max((json.loads(row.detail) for row in refused), key=lambda one: one["refused"])
    assert (most["refused"], len(most["transactions"])) == (28, 10)


@pytest.mark.usefixtures("adaptive")
def test_rows_of_a_ledger_or_receipts_that_repeat_a_message_do_not_cancel(spark: SparkSession) -> None:
    """Each transaction has receipts, a ledger row with a count for each subscription or none, and what is found."""
    once, other = ("mailer-1", 1), ("mailer-2", 1)
    cases: tuple[tuple[list[int], list[tuple[str, int]], set[str]], ...] = (
        # A receipt for each number of a replay; 0 is live.
        ([0, 7], [other, other], {"never_consumed", "consumed_twice", "consumed_not_sent"}),
        ([0, 7, 8], [other, other, once], {"consumed_twice", "consumed_not_sent"}),
        ([0, 7], [("mailer-1", 2), ("mailer-2", 0)], {"consumed_twice"}),
        ([0, 7, 8], [once], set()),
        ([0], [once], set()),
    )
    day = plain_day()
    day.subscribe(2, "another")
    for number, (replays, seen, _) in enumerate(cases, start=100):
        day.committed(number)
        for replay in replays[1:]:
            day.received(number, replay=replay)
        for name, times in seen:
            day.ledger(
                "consumer_ledger",
                {"message_id": message_id(number), "times_seen": times, "subscription": name, "answered": []},
            )
    # Of two rows that differ, either may be the wrong one.
    for number in (1, 2):
        late = born(number + 1 + (3600 if number == 1 else -3600))
        for at in (born(number + 1), late):
            said = {"transaction_id": id_of(number), "verdict": "commit", "end_decided_at": at}
            day.ledger("producer_ledger", said)
    for number in range(1, 11):
        seen_once = {"message_id": message_id(number), "times_seen": 1, "subscription": "mailer-1", "answered": []}
        day.ledger("consumer_ledger", seen_once)
    found = {(row.kind, row.subject) for row in findings(day.frames(spark, counted=False), sla_s=SLA_S).collect()}
    wanted = {(kind, message_id(number)) for number, case in enumerate(cases, start=100) for kind in case[2]}
    assert found == wanted | {("ledger_disagrees", id_of(number)) for number in (1, 2)}


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_more_subscriptions_may_ask_for_headers_than_a_number_has_bits(spark: SparkSession, tmp_path: Path) -> None:
    day, asking = plain_day(), range(20, 43)
    for subscription in asking:
        day.subscribe(subscription, "order", filters=f'{{"headers": {{"for": "{subscription}"}}}}')
    for number, subscription in enumerate(asking, start=100):
        day.committed(number, headers=f'{{"for": "{subscription}"}}')
        if number != 115:
            day.received(number, subscription=subscription)
    # Another's.
    day.received(121, subscription=20)
    wanted = {("undelivered", f"{id_of(115)}-0:35"), ("receipt_not_matched", f"{id_of(121)}-0:20")}
    for place, f in ((None, day.frames(spark, counted=False)), (tmp_path / "s", day.in_files(spark, tmp_path / "r"))):
        found = findings_of(rules.joined(f, SLA_S, place)).select("kind", "subject").collect()
        assert {tuple(row) for row in found} == wanted


@pytest.mark.parametrize("span", [4, 65_536])
def test_disorder_is_found_within_ranges_and_at_their_borders(spark: SparkSession, span: int, tmp_path: Path) -> None:
    chance = random.Random(7)
    made = [(offset, offset + chance.choice((0, 0, 0, -5, 9))) for offset in range(0, 4000, 3)]
    made += [made[5], made[900]]
    rows = [
        {"transaction_id": id_of(n), "position": 0, "offset": offset, "topic": "order", "committed_at": born(second)}
        for n, (offset, second) in enumerate(chance.sample(made, len(made)))
    ]
    ordered = sorted(made)
    wanted = [
        (offset, before)
        for (before, earlier), (offset, second) in pairwise(ordered)
        if offset == before or second < earlier
    ]
    found = disorder(breaks(frame(spark, OUTBOX, rows), span)).collect()
    assert sorted((row["offset"], row.before_offset) for row in found) == sorted(wanted)
    # Read in ranges of ids, which are not in the order of offsets here.
    table = pa.Table.from_pylist([dict.fromkeys(OUTBOX.names) | row for row in rows], arrow_schema(OUTBOX))
    for number in range(7):
        log_order.write_spans(table.slice(number * 200, 200), tmp_path, number, span)
    in_files = [row for table in log_order.disorder(tmp_path) for row in table.to_pylist()]
    assert sorted((row["offset"], row["before_offset"]) for row in in_files) == sorted(wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("adaptive")
def test_a_skewed_day_of_one_group_with_100_subscriptions(spark: SparkSession) -> None:
    day = plain_day()
    for subscription in range(2, 102):
        day.subscribe(subscription, "skewed")
    for number in range(100, 190):
        day.committed(number, topic="skewed", key="one")
        day.rows["receipt"].pop()
        for subscription in range(2, 102):
            day.received(number, subscription=subscription)
    lost = day.rows["receipt"].pop()
    subject = f"{message_id(189)}:{lost['subscription_id']}"
    found = findings(day.frames(spark, counted=False), sla_s=SLA_S)
    assert [(row.kind, row.subject) for row in found.collect()] == [("undelivered", subject)]
