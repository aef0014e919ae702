"""Each change of a subscription is in the audit and in its history; what is in one of both alone is found."""

from datetime import UTC, datetime
from typing import Any, LiteralString

import httpx
import psycopg
import pytest

from app.runtime.state import Runtime
from spark.sources.subscriptions import DIFFERING
from tests.spark.days import Connection, days_ago, rows

BY_HAND = "update subscription set {} where name = 'mailer'"
CREATED = (
    "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, "
    "created_at, updated_at, started_after, matches_since) select 'another', topics, '{}', '[]', '\"latest\"', 1, 1, "
    "'{}', 'active', clock_timestamp(), now(), 0, now() from subscription where name = 'mailer'"
)
ANSWERED: LiteralString = """
insert into attempt (transaction_id, kind, at, outcome, position, subscription_id)
select d.low, 'delivery', now() - %s::interval, %s, 0, subscription_id from subscription s, day d
where name = %s and deleted_at is null and day = current_date returning 1
"""
REDELIVERED: LiteralString = """
insert into redelivery (subscription_id, replay, transaction_id, position, "offset", what, at, died_at, died_because,
  attempts)
select subscription_id, 0, d.low, 0, 1, %s, now() - %s::interval, now(), 'refused', 1 from subscription s, day d
where name = %s and deleted_at is null and day = current_date returning 1
"""
DELETE = "delete from audit where what = 'subscription.{}'"
# The history loses a version, or it is changed; the row of the subscription is as the last one says.
LOSE = "delete from subscription_version where state = 'paused'"
FIRST = "delete from subscription_version where version_id = (select min(version_id) from subscription_version where "
FIRST += "name = 'former')"
# A statement by hand and the name and words of what is found. An audit row alone has no number of a subscription.
CHANGES = {
    BY_HAND.format("topics = '{none}'"): ("mailer", "change without audit: put"),
    BY_HAND.format("retry = '{1}'"): ("mailer", "change without audit: put"),
    BY_HAND.format('filters = \'{"tags": ["x"]}\''): ("mailer", "change without audit: put"),
    BY_HAND.format("state = 'paused'"): ("mailer", "change without audit: pause"),
    BY_HAND.format("deleted_at = clock_timestamp()"): ("mailer", "change without audit: delete"),
    CREATED: ("another", "change without audit: put"),
    DELETE.format("pause"): ("mailer", "change without audit: pause"),
    DELETE.format("resume"): ("mailer", "change without audit: resume"),
    DELETE.format("delete"): ("former", "change without audit: delete"),
    LOSE: ("mailer", "audit without change: pause"),
    "update subscription_version set state = 'active' where state = 'paused'": (
        "mailer",
        "audit without change: pause",
    ),
    FIRST: ("former", "audit without change: put"),
}


async def change(client: httpx.AsyncClient) -> None:
    """Make two subscriptions and every change that people can make of one."""
    hook = {"type": "webhook", "url": "http://127.0.0.1:9/"}
    calls: list[tuple[str, str, dict[str, Any] | None]] = [
        ("PUT", "mailer", {"topics": ["order", "b*"], "destination": hook}),
        ("PUT", "former", {"topics": ["order"], "destination": hook}),
        ("POST", "mailer/pause", None),
        ("POST", "mailer/pause", None),
        ("POST", "mailer/resume", None),
        ("PUT", "mailer", {"topics": ["order"], "destination": hook, "retry": [1, 2], "filters": {"tags": ["a"]}}),
        ("PUT", "mailer", {"topics": ["order"], "destination": hook, "retry": [1, 2], "filters": {"tags": ["a"]}}),
        ("PATCH", "mailer", {"max_in_flight": 3}),
        ("PATCH", "mailer", {"topics": ["order", "c"], "filters": None}),
        # Neither of these two makes a version.
        ("PATCH", "mailer", {"destination": {"url": "http://127.0.0.1:9/2"}}),
        ("POST", "mailer/rotate-secret", None),
        ("DELETE", "former", None),
        ("PUT", "former", {"topics": ["d"], "destination": hook}),
    ]
    for method, path, body in calls:
        answer = await client.request(method, f"/subscriptions/{path}", json=body)
        assert answer.status_code < 300, answer.text


def differing(dsn: str, days: int = 1) -> list[tuple[Any, ...]]:
    """What the proof of a day finds: names, and what differs."""
    with psycopg.connect(dsn) as db:
        return differing_in(db, days)


def differing_in(db: Connection, days: int = 1) -> list[tuple[Any, ...]]:
    """The same, in a database transaction."""
    statement: Any = DIFFERING.format(day=days_ago(days), tells=days_ago(1), seen=datetime.now(UTC).isoformat())
    return sorted((row[1], row[2]) for row in db.execute(statement).fetchall())


