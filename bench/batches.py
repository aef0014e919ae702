"""Transactions for each CPU second: a request each over 64 connections, and 500 in a request over 4 connections."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from bench.filling import fill_ours
from bench.payload import end_body, half_body, request, transaction_ids
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, backend_cpu_s, connected, halfnote
from bench.statistic import median_ratio
from bench.wrk import BrokenRunError, load

CONNECTIONS = 4
SIZES, SIZES_QUICK = (500, 100, 10), (500,)
AT_LEAST = 4.0
SINGLE = "a request each"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: transactions (half and end) per second, and CPU µs of the API and of Postgres for each."""

    rate: float
    api_us: float
    postgres_us: float

    @property
    def per_cpu_s(self) -> float:
        """Transactions for each CPU second of both."""
        return 1e6 / (self.api_us + self.postgres_us)


async def bench(stage: Stage) -> Report:
    """Run all forms in turn, several times, and compare neighboring runs."""
    report = Report("batches", "batches: half and end, one API process, 300-byte bodies")
    dsn = await stage.database("batches")
    found: dict[str, list[Measured]] = defaultdict(list)
    sizes = SIZES_QUICK if stage.quick else SIZES
    async with receiving() as receiver, halfnote(stage, dsn, receiver) as service:
        for _ in range(stage.seconds(5)):
            found[SINGLE].append(await _single(stage, service, dsn))
            for size in sizes:
                found[_name(size)].append(await _together(stage, service, dsn, size))
    for name, runs in found.items():
        report.add(name, median(run.rate for run in runs), "transactions/s")
        report.add(f"CPU of the API, {name}", median(run.api_us for run in runs), "µs/transaction")
        report.add(f"CPU of Postgres, {name}", median(run.postgres_us for run in runs), "µs/transaction")
    single = [run.per_cpu_s for run in found[SINGLE]]
    for size in sizes:
        ratio = median_ratio([run.per_cpu_s for run in found[_name(size)]], single)
        report.add(f"per CPU second, {_name(size)}", ratio, f"x {SINGLE}")
    most = median_ratio([run.per_cpu_s for run in found[_name(500)]], single)
    report.hold("transactions for each CPU second, 500 in a request", most, at_least=AT_LEAST)
    await stage.drop("batches")
    return report


def _name(size: int) -> str:
    return f"{size} in a request"


async def _single(stage: Stage, service: Service, dsn: str) -> Measured:
    async with connected(dsn) as connection:
        before = await backend_cpu_s(connection, "batches")
        done = await load(stage.place, service, "whole", stage.seconds(5), fill=partial(fill_ours, dsn))
        spent = _difference(before, await backend_cpu_s(connection, "batches"))
    transactions = done.requests / 2
    return Measured(done.rate / 2, done.cpu_us * 2, spent / transactions * 1e6)


async def _together(stage: Stage, service: Service, dsn: str, size: int) -> Measured:
    """Send halves and then their ends, on each connection one request after another."""
    async with connected(dsn) as connection:
        before, cpu_s, began = await backend_cpu_s(connection, "batches"), service.cpu_s(), time.perf_counter()
        until = began + stage.seconds(5)
        counts = await asyncio.gather(*(_caller(service.port, size, until) for _ in range(CONNECTIONS)))
        seconds, cpu_s = time.perf_counter() - began, service.cpu_s() - cpu_s
        spent = _difference(before, await backend_cpu_s(connection, "batches"))
    transactions = sum(counts)
    return Measured(transactions / seconds, cpu_s / transactions * 1e6, spent / transactions * 1e6)


async def _caller(port: int, size: int, until: float) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    done = 0
    try:
        while time.perf_counter() < until:
            ids = transaction_ids(size)
            for path, field, body, status in (("/halves", "halves", half_body, 201), ("/ends", "ends", end_body, 200)):
                writer.write(request(path, _list(field, [body(one) for one in ids]), port))
                answer = await _body(reader)
                if answer.count(b'{"status":%d,' % status) != size:
                    raise BrokenRunError(f"{path}: {answer[:500].decode()}")
            done += size
    finally:
        writer.close()
    return done


def _list(field: str, bodies: Sequence[bytes]) -> bytes:
    return b'{"%b":[%b]}' % (field.encode(), b",".join(bodies))


async def _body(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


def _difference(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(spent - before.get(pid, 0.0) for pid, spent in after.items())
