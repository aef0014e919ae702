"""Halfnote with consumers that claim, beside RocketMQ with as many consumers of its own client.

Both have 64 producers' connections and four consumers. Halfnote's consumers claim up to 100 messages and acknowledge
them in one request; RocketMQ's client takes batches of its own size and acknowledges by offset.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from bench.idle import postgres_cpu_s
from bench.payload import TOPIC
from bench.peers.halfnote import ANSWERS_S, COMMIT, requests_of, written
from bench.peers.slices import BrokenSliceError, Peer, ProcessDriver, Sent, Slice, cpu_of, driving
from bench.services import Service
from bench.stage import Stage

CLAIMS = "Halfnote, claims"

# Runs consumers while its argument commits messages, until all are acknowledged. Returns how many were committed, how
# many acknowledged, and the seconds from the start to the last acknowledgement.
Consume = Callable[[Callable[[], Awaitable[int]]], Awaitable[tuple[int, int, float]]]


@asynccontextmanager
async def claiming(stage: Stage, program: str, service: Service, consume: Consume) -> AsyncIterator[Peer]:
    """Yield Halfnote, which runs already, with callers of its own. `program`: callers.c, compiled."""
    requests = [str(path) for path in written(requests_of(TOPIC, service.port), stage.place)]
    log = stage.place / "callers-claims.log"
    async with driving("Halfnote", log, program, str(service.port), *requests) as callers:
        yield Peer(
            CLAIMS,
            ClaimsDriver(callers, consume),
            service_cpu_s=service.cpu_s,
            database_cpu_s=partial(postgres_cpu_s, stage.server),
            client_cpu_s=lambda: cpu_of([callers.process]),
            halted=service.processes,
        )


@dataclass(frozen=True, slots=True)
class ClaimsDriver:
    """Runs slices with callers.c, while consumers claim and acknowledge."""

    callers: ProcessDriver
    consume: Consume

    async def send(self, load: Slice) -> Sent:
        """Run one slice until each message is acknowledged. Raises BrokenSliceError."""

        async def committed() -> int:
            line = await self.callers.ask(f"{load.kind} {load.size} {load.seconds}\n", load.seconds + ANSWERS_S)
            count, failed, _ = (int(number) for number in line.split())
            await self.callers.read(count * COMMIT.size)
            if failed:
                raise BrokenSliceError(f"{failed:,} requests failed:\n{self.callers.messages()}")
            return count

        try:
            async with asyncio.timeout(load.seconds + load.within_s + ANSWERS_S):
                sent, acknowledged, seconds = await self.consume(committed)
        except TimeoutError as error:
            raise BrokenSliceError(f"{error or 'the messages were not acknowledged in time'}") from error
        return Sent(sent, min(sent, acknowledged), max(0, acknowledged - sent), 0, seconds)