async def test_changes_by_the_service_are_in_both(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    assert len(rows(dsn, "select from subscription_version")) == 9
    assert differing(dsn) == []


async def test_a_destination_that_is_gone_disables_without_a_person(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    rows(dsn, BY_HAND.format("state = 'disabled'") + " returning 1")
    told = [("mailer", "change without audit: disable")]
    assert differing(dsn) == told
    for subscription, outcome, at in (
        ("former", "gone", "0 s"),
        ("mailer", "failed", "0 s"),
        ("mailer", "gone", "2 h"),
    ):
        rows(dsn, ANSWERED, at, outcome, subscription)
        assert differing(dsn) == told
    rows(dsn, ANSWERED, "1 s", "gone", "mailer")
    assert differing(dsn) == []


async def test_a_redelivered_message_of_a_closed_day_leaves_no_attempt_when_its_destination_is_gone(
    client: httpx.AsyncClient, dsn: str
) -> None:
    await change(client)
    rows(dsn, BY_HAND.format("state = 'disabled'") + " returning 1")
    told = [("mailer", "change without audit: disable")]
    for subscription, what, at, found in (
        ("former", "redelivered", "0 s", told),
        ("mailer", "dropped", "0 s", told),
        ("mailer", "redelivered", "-1 h", told),
        ("mailer", "redelivered", "1 h", []),
    ):
        rows(dsn, REDELIVERED, what, at, subscription)
        assert differing(dsn) == told
        rows(dsn, "update day set state = 'archiving' where day = current_date returning 1")
        assert differing(dsn) == found
        rows(dsn, "update day set state = 'open' where day = current_date returning 1")


async def test_a_paused_subscription_is_not_disabled(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    await client.post("/subscriptions/mailer/pause")
    rows(dsn, BY_HAND.format("state = 'disabled'") + " returning 1")
    rows(dsn, ANSWERED, "1 s", "gone", "mailer")
    assert differing(dsn) == [("mailer", "change without audit: disable")]


async def test_rows_that_were_copied_are_compared_by_time(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    rows(dsn, "update subscription_version set at = at - interval '1 s' returning 1")
    assert differing(dsn) == []
    # Changes since then are compared by their database transactions again.
    await client.post("/subscriptions/mailer/pause")
    assert differing(dsn) == []
    rows(dsn, BY_HAND.format("retry = '{1}'") + " returning 1")
    assert differing(dsn) == [("mailer", "change without audit: put")]


async def test_rows_that_were_copied_have_the_same_time(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    rows(dsn, "update subscription_version set at = at returning 1")
    assert differing(dsn) == []
    rows(dsn, "update audit set at = at + interval '2 minutes' where what = 'subscription.pause' returning 1")
    told = [("mailer", "audit without change: pause"), ("mailer", "change without audit: pause")]
    assert differing(dsn) == told


async def test_a_clock_that_differs_is_no_finding(client: httpx.AsyncClient, runtime: Runtime, dsn: str) -> None:
    """The audit has the time of the service, and a version that of the database."""
    runtime.clock.offset_s -= 600
    await change(client)
    assert differing(dsn) == []


async def test_a_change_in_one_of_both_is_found(client: httpx.AsyncClient, dsn: str, subtests: pytest.Subtests) -> None:
    await change(client)
    with psycopg.connect(dsn) as db:
        for statement, told in CHANGES.items():
            with subtests.test(statement=statement):
                made: Any = statement
                assert db.execute(made).rowcount >= 1
                found = differing_in(db)
                assert told in found
                # A version after a lost one may need another audit row.
                assert {name for name, _ in found} == {told[0]}
            db.rollback()


async def test_only_what_the_kept_audit_covers_is_judged(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    rows(dsn, "delete from audit where place <= 3 returning 1")
    assert differing(dsn) == []


def find(dsn: str, days: int, at: str, run: int = 1, differs: str = "change without audit: pause") -> None:
    """Store an open finding about the subscription, of a run that is not kept."""
    rows(
        dsn,
        """insert into finding (day, kind, subject, detail, first_run, first_seen_at, last_run, last_seen_at)
        values (%s, 'subscription_differs', 'mailer', jsonb_build_object('differs', %s::text), %s,
          now() + %s::interval, 1, now()) returning 1""",
        days_ago(days),
        differs,
        run,
        at,
    )


async def test_each_change_is_reported_once(client: httpx.AsyncClient, dsn: str) -> None:
    await change(client)
    rows(dsn, BY_HAND.format("state = 'paused'") + " returning 1")
    told = [("mailer", "change without audit: pause")]
    assert (differing(dsn, 1), differing(dsn, 2)) == (told, [])
    # A finding about the row itself is not about the change.
    find(dsn, 3, "1 minute", differs="state")
    assert (differing(dsn, 1), differing(dsn, 2)) == (told, [])
    find(dsn, 2, "1 minute")
    assert (differing(dsn, 1), differing(dsn, 2)) == ([], told)
    # What came after the run that reported the first.
    last = "(select max(at) from subscription_version)"
    rows(dsn, f"update finding set first_seen_at = {last} + interval '5.001 s' returning 1")
    rows(dsn, BY_HAND.format("topics = '{none}'") + " returning 1")
    rows(dsn, BY_HAND.format("state = 'active'") + " returning 1")
    more = [("mailer", "change without audit: put, resume")]
    assert (differing(dsn, 1), differing(dsn, 2)) == (more, told)
    # The next night reports it no more.
    find(dsn, 1, "1 minute")
    assert (differing(dsn, 1), differing(dsn, 2)) == (more, told)


async def test_a_change_during_a_run_is_reported_by_the_next_one(client: httpx.AsyncClient, dsn: str) -> None:
    """A run sees what was there at its beginning, and stores its findings at its end."""
    await change(client)
    [run] = rows(
        dsn,
        """insert into reconciliation_run (state, engine, source, seen_at, started_at, ended_at, days, open,
          new, resolved, seconds)
        values ('findings', 'spark', 'primary', now() - interval '1 minute', now(), now(), '{}', 1, 1, 0, '{}')
        returning run_id""",
    )
    rows(dsn, BY_HAND.format("state = 'paused'") + " returning 1")
    find(dsn, 2, "1 minute", run["run_id"])
    told = [("mailer", "change without audit: pause")]
    assert (differing(dsn, 1), differing(dsn, 2)) == (told, [])
