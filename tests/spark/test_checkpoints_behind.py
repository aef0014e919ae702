"""A checkpoint that was set back behind what its shard has received is found."""

from datetime import UTC, datetime
from typing import Any, LiteralString

import pytest

from app.store.relay.log import HASH
from spark.sources.subscriptions import _BEHIND, DIFFERING, SHARD
from tests.spark.days import days_ago, fill_day, rows

DAY = days_ago(2)
# Of the day's 30 messages, all received.
BACK: LiteralString = 'update checkpoint set "offset" = %s returning 1'
NOT_RECEIVED: LiteralString = 'delete from receipt where "offset" = %s returning 1'


@pytest.fixture
def day(dsn: str) -> str:
    """A database with a day and a subscription as old as it."""
    fill_day(dsn, DAY, 30)
    rows(dsn, "update subscription_version set at = now() - interval '90 days' returning 1")
    rows(dsn, "update audit set at = now() - interval '90 days' returning 1")
    assert behind(dsn) == []
    return dsn


def behind(dsn: str) -> list[str]:
    """The names of the subscriptions whose checkpoints are impossible."""
    statement: Any = DIFFERING.format(day=days_ago(1), tells=days_ago(1), seen=datetime.now(UTC).isoformat())
    return sorted(row["name"] for row in rows(dsn, statement) if row["checkpoint"])


def test_messages_are_divided_among_shards_as_the_relay_does() -> None:
    assert HASH.format("o") == SHARD


def test_the_first_message_after_a_checkpoint_has_no_old_receipt(day: str) -> None:
    rows(day, BACK, 20)
    assert behind(day) == ["billing"]
    # The message is on its way, or was.
    rows(day, "update receipt set settled_at = now() - interval '50 minutes' where \"offset\" = 21 returning 1")
    assert behind(day) == []
    rows(day, NOT_RECEIVED, 21)
    assert behind(day) == []
    rows(day, BACK, 21)
    assert behind(day) == ["billing"]


@pytest.mark.parametrize(
    "change",
    [
        "update subscription set state = 'paused'",
        "update subscription set deleted_at = now()",
        "update subscription set topics = '{other}'",
        "update subscription set topics = '{halfnote.*}'",
        'update subscription set filters = \'{"tags": ["late"]}\'',
        'update subscription set filters = \'{"headers": {"vip": "no"}}\'',
        "update subscription set started_after = 30",
        "update subscription_version set at = now() - interval '50 minutes'",
        "update day set state = 'archiving'",
        "update receipt set replay = 1",
    ],
)
def test_what_a_worker_does_not_settle_leaves_it_where_it_is(day: str, change: LiteralString) -> None:
    rows(day, BACK, 20)
    rows(day, change + " returning 1")
    # The change itself is no other finding's subject here.
    rows(
        day,
        "update subscription_version set at = now() - interval '80 days' where at > now() - interval '10 minutes' "
        "returning 1",
    ) if "version" not in change else None
    assert behind(day) == []


@pytest.mark.parametrize("filters", ['{"tags": ["created"]}', '{"headers": {"vip": "yes"}}', '{"tags": []}', "null"])
def test_filters_are_those_of_the_relay(day: str, filters: str) -> None:
    rows(day, "update subscription set filters = %s returning 1", filters)
    rows(day, "update subscription_version set at = now() - interval '80 days' returning 1")
    rows(day, BACK, 20)
    assert behind(day) == ["billing"]


def test_a_message_of_a_closed_day_may_hold_a_checkpoint_back(day: str) -> None:
    """A worker had it when its day was closed, and what came after it was received."""
    fill_day(day, days_ago(1), 5, first=31)
    rows(day, "update day set state = 'archiving' where day = %s returning 1", DAY)
    rows(day, BACK, 29)
    rows(day, NOT_RECEIVED, 30)
    assert behind(day) == []
    rows(day, BACK, 30)
    assert behind(day) == ["billing"]


def test_a_log_that_no_consumer_claims_is_not_read(day: str) -> None:
    rows(day, BACK, 0)
    rows(day, "delete from receipt returning 1")
    statement: Any = "explain (analyze) " + _BEHIND.format(seen=datetime.now(UTC).isoformat())
    scans = [row["QUERY PLAN"] for row in rows(day, statement) if " on outbox_" in row["QUERY PLAN"]]
    assert len(scans) >= 2
    assert all("rows=0" in one.partition("actual")[2] or "never executed" in one for one in scans), scans


def test_each_shard_has_a_checkpoint_of_its_own(day: str) -> None:
    """One shard has messages that wait; another one that was set back has none."""
    taken: Any = f'select o."offset" from outbox o where mod({SHARD}, 2) = %s order by 1'
    of_shard = {shard: [row["offset"] for row in rows(day, taken, shard)] for shard in (0, 1)}
    rows(day, "update subscription set shards = 2 returning 1")
    rows(day, "update subscription_version set at = now() - interval '80 days' returning 1")
    rows(day, "update checkpoint set shards = 2 returning 1")
    rows(
        day,
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select subscription_id, 2, 1, 30, now() from checkpoint returning 1",
    )
    assert behind(day) == []
    waiting = of_shard[0][3]
    rows(day, 'delete from receipt where "offset" = %s returning 1', waiting)
    rows(day, 'update checkpoint set "offset" = %s where shard = 0 returning 1', of_shard[0][2])
    assert behind(day) == []
    rows(day, 'update checkpoint set "offset" = %s where shard = 1 returning 1', of_shard[1][2])
    assert behind(day) == ["billing"]
