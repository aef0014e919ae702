"""Latency of one caller, and at 500 requests per second, against single-row commits on the same Postgres."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from app.database.connection import Connection, connect
from bench.payload import end_body, half_body, request, transaction_ids
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, halfnote
from bench.statistic import median_ratio, percentile
from bench.wire import Wire, paced

RATE = 500
# The most requests at once at RATE. One starts every 2 ms, so this number allows for answers that take 64 ms.
CONNECTIONS = 32
ALONE_AT_A_TIME = 50
TABLE = "create table single (id uuid primary key, body bytea not null)"
INSERT = "insert into single values ($1::text::uuid, $2)"


@dataclass(frozen=True, slots=True)
class Callers:
    """Open connections of both kinds."""

    service: Service
    wires: list[Wire]
    connections: list[Connection]


async def bench(stage: Stage) -> Report:
    """Measure both sides in turn, in short slices."""
    report = Report("latency", "latency: one connection alone, and 500 requests a second")
    ours, rows = await stage.database("latency_ours"), await stage.empty_database("latency_rows")
    async with receiving() as receiver, halfnote(stage, ours, receiver) as service, calling(service, rows) as callers:
        with no_collections():
            await _alone(report, callers, stage.seconds(40, 6))
            await _at_rate(report, callers, stage.seconds(6, 2), stage.seconds(5))
    await stage.drop("latency_ours", "latency_rows")
    return report


async def _alone(report: Report, callers: Callers, turns: int) -> None:
    """Measure a whole transaction and two single-row commits in turn, each on one connection."""
    wire, connection, port = callers.wires[0], callers.connections[0], callers.service.port
    whole: list[float] = []
    commits: list[float] = []
    for _ in range(turns):
        ids = transaction_ids(ALONE_AT_A_TIME)
        requests = [(request("/half", half_body(id_), port), request("/end", end_body(id_), port)) for id_ in ids]
        for half, end in requests:
            started = perf_counter()
            await wire.ask(half)
            await wire.ask(end)
            whole.append(perf_counter() - started)
        more = transaction_ids(2 * ALONE_AT_A_TIME)
        for first, second in zip(more[::2], more[1::2], strict=True):
            started = perf_counter()
            await connection.execute(INSERT, first, half_body())
            await connection.execute(INSERT, second, half_body())
            commits.append(perf_counter() - started)
    report.add("two single-row commits, alone", median(commits) * 1000, "ms")
    ratio = median(whole) / median(commits)
    report.add("whole transaction, alone", median(whole) * 1000, "ms", ratio_to="two single-row commits, alone")
    report.hold("one connection alone: a transaction against two single-row commits", ratio, at_most=3.2)


async def _at_rate(report: Report, callers: Callers, turns: int, seconds: int) -> None:
    """Measure `/half` and a single-row commit at the same rate, in alternating slices."""
    port = callers.service.port
    wires, connections = list(callers.wires), list(callers.connections)
    free = asyncio.Semaphore(len(connections))
    halves: list[list[float]] = []
    commits: list[list[float]] = []
    for _ in range(turns):
        ids = transaction_ids(RATE * seconds)
        requests = [request("/half", half_body(id_), port) for id_ in ids]

        async def half(n: int, requests: list[bytes] = requests) -> None:
            # The connection that was used last: on both sides, warm connections are used first.
            wire = wires.pop() if wires else await Wire.to(port)
            if wire.closed:
                wire = await Wire.to(port)
            await wire.ask(requests[n])
            wires.append(wire)

        async def commit(n: int, ids: list[str] = ids) -> None:
            # If the disk stalls, all connections may be busy. The wait is part of the caller's latency.
            async with free:
                connection = connections.pop()
                await connection.execute(INSERT, ids[n], half_body())
                connections.append(connection)

        halves.append(await paced(RATE, seconds, half))
        commits.append(await paced(RATE, seconds, commit))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        theirs = [percentile(run, share) * 1000 for run in commits]
        ours = [percentile(run, share) * 1000 for run in halves]
        base = f"single-row commit at {RATE}/s, {name}"
        report.add(base, median(theirs), "ms")
        report.add(f"/half at {RATE}/s, {name}", median(ours), "ms", ratio_to=base, ratio=median_ratio(ours, theirs))
    report.hold(f"p99 of /half at {RATE}/s against a single-row commit's", median_ratio(ours, theirs), at_most=4)


@asynccontextmanager
async def calling(service: Service, rows: str) -> AsyncIterator[Callers]:
    """Open the connections of both kinds and make the table for single rows."""
    connections = [await connect(rows) for _ in range(CONNECTIONS)]
    wires = [await Wire.to(service.port) for _ in range(CONNECTIONS)]
    try:
        await connections[0].execute(TABLE)
        # Each connection prepares its statement now, before the measurement.
        for connection, id_ in zip(connections, transaction_ids(CONNECTIONS), strict=True):
            await connection.execute(INSERT, id_, b"")
        yield Callers(service, wires, connections)
    finally:
        for wire in wires:
            wire.close()
        for connection in connections:
            await connection.close()


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable this program's garbage collector during the measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
