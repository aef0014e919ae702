"""A day of which a third of the transactions is suspect: how much more the proof takes than for the clean day."""

import json
import shutil
from pathlib import Path

import duckdb

from bench.report import Report
from bench.spark_run import generate, reconcile, spread
from bench.stage import Stage
from bench.statistic import median_ratio

TRANSACTIONS, TRANSACTIONS_QUICK = 3_000_000, 150_000
SUSPECT_OF = 3
MOST_TIMES = 3
# An attempt each. `refused`: a refused end, which the search counts by group if the transaction is otherwise correct.
# `asked`: an answered check with a number above all policies, which is no finding by itself: the search counts numbers.
ATTEMPTS = {"refused": ("refused", "null", "refused"), "asked": ("check", "99", "unknown")}
MORE = """
copy (
  select transaction_id, '{kind}' as kind, born_at as at, {number}::int as number, '{outcome}' as outcome
  from read_parquet('{frames}/half/*.parquet') where position = 0 order by transaction_id limit {suspects}
) to '{frames}/attempt/part-more.parquet' (format parquet)
"""
# One more transaction each, in doubt, as an outage of producers leaves it: its checks go on, so it is no finding. All
# its rows are judged in full.
IN_DOUBT = "in_doubt"
HALVES = """
copy (
  select * replace (left(transaction_id, 15) || 'fff' || right(transaction_id, 18) as transaction_id)
  from read_parquet('{frames}/half/*.parquet')
  where position = 0 and substr(transaction_id, 16, 3) <> 'fff' order by transaction_id limit {suspects}
) to '{frames}/half/part-more.parquet' (format parquet)
"""
CHECK_BACK = """
copy (
  select transaction_id, producer_group, 1::smallint as state, first_check_at as swept_at, 9::int as asked,
    0::int as answered, 9::int as unanswered, '{seen_at}'::timestamptz - interval '1 hour' as unanswered_since,
    '{seen_at}'::timestamptz + interval '1 minute' as next_check_at
  from read_parquet('{frames}/half/part-more.parquet')
) to '{frames}/check_back/part-more.parquet' (format parquet)
"""


async def bench(stage: Stage, report: Report) -> None:
    """Prove a clean day in turn with the same day and each kind of suspects, from Parquet."""
    count = TRANSACTIONS_QUICK if stage.quick else TRANSACTIONS
    suspects, clean = count // SUSPECT_OF, stage.place / "clean"
    await generate("--parquet", str(clean), "--transactions", str(count))
    days = {name: stage.place / name for name in (*ATTEMPTS, IN_DOUBT)}
    for name, frames in days.items():
        shutil.copytree(clean, frames)
        make_suspect(frames, suspects, name)
    took: dict[Path, list[float]] = {frames: [] for frames in (clean, *days.values())}
    for _ in range(stage.seconds(3)):
        for frames, seconds in took.items():
            run = await reconcile("--from-parquet", str(frames))
            seconds.append(run.seconds)
    report.notes.append(f"clean {spread(took[clean])} s, in turn with those below")
    for name, frames in days.items():
        ratio = median_ratio(took[frames], took[clean])
        report.notes.append(f"{suspects:,} {name} {spread(took[frames])} s")
        report.add(f"proof of {suspects:,} {name}, against the clean day", ratio, "times")
        report.hold(f"the proof of {suspects:,} {name} against the clean day", ratio, at_most=MOST_TIMES)


def make_suspect(frames: Path, suspects: int, name: str) -> None:
    """Give so many transactions of a day an attempt of ATTEMPTS, or add so many that are IN_DOUBT."""
    given: dict[str, object] = {"frames": frames, "suspects": suspects}
    if name == IN_DOUBT:
        statements = [HALVES, CHECK_BACK]
        given["seen_at"] = json.loads((frames / "frames.json").read_text())["seen_at"]
    else:
        statements = [MORE]
        given |= zip(("kind", "number", "outcome"), ATTEMPTS[name], strict=True)
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        for statement in statements:
            connection.execute(statement.format(**given))
