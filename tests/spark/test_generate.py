"""Made days: the same from the same seed, plausible, without a finding, and each planted fault found once."""

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from spark.archive.layout import MANIFEST, frames_from_archive
from spark.jobs.generate import main, planted_beside, to_parquet, to_postgres
from spark.postgres.connections import open_snapshot
from spark.schemas import BIG
from spark.sources.frames import frames_from_parquet
from spark.sources.ledgers import consumer_ledger, producer_ledger
from spark.sources.verdicts import write_without_evidence
from spark.synthetic.chunk import chunk_of
from spark.synthetic.faults import TooFewError
from spark.synthetic.plan import ALLOWED, CHUNK, FORBIDDEN, LEDGERS, Plan
from spark.synthetic.postgres import NotEmptyError
from spark.transforms.rules import RULES, findings

Found = set[tuple[str, str]]
# One finding for each subscription: a generated day has faults of transactions and messages only.
OF_SUBSCRIPTIONS = {
    "replay_incomplete",
    "delivery_late",
    "retry_overdue",
    "retry_never_due",
    "checkpoint_differs",
    "subscription_differs",
}


def long_ago(days: int = 5) -> date:
    return datetime.now(UTC).date() - timedelta(days=days)


def planted_in(file: Path) -> Found:
    return {(kind, subject) for kind, subjects in json.loads(file.read_text()).items() for subject in subjects}


def found_in(spark: SparkSession, directory: Path, ledgers: Path | None = None) -> Found:
    archived = (directory / MANIFEST).exists()
    frames = (frames_from_archive if archived else frames_from_parquet)(spark, str(directory))
    if ledgers is not None:
        producers = producer_ledger(spark, str(ledgers / "producer"), str(ledgers / "staged-producer"))
        consumers = consumer_ledger(spark, str(ledgers / "consumer"), str(ledgers / "staged-consumer"))
        frames = replace(frames, producer_ledger=producers.rows, consumer_ledger=consumers.rows)
    found = findings(frames, sla_s=3600)
    return {(row["kind"], row["subject"]) for row in found.collect()}


def test_the_same_seed_makes_the_same_rows() -> None:
    plan = Plan(long_ago(), 7, 400, faults=32)
    assert chunk_of(plan, 0).tables == chunk_of(plan, 0).tables
    assert chunk_of(plan, 0).planted == chunk_of(plan, 0).planted
    assert chunk_of(replace(plan, seed=8), 0).tables["half"] != chunk_of(plan, 0).tables["half"]


def test_faults_change_no_row_but_their_own() -> None:
    plan = Plan(long_ago(), 7, 2000)
    plain, damaged = chunk_of(plan, 0).tables, chunk_of(replace(plan, faults=4), 0).tables
    for table in ("op", "outbox"):
        ids = [set(pc.unique(tables[table]["transaction_id"]).to_pylist()) for tables in (plain, damaged)]
        assert len(ids[0] ^ ids[1]) <= 4


def test_ids_are_of_the_day_and_unlike() -> None:
    plan = Plan(long_ago(), 1, 3000)
    ids = chunk_of(plan, 0).tables["half"].filter(pc.field("position") == 0)["transaction_id"].to_pylist()
    assert len(set(ids)) == 3000
    for text in ids:
        milliseconds = int(text.replace("-", "")[:12], 16)
        assert datetime.fromtimestamp(milliseconds / 1000, UTC).date() == plan.day
        assert text[14] == "7"
        assert text[19] in "89ab"


def test_a_day_has_of_everything() -> None:
    tables = chunk_of(Plan(long_ago(), 1, CHUNK), 0).tables
    verdicts = pc.value_counts(tables["op"]["verdict"]).to_pylist()
    assert {row["values"]: row["counts"] for row in verdicts}[1] == pytest.approx(0.9 * CHUNK, rel=0.01)
    assert set(pc.unique(tables["op"]["source"]).to_pylist()) == {0, 1, 2, 3}
    assert pc.max(tables["half"]["position"]).as_py() == 4
    assert pc.max(tables["receipt"]["attempts"]).as_py() > 1
    assert set(pc.unique(tables["receipt"]["outcome"]).to_pylist()) == {"delivered", "dropped"}
    assert set(pc.unique(tables["receipt"]["replay"]).to_pylist()) == {0, 1}
    assert set(pc.unique(tables["attempt"]["kind"]).to_pylist()) == {"swept", "check", "delivery"}
    assert tables["outbox"]["due_at"].null_count < tables["outbox"].num_rows
    assert tables["check_back"].num_rows == 0
    assert tables["dead_letter"].num_rows > 0


