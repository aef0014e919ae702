"""The proof's benchmark: its SQL finds the planted findings, its runs are read correctly, and one row end to end."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.models import DAY_TABLES
from bench import spark as bench_spark
from bench.__main__ import BENCHMARKS, RELAY, SPARK, main
from bench.report import Report
from bench.spark_day import compare
from bench.spark_run import Run
from bench.spark_sql import Found, by_duckdb, by_postgres
from bench.stage import open_stage
from spark.synthetic import parquet, postgres
from spark.synthetic.plan import ALLOWED, FORBIDDEN, Plan

KINDS = ALLOWED + FORBIDDEN


def plan() -> Plan:
    day = datetime.now(UTC).date() - timedelta(days=2)
    made = Plan(day, 2, 3000, faults=2 * len(KINDS), kinds=KINDS)
    return replace(made, seen_at=parquet.default_seen_at(made))


def subjects(planted: dict[str, list[str]]) -> Found:
    return frozenset((kind, subject) for kind, found in planted.items() for subject in found)


def test_duckdb_finds_what_was_planted(tmp_path: Path) -> None:
    made, frames = plan(), tmp_path / "frames"
    _, planted = parquet.fill(frames, made, 0)
    parquet.finish(frames, made)

    answer = by_duckdb(frames, tmp_path / "spill")

    assert answer.found == subjects(planted)
    assert {kind for kind, _ in answer.found} == set(KINDS)


async def test_postgres_finds_what_was_planted(dsn: str) -> None:
    made = postgres.prepare(dsn, plan(), 4, unconstrained=True)
    _, planted = postgres.fill(dsn, made, 0)
    for table in DAY_TABLES:
        postgres.attach(dsn, made, table)
    postgres.finish(dsn, made)

    answer = await by_postgres(dsn, made.day)

    assert answer.found == subjects(planted)
    assert {kind for kind, _ in answer.found} == set(KINDS)


def test_a_run_is_timed_from_its_own_lines() -> None:
    run = Run()
    run.hear({"stage": "read half", "seconds": 2.0, "rows": 10}, 103.0)
    run.hear({"note": "day", "text": "some day"}, 103.5)
    run.hear({"stage": "snapshot", "seconds": 4.0}, 104.5)
    run.hear({"stage": "join", "seconds": 2.0}, 106.5)
    run.hear({"stage": "figures", "seconds": 1.0}, 107.5)
    run.hear({"stage": "rules", "seconds": 1.0}, 108.5)
    run.hear({"stage": "waiting", "seconds": 0.5}, 109.0)
    run.ended_s = 110.0

    assert run.seconds == pytest.approx(9.5)
    assert (run.read_s, run.join_s, run.figures_s) == (4.0, 3.0, 1.5)
    assert run.write_s == pytest.approx(1.0)
    assert run.notes == [{"note": "day", "text": "some day"}]


def test_what_is_missed_and_what_is_too_many_is_reported() -> None:
    report = Report("spark", "some title")
    compare(
        report, "somebody", frozenset({("parked", "a"), ("parked", "b")}), frozenset({("parked", "a"), ("parked", "c")})
    )

    assert [bar.value for bar in report.bars] == [0.5, 0.5]
    assert not any(bar.held for bar in report.bars)
    assert report.notes == ["somebody: missed: [('parked', 'c')]", "somebody: too many: [('parked', 'b')]"]


def test_every_row_can_be_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert not set(SPARK) & set(BENCHMARKS | RELAY)
    assert set(SPARK) == {"spark", *(f"spark:{row}" for row in bench_spark.ROWS)}
    assert main(["spark:nothing"]) == 2
    assert "spark:growth" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed (apt install wrk)")
@pytest.mark.parametrize("row", list(bench_spark.ROWS))
async def test_a_row_measures_a_real_proof(tmp_path: Path, row: str) -> None:
    async with open_stage(quick=True) as stage:
        report = await bench_spark.bench(stage, [row])
        path = report.write(stage.machine, tmp_path)

    assert report.broken == []
    # This test checks the findings, not the time.
    assert all(bar.held for bar in report.bars if "recall" in bar.claim or "precision" in bar.claim)
    assert path.name == f"spark-{row}.json"
