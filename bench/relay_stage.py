"""The common parts of the relay's rows: a database, a receiver that records arrivals, workers, and backlogs."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from app.database.connection import Connection
from bench.arrivals import Arrival, came, noting, rate
from bench.filling import fill_committed
from bench.services import Service, serving
from bench.stage import Stage, backend_cpu_s, connected, post, put

# Far longer than any slice takes.
LONGEST_S = 120.0
WARM = 500


@dataclass(frozen=True, slots=True)
class Drained:
    """A delivered backlog: its arrivals, and the CPU seconds of the workers and of their Postgres backends."""

    arrivals: list[Arrival]
    workers_s: float
    backends_s: float

    @property
    def messages(self) -> int:
        """The number of messages that arrived."""
        return sum(arrival.messages for arrival in self.arrivals)

    @property
    def rate(self) -> float:
        """Messages per second at the receiver."""
        return rate(self.arrivals)

    @property
    def cpu_us(self) -> float:
        """CPU µs of workers and Postgres per delivery."""
        return (self.workers_s + self.backends_s) / self.messages * 1e6


@dataclass(frozen=True, slots=True)
class Relaying:
    """A running relay; `watch` is a connection to its database `name`."""

    name: str
    dsn: str
    receiver: Service
    workers: list[Service]
    watch: Connection

    async def subscribe(self, number: int, topic: str, path: str = "hook", **shape: Any) -> None:
        """Make or change subscription `number`; `shape` and `destination` are further fields of it and of its webhook.

        The relay POSTs its messages to `/<path>/<number>` of the receiver.
        """
        destination = {"type": "webhook", "url": f"{self.receiver.url}/{path}/{number}", **shape.pop("destination", {})}
        body = {"topics": [topic], "destination": destination, **shape}
        await put(self.workers[0], f"/subscriptions/{subscription(number)}", body)

    async def pause(self, number: int) -> None:
        """Pause a subscription."""
        await post(self.workers[0], f"/subscriptions/{subscription(number)}/pause", {})

    async def resume(self, number: int) -> None:
        """Resume a subscription."""
        await post(self.workers[0], f"/subscriptions/{subscription(number)}/resume", {})

    async def drain(self, topic: str, count: int, *, to: int = 1, within_s: float = LONGEST_S) -> Drained:
        """Publish `count` messages at once and wait until `to` subscriptions have received all of them."""
        await fill_committed(self.dsn, topic, count)
        return await self.wait(count * to, within_s=within_s)

    async def wait(self, messages: int, *, within_s: float = LONGEST_S) -> Drained:
        """Wait until `messages` messages have arrived, and return their arrivals and cost."""
        workers_s, before = self._workers_cpu_s(), await backend_cpu_s(self.watch, self.name)
        arrivals = await came(self.receiver, messages, within_s, self.workers)
        after = await backend_cpu_s(self.watch, self.name)
        backends_s = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items())
        return Drained(arrivals, self._workers_cpu_s() - workers_s, backends_s)

    def _workers_cpu_s(self) -> float:
        return sum(worker.cpu_s() for worker in self.workers)


def subscription(number: int) -> str:
    """Return the name of a subscription by its number."""
    return f"bench-{number}"


@asynccontextmanager
async def relaying(stage: Stage, name: str, *, workers: int = 1, role: str = "worker") -> AsyncIterator[Relaying]:
    """Run a receiver and `workers` processes of a role on a new database `name`, which is dropped at the end."""
    dsn = await stage.database(name)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(noting(stage.place))
        # Requests that hang at the end of a row are not awaited.
        env = {"HALFNOTE_DATABASE_URL": dsn, "HALFNOTE_ROLE": role, "HALFNOTE_DRAIN_S": "2"}
        serving_ = [await stack.enter_async_context(serving("app.main:app", stage.place, env)) for _ in range(workers)]
        yield Relaying(name, dsn, receiver, serving_, await stack.enter_async_context(connected(dsn)))
    await stage.drop(name)
