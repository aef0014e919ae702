"""The Python client (sdk/): its CPU time against bare httpx calls, and the rate of one asynchronous process."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

from bench.report import Report
from bench.services import ROOT, Service, printing_port, receiving
from bench.stage import Stage, halfnote
from bench.statistic import median_interval

PAIRS, PAIRS_QUICK = 20, 2
SLICE_S, SLICE_QUICK_S = 5.0, 0.5
RATES, RATES_QUICK = 6, 1
# The bar for one process, per second of its own CPU time.
TRANSACTIONS_A_SECOND = 2000
OVERHEAD = 1.15


@dataclass(frozen=True, slots=True)
class Sent:
    """The transactions of one slice, and its CPU and wall time."""

    transactions: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_us(self) -> float:
        """CPU time per transaction, user and system."""
        return self.cpu_s / self.transactions * 1e6

    @property
    def rate(self) -> float:
        """Transactions per second."""
        return self.transactions / self.wall_s


class Client:
    """The process that sends requests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def send(self, who: str, seconds: float) -> Sent:
        """Run one slice with a sender of `bench.client_side`. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{who} {seconds}\n")
        self._process.stdin.flush()
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise RuntimeError(f"the sending process ended with {self._process.wait()}; its output is above")
        return Sent(**json.loads(line))


async def bench(stage: Stage) -> Report:
    """Compare the client with bare calls; then measure its rate to a coordinator without storage, and to Halfnote."""
    report = Report("client", "client: the Python client, one process, 64 transactions at once or one after the other")
    seconds = SLICE_QUICK_S if stage.quick else SLICE_S
    async with answering_at_once() as coordinator, sending_to(coordinator) as client:
        for suffix, name in (("", "async"), ("-sync", "sync")):
            await _pairs(report, client, suffix, name, seconds, PAIRS_QUICK if stage.quick else PAIRS)
        await _rates(report, client, "a coordinator that answers at once", seconds, stage.seconds(RATES, RATES_QUICK))
    dsn = await stage.database("client")
    async with (
        receiving() as receiver,
        halfnote(stage, dsn, receiver) as service,
        sending_to(service) as client,
    ):
        await _rates(report, client, "Halfnote", seconds, stage.seconds(RATES, RATES_QUICK))
        await _batching(report, client, seconds, stage.seconds(RATES, RATES_QUICK))
    await stage.drop("client")
    return report


async def _pairs(report: Report, client: Client, suffix: str, name: str, seconds: float, pairs: int) -> None:
    """Run slices of both in pairs. The order within a pair alternates."""
    names = ["client" + suffix, "bare" + suffix]
    found: dict[str, list[Sent]] = {who: [] for who in names}
    for who in names:
        await client.send(who, seconds)
    for number in range(pairs):
        for who in names if number % 2 == 0 else reversed(names):
            found[who].append(await client.send(who, seconds))
    ours, theirs = ([sent.cpu_us for sent in found[who]] for who in names)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high, confidence = median_interval(ratios)
    base = f"{name}: bare httpx calls, CPU a transaction"
    report.add(base, median(theirs), "µs")
    report.add(f"{name}: the client, CPU a transaction", median(ours), "µs", ratio_to=base, ratio=median(ratios))
    report.notes.append(f"{name}: {low:.3f} to {high:.3f} of bare calls ({pairs} pairs, {confidence:.1%})")
    claim = f"{name}: the client's CPU time against bare httpx calls"
    report.hold(claim, median(ratios), at_most=OVERHEAD, interval=(low, high))


async def _rates(report: Report, client: Client, whom: str, seconds: float, slices: int) -> None:
    """Measure the rate of one asynchronous process, and its share of a core."""
    await client.send("client", seconds)
    found = [await client.send("client", seconds) for _ in range(slices)]
    report.add(f"one async process to {whom}", median(sent.rate for sent in found), "transactions/s")
    report.add(f"its CPU, to {whom}", median(sent.cpu_s / sent.wall_s for sent in found), "of a core")
    able = [1e6 / sent.cpu_us for sent in found]
    low, high, _ = median_interval(able)
    claim = f"transactions to {whom} for a second of one process's CPU"
    report.hold(claim, median(able), at_least=TRANSACTIONS_A_SECOND, interval=(low, high))


async def _batching(report: Report, client: Client, seconds: float, pairs: int) -> None:
    """Compare the client with and without shared requests in turn, to Halfnote."""
    names = ["client", "client-batching"]
    found: dict[str, list[Sent]] = {who: [] for who in names}
    await client.send("client-batching", seconds)
    for number in range(pairs):
        for who in names if number % 2 == 0 else reversed(names):
            found[who].append(await client.send(who, seconds))
    for what, unit, of in (
        ("transactions", "transactions/s", [[sent.rate for sent in found[who]] for who in names]),
        ("CPU a transaction", "µs", [[sent.cpu_us for sent in found[who]] for who in names]),
    ):
        single, together = of
        ratios = [one / other for one, other in zip(together, single, strict=True)]
        base = f"one async process to Halfnote, in turn, {what}"
        report.add(base, median(single), unit)
        report.add(
            f"the same with shared requests, {what}",
            median(together),
            unit,
            ratio_to=base,
            ratio=median(ratios),
            between=(min(together), max(together)),
        )


@asynccontextmanager
async def answering_at_once() -> AsyncIterator[Service]:
    """Run the coordinator that stores nothing."""
    async with printing_port(sys.executable, "-m", "bench.instant") as service:
        yield service


@asynccontextmanager
async def sending_to(service: Service) -> AsyncIterator[Client]:
    """Run the process that sends, with the client from sdk/."""
    path = os.pathsep.join([str(ROOT / "sdk"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.client_side", service.url],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Client(process)
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
