"""A day's signature shows that the day changed when a run has no other reason to read it."""

import json
from typing import Any

import psycopg
import pytest

from spark.postgres.connections import open_snapshot
from tests.spark.days import days_ago, fill_day

DAY = days_ago(2)


def signature(dsn: str) -> dict[str, Any]:
    """The day's, as the database would give it back."""
    with open_snapshot(dsn) as snapshot:
        found: dict[str, Any] = json.loads(json.dumps(snapshot.signature(snapshot.day(DAY))))
    return found


@pytest.fixture
def before(dsn: str) -> dict[str, Any]:
    fill_day(dsn, DAY, 10)
    return signature(dsn)


@pytest.mark.parametrize(
    "change",
    [
        'delete from receipt where "offset" = 3',
        "update subscription set topics = '{order,x}', matches_since = now(), updated_at = now()",
        "update subscription set deleted_at = now()",
        'update checkpoint set "offset" = 4',
        'insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, '
        "died_because, attempts) select 1, 0, transaction_id, 0, 1, 'dropped', now(), now(), 'refused', 1 from half "
        "order by transaction_id limit 1",
    ],
)
def test_what_changes_what_must_be_there_changes_it(dsn: str, before: dict[str, Any], change: str) -> None:
    with psycopg.connect(dsn) as db:
        assert db.execute(change).rowcount == 1
    assert signature(dsn) != before


def test_deliveries_of_other_days_do_not(dsn: str, before: dict[str, Any]) -> None:
    """Or a settled day would be proved every night."""
    fill_day(dsn, days_ago(1), 20, first=11)
    with psycopg.connect(dsn) as db:
        assert db.execute('update checkpoint set "offset" = 30, moved_at = now()').rowcount == 1
    assert signature(dsn) == before


def test_nor_do_they_for_a_day_with_nothing_in_it(dsn: str) -> None:
    fill_day(dsn, DAY, 0)
    before = signature(dsn)
    fill_day(dsn, days_ago(1), 20)
    assert signature(dsn) == before