def test_the_log_is_in_order_over_the_borders_of_chunks() -> None:
    plan = Plan(long_ago(), 1, CHUNK + 500, faults=64, kinds=FORBIDDEN)
    log = pa.concat_tables([chunk_of(plan, chunk).tables["outbox"] for chunk in range(plan.chunks)])
    log = log.sort_by("offset")
    times = log["committed_at"].cast(pa.int64()).to_pylist()
    assert times == sorted(times)
    assert len(set(log["offset"].to_pylist())) == log.num_rows
    assert pc.max(log["offset"]).as_py() <= plan.last_offset


def test_too_many_faults_are_refused() -> None:
    with pytest.raises(TooFewError, match="too many"):
        chunk_of(Plan(long_ago(), 1, 50, faults=50), 0)


@pytest.mark.slow
def test_nothing_is_found_in_a_day_without_faults(spark: SparkSession, tmp_path: Path) -> None:
    ledgers = tmp_path / "ledgers"
    rows = to_parquet(tmp_path, Plan(long_ago(), 3, 2000, ids=(1, 2, 3, 4, 5, 6), ledgers=ledgers))

    assert found_in(spark, tmp_path, ledgers) == set()
    assert not planted_beside(tmp_path).exists()
    assert rows["op"] == 2000
    assert spark.read.parquet(str(tmp_path / "half")).count() == rows["half"]


@pytest.mark.slow
def test_each_planted_fault_is_found_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    kinds, ledgers = ALLOWED + FORBIDDEN + LEDGERS, tmp_path / "ledgers"
    plan = Plan(long_ago(), 4, 3000, faults=3 * len(kinds), kinds=kinds, ledgers=ledgers)
    to_parquet(tmp_path, plan, archived=True)

    planted = planted_in(planted_beside(tmp_path))
    # A generated day has no certificate. Parquet for the proof has only a part of the content.
    without = {
        "half_altered",
        "published_differs",
        "times_disagree",
        "verdict_unproven",
        "audit_broken",
        "receipt_wrong",
        "delivery_wrong",
        "certificate_differs",
        # Generated ledgers have no status of an answer.
        "answer_differs",
    }
    without |= {"order_broken", "fewer_than_usual", "in_two_installations", *OF_SUBSCRIPTIONS}
    assert {kind for kind, _ in planted} == {rule.kind for rule in RULES} - without
    assert {kind for kind, _ in planted} == {*kinds, "archive_differs"}
    assert len(planted) == 3 * len(kinds) + 3
    assert found_in(spark, tmp_path, ledgers) == planted


def test_a_made_day_in_postgres_is_as_the_service_makes_its_own(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    day = long_ago(2)
    plan = Plan(day, 5, 1000, faults=15)
    rows = to_postgres(dsn, plan, tmp_path / "planted.json")

    with psycopg.connect(dsn) as connection:
        for table in BIG:
            assert connection.execute(f"select count(*) from {table}").fetchone() == (rows[table],)
            ours, theirs = (indexes(connection, table, one) for one in (day, datetime.now(UTC).date()))
            assert ours == theirs
        last = connection.execute('select max("offset") from outbox').fetchone()
        assert connection.execute("select nextval('outbox_offset') > %s", last).fetchone() == (True,)
        assert connection.execute("select day from day where day = %s", (day,)).fetchone() == (day,)
        bodies = connection.execute("select count(*) from half where sha256(body) <> body_digest").fetchone()
        assert bodies == (0,)
    with open_snapshot(dsn) as snapshot:
        assert write_without_evidence(spark, snapshot, snapshot.day(day), str(tmp_path / "without_evidence")) == 0
    with pytest.raises(NotEmptyError, match="has rows"):
        to_postgres(dsn, plan, tmp_path / "again.json")
    with pytest.raises(NotEmptyError, match="has rows"):
        to_postgres(dsn, replace(plan, day=long_ago(3)), tmp_path / "again.json", unconstrained=True)


def indexes(connection: psycopg.Connection, table: str, day: date) -> set[str]:
    name = f"{table}_{day:%Y%m%d}"
    rows = connection.execute("select indexdef from pg_indexes where tablename = %s", (name,)).fetchall()
    return {definition.replace(f"{day:%Y%m%d}", "") for (definition,) in rows}


def test_a_second_day_joins_the_first(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    for days in (2, 3):
        to_postgres(dsn, Plan(long_ago(days), 6, 300), tmp_path / "planted.json")

    with psycopg.connect(dsn) as connection:
        assert connection.execute("select count(*) from subscription").fetchone() == (4,)
        assert connection.execute("select count(*) from op").fetchone() == (600,)
        assert connection.execute(
            "select count(*) from subscription where matches_since > %s", (long_ago(3),)
        ).fetchone() == (0,)


def test_wrong_usage_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFNOTE_DATABASE_URL", raising=False)
    assert main([]) == 2
    assert "--database-url" in capsys.readouterr().err
    assert main(["--database-url", "postgresql://127.0.0.1:1/none", "--archived"]) == 2
    assert "--archived needs --parquet" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="must be over"):
        main(["--parquet", "nowhere", "--day", datetime.now(UTC).date().isoformat()])
