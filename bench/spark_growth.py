"""Ten times the rows: how much longer the proof takes, and how much memory it needs."""

from bench.report import Report
from bench.spark_run import generate, reconcile
from bench.stage import Stage

# Rows over all tables; a transaction has 4.42 rows.
ROWS, ROWS_QUICK = 3_000_000, 100_000
ROWS_OF_ONE = 4.42
TIMES, MOST_TIMES = 10, 11
# A heap of 2 GB, and the other memory of JVM and Python.
MEMORY_MB = 3072


async def bench(stage: Stage, report: Report) -> None:
    """Prove a day in Parquet and a day ten times as large, with the same memory."""
    rows = ROWS_QUICK if stage.quick else ROWS
    took, highest_mb = [], []
    for size in (rows, rows * TIMES):
        frames = stage.place / f"grown-{size}"
        made = await generate("--parquet", str(frames), "--transactions", str(round(size / ROWS_OF_ONE)))
        run = await reconcile("--from-parquet", str(frames))
        took.append(run.seconds)
        highest_mb.append(run.highest_mb)
        ratio = {} if size == rows else {"ratio_to": f"proof of {rows / 1e6:g} M rows"}
        report.add(f"proof of {size / 1e6:g} M rows", run.seconds, "s", **ratio)
        report.add(f"proof of {size / 1e6:g} M rows: joins", run.join_s, "s")
        report.add(f"proof of {size / 1e6:g} M rows: memory", run.highest_mb, "MB")
        report.notes.append(f"{made.rows:,} rows over all tables: {', '.join(run.said[-1:])}")
    report.hold(f"time for {TIMES} times the rows", took[1] / took[0], at_most=MOST_TIMES)
    report.hold("resident memory of JVM and Python, MB", max(highest_mb), at_most=MEMORY_MB)
