"""`python -m bench peers`: Halfnote, RocketMQ and DTM in turn: throughput, CPU time, and commit to received."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import psutil

from bench.latency import no_collections
from bench.peers.dtm import dtm
from bench.peers.halfnote import AHEAD, BATCHES, BATCHING, BATCHING_BOTH, WEBHOOKS, halfnote
from bench.peers.parts import MissingPartError
from bench.peers.rocketmq import TUNED, rocketmq
from bench.peers.slices import BrokenSliceError, Measured, Peer, Slice
from bench.report import Report
from bench.stage import Stage
from bench.statistic import percentile

DEFAULT_MQ, TUNED_MQ, DTM = "RocketMQ, default", "RocketMQ, tuned", "DTM"
ROCKETMQS = (DEFAULT_MQ, TUNED_MQ)
AT_ONCE = (1, 16, 64)
RATES = (100, 500, 1_500)
ROUNDS, ROUND_S, ROUND_QUICK_S = 5, 5, 2
PACED_ROUNDS, PACED_S, PACED_QUICK_S = 3, 10, 3
WARM_S, WARM_QUICK_S = 5, 1
# After the other systems were measured, a system's connections and caches are warmed again.
WAKE = Slice("run", 16, 0.5, 60)
# A message whose end was lost is checked after a minute at most, so a slice waits for longer.
WITHIN_S = 100

Opening = Callable[[], AbstractAsyncContextManager[Peer]]


@dataclass(slots=True)
class Found:
    """The slices of each system, by callers at once and by rate."""

    runs: dict[tuple[str, int], list[Measured]] = field(default_factory=dict)
    paced: dict[tuple[str, int], list[Measured]] = field(default_factory=dict)
    lost: set[tuple[str, int]] = field(default_factory=set)


async def bench(stage: Stage) -> Report:
    """Measure all systems that this machine can run, in turn, every other round backwards."""
    report = Report("peers", "peers: half, end and delivery, beside RocketMQ and DTM")
    found = Found()
    async with opened(stage, report) as peers:
        for peer in peers:
            await _awake(report, peer, Slice("run", 16, stage.seconds(WARM_S, WARM_QUICK_S), WITHIN_S))
        with no_collections():
            for number in range(stage.seconds(ROUNDS)):
                await _runs(report, found, in_turn(peers, number), stage.seconds(ROUND_S, ROUND_QUICK_S))
            for number in range(stage.seconds(PACED_ROUNDS)):
                await _paced(report, found, in_turn(peers, number), stage.seconds(PACED_S, PACED_QUICK_S))
        for peer in peers:
            peer.resume()
    add_figures(report, found)
    hold_bars(report, found)
    return report


@asynccontextmanager
async def opened(stage: Stage, report: Report) -> AsyncIterator[list[Peer]]:
    """Start each system, and halt it; leave out those that cannot run here, with a line in the report."""
    openings: dict[str, Opening] = {
        DEFAULT_MQ: lambda: rocketmq(DEFAULT_MQ, stage.place / "rocketmq", {}),
        TUNED_MQ: lambda: rocketmq(TUNED_MQ, stage.place / "rocketmq-tuned", TUNED),
        DTM: lambda: dtm(DTM, stage.place / "dtm"),
    }
    async with AsyncExitStack() as stack:
        peers = list(await stack.enter_async_context(halfnote(stage)))
        for name, opening in openings.items():
            try:
                peers.append(await stack.enter_async_context(opening()))
                # A broker without work takes most of a core.
                peers[-1].halt()
            except MissingPartError as error:
                report.notes.append(f"{name}: skipped. {error}")
            except (BrokenSliceError, OSError) as error:
                report.break_off(f"{name}: {error}")
        yield peers


def in_turn(peers: Sequence[Peer], number: int) -> Sequence[Peer]:
    """Return the systems in the order of a round."""
    return peers if number % 2 == 0 else peers[::-1]


async def _runs(report: Report, found: Found, peers: Sequence[Peer], seconds: float) -> None:
    for at_once in AT_ONCE:
        for peer in peers:
            measured = await _awake(report, peer, Slice("run", at_once, seconds, WITHIN_S))
            if measured is not None:
                found.runs.setdefault((peer.name, at_once), []).append(measured)


async def _paced(report: Report, found: Found, peers: Sequence[Peer], seconds: float) -> None:
    for rate in RATES:
        for peer in peers:
            # Batches name no transactions, so the times of their messages are unknown.
            # On schedule, no caller waits for its end, and each sends its own requests.
            if peer.name in (BATCHES, AHEAD, BATCHING, BATCHING_BOTH) or (peer.name, rate) in found.lost:
                continue
            if any(name == peer.name and lost < rate for name, lost in found.lost):
                found.lost.add((peer.name, rate))
                continue
            measured = await _awake(report, peer, Slice("pace", rate, seconds, WITHIN_S))
            if measured is None or not measured.sent.held(seconds):
                # A system that cannot hold a rate has a backlog, whose length decides the times.
                found.lost.add((peer.name, rate))
            else:
                found.paced.setdefault((peer.name, rate), []).append(measured)


async def _awake(report: Report, peer: Peer, load: Slice) -> Measured | None:
    """Let a halted system run, measure one slice and halt it again."""
    peer.resume()
    try:
        await _measure(report, peer, WAKE, None)
        measured = await _measure(report, peer, load, f"{load.kind} {load.size}")
    finally:
        peer.halt()
    if measured is not None:
        print(f"  {peer.name}, {load.kind} {load.size}: {measured.sent.rate:,.0f}/s", flush=True)
    return measured


async def _measure(report: Report, peer: Peer, load: Slice, what: str | None) -> Measured | None:
    """Measure a slice. Report an unfinished one unless it was only to warm up."""
    try:
        measured = await peer.measure(load)
    except (BrokenSliceError, OSError, RuntimeError, psutil.Error) as error:
        if what is not None:
            report.break_off(f"{peer.name}, {what}: {error}")
        return None
    sent = measured.sent
    if what is not None and not sent.whole():
        report.notes.append(
            f"{peer.name}, {what}: {sent.delivered:,} of {sent.sent:,} delivered, {sent.failed:,} refused"
        )
    if what is not None and sent.repeated:
        report.notes.append(f"{peer.name}, {what}: {sent.repeated:,} messages came again")
    return measured


def add_figures(report: Report, found: Found) -> None:
    """Add medians with ranges: throughput and CPU time by callers at once, then the times by rate."""
    for (name, at_once), runs in sorted(found.runs.items(), key=lambda item: item[0][1]):
        what = f"{name}, {at_once} at once"
        _add(report, what, [run.sent.rate for run in runs], "transactions/s")
        _add(report, f"{what}, CPU of the servers", [run.service_us for run in runs], "µs each")
        if any(run.database_s for run in runs):
            _add(report, f"{what}, CPU of Postgres", [run.database_us for run in runs], "µs each")
        _add(report, f"{what}, CPU of clients and receivers", [run.client_us for run in runs], "µs each")
    for (name, rate), runs in sorted(found.paced.items(), key=lambda item: item[0][1]):
        for share in (0.5, 0.99):
            _add(report, f"{name}, {rate}/s, p{share * 100:.0f}", late_ms(runs, share), "ms")
    for name, rate in sorted(found.lost):
        report.notes.append(f"{name}: does not hold {rate}/s, so it has no times there")


def late_ms(runs: Sequence[Measured], share: float) -> list[float]:
    """Return a percentile of each slice's times from the commit to the delivery, in ms."""
    return [percentile([us / 1000 for us in run.sent.late_us], share) for run in runs]


