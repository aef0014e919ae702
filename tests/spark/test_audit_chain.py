"""The chain of the audit: many programs make one, retention leaves it whole, and each change of it is found."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from pyspark.sql import SparkSession

from app.database.connection import connect as service_connect
from app.retention.loop import clear_audit
from app.store.admin.audit import Act, record
from spark.audit_retention import AUDIT_KEEP_S
from spark.postgres.connections import open_snapshot
from spark.sources.audit_chain import BROKEN, DIGEST, certified, write_broken
from tests.spark.days import Connection, add_day, days_ago, fill_day, prove, rows

ACT: LiteralString = """
insert into audit (at, actor, key_id, role, what, target, detail)
values (%s, 'ann', 7, 'operator', 'transaction.verdict', 'ä "1"', '{"verdict": "commit", "n": 1.50}')
"""
WRITERS, EACH = 8, 12
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
# Changes of the row with the place 5 of 9, or of all, and what is found of it: the place, or None for the head.
DAMAGE: dict[str, list[tuple[int | None, str]]] = {
    "update audit set at = at + interval '1 us' where place = 5": [(5, "digest")],
    "update audit set actor = 'bob' where place = 5": [(5, "digest")],
    "update audit set actor = null where place = 5": [(5, "digest")],
    "update audit set key_id = 8 where place = 5": [(5, "digest")],
    "update audit set role = null where place = 5": [(5, "digest")],
    "update audit set what = 'transaction.check' where place = 5": [(5, "digest")],
    "update audit set target = target || ' ' where place = 5": [(5, "digest")],
    'update audit set detail = detail || \'{"verdict": "rollback"}\' where place = 5': [(5, "digest")],
    "update audit set digest = sha256('x') where place = 5": [(5, "digest"), (6, "digest")],
    # As someone does who knows how digests are made: the next row has the old one.
    f"""update audit a set actor = 'bob', digest = {DIGEST.format(before="b.digest").replace("a.actor", "'bob'")}
    from audit b where a.place = 5 and b.place = 4""": [(6, "digest")],
    f"""update audit a set actor = 'bob', digest = {DIGEST.format(before="b.digest").replace("a.actor", "'bob'")}
    from audit b where a.place = 9 and b.place = 8""": [(None, "head")],
    "delete from audit where place = 5": [(6, "removed before")],
    "delete from audit where place in (5, 6, 7)": [(8, "removed before")],
    "delete from audit where place = 1": [(2, "removed before")],
    "delete from audit where place >= 8": [(None, "removed after")],
    "delete from audit": [(None, "removed after")],
    "delete from audit_chain": [(1, "removed before"), (None, "head")],
    "update audit_chain set place = 8": [(None, "head")],
    "update audit_chain set forgotten_place = 3": [(1, "removed before")],
    # The trigger is switched off.
    "insert into audit (at, what, detail) values (now(), 'topic.declare', '{}')": [(0, "not chained")],
    "insert into audit (at, what, detail, place, digest) values (now(), 'topic.declare', '{}', 10, sha256('x'))": [
        (10, "digest"),
        (None, "head"),
    ],
    "update audit set place = null where place = 5": [(6, "removed before"), (0, "not chained")],
    # So late no row can be past its age.
    "insert into evidence_since values ('audit', now())": [(0, "since")],
    "insert into evidence_since values ('audit', now() - interval '399 days')": [(0, "since")],
    "insert into evidence_since values ('audit', now() - interval '400 days')": [],
}


def broken(dsn: str, kept_s: int = AUDIT_KEEP_S) -> list[tuple[Any, ...]]:
    """The breaks of the chain: the place, and what is wrong."""
    with psycopg.connect(dsn) as db:
        return broken_in(db, kept_s)


def broken_in(db: Connection, kept_s: int = AUDIT_KEEP_S) -> list[tuple[Any, ...]]:
    """The same, in a database transaction."""
    known = BROKEN.format(seen=datetime.now(UTC).isoformat(), audit_keep_s=kept_s)
    statement: Any = f"select subject, place, differs from ({known}) b where differs is not null"
    found = db.execute(statement).fetchall()
    return [(None if subject == "head" else place or 0, differs) for subject, place, differs in found]


def acts(dsn: str, count: int, at: datetime | None = None) -> None:
    """Store acts, each in a database transaction of its own."""
    with psycopg.connect(dsn, autocommit=True) as db:
        for _ in range(count):
            db.execute(ACT, [at or datetime.now(UTC)])


@pytest.fixture
def chained(dsn: str) -> str:
    """A database with a row from before there was a chain, and nine rows of the chain."""
    with psycopg.connect(dsn) as db:
        db.execute("set session_replication_role = replica")
        db.execute(ACT, [datetime.now(UTC)])
    acts(dsn, 9)
    return dsn


def test_many_writers_make_one_chain(dsn: str) -> None:
    def write(number: int) -> None:
        with psycopg.connect(dsn) as db:
            for turn in range(EACH):
                for _ in range(1 + turn % 3):
                    db.execute(ACT, [datetime.now(UTC)])
                if (turn + number) % 4 == 0:
                    db.rollback()
                else:
                    db.commit()

    kept = sum(1 + turn % 3 for number in range(WRITERS) for turn in range(EACH) if (turn + number) % 4)
    threads = [threading.Thread(target=write, args=[number]) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [found] = rows(dsn, "select count(*) as rows, max(place) as last, count(distinct place) as places from audit")
    assert found["rows"] == found["last"] == found["places"] == kept
    assert broken(dsn) == []


def test_acts_of_opposite_lock_order_do_not_deadlock(dsn: str) -> None:
    rows(dsn, "insert into topic (name, first_seen_at) values ('order', now()) returning 1")
    touch: LiteralString = "update topic set declared_at = now() where name = 'order'"
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as other:
        one.execute(ACT, [datetime.now(UTC)])
        other.execute(touch)
        other.execute(ACT, [datetime.now(UTC)])
        other.commit()
        one.execute(touch)
        one.commit()
    assert broken(dsn) == []


def test_each_change_of_the_chain_is_found(chained: str, subtests: pytest.Subtests) -> None:
    assert broken(chained) == []
    with psycopg.connect(chained) as db:
        for damage, wanted in DAMAGE.items():
            with subtests.test(damage=damage):
                db.execute("set session_replication_role = replica")
                statement: Any = damage
                assert db.execute(statement).rowcount >= 1
                assert broken_in(db) == wanted
                db.rollback()


# Of a person who knows how the chain is made: the last rows are gone, and audit_chain says so; and all rows from the
# fifth on are made again, without the fifth act.
CUT = (
    "delete from audit where place >= 8",
    "update audit_chain set (place, digest) = (select place, digest from audit where place = 7)",
)
AGAIN = (
    "create temporary table kept on commit drop as select * from audit where place > 5",
    "delete from audit where place >= 5",
    "update audit_chain set (place, digest) = (select place, digest from audit where place = 4)",
    "insert into audit (at, actor, key_id, role, what, target, detail) select at, actor, key_id, role, what, target, "
    "detail from kept order by place",
)


def certify(dsn: str, sequence: int, place: int | None, at: datetime = LONG_AGO, kept_s: int | None = None) -> None:
    """Store a certificate that names a place of the audit; None: of a version that names none.

    `kept_s` None: of a version that does not say how long rows are kept.
    """
    with psycopg.connect(dsn) as db:
        said = {}
        if kept_s is not None:
            with open_snapshot(dsn) as snapshot:
                said = certified(snapshot.connection, kept_s)
        db.execute(
            """insert into day_certificate (sequence, day, run_id, document)
            select %(sequence)s, current_date - %(sequence)s::int, 1, case when %(place)s::int is null
              then '{"certificate": {}}' else jsonb_build_object('certificate', jsonb_build_object(
                'seen_at', %(at)s::text, 'audit', %(said)s::jsonb || jsonb_build_object('place', place, 'digest',
                encode(digest, 'hex'))))::text end
            from audit where place = coalesce(%(place)s, 1)""",
            {"sequence": sequence, "place": place, "at": at.isoformat(), "said": json.dumps(said)},
        )


@pytest.mark.parametrize("statements", [CUT, AGAIN], ids=["the end is gone", "the chain is made again"])
def test_a_chain_that_is_intact_again_contradicts_a_certificate(chained: str, statements: tuple[str, ...]) -> None:
    for sequence, place in ((1, 4), (2, 8), (3, 9), (4, None)):
        certify(chained, sequence, place)
    assert broken(chained) == []
    with psycopg.connect(chained) as db:
        for one in statements:
            made: Any = one
            db.execute(made)
    # The first that differs is enough. Without certificates, nothing is found.
    assert broken(chained) == [(8, "certified")]
    rows(chained, "delete from day_certificate returning 1")
    assert broken(chained) == []


def test_certificates_of_rows_past_their_age_are_not_compared(chained: str) -> None:
    certify(chained, 1, 4)
    certify(chained, 2, 5)
    forget(chained, 5)
    assert broken(chained) == []
    rows(chained, "update audit_chain set forgotten_digest = sha256('x') returning 1")
    assert (5, "certified") in broken(chained)


def forget(dsn: str, place: int) -> None:
    """Remove the first rows, and say that they were past their age."""
    with psycopg.connect(dsn) as db:
        db.execute(
            """with gone as (delete from audit where place <= %(place)s returning place, digest)
            update audit_chain set (forgotten_place, forgotten_digest)
              = (select place, digest from gone where place = %(place)s)""",
            {"place": place},
        )


def test_rows_that_are_gone_before_their_age_contradict_a_certificate(chained: str) -> None:
    """Nothing else shows it: a person who writes to the database removed the first rows, and moved the beginning."""
    now = datetime.now(UTC)
    certify(chained, 1, 3, now - timedelta(days=401))
    certify(chained, 2, 4, now - timedelta(days=399))
    certify(chained, 3, 6, now - timedelta(days=2))
    # What the second certificate saw may be as old as that of the first, and later rows are not.
    forget(chained, 4)
    assert broken(chained) == []
    forget(chained, 5)
    assert broken(chained) == [(5, "removed early")]
    with psycopg.connect(chained) as db:
        found: Any = f"select subject, before_place from ({BROKEN}) b".format(
            seen=now.isoformat(), audit_keep_s=AUDIT_KEEP_S
        )
        assert db.execute(f"{found} where differs = 'removed early'").fetchall() == [("forgotten", 4)]
        kept: Any = f"select 1 from ({BROKEN}) b where differs is not null".format(
            seen=now.isoformat(), audit_keep_s=390 * 86_400
        )
        assert db.execute(kept).fetchall() == []
    forget(chained, 9)
    assert broken(chained) == [(9, "removed early")]


def test_rows_that_went_by_a_shorter_setting_of_an_earlier_day_are_no_finding(chained: str) -> None:
    now = datetime.now(UTC)
    certify(chained, 1, 3, now - timedelta(days=40), 30 * 86_400)
    certify(chained, 2, 5, now - timedelta(days=5), 30 * 86_400)
    forget(chained, 4)
    assert broken(chained) == []
    forget(chained, 6)
    assert broken(chained) == [(6, "removed early")]


def test_what_went_until_the_setting_was_raised_is_no_finding(chained: str) -> None:
    """Upkeep went on by the shorter one after the last certificate that says so."""
    now = datetime.now(UTC)
    certify(chained, 1, 3, now - timedelta(days=30, hours=10), 30 * 86_400)
    certify(chained, 2, 5, now - timedelta(hours=12), 30 * 86_400)
    forget(chained, 4)
    rows(chained, "insert into evidence_since values ('audit', now() - interval '30 days 2 hours') returning 1")
    assert broken(chained) == []
    certify(chained, 3, 9, now - timedelta(hours=11, minutes=30))
    assert broken(chained) == [(4, "removed early"), (0, "since")]


def test_a_later_beginning_of_the_evidence_contradicts_a_certificate(chained: str) -> None:
    certify(chained, 1, 9, datetime.now(UTC), AUDIT_KEEP_S)
    assert broken(chained) == []
    rows(chained, "update evidence_since set at = '2020-01-01T00:00:00Z' where name = 'verdict' returning 1")
    assert broken(chained) == [(0, "since")]


def test_what_came_before_the_chain_is_not_judged(chained: str) -> None:
    assert rows(chained, "update audit set actor = 'bob' where place is null returning 1")
    assert broken(chained) == []


def test_acts_succeed_without_the_row_of_the_chain(chained: str) -> None:
    rows(chained, "delete from audit_chain returning 1")
    acts(chained, 2)
    assert [row["place"] for row in rows(chained, "select place from audit where place > 8 order by 1")] == [9, 10, 11]
    assert broken(chained) == []


async def test_retention_leaves_the_chain_whole(dsn: str) -> None:
    # Of the second one, which removes what is not old at all.
    now, kept_s = datetime.now(UTC), -2 * 86_400
    connection = await service_connect(dsn)
    try:
        for days in (9, 8, 7, 3, 8, 2):
            await record(connection, Act("topic.declare", "order", {}), now - timedelta(days=days))
        await clear_audit(connection, now - timedelta(days=5))
        # The fifth one is old, and goes with the fourth.
        assert [row["place"] for row in rows(dsn, "select place from audit order by 1")] == [4, 5, 6]
        assert broken(dsn, kept_s) == []
        await clear_audit(connection, now + timedelta(days=1))
        assert rows(dsn, "select place from audit") == []
        assert broken(dsn, kept_s) == []
        await record(connection, Act("topic.declare", "order", {}), now)
    finally:
        await connection.close()
    assert broken(dsn, kept_s) == []
    with open_snapshot(dsn) as snapshot:
        said = certified(snapshot.connection, AUDIT_KEEP_S)
    assert (said["place"], len(said["digest"]), said["kept_s"]) == (7, 64, AUDIT_KEEP_S)


def told(spark: SparkSession, dsn: str, number: int, path: Path) -> int:
    """How many breaks the proof of a day finds."""
    with open_snapshot(dsn) as snapshot:
        return write_broken(spark, snapshot, snapshot.day(days_ago(number)), str(path))


def test_a_break_is_told_once(spark: SparkSession, chained: str, tmp_path: Path) -> None:
    for number in (1, 3):
        add_day(chained, days_ago(number))
    assert told(spark, chained, 1, tmp_path / "whole") == 0
    [row] = rows(chained, "update audit set actor = 'bob' where place = 5 returning audit_id")
    assert told(spark, chained, 1, tmp_path / "yesterday") == 1
    assert told(spark, chained, 3, tmp_path / "earlier") == 0
    # An earlier run found it for an earlier day, and it is found again for that day alone.
    rows(
        chained,
        """insert into finding (day, kind, subject, detail, first_run, first_seen_at, last_run, last_seen_at)
        values (%s, 'audit_broken', %s, '{}', 1, now(), 1, now()) returning 1""",
        days_ago(3),
        str(row["audit_id"]),
    )
    assert told(spark, chained, 1, tmp_path / "known") == 0
    assert told(spark, chained, 3, tmp_path / "again") == 1
    rows(chained, "update finding set resolved_at = now() returning 1")
    assert told(spark, chained, 1, tmp_path / "resolved") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_break_is_told_though_yesterday_is_removed(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 1):
        add_day(dsn, days_ago(number))
    rows(dsn, "update day set state = 'gone', changed_at = now() where day < %s returning 1", days_ago(0))
    with psycopg.connect(dsn) as db:
        for _ in range(3):
            db.execute(ACT, [datetime.now(UTC)])
    rows(dsn, "update audit set actor = 'bob' where place = 2 returning 1")
    assert prove(dsn) == 3
    [note] = [line for line in capsys.readouterr().err.splitlines() if "removed_early" in line]
    assert str(days_ago(1)) in note
    found = rows(dsn, "select day, kind from finding where resolved_at is null")
    assert found == [{"day": days_ago(0), "kind": "audit_broken"}]


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_change_is_found_on_a_day_without_any_row(dsn: str) -> None:
    yesterday = days_ago(1)
    add_day(dsn, yesterday)
    with psycopg.connect(dsn) as db:
        for _ in range(3):
            db.execute(ACT, [datetime.now(UTC)])
    assert prove(dsn, "--day", yesterday) == 0
    with psycopg.connect(dsn) as db:
        db.execute("update audit set actor = 'bob' where place = 2")
    assert prove(dsn, "--day", yesterday) == 3
    found = rows(dsn, "select kind, subject from finding where resolved_at is null")
    assert [row["kind"] for row in found] == ["audit_broken"]


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_so_is_a_subscription_that_is_not_as_its_history_says(dsn: str) -> None:
    yesterday = days_ago(1)
    fill_day(dsn, yesterday, 0)
    assert prove(dsn, "--day", yesterday) == 0

    def take(topics: list[str]) -> None:
        with psycopg.connect(dsn) as db:
            db.execute("set session_replication_role = replica")
            db.execute("update subscription set topics = %s", [topics])

    take(["none"])
    assert prove(dsn, "--day", yesterday) == 3
    [found] = rows(dsn, "select kind, subject, detail from finding where resolved_at is null")
    assert found == {"kind": "subscription_differs", "subject": "billing", "detail": {"differs": "topics"}}
    take(["order"])
    rows(dsn, 'update checkpoint set "offset" = 900000 returning 1')
    assert prove(dsn, "--day", yesterday) == 3
    [found] = rows(dsn, "select kind, subject, detail from finding where resolved_at is null")
    assert found == {"kind": "checkpoint_differs", "subject": "billing", "detail": {"lowest": 900_000}}
    rows(dsn, 'update checkpoint set "offset" = 0 returning 1')
    rows(dsn, "update audit set actor = 'bob' where place = 1 returning 1")
    assert prove(dsn, "--day", yesterday) == 3
    [found] = rows(dsn, "select kind from finding where resolved_at is null")
    assert found == {"kind": "audit_broken"}
