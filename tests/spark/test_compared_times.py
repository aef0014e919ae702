"""Times and receipts are compared in Postgres, while a day is read."""

import json
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark import schemas
from spark.postgres.connections import open_snapshot
from spark.sources import scan
from spark.sources.published import write_differing
from spark.sources.received import write_wrong_receipts
from tests.spark.days import days_ago, fill_day, rows
from tests.spark.test_published_differs import read

# One change each, and what is then said of the times.
TIMES: dict[LiteralString, str | None] = {
    "update op set decided_at = decided_at - interval '6 s' where transaction_id = %s": "decided_at before born_at",
    "update op set decided_at = decided_at - interval '4 s' where transaction_id = %s": None,
    "update outbox set committed_at = committed_at - interval '6 s' where transaction_id = %s": (
        "committed_at before decided_at"
    ),
    "update outbox set committed_at = committed_at - interval '4 s' where transaction_id = %s": None,
    "with gone as (delete from op where transaction_id = %(id)s) update outbox set committed_at = committed_at "
    "- interval '6 s' where transaction_id = %(id)s": "committed_at before born_at",
    "update half set born_at = born_at + interval '1 year' where transaction_id = %s": (
        "born_at in the future, first_check_at beyond every policy, decided_at before born_at"
    ),
    "with gone as (delete from outbox where transaction_id = %(id)s) update op set verdict = 2, "
    "decided_at = now() + interval '1 minute' where transaction_id = %(id)s": "decided_at in the future",
    "update outbox set committed_at = now() + interval '1 minute' where transaction_id = %s": (
        "committed_at in the future"
    ),
    "update outbox set committed_at = now() + interval '2 s' where transaction_id = %s": None,
    "update half set first_check_at = born_at - interval '1 s' where transaction_id = %s": (
        "first_check_at beyond every policy"
    ),
    "update half set first_check_at = born_at + interval '2 days' where transaction_id = %s": (
        "first_check_at beyond every policy"
    ),
    "update half set first_check_at = born_at + interval '1 day' where transaction_id = %s": None,
}
# A person's record of a receipt's message.
REDELIVERED: LiteralString = (
    'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, '
    "died_because, attempts) select subscription_id, 0, transaction_id, position, \"offset\", '{}', now(), now(), "
    "'day_left', 0 from receipt where transaction_id = %(id)s"
)
# A failed try of a receipt's delivery.
TRIED: LiteralString = (
    "insert into attempt (transaction_id, kind, at, number, outcome, position, subscription_id) "
    "select transaction_id, 'delivery', first_at, 1, 'failed', position, subscription_id from receipt "
    "where transaction_id = %(id)s"
)
# One change each, and what is then wrong with the receipt.
RECEIPTS: dict[LiteralString, str | None] = {
    "update receipt set outcome = 'received' where transaction_id = %s": "outcome",
    "update receipt set outcome = 'dropped', status = 500, attempts = 0 where transaction_id = %s": "outcome",
    "with gone as (update receipt set outcome = 'dropped', status = 500, attempts = 0 where transaction_id = %(id)s) "
    f"{REDELIVERED.format('dropped')}": None,
    "update receipt set status = 500 where transaction_id = %s": "status",
    "update receipt set status = 302 where transaction_id = %s": "status",
    "update receipt set status = 204 where transaction_id = %s": None,
    "update receipt set status = null where transaction_id = %s": None,
    "update receipt set attempts = 0 where transaction_id = %s": "attempts",
    "update receipt set attempts = -1 where transaction_id = %s": "attempts",
    # Without a row of `attempt` for each failed try; with one; and after a redelivery, which counts from 0 again.
    "update receipt set attempts = 2 where transaction_id = %s": "attempts",
    f"with tried as ({TRIED}) update receipt set attempts = 2 where transaction_id = %(id)s": None,
    TRIED: "attempts",
    f"with tried as ({TRIED}) {REDELIVERED.format('redelivered').replace(', 0 from', ', 1 from')}": None,
    "update receipt set duration_ms = -1 where transaction_id = %s": "duration_ms",
    "update receipt set duration_ms = 3600001 where transaction_id = %s": "duration_ms",
    "update receipt set digest = null where transaction_id = %s": "digest",
    'update receipt set "offset" = "offset" + 1 where transaction_id = %s': "offset",
    "update outbox set due_at = committed_at + interval '1 hour' where transaction_id = %s": "first_at",
    # Within the time by which clocks may differ.
    "update outbox set due_at = committed_at + interval '4 s' where transaction_id = %s": None,
    "with later as (update outbox set due_at = committed_at + interval '1 hour' where transaction_id = %(id)s) "
    "update receipt set outcome = 'dropped', attempts = 0 where transaction_id = %(id)s": "outcome",
    # A redelivery sends at once, also a dead letter that the removal of a day made before the message was due.
    "with later as (update outbox set due_at = committed_at + interval '1 hour' where transaction_id = %(id)s) "
    f"{REDELIVERED.format('redelivered')}": None,
    "with later as (update outbox set due_at = committed_at + interval '1 hour' where transaction_id = %(id)s) "
    f"{REDELIVERED.format('dropped')}": "first_at",
    "with later as (update outbox set committed_at = committed_at + interval '4 s', due_at = committed_at "
    "+ interval '1 hour' where transaction_id = %(id)s), early as (update receipt set first_at = first_at - interval "
    "'6 s' where transaction_id = %(id)s) "
    f"{REDELIVERED.format('redelivered')}": "first_at",
    # A replay may send a message that is not due.
    "with later as (update outbox set due_at = committed_at + interval '1 hour' where transaction_id = %(id)s) "
    "update receipt set replay = 3 where transaction_id = %(id)s": None,
    "update receipt set replay = 3, first_at = first_at - interval '6 s' where transaction_id = %s": "first_at",
    # Of a replay that never was; and before the beginning of one, in offsets and in time.
    "update receipt set replay = 4 where transaction_id = %s": "replay",
    "update receipt set replay = -1 where transaction_id = %s": "replay",
    "update receipt set replay = 5 where transaction_id = %s": "replay",
    "update receipt set replay = 6 where transaction_id = %s": "replay",
    # Upkeep removes the replays of a deleted subscription.
    "update receipt set replay = 4, subscription_id = 2 where transaction_id = %s": None,
    "update receipt set settled_at = now() + interval '1 minute' where transaction_id = %s": "settled_at",
    "update receipt set settled_at = first_at - interval '1 hour' where transaction_id = %s": "settled_at",
    "update receipt set settled_at = first_at - interval '1 us' where transaction_id = %s": "settled_at",
    "update receipt set settled_at = first_at where transaction_id = %s": None,
    'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, died_at) '
    "select subscription_id, transaction_id, position, \"offset\", 'order', 1, 'attempts', now() from receipt "
    "where transaction_id = %s": "dead",
    'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, died_at) '
    "select subscription_id, transaction_id, position, \"offset\", 'order', 1, 'day_left', now() from receipt "
    "where transaction_id = %s": None,
    # Of a message that was published twice, either offset will do.
    'insert into outbox (transaction_id, position, "offset", topic, key, tag, committed_at) '
    'select transaction_id, position, "offset" + 1000000, topic, key, tag, now() from outbox '
    "where transaction_id = %s": None,
    # The rule receipt_without_message judges it.
    "delete from outbox where transaction_id = %s": None,
}


