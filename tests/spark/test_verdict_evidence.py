"""Verdicts are compared with the evidence of their sources in Postgres, while a day is read."""

import io
import json
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark.engine.progress import Progress
from spark.postgres.connections import open_snapshot
from spark.proof.prove_day import ReadDay, prove
from spark.sources import scan
from spark.sources.frames import frames_from_postgres
from spark.sources.verdicts import write_without_evidence
from tests.spark.days import days_ago, fill_day, rows

# `{}`: further columns.
BY = "update op set source = {source}, verdict = {verdict}{more} where transaction_id = %(id)s::uuid"
ANSWERED = (
    "insert into attempt (transaction_id, kind, at, number, outcome, verdict, source) select %(id)s::uuid, 'check', "
    "h.born_at + interval '6 s', {number}, '{outcome}', {verdict}, {source} from half h "
    "where transaction_id = %(id)s::uuid"
)
ACT = (
    "insert into audit (at, actor, what, target, detail) select h.born_at, {actor}, '{what}', {target}, '{detail}' "
    "from half h where transaction_id = %(id)s::uuid"
)
COMMIT = ANSWERED.format(number=1, outcome="commit", verdict=1, source=1)
ROLLBACK = ANSWERED.format(number=1, outcome="rollback", verdict=2, source=1)
UNKNOWN = [ANSWERED.format(number=number, outcome="unknown", verdict="null", source=1) for number in range(4)]
BY_CHECK, BY_POLICY = BY.format(source=1, verdict=1, more=""), BY.format(source=2, verdict=2, more="{}")
OF_THREE = BY_POLICY.format(", reason = '3 checks were answered `unknown`'")
OWN_POLICY = "update half set policy = '{\"max_checks\": 3}' where transaction_id = %(id)s::uuid"
BY_PERSON = BY.format(source=3, verdict=1, more=", actor = {}")
DECIDED = ACT.format(
    actor="{actor}", what="transaction.verdict", target="%(id)s::text", detail='{{"verdict": "{verdict}"{more}}}'
)
BECAUSE = BY_PERSON.format("'ann', reason = 'paid'")
# All rows of the transaction, and what a person did to it.
GONE = (
    "with op_gone as (delete from op where transaction_id = %(id)s::uuid), sent as (delete from outbox where "
    "transaction_id = %(id)s::uuid) delete from half where transaction_id = %(id)s::uuid"
)
DECIDED_OF = (
    "insert into audit (at, actor, what, target, detail) values (now(), 'ann', 'transaction.verdict', %(id)s::text, "
    '\'{{"verdict": "{}"}}\')'
)
REISSUE = (
    "insert into reissue (transaction_id, reissued_as, reason, at) values (gen_random_uuid(), %(id)s::uuid, 'x', now())"
)
REISSUED = (
    "update half set reissued_from = '019aa5a3-7e4c-7b1e-8f00-1030a1030a10' where transaction_id = %(id)s::uuid",
    "insert into audit (at, actor, what, target, detail) select h.born_at, 'ann', 'transaction.reissue', "
    "h.reissued_from::text, jsonb_build_object('reissued_as', {}::text) from half h "
    "where transaction_id = %(id)s::uuid",
)
# What is done to one transaction each, and what it then lacks.
CHANGES: dict[tuple[str, ...], str | None] = {
    (BY_CHECK,): "answer",
    (BY_CHECK, COMMIT): None,
    # Once by its URL, and once by `/end`.
    (BY_CHECK, COMMIT, COMMIT, UNKNOWN[1]): None,
    (BY_CHECK, ROLLBACK): "answer, verdict",
    (BY.format(source=1, verdict=2, more=""), ROLLBACK): None,
    (BY_CHECK, *UNKNOWN): "answer",
    (BY_CHECK, ANSWERED.format(number=1, outcome="lost", verdict=1, source=1)): "answer",
    (BY_CHECK, ANSWERED.format(number=1, outcome="commit", verdict=2, source=1)): "answer, verdict",
    (BY_CHECK, COMMIT, ROLLBACK): "verdict",
    (BY_CHECK, COMMIT, BY.format(source=1, verdict=1, more=", actor = 'ann'")): "actor",
    # The check decided, whatever the row says now.
    (COMMIT,): "verdict",
    (COMMIT, "delete from op where transaction_id = %(id)s::uuid"): "verdict",
    # The producer's own end was first.
    (ANSWERED.format(number=1, outcome="commit", verdict=1, source=0),): None,
    (ANSWERED.format(number=1, outcome="lost", verdict=2, source=1),): None,
    tuple(UNKNOWN): None,
    (OF_THREE, *UNKNOWN[:2]): "answers",
    (OF_THREE, UNKNOWN[1], *UNKNOWN[:2]): "answers",
    (OF_THREE, *UNKNOWN[:3]): None,
    (BY_POLICY.format(""),): "answers",
    (BY_POLICY.format(""), UNKNOWN[0]): None,
    (OWN_POLICY, BY_POLICY.format(""), *UNKNOWN[:2]): "answers",
    (OWN_POLICY, BY_POLICY.format(", reason = '1 checks were answered `unknown`'"), *UNKNOWN[:2]): "answers",
    (OWN_POLICY, BY_POLICY.format(""), *UNKNOWN[:3]): None,
    ('update half set policy = \'{"max_checks": "x"}\' where transaction_id = %(id)s::uuid', OF_THREE): "answers",
    (BY.format(source=2, verdict=1, more=""), *UNKNOWN): "commit",
    # The service's own message.
    (
        BY.format(source=2, verdict=1, more=", reason = 'an operational message'"),
        "update half set producer_group = 'halfnote' where transaction_id = %(id)s::uuid",
    ): None,
    (BY_PERSON.format("'ann'"),): "audit",
    (BY_PERSON.format("'ann'"), DECIDED.format(actor="'ann'", verdict="commit", more="")): None,
    (BY_PERSON.format("'ann'"), DECIDED.format(actor="'ann'", verdict="rollback", more="")): "audit",
    (BY_PERSON.format("'ann'"), DECIDED.format(actor="'bob'", verdict="commit", more="")): "actor",
    (BY_PERSON.format("null"), DECIDED.format(actor="'ann'", verdict="commit", more="")): "actor",
    # With auth off, and no name given.
    (BY_PERSON.format("null"), DECIDED.format(actor="null", verdict="commit", more="")): None,
    # The name that the request gave, with a key.
    (
        BY_PERSON.format("'ann (key ops)'"),
        DECIDED.format(actor="'ops'", verdict="commit", more=', "actor": "ann"'),
    ): None,
    (BY_PERSON.format("'ann'"), DECIDED.format(actor="'ops'", verdict="commit", more=', "actor": "ann"')): "actor",
    (BY.format(source=0, verdict=1, more=", actor = 'ann'"),): "actor",
    (BECAUSE, DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "paid"')): None,
    (BECAUSE, DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "lost"')): "reason",
    (BECAUSE, DECIDED.format(actor="'ann'", verdict="commit", more="")): "reason",
    (BY_PERSON.format("'ann'"), DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "paid"')): "reason",
    # Two people decided the same: the second verdict was a repeat.
    (
        BECAUSE,
        DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "paid"'),
        DECIDED.format(actor="'bob'", verdict="commit", more=', "reason": "by phone"'),
    ): None,
    # A person's verdict that is now of another source, and one that came after a producer's own.
    (
        BY.format(source=0, verdict=1, more=", reason = 'paid'"),
        DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "paid"'),
    ): "source",
    (
        BY.format(source=0, verdict=1, more=", reason = 'paid'"),
        DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "paid"').replace(
            "h.born_at", "h.born_at + interval '1 day'"
        ),
    ): None,
    (
        BY.format(source=0, verdict=1, more=", reason = 'done'"),
        DECIDED.format(actor="'ann'", verdict="commit", more=', "reason": "paid"'),
    ): None,
    # Policy's verdict that is now the producer's, and a producer that gives that reason.
    (BY.format(source=0, verdict=2, more=", reason = '3 checks were answered `unknown`'"), *UNKNOWN[:3]): "source",
    (BY.format(source=0, verdict=2, more=", reason = '3 checks were answered `unknown`'"), *UNKNOWN[:2]): None,
    (GONE, DECIDED_OF.format("commit")): "transaction",
    (GONE, REISSUE): "transaction",
    # A person's verdict that was refused has an audit row as well.
    (DECIDED.format(actor="'ann'", verdict="commit", more=""),): None,
    (BY_PERSON.format("'ann'"), REISSUED[0], REISSUED[1].format("h.transaction_id")): None,
    (BY_PERSON.format("'bob'"), REISSUED[0], REISSUED[1].format("h.transaction_id")): "actor",
    (BY_PERSON.format("'ann'"), REISSUED[0], REISSUED[1].format("h.reissued_from")): "audit",
}


@pytest.fixture
def day(dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with a day in which nothing is wrong, of several ranges."""
    fill_day(dsn, days_ago(3), 300)
    monkeypatch.setattr(scan, "PAGES_AT_ONCE", 1)
    return dsn


def found(spark: SparkSession, dsn: str, path: Path) -> dict[str, str]:
    """What verdicts lack, by transaction."""
    with open_snapshot(dsn) as snapshot:
        write_without_evidence(spark, snapshot, snapshot.day(days_ago(3)), str(path))
    lines = [json.loads(line) for one in path.glob("*.json") for line in one.read_text().splitlines()]
    return {line["transaction_id"]: line["differs"] for line in lines}


def changed(dsn: str) -> dict[str, str]:
    """Change one transaction each; return what is to be found, by transaction."""
    ids = [str(row["transaction_id"]) for row in rows(dsn, "select transaction_id from op order by 1")]
    wanted = {}
    with psycopg.connect(dsn) as db:
        for victim, (statements, differs) in zip(ids[:: len(ids) // len(CHANGES)], CHANGES.items(), strict=False):
            for statement in statements:
                made: LiteralString = statement  # type: ignore[assignment]
                assert db.execute(made, {"id": victim}).rowcount == 1, statement
            if differs is not None:
                wanted[victim] = differs
    assert len(wanted) == sum(differs is not None for differs in CHANGES.values())
    return wanted


def test_a_verdict_without_the_evidence_of_its_source_is_found(spark: SparkSession, day: str, tmp_path: Path) -> None:
    assert found(spark, day, tmp_path / "intact") == {}
    wanted = changed(day)
    assert found(spark, day, tmp_path / "changed") == wanted


def test_what_was_decided_before_evidence_was_kept_is_not_judged(spark: SparkSession, day: str, tmp_path: Path) -> None:
    changed(day)
    assert rows(day, "update evidence_since set at = now() where name = 'verdict' returning 1")
    assert found(spark, day, tmp_path / "before") == {}
    assert rows(day, "delete from evidence_since where name = 'verdict' returning 1")
    assert found(spark, day, tmp_path / "unknown") != {}


def test_audit_rows_that_are_removed_because_of_their_age_are_not_missed(
    spark: SparkSession, day: str, tmp_path: Path
) -> None:
    wanted = changed(day)
    rows(day, "insert into evidence_since values ('audit', now()) returning 1")
    left = {one: differs for one, differs in wanted.items() if differs != "audit"}
    by_person = {str(row["id"]) for row in rows(day, "select transaction_id as id from op where source = 3")}
    assert found(spark, day, tmp_path / "out") == {one: left[one] for one in left.keys() - by_person}


def test_a_group_whose_policy_was_changed_since_is_judged_by_the_lower_number(
    spark: SparkSession, day: str, tmp_path: Path
) -> None:
    [row] = rows(day, "select transaction_id as id from op limit 1")
    with psycopg.connect(day) as db:
        for statement in (OF_THREE, *UNKNOWN[:2]):
            made: LiteralString = statement  # type: ignore[assignment]
            db.execute(made, row)
        db.execute(
            """insert into producer_group (name, check_urls, immunity_s, interval_s, max_checks, check_timeout_s,
              unanswered_park_s, on_exhausted, check_max_in_flight, ping_interval_s, secrets, created_at, updated_at,
              check_window, next_ping_at)
            values ('shop', '{}', 6, 30, 2, 5, 60, 'rollback', 1, 60, '[]', now(), now(), 1, now())"""
        )
    assert found(spark, day, tmp_path / "lower") == {}
    rows(day, "update producer_group set max_checks = 15 returning 1")
    assert found(spark, day, tmp_path / "higher") == {str(row["id"]): "answers"}


def test_acts_on_transactions_that_are_gone_are_found_on_a_day_without_rows(
    spark: SparkSession, day: str, tmp_path: Path
) -> None:
    """Nothing else would show that the day had a transaction that a person decided."""
    [victim, *_] = [str(row["id"]) for row in rows(day, "select transaction_id as id from op order by 1")]
    with psycopg.connect(day) as db:
        db.execute(
            "insert into audit (at, actor, what, target, detail) "
            "values (now(), 'ann', 'transaction.verdict', %s, '{}')",
            (victim,),
        )
        db.execute("truncate half, op, outbox, receipt, attempt, checkpoint")
    with open_snapshot(day) as snapshot:
        snapshot.lock([days_ago(3)])
        progress = Progress(stream=io.StringIO())
        read = frames_from_postgres(spark, snapshot, days_ago(3), str(tmp_path / "read"), progress)
    proved = prove(spark, ReadDay(read, {}), str(tmp_path), progress, sla_s=3600.0, margin_s=3600)
    assert [row.subject for row in proved.findings.collect() if row.kind == "verdict_unproven"] == [victim]
