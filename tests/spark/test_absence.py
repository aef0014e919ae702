"""Runs over days with far less than usual: topic, group and subscription are a finding each."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.spark.days import add_day, days_ago, fill_day, prove, rows
from tests.spark.proved_twice import DAY, SUBJECTS, ProvedTwice, remember

pytestmark = pytest.mark.usefixtures("spark")


def absent(dsn: str) -> list[dict[str, Any]]:
    return rows(dsn, "select * from finding where kind = 'fewer_than_usual' and resolved_at is null order by subject")


def test_a_day_with_far_less_is_found(proved_twice: ProvedTwice) -> None:
    assert proved_twice.first.status == 3
    assert "3 findings (fewer_than_usual 3); new: 3" in proved_twice.first.said
    found = proved_twice.first.findings
    assert [row["subject"] for row in found] == SUBJECTS
    assert [row["producer_group"] for row in found] == ["shop", None, None]
    assert [row["subscription_id"] is None for row in found] == [True, False, True]
    detail = {"count": 40, "usual": 10_000, "days": 4, "share": 0.2, "messages": 9960}
    assert [row["detail"] for row in found] == [detail] * 3
    stored = proved_twice.first.day
    assert stored["volumes"] == {"topic": {"order": 40}, "group": {"shop": 40}, "subscription": {"billing": 40}}
    # 80 rows, and three findings with 9,960 missing messages each.
    assert stored["score"] == {"complete": 0.26, "agreed": 100.0, "timely": 100.0, "orderly": 100.0}


def test_a_share_resolves_it(proved_twice: ProvedTwice) -> None:
    assert (proved_twice.again.status, proved_twice.again.findings) == (0, [])
    assert "proved; resolved: 3" in proved_twice.again.said


@pytest.mark.slow
def test_a_day_without_any_row_is_found(dsn: str) -> None:
    fill_day(dsn, DAY - timedelta(days=1), 40)
    add_day(dsn, DAY)
    remember(dsn, DAY)
    assert prove(dsn, "--day", DAY) == 3
    assert [row["subject"] for row in absent(dsn)] == SUBJECTS


@pytest.mark.slow
def test_what_was_taken_out_of_use_is_no_finding(dsn: str) -> None:
    fill_day(dsn, DAY, 40)
    remember(dsn, DAY)
    with psycopg.connect(dsn) as db:
        db.execute("insert into topic (name, first_seen_at) values ('order', now()) on conflict do nothing")
        db.execute("delete from producer_group where name = 'shop'")
        db.execute("update subscription set state = 'paused', updated_at = now()")
        db.execute(
            "insert into audit (at, what, target, detail) values (now(), 'topic.undeclare', 'order', '{}'), "
            "(now(), 'producer_group.delete', 'shop', '{}')"
        )
    assert prove(dsn, "--day", DAY) == 0


@pytest.mark.slow
def test_the_first_days_are_counted_and_not_judged(dsn: str) -> None:
    for number in range(3):
        fill_day(dsn, days_ago(5 - number), 300 if number < 2 else 3, first=1 + 1000 * number)
    assert prove(dsn) == 0
    stored = rows(dsn, "select volumes -> 'topic' -> 'order' as count from reconciliation_day order by day")
    assert [row["count"] for row in stored if row["count"]] == [300, 300, 3]
