"""A day of three million transactions: the proof against the same rules as SQL, in Postgres and in DuckDB."""

import asyncio
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import median

import duckdb
import pyspark

from bench.report import Report
from bench.spark_run import CORES, generate, parquet_of, reconcile, spread
from bench.spark_sql import DUCKDB, FOUND, POSTGRES, Found, by_duckdb, by_postgres, planted_in
from bench.stage import Stage, connected
from bench.statistic import median_ratio
from spark.jobs.generate import planted_beside

TRANSACTIONS, TRANSACTIONS_QUICK = 3_000_000, 100_000
FAULTS, FAULTS_QUICK = 1000, 160
WHOLE_S, ROWS_A_SECOND, DUCKDB_TIMES = 30, 150_000, 1.5


def day_before_yesterday() -> date:
    """Return a day that is over and has no delivery in flight."""
    return datetime.now(UTC).date() - timedelta(days=2)


async def bench(stage: Stage, report: Report) -> None:
    """Make the same day in Postgres and as Parquet, and let each program find the planted faults."""
    count, faults = (TRANSACTIONS_QUICK, FAULTS_QUICK) if stage.quick else (TRANSACTIONS, FAULTS)
    day, frames = day_before_yesterday(), stage.place / "frames"
    of = ("--day", str(day), "--transactions", str(count), "--faults", str(faults))
    report.notes.append(
        f"pyspark {pyspark.__version__}, {CORES}, 2 GB; duckdb {duckdb.__version__}, {_settings(DUCKDB)}; "
        f"Postgres: {_settings(POSTGRES)}; a day of {count:,} transactions, {faults} faults"
    )
    dsn = await stage.database("spark_day")
    planted = stage.place / "planted.json"
    made = await generate("--database-url", dsn, "--unconstrained", "--planted", str(planted), *of)
    report.add("rows of the day", made.rows, "rows")
    report.add("made in Postgres", made.rows / made.seconds, "rows/s")
    report.hold("rows a second into Postgres", made.rows / made.seconds, at_least=ROWS_A_SECOND)
    made = await generate("--parquet", str(frames), *of)
    report.add("made as Parquet", made.rows / made.seconds, "rows/s")
    await settle(dsn)
    wanted = {"Postgres": planted_in(planted), "Parquet": planted_in(planted_beside(frames))}
    await _from_postgres(stage, report, dsn, day, wanted["Postgres"])
    await _from_parquet(stage, report, frames, wanted["Parquet"])
    await stage.drop("spark_day")


async def settle(dsn: str) -> None:
    """Vacuum, analyze and write the tables to disk, as they are at night."""
    async with connected(dsn) as connection:
        await connection.execute("vacuum (analyze)", timeout=600)
        await connection.execute("checkpoint", timeout=600)


async def _from_postgres(stage: Stage, report: Report, dsn: str, day: date, planted: Found) -> None:
    run = await reconcile("--database-url", dsn, "--day", str(day), "--out", str(stage.place / "out"))
    report.add("proof, from Postgres", run.seconds, "s")
    parts = {"read": run.read_s, "join": run.join_s, "figures": run.figures_s, "write": run.write_s}
    for name, seconds in parts.items():
        report.add(f"proof, from Postgres: {name}", seconds, "s")
    report.add("proof, from Postgres: memory", run.highest_mb, "MB")
    report.hold("the whole proof of the day, s after the session's start", run.seconds, at_most=WHOLE_S)
    async with connected(dsn) as connection:
        rows = await connection.fetch("select kind, subject from finding where day = $1 and resolved_at is null", day)
    compare(report, "proof, from Postgres", frozenset((row["kind"], row["subject"]) for row in rows), planted)
    sql = await by_postgres(dsn, day)
    report.add("rules as SQL in Postgres", sql.seconds, "s", ratio_to="proof, from Postgres")
    compare(report, "rules as SQL in Postgres", sql.found, planted)


async def _from_parquet(stage: Stage, report: Report, frames: Path, planted: Found) -> None:
    """Run both in turn over the same files; the ratio compares only the rules."""
    out, joins, others, wholes = stage.place / "out-of-parquet", [], [], []
    for _ in range(stage.seconds(3)):
        run = await reconcile("--from-parquet", str(frames), "--out", str(out))
        answer = await asyncio.to_thread(by_duckdb, frames, stage.place / "spill")
        joins.append(run.join_s)
        wholes.append(run.seconds)
        others.append(answer.seconds)
    ratio = median_ratio(joins, others)
    report.add("rules as SQL in DuckDB", median(others), "s")
    report.add("proof's joins, from Parquet", median(joins), "s", ratio_to="rules as SQL in DuckDB", ratio=ratio)
    report.add("whole proof, from Parquet", median(wholes), "s")
    report.notes.append(f"joins {spread(joins)} s, DuckDB {spread(others)} s, in turn")
    report.hold("the proof's joins against DuckDB, same Parquet", ratio, at_most=DUCKDB_TIMES)
    compare(report, "rules as SQL in DuckDB", answer.found, planted)
    compare(report, "proof, from Parquet", findings_in(out), planted)


def findings_in(out: Path) -> Found:
    """Return the findings of a run with `--out`."""
    rows = duckdb.sql(f"{FOUND.replace('found', 'read_parquet')}('{parquet_of(out)}')").fetchall()
    return frozenset((kind, subject) for kind, subject in rows)


def compare(report: Report, name: str, found: Found, planted: Found) -> None:
    """Compare the findings with the planted faults: all of them and no others must be found."""
    both = len(found & planted)
    report.hold(f"{name}: recall of {len(planted):,} planted", both / len(planted), at_least=1.0)
    report.hold(f"{name}: precision of {len(found):,} found", both / max(1, len(found)), at_least=1.0)
    for what, rest in (("missed", planted - found), ("too many", found - planted)):
        if rest:
            report.notes.append(f"{name}: {what}: {sorted(rest)[:5]}")


def _settings(settings: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())
