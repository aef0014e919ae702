"""Consumers that claim: a backlog, messages as they are committed, and what claims that wait cost."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import msgspec

from bench.arrivals import compiled
from bench.filling import fill_committed, fill_ours
from bench.idle import postgres_cpu_s
from bench.payload import TOPIC, request
from bench.peers.claims import CLAIMS, claiming
from bench.peers.parts import MissingPartError
from bench.peers.rocketmq import rocketmq
from bench.peers.slices import Slice
from bench.receiver import END_OF_HEAD, length_of
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, connected, halfnote, put
from bench.wrk import load

CONSUMERS, AT_MOST = 4, 100
BACKLOG, BACKLOG_QUICK = 120_000, 10_000
ROUNDS = 3
LOAD_S = 10
WAITING, WAITING_QUICK, WAIT_S, LOOKED_S = 1000, 100, 30, 20
# The most seconds until the last message of a run is acknowledged.
LAST_S = 60.0
FOR_BACKLOG = "bench.pull"
# The time that a service has to give back what its consumers left, before it is halted. Postgres ends a connection that
# is silent inside a database transaction for 10 s, and the next claim would fail.
BEFORE_HALT_S = 1
# Beside RocketMQ: rounds, their length, and how long the last messages may take.
ROCKETMQ, PRODUCERS = "RocketMQ 5.5.0, SYNC_FLUSH", 64
PEER_ROUNDS, PEER_S, PEER_QUICK_S, WITHIN_S = 5, 10, 2, 60


class Claimed(msgspec.Struct):
    """A message of a claim."""

    handle: str


class Claim(msgspec.Struct):
    """The answer to a claim."""

    messages: list[Claimed]


_claim = msgspec.json.Decoder(Claim).decode
_encode = msgspec.json.encode


class Caller:
    """A keep-alive connection that reads whole answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> "Caller":
        """Connect to a port of 127.0.0.1."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))

    async def ask(self, asked: bytes) -> bytes:
        """Send a request; return the body of its answer. Raises RuntimeError unless the status is 200."""
        self._writer.write(asked)
        head = await self._reader.readuntil(END_OF_HEAD)
        body = await self._reader.readexactly(length_of(head))
        if head[9:12] != b"200":
            raise RuntimeError(f"answered {(head + body)[:500].decode()}")
        return body

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


@dataclass(slots=True)
class Consumed:
    """What consumers have acknowledged, and when the last of it."""

    messages: int = 0
    last_at: float = 0.0


async def bench(stage: Stage) -> Report:
    """Measure each row on a database of its own."""
    report = Report("pull", f"pull: {CONSUMERS} consumers, claims of {AT_MOST}, one process")
    async with receiving() as receiver:
        await _backlog(stage, report, receiver)
        await _as_committed(stage, report, receiver)
        await _waiting(stage, report, receiver)
        await _beside_rocketmq(stage, report, receiver)
    return report


async def _backlog(stage: Stage, report: Report, receiver: Service) -> None:
    """Claim and acknowledge a backlog, without and with the order of keys, in turn."""
    count, dsn = BACKLOG_QUICK if stage.quick else BACKLOG, await stage.database("pull_backlog")
    rates: dict[str, list[float]] = {"none": [], "key": []}
    async with halfnote(stage, dsn, receiver) as service:
        await fill_committed(dsn, FOR_BACKLOG, count)
        async with connected(dsn) as connection:
            # The state of the tables as if the messages had arrived one after the other.
            await connection.execute("vacuum (analyze)", timeout=120)
        for n in range(1 if stage.quick else ROUNDS):
            for ordered, found in rates.items():
                name = f"backlog-{ordered}-{n}"
                await _subscribe(service, name, FOR_BACKLOG, ordered=ordered, start="earliest")
                found.append(await _drain(service, name, count))
    await stage.drop("pull_backlog")
    plain, in_order = f"backlog of {count:,}", f"backlog of {count:,}, ordered: key"
    report.add(plain, median(rates["none"]), "messages/s", between=(min(rates["none"]), max(rates["none"])))
    report.add(
        in_order, median(rates["key"]), "messages/s", ratio_to=plain, between=(min(rates["key"]), max(rates["key"]))
    )
    report.hold(f"claims of {AT_MOST} from a backlog, messages/s", median(rates["none"]), at_least=20_000)


async def _drain(service: Service, name: str, count: int) -> float:
    consumed, began = Consumed(), time.perf_counter()
    await _with_consumers(service, name, consumed, lambda: _until(consumed, count))
    return count / (consumed.last_at - began)


async def _as_committed(stage: Stage, report: Report, receiver: Service) -> None:
    """Post halves and ends over 64 connections while consumers claim and acknowledge what is committed."""
    dsn, seconds = await stage.database("pull_whole"), stage.seconds(LOAD_S)
    rates, alone = [], []
    async with halfnote(stage, dsn, receiver) as service:
        for n in range(1 if stage.quick else ROUNDS):
            done = await load(stage.place, service, "whole", seconds, fill=partial(fill_ours, dsn))
            alone.append(done.rate / 2)
            name = f"whole-{n}"
            await _subscribe(service, name, TOPIC)
            rates.append(await _consumed_while_loaded(stage, service, dsn, name, seconds))
            # The next run's messages are for the next subscription alone.
            await put(service, f"/subscriptions/{name}", {"topics": ["bench.over"], "destination": {"type": "pull"}})
    await stage.drop("pull_whole")
    base = "half and end, 64 connections, no consumer"
    report.add(base, median(alone), "transactions/s")
    report.add("half, end, claim and acknowledge", median(rates), "messages/s", ratio_to=base)


async def _consumed_while_loaded(stage: Stage, service: Service, dsn: str, name: str, seconds: int) -> float:
    consumed, began = Consumed(), time.perf_counter()

    async def work() -> None:
        async with connected(dsn) as connection:
            before = await connection.fetchval("select count(*) from outbox")
            await load(stage.place, service, "whole", seconds, fill=partial(fill_ours, dsn))
            published = await connection.fetchval("select count(*) from outbox") - before
        await _until(consumed, published)

    await _with_consumers(service, name, consumed, work)
    return consumed.messages / (consumed.last_at - began)


async def _beside_rocketmq(stage: Stage, report: Report, receiver: Service) -> None:
    """Post halves and ends over 64 connections, claim and acknowledge; RocketMQ with its own client in turn."""
    seconds = stage.seconds(PEER_S, PEER_QUICK_S)
    dsn, program = await stage.database("pull_peers"), await compiled("callers", stage.place)
    rates: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(halfnote(stage, dsn, receiver))
        await _subscribe(service, "peers", TOPIC)
        consume = partial(_consumed_of, service, "peers")
        peers = [await stack.enter_async_context(claiming(stage, str(program), service, consume))]
        peers[0].halt()
        try:
            theirs = rocketmq(ROCKETMQ, stage.place / "rocketmq-pull", {}, consumers=CONSUMERS)
            peers.append(await stack.enter_async_context(theirs))
            peers[1].halt()
        except MissingPartError as error:
            report.notes.append(f"{ROCKETMQ}: skipped. {error}")
        for number in range(1 + stage.seconds(PEER_ROUNDS)):
            for peer in peers if number % 2 else peers[::-1]:
                peer.resume()
                try:
                    measured = await peer.measure(Slice("run", PRODUCERS, seconds, WITHIN_S))
                finally:
                    await asyncio.sleep(BEFORE_HALT_S)
                    peer.halt()
                # The first round warms up.
                if number:
                    rates.setdefault(peer.name, []).append(measured.sent.rate)
                if not measured.sent.whole():
                    report.notes.append(f"{peer.name}: {measured.sent.delivered:,} of {measured.sent.sent:,} came")
        for peer in peers:
            peer.resume()
    await stage.drop("pull_peers")
    for name, found in rates.items():
        what = f"{name}: half, end, claim and acknowledge"
        report.add(what, median(found), "transactions/s", between=(min(found), max(found)))
    if ROCKETMQ in rates:
        ratios = [ours / theirs for ours, theirs in zip(rates[CLAIMS], rates[ROCKETMQ], strict=True)]
        report.hold(f"against RocketMQ's client ({min(ratios):.2f} to {max(ratios):.2f} x)", median(ratios), at_least=1)


async def _consumed_of(service: Service, name: str, committed: Callable[[], Awaitable[int]]) -> tuple[int, int, float]:
    """Let consumers claim and acknowledge what is committed meanwhile."""
    consumed, began, sent = Consumed(), time.perf_counter(), 0

    async def work() -> None:
        nonlocal sent
        sent = await committed()
        await _until(consumed, sent)

    await _with_consumers(service, name, consumed, work)
    return sent, consumed.messages, consumed.last_at - began


async def _waiting(stage: Stage, report: Report, receiver: Service) -> None:
    """Let many claims wait on a service without other work; compare with the same service without them."""
    count = WAITING_QUICK if stage.quick else WAITING
    dsn, looked_s = await stage.database("pull_waiting"), stage.seconds(LOOKED_S, 2)
    async with halfnote(stage, dsn, receiver) as service:
        await _subscribe(service, "waiting", FOR_BACKLOG)
        await asyncio.sleep(stage.seconds(5))
        without = await _share(stage, service, looked_s)
        claim = request("/subscriptions/waiting/claim", _encode({"max": 10, "wait_s": float(WAIT_S)}), service.port)
        callers = [await Caller.to(service.port) for _ in range(count)]
        waiting = [asyncio.create_task(caller.ask(claim)) for caller in callers]
        await asyncio.sleep(stage.seconds(3))
        with_them = await _share(stage, service, looked_s)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for caller in callers:
            caller.close()
    await stage.drop("pull_waiting")
    report.add("service and Postgres, no claim waits", without, "% of a core")
    report.add(f"service and Postgres, {count:,} claims wait", with_them, "% of a core")
    report.hold(f"{count:,} claims that wait, % of a core", with_them - without, at_most=5)


async def _share(stage: Stage, service: Service, seconds: int) -> float:
    """Return the CPU that the service and Postgres use, in percent of a core."""
    before, began = service.cpu_s() + postgres_cpu_s(stage.server), time.perf_counter()
    await asyncio.sleep(seconds)
    spent = service.cpu_s() + postgres_cpu_s(stage.server) - before
    return 100 * spent / (time.perf_counter() - began)


async def _subscribe(service: Service, name: str, topic: str, **fields: str) -> None:
    await put(service, f"/subscriptions/{name}", {"topics": [topic], "destination": {"type": "pull"}, **fields})


async def _until(consumed: Consumed, count: int) -> None:
    """Wait until so many messages are acknowledged. Raises TimeoutError if no more come."""
    while consumed.messages < count:
        before = consumed.messages
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while consumed.messages == before:
                    await asyncio.sleep(0.02)
        if consumed.messages == before:
            raise TimeoutError(f"{count - before} of {count} messages were not acknowledged")


async def _with_consumers(service: Service, name: str, consumed: Consumed, work: Callable[[], Awaitable[None]]) -> None:
    consumers = [asyncio.create_task(_consume(service, name, consumed)) for _ in range(CONSUMERS)]
    working = asyncio.ensure_future(work())
    try:
        await asyncio.wait([working, *consumers], return_when=asyncio.FIRST_COMPLETED)
        # A consumer ends only by an error.
        for consumer in consumers:
            if consumer.done():
                consumer.result()
        await working
    finally:
        for task in (working, *consumers):
            task.cancel()
        await asyncio.gather(working, *consumers, return_exceptions=True)


async def _consume(service: Service, name: str, consumed: Consumed) -> None:
    """Claim, and acknowledge all of a claim in one request."""
    caller = await Caller.to(service.port)
    wanted = _encode({"max": AT_MOST, "invisible_s": 60.0, "wait_s": 5.0})
    claim = request(f"/subscriptions/{name}/claim", wanted, service.port)
    try:
        while True:
            handles = [one.handle for one in _claim(await caller.ask(claim)).messages]
            if not handles:
                continue
            body = _encode({"handles": handles})
            answer = await caller.ask(request(f"/subscriptions/{name}/ack", body, service.port))
            if answer.count(b'"status":200') != len(handles):
                raise RuntimeError(f"an acknowledgement failed: {answer[:500].decode()}")
            consumed.messages += len(handles)
            consumed.last_at = time.perf_counter()
    finally:
        caller.close()
