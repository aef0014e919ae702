"""Receipts of ordered subscriptions are compared, key by key, in Postgres while a day is read."""

import json
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark.postgres.connections import open_snapshot
from spark.sources.key_order import write_out_of_order
from tests.spark.days import days_ago, fill_day, rows

# Message n has the key n % KEYS, so a key has a message every 6 seconds.
KEYS = 60
# One change each, of the messages at the offsets %(a)s and %(b)s, which are neighbors in a key of their own. The names
# of what is out of order then. Each statement is a database transaction.
CHANGES: dict[tuple[LiteralString, ...], str] = {
    ("""update receipt set first_at = first_at - interval '1 minute' where "offset" = %(b)s""",): "b",
    ("""update receipt set settled_at = settled_at + interval '1 minute' where "offset" = %(a)s""",): "b",
    # Further back than its neighbor, and so is the next one: each is found once.
    (
        """update receipt set first_at = first_at - interval '1 hour', settled_at = settled_at - interval '1 hour'
        where "offset" in (%(a)s, %(b)s)""",
    ): "a",
    ("""update receipt set replay = 3, first_at = first_at - interval '1 minute' where "offset" = %(b)s""",): "",
    (
        """update receipt set replay = 3, first_at = first_at + case "offset" when %(a)s then interval '1 minute'
        else '0' end, settled_at = settled_at + interval '1 minute' where "offset" in (%(a)s, %(b)s)""",
    ): "b",
    # One settle.
    (
        """update receipt b set settled_at = a.settled_at, first_at = a.first_at from receipt a
        where a."offset" = %(a)s and b."offset" = %(b)s""",
    ): "b",
    # By less than clocks differ: what was written first says whether it is so.
    (
        """update receipt b set settled_at = a.settled_at + interval '5 ms', first_at = a.first_at from receipt a
        where a."offset" = %(a)s and b."offset" = %(b)s""",
        """update receipt set status = 200 where "offset" = %(a)s""",
    ): "b",
    (
        """update receipt b set settled_at = a.settled_at + interval '5 ms', first_at = a.first_at from receipt a
        where a."offset" = %(a)s and b."offset" = %(b)s""",
    ): "",
    # A person wrote this receipt again; its times are right.
    ("""update receipt set status = 200 where "offset" = %(a)s""",): "",
    # The order does not hold for these.
    (
        """update receipt set settled_at = settled_at + interval '1 minute', outcome = 'dropped'
        where "offset" = %(a)s""",
    ): "",
    (
        """update receipt set settled_at = settled_at + interval '1 minute' where "offset" = %(a)s""",
        """update outbox set key = null where "offset" = %(a)s""",
    ): "",
    (
        """update receipt set settled_at = settled_at + interval '1 minute' where "offset" = %(a)s""",
        """update outbox set due_at = committed_at + interval '30 s' where "offset" = %(a)s""",
    ): "",
    (
        """update receipt set settled_at = settled_at + interval '1 minute' where "offset" = %(a)s""",
        """insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at,
          died_because, attempts)
        select subscription_id, replay, transaction_id, position, "offset", 'redelivered', now(), now(), 'refused', 1
        from receipt where "offset" = %(a)s""",
    ): "",
    ("""delete from receipt where "offset" = %(a)s""",): "",
}
# Since when the subscription is ordered, as seconds of the day: `ordered`, from, and the same again.
VERSIONS = (("none", -86_400), ("key", 50), ("key", 150), ("none", 200), ("key", 240))
# The messages that are an hour early, and whether they are judged. A message and the previous one must both be sent in
# the time of the order, a minute after it began.
SWITCHED = {
    490: False,
    1090: False,
    1140: False,
    1170: True,
    1940: True,
    1960: False,
    2390: False,
    2990: False,
    3070: True,
}


@pytest.fixture
def ordered(dsn: str) -> str:
    """A database with a day of an ordered subscription, in which nothing is wrong."""
    fill_day(dsn, days_ago(3), 3100)
    with psycopg.connect(dsn) as db:
        db.execute("update outbox set key = ('k' || \"offset\" %% %s)", [KEYS])
        db.execute("update subscription_version set ordered = 'key'")
    return dsn


def found(spark: SparkSession, dsn: str, path: Path) -> dict[int, int]:
    """The offsets that are out of order, and the one before each."""
    with open_snapshot(dsn) as snapshot:
        number = write_out_of_order(spark, snapshot, snapshot.day(days_ago(3)), str(path))
    lines = [json.loads(line) for one in path.glob("*.json") for line in one.read_text().splitlines()]
    assert len(lines) == number
    return {line["offset"]: line["before_offset"] for line in lines}


