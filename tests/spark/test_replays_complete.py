"""Replays that are over are compared with their receipts in Postgres, while a day is read."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from app.topic_patterns import TopicPatterns
from spark.postgres.connections import open_snapshot
from spark.sources.replays import TAKES, write_incomplete
from tests.spark.days import days_ago, fill_day, rows
from tests.support.topic_cases import topic_cases

# Each replays the offsets 11 to 20, from noon on, for a minute.
REPLAY: LiteralString = """
insert into replay (replay_id, subscription_id, after, until, "offset", filters, state, created_at, moved_at, ended_at)
overriding system value values (%s, 1, 10, 20, 20, %s, %s, %s, now(), %s)
"""
NOON = datetime(*days_ago(3).timetuple()[:3], 12, tzinfo=UTC)
RECEIVED: LiteralString = """
insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms,
  settled_at, replay)
select transaction_id, position, 1, "offset", 'delivered', 1, now(), 5, now(), %s from outbox
where "offset" = any(%s)
"""
# What is known of the message 20 instead of a receipt.
TRACES: dict[str, Any] = {
    "dead": 'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
    "died_at, replay) select 1, transaction_id, position, \"offset\", topic, 1, 'refused', now(), %s from outbox "
    'where "offset" = 20',
    "in_retry": 'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, '
    'first_at, due_at, replay) select 1, transaction_id, position, "offset", topic, 1, now(), now(), %s from outbox '
    'where "offset" = 20',
} | {
    what: 'insert into redelivery (subscription_id, transaction_id, position, "offset", what, at, died_at, '
    f"died_because, attempts, replay) select 1, transaction_id, position, \"offset\", '{what}', now(), now(), "
    "'refused', 1, %s from outbox where \"offset\" = 20"
    for what in ("redelivered", "dropped")
}
ALL = range(11, 21)
# The replay's filters, the offsets that were received, what else there is; and how many are missing, and the first.
Case = tuple[dict[str, Any] | None, Iterable[int], str, tuple[int, int] | None]
CASES: list[Case] = [
    (None, ALL, "done", None),
    (None, range(11, 20), "done", (1, 20)),
    (None, [], "done", (10, 11)),
    (None, [], "running", None),
    (None, [], "cancelled", None),
    (None, range(11, 20), "dead", None),
    (None, range(11, 20), "in_retry", None),
    (None, range(11, 20), "dropped", None),
    # It is sent again by the replay, and must leave a receipt.
    (None, range(11, 20), "redelivered", (1, 20)),
    (None, range(12, 20), "dead", (1, 11)),
    ({"keys": ["order-15", "order-16"]}, [15, 16], "done", None),
    ({"keys": ["order-15", "order-16"]}, [15], "done", (1, 16)),
    ({"topics": ["order"]}, [], "done", (10, 11)),
    ({"topics": ["orders"]}, [], "done", None),
    ({"tags": ["created", "late"]}, [], "done", (10, 11)),
    ({"tags": ["late"]}, [], "done", None),
    ({"tags": []}, [], "done", (10, 11)),
    ({"headers": {"vip": "yes"}}, [], "done", (10, 11)),
    ({"headers": {"vip": "no"}}, [], "done", None),
    ({"headers": {}}, [], "done", (10, 11)),
]


@pytest.fixture
def day(dsn: str) -> str:
    """A database with a day in which nothing is wrong, and no replay."""
    fill_day(dsn, days_ago(3), 30)
    return dsn


def found(spark: SparkSession, dsn: str, path: Path) -> dict[int, tuple[int, int]]:
    """How many messages a replay lacks, and the offset of the first."""
    with open_snapshot(dsn) as snapshot:
        write_incomplete(spark, snapshot, snapshot.day(days_ago(3)), str(path))
    lines = [json.loads(line) for one in path.glob("*.json") for line in one.read_text().splitlines()]
    return {line["replay_id"]: (line["messages"], line["offset"]) for line in lines}


def replayed(dsn: str, number: int, case: Case, at: datetime = NOON) -> None:
    """Store a replay."""
    filters, received, state, _ = case
    with psycopg.connect(dsn) as db:
        stored = state if state in ("running", "cancelled") else "done"
        given = None if filters is None else json.dumps(filters)
        db.execute(REPLAY, [number, given, stored, at, at + timedelta(minutes=1)])
        db.execute(RECEIVED, [number, list(received)])
        if state in TRACES:
            assert db.execute(TRACES[state], [number]).rowcount == 1


def test_a_replay_that_is_over_without_its_receipts_is_found(spark: SparkSession, day: str, tmp_path: Path) -> None:
    assert found(spark, day, tmp_path / "none") == {}
    for number, case in enumerate(CASES, 1):
        replayed(day, number, case)
    wanted = {number: case[3] for number, case in enumerate(CASES, 1) if case[3] is not None}
    assert found(spark, day, tmp_path / "all") == wanted
    rows(day, "update replay set cancelled_at = ended_at where replay_id = 2 returning 1")
    del wanted[2]
    assert found(spark, day, tmp_path / "canceled") == wanted
    late = 'set filters = \'{"tags": ["late"]}\''
    rows(day, f"update subscription_version {late} where at < now() - interval '1 day' returning 1")
    assert found(spark, day, tmp_path / "of others") == {}


def test_a_replay_is_judged_by_what_the_subscription_took_all_the_time(
    spark: SparkSession, day: str, tmp_path: Path
) -> None:
    replayed(day, 1, (None, [], "done", None))
    changed: LiteralString = """
    with copied as (select * from subscription_version where subscription_id = 1 order by version_id limit 1)
    insert into subscription_version (subscription_id, at, name, topics, state, ordered, on_dead, shards, max_in_flight,
      timeout_s, retry, started_after)
    select 1, %s, name, %s, state, ordered, on_dead, shards, max_in_flight, timeout_s, retry, started_after from copied
    returning version_id
    """
    for number, (seconds, topics, wanted) in enumerate(
        (
            (-61, ["order"], True),
            (30, ["order"], True),
            (61, ["orders"], True),
            (30, ["orders"], False),
            (-30, ["orders"], False),
            (-61, ["orders"], False),
        )
    ):
        [row] = rows(day, changed, NOON + timedelta(seconds=seconds), topics)
        is_found = found(spark, day, tmp_path / str(number)) == {1: (10, 11)}
        assert is_found is wanted, (seconds, topics)
        rows(day, "delete from subscription_version where version_id = %s returning 1", row["version_id"])


def test_a_closed_day_and_a_deleted_subscription_are_not_judged(spark: SparkSession, day: str, tmp_path: Path) -> None:
    replayed(day, 1, (None, [], "done", None))
    assert found(spark, day, tmp_path / "open") == {1: (10, 11)}
    opened = "update day set state = 'open', changed_at = %s where day = %s returning 1"
    rows(day, opened, NOON + timedelta(days=2), days_ago(3))
    assert found(spark, day, tmp_path / "opened again") == {}
    rows(day, opened, NOON, days_ago(3))
    assert found(spark, day, tmp_path / "never closed") == {1: (10, 11)}
    rows(day, "update day set state = 'archiving' where day = %s returning 1", days_ago(3))
    assert found(spark, day, tmp_path / "closed") == {}
    rows(day, opened, NOON, days_ago(3))
    rows(day, "update subscription set deleted_at = now() returning 1")
    assert found(spark, day, tmp_path / "deleted") == {}


def test_topics_match_as_the_service_does(dsn: str) -> None:
    cases = topic_cases(300)
    takes = TAKES.format(patterns="c.patterns", topic="c.topic")
    statement: Any = f"""
    select {takes} from rows from (
      jsonb_to_recordset(%s::jsonb) as (patterns text[], topic text)
    ) with ordinality as c(patterns, topic, n) order by n
    """
    given = json.dumps([{"patterns": patterns, "topic": topic} for patterns, topic in cases])
    with psycopg.connect(dsn) as db:
        answers = [row[0] for row in db.execute(statement, [given]).fetchall()]
    assert answers == [TopicPatterns(patterns).match(topic) for patterns, topic in cases]
