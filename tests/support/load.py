"""Load while a service is changed under it: what its producers were told, and whether that stands."""

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

# A replica has every request that was sent this long before its signal: it reads what came before it looks at signals.
TAKEN_WITHIN_S = 0.5
# How a connection looks that the other side closed without a byte of an answer.
CLOSED = "Server disconnected without sending a response."


class Replicas:
    """The processes that requests go to, and when each one that is being stopped got SIGTERM."""

    def __init__(self) -> None:
        self.serving: list[Service] = []
        self.notified_at: dict[str, float] = {}

    async def add(self, service: Service) -> None:
        await service.start()
        self.serving.append(service)

    async def take_out(self, service: Service) -> None:
        """Send SIGTERM to a replica while requests still go there, and to the others alone once it has ended."""
        self.notified_at[service.url] = monotonic()
        assert await asyncio.to_thread(service.stop) == 0
        self.serving.remove(service)

    def untaken(self, url: str, sent_at: float, error: httpx.TransportError) -> bool:
        """Return whether a request without an answer may be one that a leaving replica never took.

        Then it could not connect; or its connection, which may have rested until then, was closed without a byte.
        """
        if url not in self.notified_at or sent_at < self.notified_at[url] - TAKEN_WITHIN_S:
            return False
        return isinstance(error, httpx.ConnectError | httpx.ReadError | httpx.WriteError) or (
            isinstance(error, httpx.RemoteProtocolError) and str(error) == CLOSED
        )


class Producer:
    """Posts halves and ends without rest, to any replica, repeats what was not acknowledged, and remembers."""

    def __init__(self, replicas: Replicas, seed: int) -> None:
        self._replicas = replicas
        self._chance = random.Random(seed)
        self.verdicts: dict[str, str] = {}
        # Answers and failures that must not occur.
        self.wrong: list[str] = []
        # How many connections were closed under a request that the replica, as far as one can tell, did not take.
        self.closed = 0
        # Where the request is that waits for its answer, and since when all of it was sent.
        self.waits_at: str | None = None
        self.sent_at = inf
        self.stopping = False

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while not self.stopping:
                one = str(uuid7(datetime.now(UTC)))
                half = {"producer_group": "shop", "transaction_id": one, "messages": [order(1030)]}
                await self._acknowledged(client, "/half", half)
                verdict = self._chance.choice(["commit", "commit", "rollback"])
                end = {"producer_group": "shop", "transaction_id": one, "verdict": verdict}
                await self._acknowledged(client, "/end", end)
                self.verdicts[one] = verdict

    async def _acknowledged(self, client: httpx.AsyncClient, path: str, request: dict[str, Any]) -> None:
        unanswered, may_stand = "", False
        while True:
            url = self._chance.choice(self._replicas.serving).url
            try:
                answer = await self._post(client, url, path, request)
            except httpx.TransportError as error:
                if not self._replicas.untaken(url, self.sent_at, error):
                    self.wrong.append(f"{path}: {error!r}")
                if not isinstance(error, httpx.ConnectError):
                    self.closed += 1
                    unanswered = repr(error)
                continue
            if answer.status_code in (200, 201):
                if unanswered and not may_stand and answer.json()["replayed"]:
                    self.wrong.append(f"{path}: carried out, but not answered: {unanswered}")
                return
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                self.wrong.append(f"{path}: {answer.status_code} {answer.text}")
            may_stand = may_stand or "outcome-unknown" in answer.text
            await asyncio.sleep(0.05)

    async def _post(self, client: httpx.AsyncClient, url: str, path: str, request: dict[str, Any]) -> httpx.Response:
        """Post a request, and note where it waits and since when."""

        async def note(step: str, _: dict[str, Any]) -> None:
            if step == "http11.send_request_body.complete":
                self.waits_at, self.sent_at = url, monotonic()

        self.sent_at = inf
        try:
            return await client.post(url + path, json=request, extensions={"trace": note})
        finally:
            self.waits_at = None


class Load:
    """Producers at work, from `begin` to `end`."""

    def __init__(self, replicas: Replicas, producers: int) -> None:
        self._producers = [Producer(replicas, seed) for seed in range(producers)]
        self._running: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start to post."""
        self._running = [asyncio.create_task(producer.run()) for producer in self._producers]

    async def go_on(self, transactions: int) -> None:
        """Return when so many more were acknowledged, both half and end."""
        enough = len(self.verdicts) + transactions
        await until(lambda: len(self.verdicts) >= enough, self._running)

    async def end(self) -> None:
        """Let each producer finish the transaction that it is at."""
        for producer in self._producers:
            producer.stopping = True
        await asyncio.gather(*self._running)

    def cancel(self) -> None:
        """Stop at once."""
        for task in self._running:
            task.cancel()

    def held_at(self, service: Service) -> int:
        """Return how many requests a replica must have taken, and has not answered."""
        long_ago = monotonic() - TAKEN_WITHIN_S
        return sum(one.waits_at == service.url and one.sent_at < long_ago for one in self._producers)

    @property
    def closed(self) -> int:
        """How many connections were closed under a request that the replica did not take."""
        return sum(producer.closed for producer in self._producers)

    @property
    def verdicts(self) -> dict[str, str]:
        """What was acknowledged, by transaction."""
        return {one: verdict for producer in self._producers for one, verdict in producer.verdicts.items()}

    @property
    def committed(self) -> set[str]:
        """The ids of the messages that are to be delivered."""
        return {f"{one}-0" for one, verdict in self.verdicts.items() if verdict == "commit"}

    @property
    def wrong(self) -> list[str]:
        """What producers saw that they should not have seen."""
        return [fault for producer in self._producers for fault in producer.wrong]


async def recorded(url: str) -> dict[str, str]:
    """Return the verdicts that stand, of transactions whose half is there, by transaction."""
    connection = await connect(url)
    try:
        rows = await connection.fetch("select o.transaction_id, o.verdict from op o join half h using (transaction_id)")
    finally:
        await connection.close()
    return {str(row[0]): Verdict(row[1]).word for row in rows}


async def until(reached: Callable[[], Any], running: Sequence[asyncio.Task[None]] = ()) -> None:
    """Wait until `reached()`, which may be awaitable, is so; what a task of `running` raises comes out at once."""
    async with asyncio.timeout(180):
        while True:
            so = reached()
            if (await so) if asyncio.iscoroutine(so) else so:
                return
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)
