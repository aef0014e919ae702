"""`python -m bench [name…]`: run benchmarks, print a table for each and write bench/out/<name>.json.

Without names, all benchmarks run except `relay`, `spark` and `peers`, which take a quarter of an hour each, `pull` and
`console`, which take several minutes, and `scale`, which is for a machine with many cores. `relay:<row>` is one row of
`relay`. With QUICK=1 a benchmark takes seconds. `--help` prints the names.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import uvloop

from bench import (
    batches,
    checkback,
    client,
    console,
    disk,
    http,
    idle,
    keys,
    latency,
    memory,
    processes,
    pull,
    relay,
    scale,
    shedding,
    spark,
    stored,
    tracing,
)
from bench.arrivals import require_cc
from bench.machine import as_text
from bench.peers import run as peers
from bench.report import Report
from bench.stage import Stage, open_stage
from bench.wrk import require_wrk

BENCHMARKS: dict[str, Callable[[Stage], Awaitable[Report]]] = {
    "http": http.bench,
    "latency": latency.bench,
    "idle": idle.bench,
    "processes": processes.bench,
    "stored": stored.bench,
    "keys": keys.bench,
    "checkback": checkback.bench,
    "memory": memory.bench,
    "disk": disk.bench,
    "batches": batches.bench,
    "shedding": shedding.bench,
    "tracing": tracing.bench,
    "client": client.bench,
}
SCALE: dict[str, Callable[[Stage], Awaitable[Report]]] = {"scale": scale.bench}
RELAY: dict[str, Callable[[Stage], Awaitable[Report]]] = {
    "relay": relay.bench,
    **{f"relay:{row}": partial(relay.bench, names=[row]) for row in relay.ROWS},
}
SPARK: dict[str, Callable[[Stage], Awaitable[Report]]] = {
    "spark": spark.bench,
    **{f"spark:{row}": partial(spark.bench, names=[row]) for row in spark.ROWS},
}
CONSOLE: dict[str, Callable[[Stage], Awaitable[Report]]] = {"console": console.bench}
PULL: dict[str, Callable[[Stage], Awaitable[Report]]] = {"pull": pull.bench}
PEERS: dict[str, Callable[[Stage], Awaitable[Report]]] = {"peers": peers.bench}
ALL = BENCHMARKS | SCALE | RELAY | SPARK | CONSOLE | PULL | PEERS


async def run(names: Sequence[str], *, quick: bool) -> list[Report]:
    """Run the named benchmarks, one after another, on one Postgres."""
    reports = []
    async with open_stage(quick=quick) as stage:
        print(as_text(stage.machine))
        if quick:
            print("QUICK: single short runs. They show that the benchmarks work; their figures are not reliable.")
        for name in names:
            report = await ALL[name](stage)
            path = report.write(stage.machine)
            print(f"{report}\n  → {os.path.relpath(path)}", flush=True)
            reports.append(report)
    return reports


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a part of a benchmark did not finish, else 0, even if a bar is missed: only tests judge figures."""
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nNames: {', '.join(ALL)}")
        return 0
    names = list(arguments) or list(BENCHMARKS)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        known = ", ".join(ALL)
        print(f"No benchmark is called {', '.join(unknown)}; there are {known}.", file=sys.stderr)
        return 2
    if set(names) - set(PEERS):
        require_wrk()
    if set(names) & set(PEERS):
        require_cc()
    # SIGTERM acts as Ctrl-C does, so that all programs are stopped in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        reports = uvloop.run(run(names, quick=os.environ.get("QUICK", "0") not in ("", "0")))
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    return print_summary(reports)


def print_summary(reports: Sequence[Report]) -> int:
    """Print the missed bars and the unfinished parts, and return the exit status."""
    missed = [bar for report in reports for bar in report.bars if not bar.held]
    broken = [what for report in reports for what in report.broken]
    bars = sum(len(report.bars) for report in reports)
    print(f"\n{len(missed)} of {bars} bars missed" if missed else f"\nEvery bar held ({bars})")
    for bar in missed:
        print(f"  {bar}")
    for what in broken:
        print(f"  NOT FINISHED: {what}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
