"""A backlog of a million messages, and a burst at a limited rate: whether rate and memory stay constant."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.arrivals import Arrival, messages_of, now_s, parts_of, rate, rates_in_windows
from bench.filling import fill_committed
from bench.relay_stage import relaying
from bench.report import Report
from bench.services import Service
from bench.stage import Stage

TOPIC = "bench.backlog"
BACKLOG, BACKLOG_QUICK = 1_000_000, 50_000
# A million single messages take as long as all other rows together, so only the end of the backlog is sent singly.
SINGLES, SINGLES_QUICK = 200_000, 10_000
BATCH = 100
LONGEST_S = 300
PARTS = 10
# A tenth takes some three seconds, so other work of the machine distorts it. Therefore each backlog is drained this
# many times, by separate subscriptions, one after another.
ROUNDS = 3
MEMORY_MB = 250
LOOK_EVERY_S = 0.25

RATE = 1000
BURST, BURST_QUICK = 30_000, 5_000
WINDOW_S, WINDOW_S_QUICK = 10, 2


@dataclass(frozen=True, slots=True)
class Look:
    """A sample of a process: the time (on the receiver's clock), resident memory, and CPU seconds so far."""

    at_s: float
    resident_mb: float
    cpu_s: float


async def drains(stage: Stage, report: Report) -> None:
    """Store the backlog, deliver all of it in batches and its end one by one, and measure rates and memory."""
    count, singles = (BACKLOG_QUICK, SINGLES_QUICK) if stage.quick else (BACKLOG, SINGLES)
    async with relaying(stage, "relay_backlog") as relay:
        await fill_committed(relay.dsn, TOPIC, count)
        # The state of the tables as if the messages had arrived one after the other.
        await relay.watch.execute("vacuum (analyze)", timeout=120)
        await relay.watch.execute("checkpoint", timeout=120)
        head: int = await relay.watch.fetchval('select max("offset") from outbox')
        async with watched(relay.workers[0]) as looks:
            batched, single = [], []
            for round_ in range(1 if stage.quick else ROUNDS):
                batches = {"mode": "batch", "batch_max": BATCH}
                await relay.subscribe(2 * round_ + 1, TOPIC, "batch", start="earliest", destination=batches)
                batched.append((await relay.wait(count, within_s=LONGEST_S)).arrivals)
                # `after` is exclusive. Offsets have no gaps here, because there are no other messages.
                await relay.subscribe(2 * round_ + 2, TOPIC, start={"offset": head - singles})
                single.append((await relay.wait(singles, within_s=LONGEST_S)).arrivals)
    for name, drained in ((f"{count:,}, batches of {BATCH}", batched), (f"{singles:,}, one by one", single)):
        _add_figures(report, name, drained, looks)
    highest_mb = max(look.resident_mb for look in looks)
    report.add("worker's memory before", looks[0].resident_mb, "MB")
    report.add("worker's memory, highest", highest_mb, "MB", ratio_to="worker's memory before")
    report.hold("a worker's memory while it drains a backlog, MB", highest_mb, at_most=MEMORY_MB)


def _add_figures(report: Report, name: str, drained: Sequence[Sequence[Arrival]], looks: Sequence[Look]) -> None:
    rates: list[list[float]] = []
    costs: list[list[float]] = []
    for arrivals in drained:
        tenths = parts_of(arrivals, PARTS)
        rates.append([rate(tenth) for tenth in tenths])
        costs.append([cpu_between(looks, tenth[0].at_s, tenth[-1].at_s) * 1e6 / messages_of(tenth) for tenth in tenths])
        tenths = ", ".join(f"{part:,.0f}" for part in rates[-1])
        report.notes.append(f"rate of each tenth, {name}: {tenths} messages/s")
    flat = median(parts[-1] / parts[0] for parts in rates)
    report.add(f"backlog of {name}", median(map(rate, drained)), "messages/s")
    report.add(f"{name}: first tenth", median(parts[0] for parts in rates), "messages/s")
    last, first = f"{name}: last tenth", f"{name}: first tenth"
    report.add(last, median(parts[-1] for parts in rates), "messages/s", ratio_to=first, ratio=flat)
    base = f"{name}: worker's CPU, first tenth"
    report.add(base, median(parts[0] for parts in costs), "µs/message")
    report.add(f"{name}: worker's CPU, last tenth", median(parts[-1] for parts in costs), "µs/message", ratio_to=base)
    report.hold(f"last tenth against the first, backlog of {name}", flat, at_least=0.85)


async def smooths(stage: Stage, report: Report) -> None:
    """Publish a burst to a subscription with `rate_per_s`, and measure the rate of every window of 10 s."""
    count, window_s = (BURST_QUICK, WINDOW_S_QUICK) if stage.quick else (BURST, WINDOW_S)
    async with relaying(stage, "relay_rate") as relay:
        await relay.subscribe(1, TOPIC, rate_per_s=RATE)
        drained = await relay.drain(TOPIC, count)
    windows = rates_in_windows([arrival.at_s for arrival in drained.arrivals], window_s)
    report.add("rate_per_s asked for", RATE, "messages/s")
    report.add(f"a burst of {count:,} at rate_per_s", drained.rate, "messages/s", ratio_to="rate_per_s asked for")
    report.add(f"slowest {window_s} s of it", min(windows), "messages/s", ratio_to="rate_per_s asked for")
    report.add(f"fastest {window_s} s of it", max(windows), "messages/s", ratio_to="rate_per_s asked for")
    report.hold(f"rate_per_s over the slowest {window_s} s", min(windows) / RATE, at_least=0.95)
    report.hold(f"rate_per_s over the fastest {window_s} s", max(windows) / RATE, at_most=1.05)


@asynccontextmanager
async def watched(service: Service) -> AsyncIterator[list[Look]]:
    """Yield a list of samples of a service, which grows until the end of the block."""

    def look() -> Look:
        return Look(now_s(), service.resident_mb(), service.cpu_s())

    looks = [look()]

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            looks.append(look())

    looking = asyncio.create_task(keep_looking())
    try:
        yield looks
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        looks.append(look())


def cpu_between(looks: Sequence[Look], begin_s: float, end_s: float) -> float:
    """Return the CPU seconds at a time, interpolated between two samples."""
    return _cpu_at(looks, end_s) - _cpu_at(looks, begin_s)


def _cpu_at(looks: Sequence[Look], at_s: float) -> float:
    for before, after in pairwise(looks):
        if before.at_s <= at_s <= after.at_s:
            return before.cpu_s + (after.cpu_s - before.cpu_s) * (at_s - before.at_s) / (after.at_s - before.at_s)
    raise ValueError(f"no sample was taken around {at_s}")
