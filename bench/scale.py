"""What more cores give: CPU time of a delivered transaction by part with 1, 2 and 4 API processes, and the serial part.

Only one flush at a time holds the offset lock, whatever the number of processes and cores. The time for which a flush
holds it is measured by the lock's own time, which each published message carries as `committed_at`.
"""

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from app.runtime import worker_state
from app.store.coordinator.ops import End, record_ends
from app.verdicts import Verdict
from bench.filling import fill_ours
from bench.idle import postgres_cpu_s
from bench.payload import GROUP, as_uuids, end_body, half_body, request, transaction_ids
from bench.report import Report
from bench.services import Service, receiving, serving
from bench.stage import IMMUNITY_S, Stage, connected, count_of, put, relay_busy
from bench.wire import Wire, paced

PROCESSES, PROCESSES_QUICK = (1, 2, 4), (1, 2)
ROUNDS = 3
# Callers at once for each API process: each sends a half, then its end, without a pause.
CALLERS = 32
SECONDS, SECONDS_QUICK = 10, 1
# Transactions a second of the paced rounds, in which flushes are small however many processes there are.
RATE = 300
# The time limit for the messages that are not delivered at the end of a round.
LAST_S = 120.0
# Ends of one flush, and the flushes that are measured of each size.
BATCHES = (1, 50, 500)
FLUSHES, FLUSHES_QUICK = 60, 10
# The cores for which the model is printed.
CORES = (2, 4, 8, 16, 32)
# The share of its cores that an installation should use at most: the rest is for bursts, vacuum and the nightly proof.
USED = 0.7


@dataclass(frozen=True, slots=True)
class Cost:
    """A round: transactions, their rate until the last answer, and CPU seconds by part until the last delivery."""

    transactions: int
    seconds: float
    api_s: float
    worker_s: float
    postgres_s: float

    @property
    def rate(self) -> float:
        """Committed transactions per second."""
        return self.transactions / self.seconds

    def us(self, part_s: float) -> float:
        """Return µs of a transaction."""
        return part_s / self.transactions * 1e6

    @property
    def all_us(self) -> float:
        """CPU µs of a transaction, all parts together."""
        return self.us(self.api_s + self.worker_s + self.postgres_s)


async def bench(stage: Stage) -> Report:
    """Measure the numbers of processes in turn, then the serial part, and print the model of both."""
    report = Report("scale", "scale: CPU time of a delivered transaction by part, and the part that no core shortens")
    numbers = PROCESSES_QUICK if stage.quick else PROCESSES
    full: dict[int, list[Cost]] = {number: [] for number in numbers}
    at_rates: dict[int, list[Cost]] = {number: [] for number in numbers}
    async with receiving() as receiver:
        for _ in range(stage.seconds(ROUNDS)):
            for number in numbers:
                at_full, at_rate = await _round(stage, receiver, number)
                full[number].append(at_full)
                at_rates[number].append(at_rate)
    for load, found in (("", full), (f" at {RATE}/s", at_rates)):
        for number, costs in found.items():
            _add(report, f"{number} API process{'es' if number > 1 else ''}{load}", costs)
        one, most = found[numbers[0]], found[numbers[-1]]
        more = median(cost.all_us for cost in most) / median(cost.all_us for cost in one)
        report.hold(f"CPU of a transaction{load}, {numbers[-1]} API processes against one", more, at_most=1.1)
    serial_us = await _serial(stage, report)
    report.notes += model(median(cost.all_us for cost in full[numbers[0]]), serial_us)
    return report


def _add(report: Report, of: str, costs: Sequence[Cost]) -> None:
    report.add(of, median(cost.rate for cost in costs), "transactions/s")
    report.add(f"{of}, API", median(cost.us(cost.api_s) for cost in costs), "µs CPU each")
    report.add(f"{of}, worker", median(cost.us(cost.worker_s) for cost in costs), "µs CPU each")
    report.add(f"{of}, Postgres", median(cost.us(cost.postgres_s) for cost in costs), "µs CPU each")


def model(cpu_us: float, serial_us: float) -> list[str]:
    """Return lines that say what a number of cores carries, from CPU µs of a transaction and its serial µs."""
    ceiling = 1e6 / serial_us
    lines = [
        f"model: {USED:.0%} of the cores / {cpu_us:.0f} µs, at most {ceiling:,.0f}/s (1 s / {serial_us:.1f} µs serial)"
    ]
    for cores in CORES:
        rate = cores * USED * 1e6 / cpu_us
        limit = "CPU" if rate < ceiling else "the offset lock"
        lines.append(f"model: {cores:>2} cores: {min(rate, ceiling):>7,.0f} transactions/s, limited by {limit}")
    return lines


