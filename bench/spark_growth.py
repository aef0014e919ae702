"""More rows in the same memory: how much longer the proof takes, and how much memory it needs."""

import shutil

from bench.report import Report
from bench.spark_run import generate, reconcile
from bench.stage import Stage

# Rows over all tables; a transaction has 4.42 rows.
ROWS, ROWS_QUICK = 3_000_000, 100_000
ROWS_OF_ONE = 4.42
# How many times so many rows. The last one is the first of LARGEST for which the disk has room.
TIMES, LARGEST = 10, (100 / 3, 20.0)
# The most time for so many times the rows, divided by that number.
MOST_TIMES = 1.1
# A row in Parquet, and the same for what Spark keeps on the disk during a run.
BYTES_OF_ROW = 2 * 61
# A heap of 2 GB, and the other memory of JVM and Python.
MEMORY_MB = 3072


async def bench(stage: Stage, report: Report) -> None:
    """Prove a day in Parquet, one ten times as large and one as large as the disk allows, with the same memory."""
    rows = ROWS_QUICK if stage.quick else ROWS
    first_s: float | None = None
    highest_mb = 0.0
    for times in (1, TIMES, largest(rows, shutil.disk_usage(stage.place).free)):
        size = round(rows * times)
        frames = stage.place / f"grown-{size}"
        made = await generate("--parquet", str(frames), "--transactions", str(round(size / ROWS_OF_ONE)))
        run = await reconcile("--from-parquet", str(frames))
        shutil.rmtree(frames)
        highest_mb = max(highest_mb, run.highest_mb)
        ratio = {} if first_s is None else {"ratio_to": f"proof of {rows / 1e6:g} M rows"}
        report.add(f"proof of {size / 1e6:g} M rows", run.seconds, "s", **ratio)
        report.add(f"proof of {size / 1e6:g} M rows: joins", run.join_s, "s")
        report.add(f"proof of {size / 1e6:g} M rows: memory", run.highest_mb, "MB")
        report.notes.append(f"{made.rows:,} rows over all tables: {', '.join(run.said[-1:])}")
        if first_s is None:
            first_s = run.seconds
        else:
            report.hold(f"time for {times:.3g} times the rows", run.seconds / first_s, at_most=times * MOST_TIMES)
    report.hold("resident memory of JVM and Python, MB", highest_mb, at_most=MEMORY_MB)


def largest(rows: int, free_bytes: int) -> float:
    """Return how many times the rows the largest day has."""
    return next((times for times in LARGEST if rows * times * BYTES_OF_ROW < free_bytes), LARGEST[-1])
