"""The figures of a day: each row counts in its bucket, also at the edges of the buckets."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark import schemas
from spark.frames import Frames
from spark.jobs.reconcile import names_in
from spark.proof.prove_day import ReadDay
from spark.transforms import figures as module
from spark.transforms.figures import FROM_MS, MOST_ATTEMPTS, MOST_CHECKS, QUARTERS, bucket_of, figures, no_figures
from tests.spark.conftest import frame

DAY = date(2026, 3, 29)  # one on which Central Europe's clocks jump
MIDNIGHT = datetime.combine(DAY, time(), UTC)
SECOND = timedelta(seconds=1)


def frames(spark: SparkSession, **rows: Sequence[Mapping[str, Any]]) -> Frames:
    made = {name: frame(spark, schema, rows.get(name, ())) for name, schema in schemas.FRAMES.items()}
    return Frames(day=DAY, seen_at=MIDNIGHT + timedelta(days=2), **made)


def half(transaction_id: str, born_at: datetime, position: int = 0) -> dict[str, Any]:
    place = {"transaction_id": transaction_id, "position": position, "producer_group": "shop", "topic": "order"}
    return place | {"body_digest": b"", "born_at": born_at, "first_check_at": born_at}


def op(transaction_id: str, decided_at: datetime, verdict: int = 1, source: int = 0) -> dict[str, Any]:
    return {"transaction_id": transaction_id, "verdict": verdict, "source": source, "decided_at": decided_at}


def in_doubt(transaction_id: str, state: int) -> dict[str, Any]:
    counts = {"asked": 0, "answered": 0, "unanswered": 0}
    place = {"transaction_id": transaction_id, "producer_group": "shop", "state": state}
    return place | {"swept_at": MIDNIGHT} | counts


def check(transaction_id: str, number: int) -> dict[str, Any]:
    return {
        "transaction_id": transaction_id,
        "attempt_id": number,
        "number": number,
        "kind": "check",
        "at": MIDNIGHT,
        "outcome": "unknown",
    }


def sent(
    transaction_id: str, committed_at: datetime, due_at: datetime | None = None, position: int = 0
) -> dict[str, Any]:
    place = {"transaction_id": transaction_id, "position": position, "offset": 1, "topic": "order"}
    return place | {"committed_at": committed_at, "due_at": due_at}


def receipt(transaction_id: str, subscription_id: int, settled_at: datetime, **others: Any) -> dict[str, Any]:
    place = {"transaction_id": transaction_id, "position": 0, "subscription_id": subscription_id, "offset": 1}
    usual = {"outcome": "delivered", "attempts": 1, "first_at": MIDNIGHT, "duration_ms": 5, "replay": 0}
    return place | usual | {"settled_at": settled_at} | others


def subscription(subscription_id: int, name: str) -> dict[str, Any]:
    since = {"started_after": 0, "matches_since": MIDNIGHT, "created_at": MIDNIGHT}
    return {"subscription_id": subscription_id, "name": name, "topics": ["order"], "state": "active"} | since


def waiting(transaction_id: str, subscription_id: int, **others: Any) -> dict[str, Any]:
    place = {"transaction_id": transaction_id, "position": 0, "subscription_id": subscription_id, "offset": 1}
    return place | {"replay": 0, "topic": "order", "attempts": 1} | others


def places(counts: Sequence[int]) -> dict[int, int]:
    """Return the counts that are not 0 by their places."""
    return {place: count for place, count in enumerate(counts) if count}


def test_an_empty_day_has_figures_of_nothing(spark: SparkSession) -> None:
    found = figures(frames(spark))
    assert [sum(counts) for counts in found["outcomes"].values()] == [0, 0, 0, 0]
    assert [sum(counts) for counts in found["verdict"].values()] == [0, 0, 0, 0]
    assert (sum(found["checks"]), found["subscriptions"], found["others"]) == (0, [], None)
    assert json.loads(json.dumps(found)) == found
    assert no_figures() == found


@pytest.fixture(scope="module")
def found_of_day(spark: SparkSession) -> dict[str, Any]:
    """The figures of one day with transactions and deliveries; Spark plans each call of `figures` for seconds."""
    born = {
        "a": MIDNIGHT,
        "b": MIDNIGHT + 900 * SECOND - timedelta(microseconds=1),
        "c": MIDNIGHT + 900 * SECOND,
        "d": MIDNIGHT + timedelta(hours=23, minutes=59),
        "e": MIDNIGHT + timedelta(hours=12),
        # The id's clock and the coordinator's differ: the day is the id's.
        "f": MIDNIGHT - SECOND,
        "g": MIDNIGHT + timedelta(days=1, seconds=1),
    }
    return figures(
        frames(
            spark,
            half=[half(name, at) for name, at in born.items()] + [half("a", MIDNIGHT, position=1)],
            op=[op("a", MIDNIGHT), op("b", MIDNIGHT + 901 * SECOND, verdict=2), op("d", MIDNIGHT + timedelta(days=1))],
            # A decided transaction counts by its verdict, even if check_back still has a row of it.
            check_back=[in_doubt("c", 2), in_doubt("e", 1), in_doubt("a", 2)],
            subscription=[subscription(1, "points"), subscription(2, "mail"), subscription(3, "idle")],
            outbox=[sent("a", MIDNIGHT), sent("b", MIDNIGHT, due_at=MIDNIGHT + 60 * SECOND), sent("c", MIDNIGHT)],
            receipt=[
                receipt("a", 1, MIDNIGHT + 0.004 * SECOND),
                receipt("b", 1, MIDNIGHT + 60.3 * SECOND, attempts=3),
                receipt("c", 1, MIDNIGHT + 900 * SECOND, outcome="dropped", attempts=16),
                receipt("a", 1, MIDNIGHT + 9000 * SECOND, replay=7),
                receipt("a", 2, MIDNIGHT + 7 * SECOND, attempts=MOST_ATTEMPTS + 5),
                # No outbox row: delivered, but the commit time is unknown.
                receipt("x", 9, MIDNIGHT + SECOND),
            ],
            delivery_retry=[waiting("c", 2, due_at=MIDNIGHT), waiting("c", 2, replay=1, due_at=MIDNIGHT)],
            dead_letter=[waiting("b", 2, reason="410", died_at=MIDNIGHT)],
        )
    )


def test_transactions_count_in_the_quarter_of_their_birth_by_their_outcome(found_of_day: dict[str, Any]) -> None:
    outcomes = {name: places(counts) for name, counts in found_of_day["outcomes"].items()}
    assert outcomes == {
        "committed": {0: 1, QUARTERS - 1: 1},
        "rolled_back": {0: 1},
        "parked": {1: 1},
        "undecided": {0: 1, 48: 1, QUARTERS - 1: 1},
    }


@pytest.mark.slow
def test_durations_fall_between_one_two_and_five_of_each_decade(spark: SparkSession) -> None:
    micros = sorted({0, 999, 10**15} | {ms * 1000 + by for ms in FROM_MS for by in (-1, 0, 1)})
    ids = {f"t{number}": each for number, each in enumerate(micros)}
    decided = [op(name, MIDNIGHT + timedelta(microseconds=each)) for name, each in ids.items()]
    # A clock that went back between the two.
    decided.append(op("back", MIDNIGHT - SECOND))
    found = figures(frames(spark, half=[half(name, MIDNIGHT) for name in [*ids, "back"]], op=decided))
    expected = [0] * len(FROM_MS)
    for each in [*micros, -1_000_000]:
        expected[bucket_of(each / 1_000_000)] += 1
    assert found["verdict"]["producer"] == expected
    assert expected[0] == 1 + len([each for each in micros if each < 2000])
    assert [found["from_s"][place] for place in (0, 1, 2, 3, -1)] == [0.001, 0.002, 0.005, 0.01, 500_000]


@pytest.mark.slow
def test_verdicts_count_by_who_gave_them(spark: SparkSession) -> None:
    ops = [op(f"t{source}", MIDNIGHT + 3 * SECOND, verdict=1 + source % 2, source=source) for source in range(4)]
    found = figures(frames(spark, half=[half(one["transaction_id"], MIDNIGHT) for one in ops], op=ops))
    there = {bucket_of(3): 1}
    assert {name: places(counts) for name, counts in found["verdict"].items()} == {
        "producer": there,
        "check": there,
        "policy": there,
        "operator": there,
    }


@pytest.mark.slow
def test_checks_are_counted_by_transaction(spark: SparkSession) -> None:
    attempts = [check("b", 1)] + [check("c", number) for number in range(1, 4)]
    # The answer of the third check came by `/end`, too.
    attempts.append({**check("c", 3), "attempt_id": 4})
    attempts += [check("d", number) for number in range(1, MOST_CHECKS + 8)]
    attempts.append({**check("a", 99), "kind": "swept"})
    found = figures(frames(spark, half=[half(name, MIDNIGHT) for name in "abcd"], attempt=attempts))
    assert places(found["checks"]) == {0: 1, 1: 1, 3: 1, MOST_CHECKS: 1}


def test_a_subscription_has_its_deliveries_tries_and_latencies(found_of_day: dict[str, Any]) -> None:
    found_by_id = {one["subscription_id"]: one for one in found_of_day["subscriptions"]}
    assert list(found_by_id) == [1, 2, 9]
    numbers = ("name", "delivered", "dropped", "waiting", "dead")
    assert [tuple(one[name] for name in numbers) for one in found_by_id.values()] == [
        ("points", 2, 1, 0, 0),
        ("mail", 1, 0, 1, 1),
        (None, 1, 0, 0, 0),
    ]
    assert [places(one["attempts"]) for one in found_by_id.values()] == [{0: 1, 2: 1}, {MOST_ATTEMPTS - 1: 1}, {0: 1}]
    assert [places(one["latency"]) for one in found_by_id.values()] == [
        {bucket_of(0.004): 1, bucket_of(0.3): 1},
        {bucket_of(7): 1},
        {},
    ]
    assert (found_of_day["others"], found_of_day["latency_of_one_in"]) == (None, 1)


def test_the_subscriptions_of_findings_have_names(spark: SparkSession) -> None:
    """Of a deleted subscription the last name; an unknown one has none."""
    common = {"topics": ["order"], "state": "active", "started_after": 0}
    versions = [(1, 1, "points-before"), (3, 2, "mail"), (2, 2, "mail-before")]
    made = frames(
        spark,
        subscription=[subscription(1, "points"), subscription(4, "other")],
        subscription_version=[
            {
                "version_id": version,
                "subscription_id": number,
                "at": MIDNIGHT,
                "name": name,
                "ordered": "none",
                **common,
            }
            for version, number, name in versions
        ],
    )
    found = [(DAY, "undelivered", "s", None, None, number, None, "{}") for number in (1, 2, 9, None)]
    assert names_in([ReadDay(made, {})], found) == {1: "points", 2: "mail"}
    assert names_in([ReadDay(made, {})], found[3:]) == {}


@pytest.mark.slow
def test_past_the_limit_of_subscriptions_the_rest_is_summed(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SUBSCRIPTIONS", 2)
    receipts = [receipt(f"t{number}", number % 4, MIDNIGHT + SECOND, attempts=2) for number in range(10)]
    found = figures(frames(spark, receipt=receipts, outbox=[sent(f"t{number}", MIDNIGHT) for number in range(10)]))
    assert [one["subscription_id"] for one in found["subscriptions"]] == [0, 1]
    others = found["others"]
    assert (others["subscriptions"], others["delivered"], others["name"]) == (2, 4, None)
    assert (places(others["attempts"]), places(others["latency"])) == ({1: 4}, {bucket_of(1): 4})


@pytest.mark.slow
def test_of_many_deliveries_a_part_stands_for_all(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATENCIES", 100)
    ids = [f"t{number}" for number in range(1000)]
    found = figures(
        frames(
            spark,
            receipt=[receipt(name, 1, MIDNIGHT + SECOND, offset=offset) for offset, name in enumerate(ids)],
            outbox=[sent(name, MIDNIGHT) | {"offset": offset} for offset, name in enumerate(ids)],
        )
    )
    [one] = found["subscriptions"]
    assert (found["latency_of_one_in"], one["delivered"], list(places(one["latency"]))) == (10, 1000, [bucket_of(1)])
    # By a hash, so the same messages each time; a tenth of a thousand, give or take four standard deviations.
    assert 60 <= sum(one["latency"]) <= 140


@pytest.mark.slow
def test_the_session_s_time_zone_changes_nothing(spark: SparkSession) -> None:
    day = frames(
        spark,
        half=[half("a", MIDNIGHT + timedelta(hours=2))],
        op=[op("a", MIDNIGHT + timedelta(hours=3))],
        outbox=[sent("a", MIDNIGHT)],
        receipt=[receipt("a", 1, MIDNIGHT + timedelta(hours=2))],
    )
    expected = figures(day)
    assert places(expected["outcomes"]["committed"]) == {8: 1}
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        assert figures(day) == expected
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
