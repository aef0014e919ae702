"""Load on a service while its replicas change: what was acknowledged, and whether it is recorded."""

import asyncio
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import inf
from time import monotonic
from typing import Any

import httpx

from app.database.connection import connect
from app.ids import uuid7
from app.verdicts import Verdict
from tests.support.processes import Service
from tests.support.relay_stepping import order

# A replica has read every request that was sent this long before its signal: it reads requests before signals.
READ_WITHIN_S = 0.5
# The error of a connection that the server closed without a byte of an answer.
CLOSED = "Server disconnected without sending a response."


class Replicas:
    """The processes that get requests, and when leaving ones got their signal."""

    def __init__(self) -> None:
        self.serving: list[Service] = []
        self.signaled_at: dict[str, float] = {}

    async def add(self, service: Service) -> None:
        await service.start()
        self.serving.append(service)

    async def remove(self, service: Service) -> None:
        """Send SIGTERM to a replica while it still gets requests; it gets no more once it has ended."""
        self.signaled_at[service.url] = monotonic()
        assert await asyncio.to_thread(service.stop) == 0
        self.serving.remove(service)

    def may_be_unread(self, url: str, sent_at: float, error: httpx.TransportError) -> bool:
        """Return whether a request without an answer may be one that a leaving replica never read.

        Either it could not connect, or its connection, perhaps an idle one, was closed without a byte.
        """
        if url not in self.signaled_at or sent_at < self.signaled_at[url] - READ_WITHIN_S:
            return False
        return isinstance(error, httpx.ConnectError | httpx.ReadError | httpx.WriteError) or (
            isinstance(error, httpx.RemoteProtocolError) and str(error) == CLOSED
        )


class Producer:
    """Posts halves and ends continuously, to any replica; repeats unacknowledged ones and records acknowledged ones."""

    def __init__(self, replicas: Replicas, seed: int) -> None:
        self._replicas = replicas
        self._rng = random.Random(seed)
        self.verdicts: dict[str, str] = {}
        # Answers and failures that must not occur.
        self.faults: list[str] = []
        # The number of connections that were closed during a request that the replica probably had not read.
        self.closed = 0
        # The replica that has not answered the current request, and when all of the request had been sent.
        self.waits_at: str | None = None
        self.sent_at = inf
        self.stopping = False

    @property
    def is_read(self) -> bool:
        """Whether its last request was sent long enough ago for the replica to have read it."""
        return self.sent_at < monotonic() - READ_WITHIN_S

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while not self.stopping:
                one = str(uuid7(datetime.now(UTC)))
                half = {"producer_group": "shop", "transaction_id": one, "messages": [order(1030)]}
                await self._acknowledged(client, "/half", half)
                verdict = self._rng.choice(["commit", "commit", "rollback"])
                end = {"producer_group": "shop", "transaction_id": one, "verdict": verdict}
                await self._acknowledged(client, "/end", end)
                self.verdicts[one] = verdict

    async def _acknowledged(self, client: httpx.AsyncClient, path: str, request: dict[str, Any]) -> None:
        unanswered, may_be_recorded = "", False
        while True:
            url = self._rng.choice(self._replicas.serving).url
            try:
                answer = await self._post(client, url, path, request)
            except httpx.TransportError as error:
                if not self._replicas.may_be_unread(url, self.sent_at, error):
                    self.faults.append(f"{path}: {error!r}")
                if not isinstance(error, httpx.ConnectError):
                    self.closed += 1
                    unanswered = repr(error)
                continue
            if answer.status_code in (200, 201):
                if unanswered and not may_be_recorded and answer.json()["replayed"]:
                    self.faults.append(f"{path}: executed, but not answered: {unanswered}")
                return
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                self.faults.append(f"{path}: {answer.status_code} {answer.text}")
            may_be_recorded = may_be_recorded or "outcome-unknown" in answer.text
            await asyncio.sleep(0.05)

    async def _post(self, client: httpx.AsyncClient, url: str, path: str, request: dict[str, Any]) -> httpx.Response:
        """Post a request; record the replica and the time while it waits for its answer."""

        async def note(step: str, _: dict[str, Any]) -> None:
            if step == "http11.send_request_body.complete":
                self.waits_at, self.sent_at = url, monotonic()

        self.sent_at = inf
        try:
            return await client.post(url + path, json=request, extensions={"trace": note})
        finally:
            self.waits_at = None


class Load:
    """Producers that post from `begin` to `end`."""

    def __init__(self, replicas: Replicas, producers: int) -> None:
        self._producers = [Producer(replicas, seed) for seed in range(producers)]
        self._running: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the producers."""
        self._running = [asyncio.create_task(producer.run()) for producer in self._producers]

    async def until_more(self, transactions: int) -> None:
        """Return when this many more transactions were acknowledged, both half and end."""
        enough = len(self.verdicts) + transactions
        await until(lambda: len(self.verdicts) >= enough, self._running)

    async def end(self) -> None:
        """Stop each producer after its current transaction."""
        for producer in self._producers:
            producer.stopping = True
        await asyncio.gather(*self._running)

    def cancel(self) -> None:
        """Stop at once."""
        for task in self._running:
            task.cancel()

    def unanswered_at(self, service: Service) -> int:
        """Return how many requests a replica must have read and has not answered."""
        return sum(one.waits_at == service.url and one.is_read for one in self._producers)

    def all_wait(self) -> bool:
        """Return whether each producer waits for the answer to a request that a replica must have read."""
        return all(one.waits_at is not None and one.is_read for one in self._producers)

    @property
    def closed(self) -> int:
        """The number of connections that were closed during a request that the replica had not read."""
        return sum(producer.closed for producer in self._producers)

    @property
    def verdicts(self) -> dict[str, str]:
        """The acknowledged verdicts, by transaction."""
        return {one: verdict for producer in self._producers for one, verdict in producer.verdicts.items()}

    @property
    def committed(self) -> set[str]:
        """The ids of the messages that must be delivered."""
        return {f"{one}-0" for one, verdict in self.verdicts.items() if verdict == "commit"}

    @property
    def faults(self) -> list[str]:
        """Answers and failures that must not occur."""
        return [fault for producer in self._producers for fault in producer.faults]


async def recorded(url: str) -> dict[str, str]:
    """Return the recorded verdicts of transactions whose half is stored, by transaction."""
    connection = await connect(url)
    try:
        rows = await connection.fetch("select o.transaction_id, o.verdict from op o join half h using (transaction_id)")
    finally:
        await connection.close()
    return {str(row[0]): Verdict(row[1]).word for row in rows}


async def until(reached: Callable[[], Any], running: Sequence[asyncio.Task[None]] = ()) -> None:
    """Wait until `reached()`, which may be awaitable, is true; raise at once what a task of `running` raises."""
    async with asyncio.timeout(180):
        while True:
            result = reached()
            if (await result) if asyncio.iscoroutine(result) else result:
                return
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)