def hold_bars(report: Report, found: Found) -> None:
    """Add the bars, against the better one of both RocketMQs in each round."""
    rates = {key: [run.sent.rate for run in runs] for key, runs in found.runs.items()}
    for at_once in AT_ONCE:
        best = better(rates, at_once, max)
        for ours, theirs, name, at_least in (
            (WEBHOOKS, best, "RocketMQ's", 1.0),
            (BATCHES, best, "RocketMQ's", 1.5),
            (AHEAD, best, "RocketMQ's", 1.0),
            (BATCHING, best, "RocketMQ's", 1.0),
            (BATCHING_BOTH, best, "RocketMQ's", 1.5),
            (WEBHOOKS, rates.get((DTM, at_once), []), "DTM's", 7.0),
        ):
            _hold_ratio(report, f"{ours}, {at_once} at once, against {name}", rates, (ours, at_once), theirs, at_least)
    for rate in RATES:
        for share in (0.5, 0.99):
            times = {key: late_ms(runs, share) for key, runs in found.paced.items() if key not in found.lost}
            _hold_time(report, f"p{share * 100:.0f} of commit to received at {rate}/s, ms", times, rate)
    if runs := found.runs.get((WEBHOOKS, AT_ONCE[-1])):
        what = f"of a delivered transaction, {AT_ONCE[-1]} at once, µs CPU"
        report.hold(f"service {what}", median(run.service_us for run in runs), at_most=230)
        report.hold(f"Postgres {what}", median(run.database_us for run in runs), at_most=100)


def better(values: Mapping[tuple[str, int], Sequence[float]], size: int, choose: Callable[..., float]) -> list[float]:
    """Return the better value of both RocketMQs in each round, or of the only one that was measured."""
    measured = [values[name, size] for name in ROCKETMQS if values.get((name, size))]
    return [choose(pair) for pair in zip(*measured, strict=False)]


def _hold_ratio(
    report: Report,
    claim: str,
    rates: Mapping[tuple[str, int], Sequence[float]],
    ours: tuple[str, int],
    theirs: Sequence[float],
    at_least: float,
) -> None:
    ratios = [one / other for one, other in zip(rates.get(ours, []), theirs, strict=False)]
    if ratios:
        report.hold(f"{claim} ({min(ratios):.2f} to {max(ratios):.2f} x)", median(ratios), at_least=at_least)


def _hold_time(report: Report, claim: str, times: Mapping[tuple[str, int], Sequence[float]], rate: int) -> None:
    ours, theirs = times.get((WEBHOOKS, rate)), better(times, rate, min)
    if theirs and not ours:
        report.break_off(f"Halfnote does not hold {rate}/s, and RocketMQ does")
    if ours and theirs:
        report.hold(f"{claim}, against RocketMQ's", median(ours), at_most=median(theirs))


def _add(report: Report, name: str, values: Sequence[float], unit: str) -> None:
    report.add(name, median(values), unit, between=(min(values), max(values)))