def changed(dsn: str, changes: dict[LiteralString, str | None]) -> dict[str, str]:
    """Change one message each, spread over the day; return what is to be found, by transaction."""
    ids = [str(row["transaction_id"]) for row in rows(dsn, "select transaction_id from outbox order by 1")]
    wanted = {}
    with psycopg.connect(dsn) as connection:
        connection.execute("alter table outbox drop constraint outbox_pkey cascade")
        for victim, (change, differs) in zip(ids[:: len(ids) // len(changes)], changes.items(), strict=False):
            given = {"id": victim} if "%(id)s" in change else [victim]
            assert connection.execute(change, given).rowcount == 1, change
            if differs is not None:
                wanted[victim] = differs
    assert len(wanted) == sum(differs is not None for differs in changes.values())
    return wanted


@pytest.fixture
def day(dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with a day in which nothing is wrong, of several ranges."""
    fill_day(dsn, days_ago(3), 100)
    with psycopg.connect(dsn) as db:
        db.execute(
            """insert into replay (replay_id, subscription_id, after, until, "offset", state, created_at, moved_at)
            overriding system value values (3, 1, 0, 300, 300, 'done', now() - interval '9 days', now()),
              (5, 1, 300, 400, 400, 'done', now() - interval '9 days', now()),
              (6, 1, 0, 300, 300, 'done', now(), now())"""
        )
    monkeypatch.setattr(scan, "PAGES_AT_ONCE", 1)
    return dsn


def compared(write: Any, spark: SparkSession, dsn: str, path: Path) -> list[dict[str, Any]]:
    """What one of the comparisons writes while the day is read."""
    with open_snapshot(dsn) as snapshot:
        write(spark, snapshot, snapshot.day(days_ago(3)), str(path))
    return [json.loads(line) for one in sorted(path.glob("*.json")) for line in one.read_text().splitlines()]


def test_nothing_is_said_of_a_day_as_it_is(spark: SparkSession, day: str, tmp_path: Path) -> None:
    f = read(spark, day, tmp_path)
    # The replays of this day lack receipts.
    found = {name: getattr(f, name) for name in schemas.FOUND if name != "replay_incomplete"}
    assert {name for name, one in found.items() if one is None or one.collect()} == set()


def test_times_that_disagree_are_named(spark: SparkSession, day: str, tmp_path: Path) -> None:
    wanted = changed(day, TIMES)
    found = compared(write_differing, spark, day, tmp_path)
    assert {row["transaction_id"]: row["times"] for row in found if row["times"]} == wanted


def test_what_is_wrong_with_a_receipt_is_named(spark: SparkSession, day: str, tmp_path: Path) -> None:
    wanted = changed(day, RECEIPTS)
    found = read(spark, day, tmp_path).wrong_receipt
    assert found is not None
    assert {row.transaction_id: row.differs for row in found.collect()} == wanted


@pytest.mark.parametrize(("sign", "older_postgres"), [("-", False), ("+", True)])
def test_a_birth_far_from_the_time_of_its_id(
    spark: SparkSession, day: str, tmp_path: Path, sign: str, older_postgres: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older_postgres:
        monkeypatch.setattr(scan, "_ID_TIME_18", scan._ID_TIME)
    near, far = [row["transaction_id"] for row in rows(day, "select transaction_id from op order by 1 limit 2")]
    for one, seconds in ((near, 364), (far, 366)):
        shift: LiteralString = "+ %s * interval '1 second'" if sign == "+" else "- %s * interval '1 second'"
        rows(
            day,
            f"update half set born_at = born_at {shift}, first_check_at = first_check_at {shift} "
            "where transaction_id = %s returning 1",
            seconds,
            seconds,
            one,
        )
    rows(day, "update op set decided_at = decided_at + interval '10 minutes' returning 1")
    rows(day, "update outbox set committed_at = committed_at + interval '10 minutes' returning 1")

    def far_off(place: str) -> list[tuple[str, str]]:
        found = compared(write_differing, spark, day, tmp_path / place)
        return [(row["transaction_id"], row["times"]) for row in found]

    # No process has stored what it permits.
    assert far_off("unknown") == []
    rows(day, "insert into shared_rule values ('longest_id_skew_s', 300) returning 1")
    assert far_off("known") == [(str(far), "born_at far from the time of the id")]


def test_the_time_of_an_id_is_that_of_its_first_48_bits(dsn: str) -> None:
    milliseconds = [0, 1, 999, 1_700_000_000_123, 2**32 - 1, 2**40, 2**47, 2**48 - 1]
    # Those with all other bits set have the same time.
    ids = [UUID(int=(ms << 80) + rest) for ms in milliseconds for rest in (0, 2**80 - 1)]
    query: Any = (
        f"select round(extract(epoch from {scan._ID_TIME}) * 1000)::bigint as ms "
        "from unnest(%s) with ordinality h(transaction_id, n) order by n"
    )
    assert [row["ms"] for row in rows(dsn, query, ids)] == [one.int >> 80 for one in ids]


def test_older_versions_settled_receipts_a_turn_too_early(spark: SparkSession, day: str, tmp_path: Path) -> None:
    rows(day, "update evidence_since set at = now() where name = 'verdict' returning 1")
    turn, late = [row["transaction_id"] for row in rows(day, "select transaction_id from receipt order by 1 limit 2")]
    change: LiteralString = (
        "update receipt set settled_at = first_at - %s::interval where transaction_id = %s returning 1"
    )
    rows(day, change, "59 s", turn)
    rows(day, change, "61 s", late)
    found = compared(write_wrong_receipts, spark, day, tmp_path)
    assert [(row["transaction_id"], row["differs"]) for row in found] == [(str(late), "settled_at")]


def test_a_webhook_has_answered_with_a_status(spark: SparkSession, day: str, tmp_path: Path) -> None:
    rows(day, 'update receipt set status = null where "offset" = 100 returning 1')
    put: LiteralString = (
        "insert into audit (at, what, target, detail) values (%s, 'subscription.put', %s, '{}') returning 1"
    )

    def wrong(place: str) -> list[str]:
        return [row["differs"] for row in compared(write_wrong_receipts, spark, day, tmp_path / place)]

    # Not if there is no audit, or it began later, or is of a later change, or the destination is a broker.
    rows(day, 'update subscription set destination = \'{"type": "webhook"}\' returning 1')
    rows(day, "delete from audit returning 1")
    assert wrong("no audit") == []
    rows(day, put, days_ago(2), "other")
    assert wrong("later audit") == []
    rows(day, put, days_ago(9), "billing")
    assert wrong("webhook") == ["status"]
    rows(day, 'update subscription set destination = \'{"type": "kafka"}\' returning 1')
    assert wrong("broker") == []
    rows(day, 'update subscription set destination = \'{"type": "webhook"}\' returning 1')
    rows(day, put, days_ago(2), "billing")
    assert wrong("changed") == []
