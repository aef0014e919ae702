"""Halfnote beside the others: an API process and a worker, with a topic for single webhooks and one for batches.

`halfnote serve` runs the same two processes on two cores.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from itertools import count

import httpx

from app.runtime import worker_state
from bench.arrivals import Arrival, noting, now_s, take
from bench.idle import postgres_cpu_s
from bench.payload import GROUP, TOPIC, end_body, half_body, template, transaction_ids
from bench.peers.slices import BrokenSliceError, Peer, Sent, Slice
from bench.services import Service, serving
from bench.stage import IMMUNITY_S, Stage, put
from bench.wire import Wire, paced

WEBHOOKS, BATCHES = "Halfnote, webhooks", "Halfnote, batches"
IN_FLIGHT = 64
BATCH = 100
# As long as TOPIC, so that the requests of both are equally long.
BATCH_TOPIC = "batch"
PACED_CONNECTIONS = 64
# The most transactions per second for which ids are made.
IDS_A_SECOND = 20_000
LOOK_EVERY_S = 0.02
AFTER_S = 0.2


@asynccontextmanager
async def halfnote(stage: Stage) -> AsyncIterator[tuple[Peer, Peer]]:
    """Run Halfnote; yield it twice, for webhooks one by one and for batches."""
    dsn = await stage.database("peers")
    # As `halfnote serve` runs them: the API process wakes the worker by a socket beside this file.
    env = {"HALFNOTE_DATABASE_URL": dsn, worker_state.VARIABLE: str(stage.place / "worker.json")}
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(noting(stage.place))
        service, worker = [
            await stack.enter_async_context(serving("app.main:app", stage.place, env | {"HALFNOTE_ROLE": role}))
            for role in ("api", "worker")
        ]
        group = {"check_urls": [f"{receiver.url}/check"], "immunity_s": IMMUNITY_S}
        await put(service, f"/producer-groups/{GROUP}", group)
        webhook = {"type": "webhook", "url": f"{receiver.url}/hook/1"}
        batch = {"type": "webhook", "url": f"{receiver.url}/batch/2", "mode": "batch", "batch_max": BATCH}
        for topic, destination in ((TOPIC, webhook), (BATCH_TOPIC, batch)):
            body = {"topics": [topic], "destination": destination, "max_in_flight": IN_FLIGHT}
            await put(service, f"/subscriptions/{topic}", body)

        def peer(name: str, topic: str) -> Peer:
            driver = WireDriver(service, receiver, topic)
            database_s = lambda: postgres_cpu_s(stage.server)  # noqa: E731
            processes = lambda: [*service.processes(), *worker.processes(), receiver.root]  # noqa: E731
            return Peer(name, driver, lambda: service.cpu_s() + worker.cpu_s(), database_s, processes)

        yield peer(WEBHOOKS, TOPIC), peer(BATCHES, BATCH_TOPIC)
    await stage.drop("peers")


@dataclass(slots=True)
class WireDriver:
    """Sends halves and ends over connections that stay open, and reads the receiver's log."""

    service: Service
    receiver: Service
    topic: str
    _half: tuple[bytes, bytes] = field(init=False)
    _end: tuple[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        body = half_body().replace(f'"topic":"{TOPIC}"'.encode(), f'"topic":"{self.topic}"'.encode())
        self._half = template("/half", body, self.service.port)
        self._end = template("/end", end_body(), self.service.port)

    async def send(self, load: Slice) -> Sent:
        """Run one slice and wait until each message is received. Raises BrokenSliceError, RuntimeError and OSError."""
        rate = load.size if load.kind == "pace" else IDS_A_SECOND
        ids = [id_.encode() for id_ in transaction_ids(int(rate * load.seconds) + load.size)]
        await take(self.receiver)
        ends: dict[bytes, float] = {}
        began_s = now_s()
        sending = self._pace if load.kind == "pace" else self._run
        try:
            await sending(load, ids, ends)
            arrivals = await self._received(len(ends), load.within_s)
        except ExceptionGroup as errors:
            raise BrokenSliceError(str(errors.exceptions[0])) from errors
        except httpx.HTTPError as error:
            raise BrokenSliceError(f"the receiver does not answer: {error}") from error
        return as_sent(load, began_s, ends, arrivals)

    async def _run(self, load: Slice, ids: Sequence[bytes], ends: dict[bytes, float]) -> None:
        """Send transactions from `size` callers, each with its next one as soon as the last is committed."""
        until_s, numbers = now_s() + load.seconds, count()

        async def caller() -> None:
            with closing(await Wire.to(self.service.port)) as wire:
                while now_s() < until_s:
                    await self._one(wire, ids[next(numbers)], ends)

        async with asyncio.TaskGroup() as callers:
            for _ in range(load.size):
                callers.create_task(caller())

    async def _pace(self, load: Slice, ids: Sequence[bytes], ends: dict[bytes, float]) -> None:
        """Send transactions at a rate, whether or not earlier ones are answered."""
        wires = [await Wire.to(self.service.port) for _ in range(PACED_CONNECTIONS)]
        opened = [*wires]

        async def act(n: int) -> None:
            if not wires:
                opened.append(await Wire.to(self.service.port))
                wires.append(opened[-1])
            wire = wires.pop()
            await self._one(wire, ids[n], ends)
            wires.append(wire)

        try:
            await paced(load.size, load.seconds, act)
        finally:
            for wire in opened:
                wire.close()

    async def _one(self, wire: Wire, id_: bytes, ends: dict[bytes, float]) -> None:
        before, after = self._half
        await wire.ask(before + id_ + after)
        before, after = self._end
        ends[id_] = now_s()
        await wire.ask(before + id_ + after)

    async def _received(self, messages: int, within_s: float) -> list[Arrival]:
        until_s = now_s() + within_s
        async with httpx.AsyncClient(base_url=self.receiver.url, trust_env=False) as client:
            while int((await client.get("/count")).text) < messages and now_s() < until_s:
                await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.sleep(AFTER_S)
        return await take(self.receiver)


def as_sent(load: Slice, began_s: float, ends: dict[bytes, float], arrivals: Sequence[Arrival]) -> Sent:
    """Return the result of a slice. Batches name no transactions, so their messages are only counted.

    Raises BrokenSliceError if nothing arrived.
    """
    if not arrivals:
        raise BrokenSliceError(f"nothing of {len(ends):,} transactions was delivered")
    if all(arrival.transaction_id for arrival in arrivals):
        first: dict[bytes, float] = {}
        for arrival in arrivals:
            first.setdefault(arrival.transaction_id.encode(), arrival.at_s)
        late = [int((at_s - ends[id_]) * 1e6) for id_, at_s in first.items() if id_ in ends]
        delivered, repeated = len(late), len(arrivals) - len(first)
    else:
        late, total = [], sum(arrival.messages for arrival in arrivals)
        delivered, repeated = min(total, len(ends)), max(0, total - len(ends))
    seconds = arrivals[-1].at_s - began_s
    return Sent(len(ends), delivered, repeated, 0, seconds, late if load.kind == "pace" else ())
