"""What keeps a day from being final: deliveries that wait for a retry, live or of a replay, and replays that run."""

import json
from datetime import timedelta
from pathlib import Path
from typing import LiteralString

from pyspark.sql import SparkSession

from spark.postgres.connections import open_snapshot
from spark.sources.replays import write_running
from spark.transforms.waiting import waiting
from tests.spark.days import days_ago, fill_day, rows
from tests.spark.frames import born, id_of, plain_day

DAY = days_ago(3)
REPLAY: LiteralString = """
insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at)
select subscription_id, %s, %s, %s, %s, now(), now() from subscription returning replay_id
"""
# Of a day with the offsets 101 to 110: the range, the offset that was reached, the state, and whether it reads the day.
REPLAYS = (
    (0, 200, 0, "running", True),
    (0, 200, 109, "running", True),
    (0, 200, 110, "running", False),
    (0, 101, 0, "running", True),
    (0, 100, 0, "running", False),
    (110, 200, 110, "running", False),
    (105, 106, 105, "running", True),
    (105, 106, 106, "running", False),
    (0, 200, 0, "cancelled", False),
    (0, 200, 200, "done", False),
)


def test_retries_of_replays_wait_and_those_of_a_deleted_subscription_do_not(spark: SparkSession) -> None:
    day = plain_day()
    day.subscribe(2)
    day.subscribe(3, deleted_at=born(60))
    for number, replay, subscription in ((1, 0, 1), (1, 7, 1), (2, 7, 2), (3, 0, 3), (3, 7, 3)):
        due_at = day.seen_at - timedelta(hours=1)
        day.delivery("delivery_retry", number, 0, subscription, replay=replay, due_at=due_at)
    for last_offset in (None, 1500):
        found = waiting(day.frames(spark), last_offset).collect()
        assert {(row["transaction_id"], row["subscription_id"], row["replay"]) for row in found} == {
            (id_of(1), 1, 0),
            (id_of(1), 1, 7),
            (id_of(2), 2, 7),
        }


def test_what_a_subscription_has_not_passed_waits(spark: SparkSession) -> None:
    day = plain_day()
    day.subscribe(2, lowest=900)
    for last_offset in (None, 1000):
        found = waiting(day.frames(spark), last_offset).collect()
        assert {(row["transaction_id"], row["subscription_id"]) for row in found} == {(id_of(10), 2)}


def test_replays_that_still_have_to_read_the_day_are_found(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    fill_day(dsn, days_ago(4), 100)
    fill_day(dsn, DAY, 10, first=101)
    fill_day(dsn, days_ago(2), 90, first=111)

    def found(path: Path) -> list[int]:
        with open_snapshot(dsn) as snapshot:
            count = write_running(spark, snapshot, snapshot.day(DAY), str(path))
        lines = [json.loads(line) for one in path.glob("*.json") for line in one.read_text().splitlines()]
        assert (count, {line["name"] for line in lines}) == (len(lines), {"billing"} if lines else set())
        return sorted(line["replay_id"] for line in lines)

    assert found(tmp_path / "none") == []
    wanted = []
    for *replay, reads in REPLAYS:
        [row] = rows(dsn, REPLAY, *replay)
        wanted += [row["replay_id"]] if reads else []
    assert found(tmp_path / "running") == wanted
    rows(dsn, "update subscription set deleted_at = now() returning 1")
    assert found(tmp_path / "deleted") == []
