"""What a run makes of what the last ones left in the database; without Spark, which has no part in it."""

from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime
from itertools import zip_longest
from typing import Any
from uuid import UUID

import pytest

from spark.errors import RunFailedError
from spark.jobs.reconcile import verdict_of
from spark.postgres.connections import connect
from spark.proof import store_results
from spark.proof.store_results import DayResult, RunResult, Written
from tests.spark.days import days_ago, fill_day, rows

KIND, OTHER = "published_after_rollback", "ledger_disagrees"
ALL = (KIND, OTHER)


def write(
    dsn: str,
    subjects: Collection[str],
    *,
    day: date | None = None,
    kind: str = KIND,
    looked_for: Collection[str] = ALL,
    fails: bool = False,
    subscription_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Write a run that found these of one kind on a day; return its row."""
    day = day or days_ago(2)
    of = zip_longest(subjects, subscription_ids)
    found = [(day, kind, one, str(UUID(int=1)), 0, number, "shop", "{}") for one, number in of]
    of_day = DayResult(day, "provisional", {}, {kind: len(found)} if found else {}, {}, {}, looked_for)
    with (
        connect(dsn) as connection,
        store_results.writing(
            connection, RunResult("none", "primary", datetime.now(UTC), days=[day]), [of_day], found
        ) as it,
    ):
        if fails:
            raise ZeroDivisionError
    return dict(it.run) | {"elsewhere": it.elsewhere, "named": [row["subscription"] for row in it.findings]}


def findings(dsn: str, *, open_only: bool = False) -> list[dict[str, Any]]:
    found = rows(dsn, "select * from finding order by day, kind, subject")
    return [row for row in found if not open_only or row["resolved_at"] is None]


def summary(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["state"], run["open"], run["new"], run["resolved"]


def test_a_finding_is_kept_resolved_and_opened_again(dsn: str) -> None:
    assert summary(write(dsn, ["a"])) == ("findings", 1, 1, 0)
    [found] = findings(dsn)
    assert (found["first_run"], found["last_run"], found["resolved_at"], found["announced_at"]) == (1, 1, None, None)

    rows(dsn, "update finding set announced_at = now() returning 1")
    assert summary(write(dsn, ["a"])) == ("findings", 1, 0, 0)
    [again] = findings(dsn)
    assert (again["finding_id"], again["first_run"], again["last_run"]) == (found["finding_id"], 1, 2)
    assert again["announced_at"] is not None

    assert summary(write(dsn, [])) == ("proved", 0, 0, 1)
    [gone] = findings(dsn)
    assert (gone["resolved_run"], gone["last_run"]) == (3, 2)

    assert summary(write(dsn, ["a"])) == ("findings", 1, 1, 0)
    [back] = findings(dsn)
    assert (back["first_run"], back["last_run"], back["resolved_run"]) == (1, 4, None)
    # It is announced again.
    assert (back["resolved_at"], back["announced_at"]) == (None, None)


def test_what_was_not_looked_for_in_full_is_not_resolved(dsn: str) -> None:
    write(dsn, ["a", "b"])
    assert summary(write(dsn, ["b"], looked_for=[OTHER])) == ("findings", 2, 0, 0)
    assert summary(write(dsn, ["x"], kind=OTHER, looked_for=[OTHER])) == ("findings", 3, 1, 0)
    assert summary(write(dsn, ["b"], looked_for=[KIND])) == ("findings", 2, 0, 1)
    assert [(row["kind"], row["subject"]) for row in findings(dsn, open_only=True)] == [(OTHER, "x"), (KIND, "b")]


def test_other_days_findings_stay_and_are_named(dsn: str) -> None:
    write(dsn, ["a"], day=days_ago(4))
    write(dsn, ["a", "b"], day=days_ago(3))
    run = write(dsn, [])
    assert summary(run) == ("proved", 0, 0, 0)
    # The run reports them beside the verdict.
    assert list(run["elsewhere"].items()) == [(days_ago(3), 2), (days_ago(4), 1)]
    assert [row["day"] for row in findings(dsn, open_only=True)] == [days_ago(4), days_ago(3), days_ago(3)]


def test_shown_findings_have_the_names_of_their_subscriptions(dsn: str) -> None:
    """Of a deleted subscription the last name; an unknown one has none."""
    fill_day(dsn, days_ago(3), 1)
    [one] = rows(dsn, "select subscription_id, name from subscription")
    rows(
        dsn,
        "insert into subscription_version overriding system value select (jsonb_populate_record(version, "
        "jsonb_build_object('version_id', id, 'subscription_id', 77, 'name', other.name))).* from subscription_version "
        "version, (values (1001, 'last'), (1000, 'before')) other (id, name) returning 1",
    )
    run = write(dsn, "abcd", kind="undelivered", subscription_ids=[one["subscription_id"], 77, 9])
    assert run["named"] == [one["name"], "last", None, None]
    finding = (days_ago(2), "undelivered", "a", None, None, 77, None, "{}")
    it = store_results.unwritten(RunResult("none", "archive", datetime.now(UTC)), [], [finding], {77: "last"})
    assert [row["subscription"] for row in it.findings] == ["last"]


def test_what_fails_before_the_end_takes_the_whole_run_back(dsn: str) -> None:
    with pytest.raises(ZeroDivisionError):
        write(dsn, ["a"], fails=True)
    for table in ("finding", "reconciliation_run", "reconciliation_day"):
        assert rows(dsn, f"select * from {table}") == []


def test_a_database_that_does_not_take_it_is_reported(dsn: str) -> None:
    with pytest.raises(RunFailedError, match="The database did not accept the result: "):
        write(dsn, ["a\0"])
    assert findings(dsn) == []


def test_a_subject_that_a_rule_names_twice_is_one_finding(dsn: str) -> None:
    assert summary(write(dsn, ["a", "b", "a"])) == ("findings", 2, 2, 0)
    assert summary(write(dsn, ["a", "a", "c", "c"])) == ("findings", 2, 1, 1)
    assert [row["subject"] for row in findings(dsn, open_only=True)] == ["a", "c"]


def test_the_numbers_of_the_verdict_add_up() -> None:
    run = {"new": 2, "resolved": 1}

    def said(open_kinds: dict[str, int], *found: dict[str, int]) -> str:
        return verdict_of(Written(run, [], [], [], open_kinds=open_kinds), found)

    # A ledger that an earlier run had found two more, which this run did not look for.
    one = said({"parked": 3, "ledger_disagrees": 2}, {"parked": 2, "unrouted": 0}, {"parked": 1})
    assert one == "5 findings (ledger_disagrees 2, parked 3); new: 2, from earlier runs: 3, resolved: 1"
    # The database stores a limited number of a kind.
    assert said({"parked": 3}, {"parked": 7}).startswith("7 findings (parked 7); new: 2, from earlier runs: 5,")
    assert said({}, {"parked": 0}) == "proved; resolved: 1"
