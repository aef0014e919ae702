"""A day's signature shows that the day changed when a run has no other reason to read it."""

import json
from datetime import date, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from spark.day_selection import Seen
from spark.postgres.connections import open_snapshot
from tests.spark.days import days_ago, fill_day, rows

DAY = days_ago(2)
REPLAY: LiteralString = """
insert into replay (replay_id, subscription_id, after, until, "offset", state, created_at, moved_at)
overriding system value select %s, 1, %s, %s, %s, 'done', now(), now() returning 1
"""
REDELIVERED: LiteralString = """
insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, died_because,
  attempts)
select 1, 0, transaction_id, 0, "offset", 'redelivered', now(), now(), 'refused', 1 from outbox where "offset" = %s
returning 1
"""


def signature(dsn: str) -> dict[str, Any]:
    """The day's, as the database would give it back."""
    with open_snapshot(dsn) as snapshot:
        found: dict[str, Any] = json.loads(json.dumps(snapshot.signature(snapshot.day(DAY))))
    return found


def final(signature: dict[str, Any], seen_at: datetime | None = None) -> Seen:
    """The result of a run that made a day with this signature final."""
    return Seen("final", open=False, findings=0, signature=signature, seen_at=seen_at)


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
        'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
        "values (1, 9, 20, 20, 'done', now(), now())",
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


def test_a_replay_or_a_redelivery_since_then_is_of_the_days_that_it_meets(dsn: str) -> None:
    """Of all final days at once. None of their own tables is read, so that upkeep can remove them meanwhile."""
    days = {days_ago(4): range(1, 11), days_ago(3): range(11, 11), DAY: range(21, 31)}
    for day, offsets in days.items():
        fill_day(dsn, day, len(offsets), first=offsets.start)
    rows(dsn, REPLAY, 7, 0, 30, 30)
    rows(dsn, REDELIVERED, 1)

    def signatures() -> dict[date, dict[str, Any]]:
        with open_snapshot(dsn) as snapshot:
            return {day: json.loads(json.dumps(snapshot.signature(snapshot.day(day)))) for day in days}

    def since(before: dict[date, dict[str, Any]]) -> set[date]:
        with psycopg.connect(dsn) as upkeep:
            for day in days:
                upkeep.execute(f"lock table outbox_{day:%Y%m%d}, receipt_{day:%Y%m%d} in access exclusive mode")
            with open_snapshot(dsn) as snapshot:
                snapshot.connection.execute("set local lock_timeout = '1s'")
                return snapshot.touched_since({day: final(one) for day, one in before.items()})

    before = signatures()
    assert since(before) == set()
    # After all of them; then before the first message of the last one, and before its last.
    rows(dsn, REPLAY, 8, 30, 99, 30)
    rows(dsn, REPLAY, 9, 10, 20, 10)
    assert since(before) == set()
    rows(dsn, REPLAY, 10, 29, 99, 29)
    assert since(before) == {DAY}
    rows(dsn, REDELIVERED, 2)
    assert since(before) == {DAY, days_ago(4)}
    before = signatures()
    assert since(before) == set()
    # It got its number before the others, and is visible after them; and another's rows are gone with its subscription.
    rows(dsn, REPLAY, 6, 5, 6, 5)
    assert since(before) == {days_ago(4)}
    rows(dsn, "delete from replay where replay_id < 8 returning 1")
    assert since(before) == set()
    rows(dsn, REPLAY, 11, 5, 6, 5)
    assert since(before) == {days_ago(4)}
    before = signatures()
    # Records of redeliveries are kept for 45 days.
    rows(dsn, "delete from redelivery returning 1")
    assert since(before) == set()
    rows(dsn, REDELIVERED, 2)
    assert since(before) == {days_ago(4)}


def test_of_a_day_that_an_older_version_made_final_the_time_of_its_run_says_it(dsn: str) -> None:
    """Its signature has nothing of replays, so a replay of any day counts, and a redelivery of its own messages."""
    fill_day(dsn, days_ago(4), 10)
    fill_day(dsn, DAY, 10, first=11)
    [now] = rows(dsn, "select clock_timestamp() as at")

    def since(seen_at: datetime | None) -> set[date]:
        with open_snapshot(dsn) as snapshot:
            old = {"half": 10, "redelivery": 0}
            return snapshot.touched_since({day: final(old, seen_at) for day in (days_ago(4), DAY)})

    later, earlier = now["at"] + timedelta(hours=2), now["at"] - timedelta(hours=2)
    assert [since(at) for at in (later, earlier, None)] == [set()] * 3
    rows(dsn, REDELIVERED, 12)
    assert [since(at) for at in (later, earlier, None)] == [set(), {DAY}, {DAY}]
    rows(dsn, REPLAY, 7, 0, 30, 30)
    both = {days_ago(4), DAY}
    assert [since(at) for at in (later, earlier, None)] == [set(), both, both]
    # What runs has its end to come.
    rows(dsn, "update replay set state = 'running' returning 1")
    assert since(earlier) == {DAY}


SUBSCRIBED: LiteralString = """
insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, created_at,
  updated_at, started_after, matches_since)
select %s, '{order}', '{}', '[]', '"earliest"', 1, 1, '{}', 'active', now(), now(), %s, now() returning 1
"""
REFUSED_END: LiteralString = """
insert into attempt (transaction_id, kind, at, outcome, verdict, source)
select transaction_id, 'refused', now(), 'refused', 2, 0 from outbox where "offset" = %s returning 1
"""


def test_a_later_subscription_and_a_refused_end_are_of_the_days_that_they_meet(dsn: str) -> None:
    """A final day is read again for a subscription that begins before its last message, and for an end that is late."""
    days = {days_ago(4): range(1, 11), days_ago(3): range(11, 21), DAY: range(21, 31)}
    for day, offsets in days.items():
        fill_day(dsn, day, len(offsets), first=offsets.start)

    def signatures() -> dict[date, dict[str, Any]]:
        with open_snapshot(dsn) as snapshot:
            return {day: json.loads(json.dumps(snapshot.signature(snapshot.day(day)))) for day in days}

    def since(before: dict[date, dict[str, Any]]) -> set[date]:
        with open_snapshot(dsn) as snapshot:
            return snapshot.touched_since({day: final(one) for day, one in before.items()})

    before = signatures()
    rows(dsn, SUBSCRIBED, "later", 30)
    rows(dsn, "update subscription set shards = 2, started_after = 0 where name = 'billing' returning 1")
    assert since(before) == set()
    rows(dsn, SUBSCRIBED, "earlier", 15)
    assert since(before) == {days_ago(3), DAY}
    before = signatures()
    assert since(before) == set()
    rows(dsn, REFUSED_END, 5)
    assert since(before) == {days_ago(4)}
    # A version that did not count them; and a day that upkeep removes.
    assert since({day: {"half": 10} for day in days}) == set()
    with psycopg.connect(dsn) as upkeep:
        upkeep.execute(f"lock table attempt_{days_ago(4):%Y%m%d} in access exclusive mode")
        assert since(before) == set()
        rows(dsn, REFUSED_END, 15)
        assert since(before) == {days_ago(3)}
    assert since(before) == {days_ago(4), days_ago(3)}
    with open_snapshot(dsn) as snapshot:
        one = final(before[days_ago(4)])
        assert snapshot.touched_since({days_ago(4): one, days_ago(9): one}) == {days_ago(4)}
        [locked] = snapshot.rows(
            "select count(*) as tables from pg_locks l join pg_class c on c.oid = l.relation "
            "where l.pid = pg_backend_pid() and c.relname like 'attempt%'"
        )
        assert locked["tables"] == 0
