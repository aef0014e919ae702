"""Halfnote beside the others: an API process and a worker, with a topic for single webhooks and one for batches.

`halfnote serve` runs the same two processes on two cores.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from app.runtime import worker_state
from bench.arrivals import Arrival, compiled, noting, now_s, take
from bench.idle import postgres_cpu_s
from bench.payload import GROUP, TOPIC, end_body, half_body, request
from bench.peers.slices import BrokenSliceError, Peer, ProcessDriver, Sent, Slice, cpu_of, driving
from bench.services import Service, serving
from bench.stage import IMMUNITY_S, Stage, put

WEBHOOKS, BATCHES, AHEAD = "Halfnote, webhooks", "Halfnote, batches", "Halfnote, ends not awaited"
BATCHING, BATCHING_BOTH = "Halfnote, batching client", "Halfnote, batching client and webhooks"
# The format of `struct sent` in callers.c.
COMMIT, ID_BYTES = struct.Struct("=q40s"), 36
IN_FLIGHT = 64
BATCH = 100
# As long as TOPIC, so that the requests of both are equally long.
BATCH_TOPIC = "batch"
LOOK_EVERY_S = 0.02
AFTER_S = 0.2
# How long callers.c waits for the last answers, and some seconds more.
ANSWERS_S = 90


@asynccontextmanager
async def halfnote(stage: Stage) -> AsyncIterator[tuple[Peer, ...]]:
    """Run Halfnote; yield it for webhooks one by one, for batches, and for callers that do not await their ends."""
    dsn = await stage.database("peers")
    program = await compiled("callers", stage.place)
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
        callers = {}
        for topic, destination in ((TOPIC, webhook), (BATCH_TOPIC, batch)):
            body = {"topics": [topic], "destination": destination, "max_in_flight": IN_FLIGHT}
            await put(service, f"/subscriptions/{topic}", body)
            requests = [str(path) for path in written(requests_of(topic, service.port), stage.place)]
            command = (str(program), str(service.port), *requests)
            log = stage.place / f"callers-{topic}.log"
            callers[topic] = await stack.enter_async_context(driving("Halfnote", log, *command))

        def peer(name: str, topic: str, kind: str = "run") -> Peer:
            driving_it = callers[topic]
            return Peer(
                name,
                CallersDriver(driving_it, receiver, kind),
                service_cpu_s=lambda: service.cpu_s() + worker.cpu_s(),
                database_cpu_s=partial(postgres_cpu_s, stage.server),
                client_cpu_s=lambda: cpu_of([driving_it.process, receiver.root]),
                halted=lambda: [*service.processes(), *worker.processes(), receiver.root],
            )

        yield (
            peer(WEBHOOKS, TOPIC),
            peer(BATCHES, BATCH_TOPIC),
            peer(AHEAD, TOPIC, "ahead"),
            peer(BATCHING, TOPIC, "batch"),
            peer(BATCHING_BOTH, BATCH_TOPIC, "batch"),
        )
    await stage.drop("peers")


def requests_of(topic: str, port: int) -> Mapping[str, bytes]:
    """Return the requests that callers.c sends: half and end."""
    body = half_body().replace(f'"topic":"{TOPIC}"'.encode(), f'"topic":"{topic}"'.encode())
    return {f"{topic}-half": request("/half", body, port), f"{topic}-end": request("/end", end_body(), port)}


def written(files: Mapping[str, bytes], place: Path) -> list[Path]:
    """Write files into a directory and return their paths."""
    for name, content in files.items():
        (place / name).write_bytes(content)
    return [place / name for name in files]


@dataclass(frozen=True, slots=True)
class CallersDriver:
    """Runs slices with callers.c, and reads the receiver's log. `kind`: how callers send a run (see callers.c)."""

    callers: ProcessDriver
    receiver: Service
    kind: str

    async def send(self, load: Slice) -> Sent:
        """Run one slice and wait until each message is received. Raises BrokenSliceError and OSError."""
        await take(self.receiver)
        kind = self.kind if load.kind == "run" else load.kind
        line = await self.callers.ask(f"{kind} {load.size} {load.seconds}\n", load.seconds + ANSWERS_S)
        committed, failed, began_ns = (int(number) for number in line.split())
        log = await self.callers.read(committed * COMMIT.size)
        ends = {transaction_id[:ID_BYTES]: ns / 1e9 for ns, transaction_id in COMMIT.iter_unpack(log)}
        if failed:
            raise BrokenSliceError(f"{failed:,} requests failed:\n{self.callers.messages()}")
        try:
            arrivals = await self._received(len(ends), load.within_s)
        except httpx.HTTPError as error:
            raise BrokenSliceError(f"the receiver does not answer: {error}") from error
        return as_sent(load, began_ns / 1e9, ends, arrivals)

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
