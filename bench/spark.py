"""The nightly proof: `python -m bench spark` runs every row, `spark:<row>` one. See docs/benchmarks.md."""

import time
from collections.abc import Awaitable, Callable, Sequence

from bench import spark_day, spark_growth, spark_ledgers, spark_snapshot, spark_standby, spark_suspects
from bench.report import Report
from bench.stage import Stage

ROWS: dict[str, Callable[[Stage, Report], Awaitable[None]]] = {
    "day": spark_day.bench,
    "ledgers": spark_ledgers.bench,
    "growth": spark_growth.bench,
    "suspects": spark_suspects.bench,
    "standby": spark_standby.bench,
    "snapshot": spark_snapshot.bench,
}


async def bench(stage: Stage, names: Sequence[str] = ()) -> Report:
    """Run the named rows, or all of them, into one report. It records a row that fails; the other rows still run."""
    report = Report("-".join(("spark", *names)), "spark: the proof of a day")
    for name in names or ROWS:
        began = time.monotonic()
        try:
            await ROWS[name](stage, report)
        except Exception as error:
            report.break_off(f"{name}: {type(error).__name__}: {error}")
        print(f"  spark:{name} took {time.monotonic() - began:.0f} s", flush=True)
    return report
