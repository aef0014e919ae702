"""A process under too much load: idle connections, slow connections, too many requests at once, large bodies."""

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from time import perf_counter

from bench.payload import GROUP, half_body, request, transaction_ids
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, halfnote
from bench.statistic import percentile
from bench.wire import Wire, paced

IDLE, IDLE_QUICK = 10_000, 200
SLOW, SLOW_QUICK = 1_000, 50
# The pause before a slow client sends the next line of its request head.
TRICKLE_S = 0.5
HEAD = b"POST /half HTTP/1.1\r\nHost: 127.0.0.1\r\n"
RATE = 300
WIRES = 32
# More callers than the limit of requests in flight. Each sends its next request as soon as it has an answer.
CALLERS, TAKEN = 512, 64
LARGE, LARGE_CALLERS = 4 * 1024 * 1024, 100
# The bar, as a multiple of the latency without other connections. Only a service that hardly answers misses it.
MOST = 10
FILES = 512


async def bench(stage: Stage) -> Report:
    """Run each part in turn, on a new service."""
    report = Report("shedding", "shedding: one process in role all under too much load")
    async with receiving() as receiver:
        await _company(stage, receiver, report)
        await _overload(stage, receiver, report)
        await _large_bodies(stage, receiver, report)
    return report


async def _company(stage: Stage, receiver: Service, report: Report) -> None:
    """Measure `/half` at a steady rate: alone, beside idle connections, beside slow connections, and alone again."""
    idle, slow = (IDLE_QUICK, SLOW_QUICK) if stage.quick else (IDLE, SLOW)
    with files(idle + slow + FILES):
        dsn = await stage.database("shedding")
        # Idle connections must outlive the slice; otherwise the service closes them under load.
        env = {"HALFNOTE_REQUEST_TIMEOUT_S": "600"}
        async with halfnote(stage, dsn, receiver, env=env) as service:
            alone = await _steady(stage, service)
            report.add("resident alone", service.resident_mb(), "MB")
            async with idling(service.port, idle):
                beside_idle = await _steady(stage, service)
                report.add(f"resident beside {idle:,} idle connections", service.resident_mb(), "MB")
            async with trickling(service.port, slow):
                beside_slow = await _steady(stage, service)
            again = await _steady(stage, service)
        await stage.drop("shedding")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        base = f"/half at {RATE}/s, {name}"
        theirs = median([percentile(run, share) for run in (alone, again)])
        report.add(base, theirs * 1000, "ms")
        for company, run in ((f"{idle:,} idle connections", beside_idle), (f"{slow:,} slow ones", beside_slow)):
            report.add(f"beside {company}, {name}", percentile(run, share) * 1000, "ms", ratio_to=base)
            report.hold(f"{name} beside {company}", percentile(run, share) / theirs, at_most=MOST)


async def _steady(stage: Stage, service: Service) -> list[float]:
    wires = [await Wire.to(service.port) for _ in range(WIRES)]
    seconds = stage.seconds(10, 2)
    requests = [request("/half", half_body(id_), service.port) for id_ in transaction_ids(RATE * seconds)]

    async def half(n: int) -> None:
        wire = wires.pop() if wires else await Wire.to(service.port)
        await wire.ask(requests[n])
        wires.append(wire)

    found = await paced(RATE, seconds, half)
    for wire in wires:
        wire.close()
    return found


@asynccontextmanager
async def idling(port: int, count: int) -> AsyncIterator[None]:
    """Hold connections open: half of them send nothing, the others send an unfinished request head."""
    writers = []
    try:
        for number in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            if number % 2:
                writer.write(HEAD)
            writers.append(writer)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def trickling(port: int, count: int) -> AsyncIterator[None]:
    """Hold connections open that send one line of a request head now and then, without an end."""
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(count)]

    async def trickle() -> None:
        while True:
            for writer in writers:
                writer.write(b"x-a: b\r\n")
            await asyncio.sleep(TRICKLE_S)

    for writer in writers:
        writer.write(HEAD)
    sending = asyncio.create_task(trickle())
    try:
        yield
    finally:
        sending.cancel()
        for writer in writers:
            writer.transport.abort()


async def _overload(stage: Stage, receiver: Service, report: Report) -> None:
    """Measure the answers and their latency with as many callers as the limit, then with eight times as many."""
    dsn = await stage.database("shedding")
    async with halfnote(stage, dsn, receiver, env={"HALFNOTE_IN_FLIGHT_MAX": str(TAKEN)}) as service:
        seconds = stage.seconds(10, 1)
        for callers in (TAKEN, CALLERS):
            statuses, accepted, refused = await _hammer(service, callers, seconds)
            report.add(f"{callers} callers, stored", statuses[201] / seconds, "a second")
            report.add(f"{callers} callers, stored, p99", percentile(accepted, 0.99) * 1000, "ms")
            if refused:
                report.add(f"{callers} callers, refused", statuses[503] / seconds, "a second")
                report.add(f"{callers} callers, refused, p99", percentile(refused, 0.99) * 1000, "ms")
            others = statuses.total() - statuses[201] - statuses[503]
            report.hold(f"{callers} callers: answers but 201 and 503", others, at_most=0)
    await stage.drop("shedding")


async def _hammer(service: Service, callers: int, seconds: float) -> tuple[Counter[int], list[float], list[float]]:
    """Return the number of answers by status, and the latencies of stored and of refused requests, in seconds."""
    statuses: Counter[int] = Counter()
    accepted: list[float] = []
    refused: list[float] = []
    until = perf_counter() + seconds

    async def call() -> None:
        wire = await Wire.to(service.port)
        while perf_counter() < until:
            [id_] = transaction_ids(1)
            began = perf_counter()
            status = await wire.status(request("/half", half_body(id_), service.port))
            statuses[status] += 1
            (accepted if status == 201 else refused).append(perf_counter() - began)
            if status == 503:
                # An impatient caller repeats the request earlier than Retry-After says.
                await asyncio.sleep(0.1)
        wire.close()

    await asyncio.gather(*(call() for _ in range(callers)))
    return statuses, accepted, refused


async def _large_bodies(stage: Stage, receiver: Service, report: Report) -> None:
    """Measure the memory while many callers send the largest allowed bodies at once."""
    dsn = await stage.database("shedding")
    async with AsyncExitStack() as open_:
        service = await open_.enter_async_context(halfnote(stage, dsn, receiver))
        report.add("resident before large bodies", service.resident_mb(), "MB")
        highest, statuses = 0.0, Counter[int]()
        watching = True

        async def watch() -> None:
            nonlocal highest
            while watching:
                highest = max(highest, service.resident_mb())
                await asyncio.sleep(0.05)

        async def call() -> None:
            head, tail = f'{{"producer_group":"{GROUP}","messages":[{{"topic":"order","body":"', '"}]}'
            body = (head + "x" * (LARGE - len(head) - len(tail))).encode() + tail.encode()
            for _ in range(stage.seconds(5, 1)):
                wire = await Wire.to(service.port)
                with contextlib.suppress(ConnectionError):
                    statuses[await wire.status(request("/half", body, service.port))] += 1
                wire.close()

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(call() for _ in range(stage.seconds(LARGE_CALLERS, 8))))
        watching = False
        await watcher
    report.add("resident at most with large bodies", highest, "MB")
    report.add("large bodies stored", statuses[201], "requests")
    report.add("large bodies refused with 503", statuses[503], "requests")
    await stage.drop("shedding")


@contextlib.contextmanager
def files(needed: int) -> Iterator[None]:
    """Raise the limit of open files for this process and its children. Raises ValueError if the system refuses."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], needed), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
