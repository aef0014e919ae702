"""Requests per second over HTTP, 64 connections, one API process: an echo, FastAPI, the naive service, Halfnote."""

from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

from bench.filling import fill_naive, fill_ours
from bench.report import Report
from bench.services import Service, receiving, serving
from bench.stage import Stage, count_of, halfnote, relay_busy
from bench.statistic import median_ratio
from bench.wrk import PATIENCE_S, Fill, Plan, load

# The pool that the 64 callers of the naive service share is not fair, and a few of them wait for seconds.
NAIVE_PATIENCE_S = 15


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a service and its requests; `fill` stores the halves that the requests need."""

    name: str
    service: Service
    plan: Plan
    half: str = "/half"
    end: str = "/end"
    fill: Fill | None = None
    busy: bool = False
    patience_s: int = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a row: its rate (transactions for `whole`, else requests) and CPU µs of the API process for each."""

    rate: float
    cpu_us: float
    p99_ms: float


async def bench(stage: Stage) -> Report:
    """Run all rows in turn, several times, and compare neighboring runs."""
    report = Report("http", "http: 64 connections, one API process, 300-byte bodies")
    naive_dsn, ours_dsn = await stage.empty_database("http_naive"), await stage.database("http_ours")
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        rivals = await stack.enter_async_context(serving("bench.rivals:app", stage.place, {"BENCH_DSN": naive_dsn}))
        ours = await stack.enter_async_context(halfnote(stage, ours_dsn, receiver))
        rows = _rows(rivals, ours, partial(fill_naive, naive_dsn), partial(fill_ours, ours_dsn))
        found: dict[str, list[Measured]] = defaultdict(list)
        delivered: list[float] = []
        for turn in range(stage.seconds(5)):
            quiet = [row for row in rows if not row.busy]
            # Alternate the order, so that warm-up or a filling disk affects every row equally.
            for row in quiet if turn % 2 == 0 else reversed(quiet):
                found[row.name].append(await _measure(stage, row))
            await relay_busy(ours, receiver, busy=True)
            for row in (row for row in rows if row.busy):
                before = await count_of(receiver)
                found[row.name].append(await _measure(stage, row))
                if row.plan == "whole":
                    delivered.append((await count_of(receiver) - before) / stage.seconds(5))
            await relay_busy(ours, receiver, busy=False)
        _add_figures(report, rows, found)
        report.add("delivered while busy", median(delivered), "messages/s", ratio_to="whole, relay busy")
        report.add("resident after it", ours.resident_mb(), "MB")
    await stage.drop("http_naive", "http_ours")
    return report


def _rows(rivals: Service, ours: Service, fill_naive: Fill, fill_ours: Fill) -> list[Row]:
    def naive(name: str, plan: Plan, fill: Fill | None = None) -> Row:
        return Row(name, rivals, plan, "/naive/half", "/naive/end", fill, patience_s=NAIVE_PATIENCE_S)

    return [
        Row("bare ASGI echo", rivals, "half", "/echo"),
        Row("do-nothing FastAPI", rivals, "half", "/noop"),
        Row("half", ours, "half"),
        Row("end", ours, "end", fill=fill_ours),
        Row("whole", ours, "whole", fill=fill_ours),
        naive("naive whole", "whole", fill_naive),
        naive("naive half", "half"),
        naive("naive end", "end", fill_naive),
        Row("half, relay busy", ours, "half", busy=True),
        Row("end, relay busy", ours, "end", fill=fill_ours, busy=True),
        Row("whole, relay busy", ours, "whole", fill=fill_ours, busy=True),
    ]


async def _measure(stage: Stage, row: Row) -> Measured:
    seconds = stage.seconds(5)
    done = await load(
        *(stage.place, row.service, row.plan, seconds),
        half=row.half,
        end=row.end,
        fill=row.fill,
        patience_s=row.patience_s,
    )
    requests = 2 if row.plan == "whole" else 1
    return Measured(done.rate / requests, done.cpu_us * requests, done.p99_ms)


def _add_figures(report: Report, rows: list[Row], found: dict[str, list[Measured]]) -> None:
    """Turn the runs into figures and check the bars."""

    def ratio(of: str, to: str) -> float:
        return median_ratio([run.rate for run in found[of]], [run.rate for run in found[to]])

    idle, naive = "do-nothing FastAPI", "naive whole"
    for row in sorted(rows, key=lambda row: row.plan == "whole" and row.name != naive):
        whole = row.plan == "whole"
        to = naive if whole else idle
        rate = median(run.rate for run in found[row.name])
        compared = {} if row.name == to or "echo" in row.name else {"ratio_to": to, "ratio": ratio(row.name, to)}
        report.add(row.name, rate, "transactions/s" if whole else "requests/s", **compared)  # type: ignore[arg-type]
    for row in rows:
        cpu_us = median(run.cpu_us for run in found[row.name])
        report.add(f"CPU of the API, {row.name}", cpu_us, "µs/transaction" if row.plan == "whole" else "µs/request")
    report.hold("/half against a do-nothing FastAPI route", ratio("half", idle), at_least=1.0)
    report.hold("/end against a do-nothing FastAPI route", ratio("end", idle), at_least=1.0)
    report.hold("a whole transaction against the naive service's", ratio("whole", naive), at_least=6)
