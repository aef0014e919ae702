"""The relay: `python -m bench relay` runs every row, `relay:<row>` one row. docs/benchmarks.md explains the rows."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench import (
    relay_backlog,
    relay_brokers,
    relay_isolation,
    relay_keys,
    relay_latency,
    relay_many,
    relay_shards,
    relay_webhook,
)
from bench.arrivals import require_cc
from bench.report import Report
from bench.stage import Stage

Bench = Callable[[Stage, Report], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """A part of the table, and its time limit in seconds. A row over its limit ends; the other rows still run."""

    bench: Bench
    budget_s: float


ROWS = {
    "webhook": Row(relay_webhook.bench, 130),
    "brokers": Row(relay_brokers.bench, 200),
    "latency": Row(relay_latency.bench, 90),
    "isolation": Row(relay_isolation.bench, 170),
    "keys": Row(relay_keys.bench, 120),
    "shards": Row(relay_shards.bench, 150),
    "many": Row(relay_many.fan_out, 150),
    "idle": Row(relay_many.idle, 90),
    "rate": Row(relay_backlog.smooths, 90),
    # This row comes last, because it leaves the disk busy.
    "backlog": Row(relay_backlog.drains, 420),
}


async def bench(stage: Stage, names: Sequence[str] = ()) -> Report:
    """Run the named rows, or all of them, into one report."""
    require_cc()
    report = Report(
        "-".join(("relay", *names)), "relay: committed messages to their subscribers, one worker unless said otherwise"
    )
    for name in names or ROWS:
        await _run(stage, report, name)
    return report


async def _run(stage: Stage, report: Report, name: str) -> None:
    """Run one row into the report, which also records why a row ended early."""
    row, began = ROWS[name], time.monotonic()
    try:
        async with asyncio.timeout(row.budget_s):
            await row.bench(stage, report)
    except Exception as error:
        what = (
            f"not done in {row.budget_s:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        )
        report.break_off(f"{name}: {what}")
    print(f"  relay:{name} took {time.monotonic() - began:.0f} s", flush=True)
