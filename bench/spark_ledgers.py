"""An archived day with the ledgers of producers and consumers, and faults of every kind at once."""

from bench.report import Report
from bench.spark_day import FAULTS, FAULTS_QUICK, TRANSACTIONS, TRANSACTIONS_QUICK, compare, findings_in
from bench.spark_run import generate, reconcile
from bench.spark_sql import planted_in
from bench.stage import Stage
from spark.jobs.generate import planted_beside


async def bench(stage: Stage, report: Report) -> None:
    """Make the day and both ledgers as Parquet, and let the proof find the faults planted in all three."""
    count, faults = (TRANSACTIONS_QUICK, FAULTS_QUICK) if stage.quick else (TRANSACTIONS, FAULTS)
    frames, ledgers, out = (stage.place / name for name in ("with-ledgers", "ledgers", "out-with-ledgers"))
    made = await generate(
        *("--parquet", str(frames), "--archived", "--ledgers", str(ledgers)),
        *("--transactions", str(count), "--faults", str(faults)),
    )
    report.add("rows of the day, without ledgers", made.rows, "rows")
    given = [f"--{whose}-ledger={ledgers / whose}" for whose in ("producer", "consumer")]
    run = await reconcile("--from-parquet", str(frames), "--out", str(out), *given)
    report.add("proof with ledgers, from Parquet", run.seconds, "s")
    for whose in ("producer", "consumer"):
        report.add(f"reading the {whose} ledger", run.stages[f"read {whose} ledger"], "s")
    report.add("joins with ledgers", run.join_s, "s")
    report.add("proof with ledgers: memory", run.highest_mb, "MB")
    planted = planted_in(planted_beside(frames))
    kinds = len({kind for kind, _ in planted})
    report.notes.append(f"{count:,} transactions, {len(planted):,} faults of {kinds} kinds")
    compare(report, "proof with ledgers", findings_in(out), planted)