async def _round(stage: Stage, receiver: Service, number: int) -> tuple[Cost, Cost]:
    """Load `number` API processes beside one worker: each caller as fast as it is answered, then at RATE."""
    name = f"scale_{number}"
    dsn = await stage.database(name)
    try:
        async with AsyncExitStack() as stack:
            # As `halfnote serve` runs them: the API processes wake the worker by a socket beside this file.
            beside = tempfile.mkdtemp(dir=stage.place)
            of_all = {"HALFNOTE_DATABASE_URL": dsn, worker_state.VARIABLE: f"{beside}/worker.json"}
            api, worker = [
                await stack.enter_async_context(
                    serving("app.main:app", stage.place, of_all | {"HALFNOTE_ROLE": role}, workers=workers)
                )
                for role, workers in (("api", number), ("worker", 1))
            ]
            group = {"check_urls": [f"{receiver.url}/check"], "immunity_s": IMMUNITY_S}
            await put(api, f"/producer-groups/{GROUP}", group)
            await relay_busy(api, receiver, busy=True)
            delivered = await count_of(receiver)
            warm, _ = await _load(api, number, 1.0)
            await _delivered(receiver, delivered + warm)
            services = api, worker, receiver
            at_full = await _measured(stage, services, lambda s: _load(api, number, s))
            return at_full, await _measured(stage, services, lambda s: _paced(api, number, s))
    finally:
        await stage.drop(name)


async def _measured(
    stage: Stage, services: tuple[Service, Service, Service], load: Callable[[float], Awaitable[tuple[int, float]]]
) -> Cost:
    """Return the cost of a load, until its last message is delivered."""
    api, worker, receiver = services
    delivered = await count_of(receiver)
    before = api.cpu_s(), worker.cpu_s(), postgres_cpu_s(stage.server)
    done, seconds = await load(stage.seconds(SECONDS, SECONDS_QUICK))
    await _delivered(receiver, delivered + done)
    after = api.cpu_s(), worker.cpu_s(), postgres_cpu_s(stage.server)
    api_s, worker_s, postgres_s = (late - early for early, late in zip(before, after, strict=True))
    return Cost(done, seconds, api_s, worker_s, postgres_s)


async def _delivered(receiver: Service, count: int) -> None:
    async with asyncio.timeout(LAST_S):
        while await count_of(receiver) < count:
            await asyncio.sleep(0.05)


async def _load(api: Service, number: int, seconds: float) -> tuple[int, float]:
    """Send for `seconds`; return the transactions, and the seconds until the last answer."""
    began = time.perf_counter()
    until, wires = began + seconds, [await Wire.to(api.port) for _ in range(CALLERS * number)]
    done = sum(await asyncio.gather(*(_call(wire, api.port, until) for wire in wires)))
    taken_s = time.perf_counter() - began
    for wire in wires:
        wire.close()
    return done, taken_s


async def _paced(api: Service, number: int, seconds: float) -> tuple[int, float]:
    """Send at RATE, each transaction on the connection that rested longest, so that all processes get some."""
    port, wires = api.port, deque([await Wire.to(api.port) for _ in range(CALLERS * number)])

    async def act(n: int) -> None:
        wire = wires.popleft() if wires else await Wire.to(port)
        await _transaction(wire, port)
        wires.append(wire)

    began = time.perf_counter()
    done = len(await paced(RATE, seconds, act))
    taken_s = time.perf_counter() - began
    for wire in wires:
        wire.close()
    return done, taken_s


async def _call(wire: Wire, port: int, until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await _transaction(wire, port)
        done += 1
    return done


async def _transaction(wire: Wire, port: int) -> None:
    [id_] = transaction_ids(1)
    await wire.ask(request("/half", half_body(id_), port))
    await wire.ask(request("/end", end_body(id_), port))


async def _serial(stage: Stage, report: Report) -> float:
    """Measure for how long flushes of each size hold the offset lock; return the µs of an end in the largest."""
    dsn, flushes = await stage.database("scale_serial"), stage.seconds(FLUSHES, FLUSHES_QUICK)
    held_us = 0.0
    for size in BATCHES:
        held_us = median(await _held_us(dsn, size, flushes)) / size
        report.add(f"offset lock, flushes of {size}", held_us, "µs an end")
        report.add(f"wholly serial, flushes of {size}", 1e6 / held_us, "ends/s")
    await stage.drop("scale_serial")
    return held_us


async def _held_us(dsn: str, size: int, flushes: int) -> list[float]:
    """Return the µs from the time of the lock to the answer, for each flush of `size` ends.

    The machine's clock is the server's, because the benchmark starts the server.
    """
    ids = transaction_ids(size * flushes)
    await fill_ours(dsn, ids)
    held = []
    async with connected(dsn) as connection:
        for at in range(0, len(ids), size):
            flush = as_uuids(ids[at : at + size])
            ends = [End(id_, GROUP, Verdict.COMMIT) for id_ in flush]
            recorded = await record_ends(connection, ends, datetime.now(UTC))
            answered = time.time()
            assert len(recorded) == size
            locked = await connection.fetchval(
                "select extract(epoch from max(committed_at))::float8 from outbox where transaction_id = any($1)", flush
            )
            held.append((answered - locked) * 1e6)
    return held
