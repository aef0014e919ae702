"""What a service costs that has little to do: CPU time without any request, and at 100 transactions per second."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

from app.database.connection import Connection
from app.embedded_postgres import EmbeddedPostgres
from bench.latency import INSERT, TABLE, no_collections
from bench.payload import end_body, half_body, request, transaction_ids
from bench.report import Report
from bench.services import Service, cpu_s, receiving, serving
from bench.stage import Stage, connected, count_of, halfnote, put, relay_busy
from bench.wire import Wire, paced

SUBSCRIPTIONS, SUBSCRIPTIONS_QUICK = 200, 10
IDLE_S, RATE, LOAD_S = 30, 100, 20
CONNECTIONS = 8
# The relay takes the new leases, and the first statements are planned, before the measurement.
SETTLED_S = 5
# The time limit for the last messages.
LAST_S = 10.0
# A statement outside of a transaction is one of its own.
TRANSACTIONS = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


@dataclass(frozen=True, slots=True)
class Used:
    """What a span of time used: seconds, CPU seconds of the service and of Postgres, database transactions."""

    seconds: float
    service_s: float
    postgres_s: float
    transactions: int


async def bench(stage: Stage) -> Report:
    """Measure an idle service with many subscriptions, another one with one subscription and a low load, and the least
    that the machine takes at that load."""
    report = Report("idle", f"idle: {SUBSCRIPTIONS} subscriptions without a message, and {RATE} transactions a second")
    async with receiving() as receiver:
        await _idle(stage, report, receiver)
        await _low_load(stage, report, receiver)
    await _least(stage, report)
    return report


async def _idle(stage: Stage, report: Report, receiver: Service) -> None:
    dsn = await stage.database("idle")
    async with halfnote(stage, dsn, receiver) as service, connected(dsn) as connection:
        destination = {"type": "webhook", "url": f"{receiver.url}/hook"}
        for number in range(stage.seconds(SUBSCRIPTIONS, SUBSCRIPTIONS_QUICK)):
            body = {"topics": [f"idle.{number}"], "destination": destination}
            await put(service, f"/subscriptions/idle-{number}", body)
        await asyncio.sleep(SETTLED_S)
        used = await _measured(stage.server, service, connection, lambda: asyncio.sleep(stage.seconds(IDLE_S)))
    await stage.drop("idle")
    report.add("idle, service", 100 * used.service_s / used.seconds, "% of a core")
    report.add("idle, Postgres", 100 * used.postgres_s / used.seconds, "% of a core")
    report.add("idle, database transactions", used.transactions / used.seconds, "/s")
    share = 100 * (used.service_s + used.postgres_s) / used.seconds
    report.hold(f"an idle service with {SUBSCRIPTIONS} subscriptions, with Postgres, % of a core", share, at_most=1.5)


async def _low_load(stage: Stage, report: Report, receiver: Service) -> None:
    dsn, seconds = await stage.database("low_load"), stage.seconds(LOAD_S)
    async with halfnote(stage, dsn, receiver) as service, connected(dsn) as connection:
        await relay_busy(service, receiver, busy=True)
        await _warm_up(service, receiver)
        with no_collections():
            used = await _measured(stage.server, service, connection, lambda: _load(service, receiver, seconds))
    await stage.drop("low_load")
    done = RATE * seconds
    ours, theirs = 1000 * used.service_s / done, 1000 * used.postgres_s / done
    report.add(f"{RATE} delivered transactions/s, service", ours, "ms CPU each")
    report.add(f"{RATE} delivered transactions/s, Postgres", theirs, "ms CPU each")
    report.add(f"{RATE} delivered transactions/s, database transactions", used.transactions / done, "each")
    report.hold(f"service, a transaction at {RATE}/s, ms CPU", ours, at_most=1.0)
    report.hold(f"Postgres, a transaction at {RATE}/s, ms CPU", theirs, at_most=0.8)


async def _least(stage: Stage, report: Report) -> None:
    """Measure, at the same rate, two requests that do nothing, and two single-row commits, each with a transaction."""
    dsn, seconds = await stage.empty_database("least"), stage.seconds(LOAD_S)
    ids = iter(transaction_ids(2 * RATE * (SETTLED_S + seconds)))
    async with connected(dsn) as connection, serving("bench.rivals:app", stage.place, {"BENCH_DSN": dsn}) as rivals:
        await connection.execute(TABLE)
        wire, nothing = await Wire.to(rivals.port), request("/noop", half_body(), rivals.port)
        # One connection commits all of them, one after another: the least that Postgres can take.
        free = asyncio.Lock()

        async def act(n: int) -> None:
            async with free:
                for _ in range(2):
                    await wire.ask(nothing)
                    await connection.execute(INSERT, next(ids), half_body())

        await paced(RATE, SETTLED_S, act)
        async with connected(dsn) as watching:
            used = await _measured(stage.server, rivals, watching, lambda: paced(RATE, seconds, act))
        wire.close()
    await stage.drop("least")
    done, base = RATE * seconds, f"{RATE} delivered transactions/s"
    for what, spent, part in (
        ("two requests that do nothing", used.service_s, "service"),
        ("two single-row commits", used.postgres_s, "Postgres"),
    ):
        report.add(f"{what} at {RATE}/s, {part}", 1000 * spent / done, "ms CPU each", ratio_to=f"{base}, {part}")


async def _warm_up(service: Service, receiver: Service) -> None:
    """Load until the relay delivers the topic, which it does within seconds, and then until its plans are made."""
    async with asyncio.timeout(LAST_S):
        while not await count_of(receiver):
            await _send(service, 0.1)
            await asyncio.sleep(0.5)
    await _load(service, receiver, SETTLED_S)


async def _load(service: Service, receiver: Service, seconds: int) -> None:
    """Send whole transactions at RATE, and wait until each is delivered. Raises TimeoutError if one is not."""
    before = await count_of(receiver)
    await _send(service, seconds)
    async with asyncio.timeout(LAST_S):
        while await count_of(receiver) < before + RATE * seconds:
            await asyncio.sleep(0.05)


async def _send(service: Service, seconds: float) -> None:
    """Send whole transactions at RATE."""
    ids = transaction_ids(int(RATE * seconds))
    port, wires = service.port, [await Wire.to(service.port) for _ in range(CONNECTIONS)]
    requests = [(request("/half", half_body(id_), port), request("/end", end_body(id_), port)) for id_ in ids]

    async def act(n: int) -> None:
        wire = wires.pop() if wires else await Wire.to(port)
        half, end = requests[n]
        await wire.ask(half)
        await wire.ask(end)
        wires.append(wire)

    await paced(RATE, seconds, act)
    for wire in wires:
        wire.close()


async def _measured(
    server: EmbeddedPostgres, service: Service, connection: Connection, act: Callable[[], Awaitable[object]]
) -> Used:
    loop = asyncio.get_running_loop()
    transactions, began_s = await connection.fetchval(TRANSACTIONS), loop.time()
    ours, theirs = service.cpu_s(), postgres_cpu_s(server)
    await act()
    ours, theirs = service.cpu_s() - ours, postgres_cpu_s(server) - theirs
    seconds = loop.time() - began_s
    # A session reports its counts within a second.
    await asyncio.sleep(1)
    return Used(seconds, ours, theirs, await connection.fetchval(TRANSACTIONS) - transactions)


def postgres_cpu_s(server: EmbeddedPostgres) -> float:
    """Return the CPU seconds so far of the server's processes, those that ended included."""
    postmaster = psutil.Process(server.pid)
    ended = postmaster.cpu_times()
    total = cpu_s(postmaster) + float(ended.children_user + ended.children_system)
    for process in postmaster.children(recursive=True):
        try:
            total += cpu_s(process)
        except psutil.NoSuchProcess:
            continue
    return total