def test_a_receipt_that_breaks_the_order_of_its_key_is_found(spark: SparkSession, ordered: str, tmp_path: Path) -> None:
    assert found(spark, ordered, tmp_path / "intact") == {}
    wanted = {}
    with psycopg.connect(ordered, autocommit=True) as db:
        for key, (changes, late) in enumerate(CHANGES.items(), 1):
            offsets = {"a": 20 * KEYS + key, "b": 21 * KEYS + key}
            for change in changes:
                assert db.execute(change, offsets).rowcount >= 1, change
            if late:
                wanted[offsets[late]] = offsets[late] - KEYS
    assert found(spark, ordered, tmp_path / "changed") == wanted
    rows(ordered, "update subscription_version set ordered = 'none' returning 1")
    assert found(spark, ordered, tmp_path / "unordered") == {}


def test_only_what_was_sent_in_the_time_of_an_order_is_judged(
    spark: SparkSession, ordered: str, tmp_path: Path
) -> None:
    with psycopg.connect(ordered) as db:
        db.execute("create temp table first as select * from subscription_version; delete from subscription_version")
        for name, second in VERSIONS:
            db.execute(
                "update first set ordered = %s, at = %s::timestamptz + %s * interval '1 s'",
                [name, f"{days_ago(3)} 00:00Z", second],
            )
            columns = (
                "subscription_id, at, name, topics, state, ordered, on_dead, shards, max_in_flight, timeout_s, retry"
            )
            db.execute(
                f"insert into subscription_version ({columns}, started_after) select {columns}, started_after "
                "from first"
            )
        for offset in SWITCHED:
            changed = """update receipt set settled_at = settled_at + interval '1 hour' where "offset" = %s"""
            assert db.execute(changed, [offset - KEYS]).rowcount == 1
    wanted = {offset: offset - KEYS for offset, judged in SWITCHED.items() if judged}
    assert found(spark, ordered, tmp_path / "out") == wanted


def test_a_message_that_only_new_filters_take_may_come_after_later_ones_of_its_key(
    spark: SparkSession, ordered: str, tmp_path: Path
) -> None:
    """Workers judge what is above the checkpoint by the new filters, and may still send by the former ones for a
    while."""
    late, changed_at = 20 * KEYS + 1, f"{days_ago(3)} 00:10Z"
    times = "first_at = %s::timestamptz + interval '1 second', settled_at = %s::timestamptz + interval '2 seconds'"
    rows(ordered, f'update receipt set {times} where "offset" = %s returning 1', changed_at, changed_at, late)
    sent = {late + KEYS: late}
    assert found(spark, ordered, tmp_path / "unchanged") == sent
    with psycopg.connect(ordered) as db:
        columns = "subscription_id, name, topics, state, ordered, on_dead, shards, max_in_flight, timeout_s, retry"
        db.execute(
            f"insert into subscription_version ({columns}, started_after, at, filters) "
            f'select {columns}, started_after, %s, \'{{"tags": ["created"]}}\' from subscription_version',
            [changed_at],
        )
    assert found(spark, ordered, tmp_path / "changed") == {}
    earlier = "update subscription_version set at = at - interval '9 minutes' where filters is not null returning 1"
    rows(ordered, earlier)
    assert found(spark, ordered, tmp_path / "earlier") == sent


def test_what_one_claim_had_may_be_settled_in_any_order(spark: SparkSession, ordered: str, tmp_path: Path) -> None:
    """Consumers claim: a claim may have several of a key, and which claim had a later attempt is not known.

    Nor is it of a message that came again because its consumer had not begun: the consumer held it for less time.
    """
    pulled = 'update subscription set destination = \'{"type": "pull"}\' returning 1'
    together = """update receipt b set first_at = a.first_at, settled_at = a.settled_at
        from receipt a where a."offset" = %(a)s and b."offset" = %(b)s"""
    early = """update receipt set first_at = first_at - interval '1 minute', duration_ms = duration_ms + 60000
        where "offset" = %(b)s"""
    not_begun = """update receipt set first_at = first_at - interval '1 minute' where "offset" = %(b)s"""
    before_not_begun = """update receipt set
        first_at = first_at - case "offset" when %(a)s then interval '0' else interval '1 minute' end,
        duration_ms = case "offset" when %(a)s then 0 else duration_ms + 60000 end
        where "offset" in (%(a)s, %(b)s)"""
    again = """update receipt set attempts = 2 where "offset" = %(one)s"""
    cases = ((together,), (early,), (early, again, "a"), (early, again, "b"), (not_begun,), (before_not_begun,))
    with psycopg.connect(ordered, autocommit=True) as db:
        # A consumer holds a message from its claim until its receipt.
        db.execute("update receipt set duration_ms = extract(epoch from settled_at - first_at) * 1000")
        for key, (change, *rest) in enumerate(cases, 1):
            offsets = {"a": 20 * KEYS + key, "b": 21 * KEYS + key}
            assert db.execute(change, offsets).rowcount >= 1
            if rest:
                assert db.execute(again, {"one": offsets[rest[1]]}).rowcount == 1
    late = {21 * KEYS + key: 20 * KEYS + key for key in range(1, 7)}
    assert found(spark, ordered, tmp_path / "sent") == late
    rows(ordered, pulled)
    assert found(spark, ordered, tmp_path / "claimed") == {21 * KEYS + 2: 20 * KEYS + 2}
