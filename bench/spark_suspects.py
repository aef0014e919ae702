"""A day of which a third of the transactions is suspect: how much more the proof takes than for the clean day."""

from pathlib import Path

import duckdb

from bench.report import Report
from bench.spark_run import generate, reconcile, spread
from bench.stage import Stage
from bench.statistic import median_ratio

TRANSACTIONS, TRANSACTIONS_QUICK = 3_000_000, 150_000
SUSPECT_OF = 3
MOST_TIMES = 3
# A refused end each,: all rows of the transaction are judged in full, and there is one finding for each group.
REFUSED = """
copy (
  select transaction_id, 'refused' as kind, born_at as at, null::int as number, 'refused' as outcome
  from read_parquet('{frames}/half/*.parquet') where position = 0 order by transaction_id limit {suspects}
) to '{frames}/attempt/part-refused.parquet' (format parquet)
"""


async def bench(stage: Stage, report: Report) -> None:
    """Prove a clean day in turn with the same day and suspects, from Parquet."""
    count = TRANSACTIONS_QUICK if stage.quick else TRANSACTIONS
    suspects, clean, suspected = count // SUSPECT_OF, stage.place / "clean", stage.place / "suspected"
    for frames in (clean, suspected):
        await generate("--parquet", str(frames), "--transactions", str(count))
    make_suspect(suspected, suspects)
    took: dict[Path, list[float]] = {clean: [], suspected: []}
    for _ in range(stage.seconds(3)):
        for frames, seconds in took.items():
            run = await reconcile("--from-parquet", str(frames))
            seconds.append(run.seconds)
    ratio = median_ratio(took[suspected], took[clean])
    report.notes.append(f"clean {spread(took[clean])} s, {suspects:,} suspects {spread(took[suspected])} s, in turn")
    report.add(f"proof of {suspects:,} suspects, against the clean day", ratio, "times")
    report.hold(f"the proof of {suspects:,} suspects against the clean day", ratio, at_most=MOST_TIMES)


def make_suspect(frames: Path, suspects: int) -> None:
    """Give so many transactions of a day a refused end."""
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute(REFUSED.format(frames=frames, suspects=suspects))
