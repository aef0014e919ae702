"""The model of test_model.py with the real service: a process that asks and delivers by itself, and is killed too.

The same must hold in the end: the orders in the producer's database, the messages that were published and the points
in the consumer's database are the same, each once.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from halfnote import TransactionProducer
from halfnote.testing import SECRET
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.database.connection import Connection
from tests.sdk.crashes import Death, Network, killed
from tests.sdk.servers import asgi_server
from tests.sdk.shop import fresh
from tests.sdk.worlds import SCHEMA, Attempt, World, attempts
from tests.support.processes import Service

WITHIN_S = 240.0
# As many orders are under way at once as services have.
AT_ONCE = 4
# Callers of one producer whose requests are shared.
SHARING = 20
PUBLISHED = """
select convert_from(h.body, 'utf8')::int from outbox o join half h using (transaction_id, position)
where h.producer_group = 'shop' order by 1
"""
UNSETTLED = """
select count(*) from outbox o left join receipt r using (transaction_id, position)
where o.topic = 'order' and r.outcome is null
"""
UNDECIDED = "select transaction_id::text from half h left join op o using (transaction_id) where o.verdict is null"

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Mortal:
    """An endpoint whose process dies with the next requests, as `deaths` say: those are not answered."""

    def __init__(self, endpoint: Asgi) -> None:
        self._endpoint = endpoint
        self.deaths: deque[Death | None] = deque()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or die of it."""
        death = self.deaths.popleft() if self.deaths else None
        if not await killed(self._endpoint(scope, receive, send), death):
            raise ConnectionAbortedError("the process died")


class Real(World):
    """With a service, over sockets; `db` looks into its database."""

    def __init__(self, shop: str, service: Service, db: Connection) -> None:
        # Long enough for a service that is killed to be back, however slow the machine is.
        super().__init__(shop, Network(httpx.AsyncHTTPTransport()), service.url, half_within_s=90.0)
        self.service, self._db = service, db
        self.asked, self.told = Mortal(self.checks.asgi()), Mortal(self.deliveries.asgi())
        self._numbers = itertools.count()
        self._bouncing, self._looking = asyncio.Lock(), asyncio.Lock()
        self._api = httpx.AsyncClient(base_url=service.url, timeout=60)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a check and receive a delivery."""
        await (self.asked if scope["path"] == "/check" else self.told)(scope, receive, send)

    async def register(self, url: str) -> None:
        """Make the group and the subscription; `url` is the app's."""
        group = {"check_urls": [f"{url}/check"], "secret": SECRET, "interval_s": 1, "max_checks": 1000}
        destination = {"type": "webhook", "url": f"{url}/deliveries", "secret": SECRET}
        subscription = {"topics": ["order"], "destination": destination, "retry": [0.05] * 100}
        for path, content in (("/producer-groups/shop", group), ("/subscriptions/points", subscription)):
            assert (await self._api.put(path, json=content)).status_code == 201

    async def bounce(self) -> None:
        """Kill the service, and start it again."""
        async with self._bouncing:
            self.service.kill()
            await self.service.start()

    async def take(self, attempt: Attempt) -> bool:
        """Take the next order; tell whether its process lived."""
        if attempt.check_dies is not None:
            self.asked.deaths.append(attempt.check_dies)
        if attempt.delivery_dies is not None:
            self.told.deaths.append(attempt.delivery_dies)
        placing = asyncio.create_task(self.place(next(self._numbers), attempt))
        if attempt.checked:
            await self._ask()
        return await placing

    async def ends_well(self) -> None:
        """Have Halfnote ask and deliver until nothing is left to do, and compare."""
        await self.rested()
        self.asked.deaths.clear()
        self.told.deaths.clear()
        async with asyncio.timeout(WITHIN_S):
            while await self._ask() or await self._db.fetchval(UNSETTLED):
                await asyncio.sleep(0.05)
        orders = await self.column("orders")
        assert [row[0] for row in await self._db.fetch(PUBLISHED)] == orders
        assert await self.column("points") == orders
        await self.connections.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.network.close()
        await self._api.aclose()

    async def _ask(self) -> bool:
        """Have all that is undecided asked about now; tell whether there was anything."""
        async with self._looking:
            undecided = [row[0] for row in await self._db.fetch(UNDECIDED)]
        for transaction_id in undecided:
            try:
                answer = await self._api.post(f"/transactions/{transaction_id}/check")
            except httpx.TransportError:
                # The service is just being killed.
                continue
            # 409: it is decided already; 503: the service has only just begun.
            assert answer.status_code in (202, 409, 503), answer.text
        return bool(undecided)


@pytest.fixture
async def world(data_dir: Path, dsn: str, db: Connection) -> AsyncIterator[Real]:
    """A service of the test's own, a shop and its consumer."""
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    try:
        made = Real(fresh(SCHEMA), service, db)
        await made.create_tables()
        async with asgi_server(made) as url:
            await made.register(url)
            yield made
        await made.close()
    finally:
        service.stop()


async def test_deaths_at_each_await_and_of_the_service(world: Real) -> None:
    """Of the shop at each await in turn until one lives to its end, in four ways at once; of its consumers; of both."""

    async def each_await(unit: bool, during: bool) -> int:
        for at in itertools.count():
            attempt = Attempt(
                unit,
                dies=Death(at, during),
                checked=bool(at % 2),
                check_dies=Death(at % 6),
                delivery_dies=Death(at % 8, during),
            )
            if await world.take(attempt):
                return at
        raise AssertionError("unreachable")

    ways = [each_await(unit, during) for unit in (True, False) for during in (True, False)]
    played = asyncio.gather(*ways)
    async with asyncio.timeout(WITHIN_S):
        while not await world.column("orders"):
            await asyncio.sleep(0.02)
    await world.bounce()
    assert min(await played) > 6
    await world.ends_well()
    assert await world.column("orders")


class Noted(httpx.AsyncBaseTransport):
    """Notes the paths of the requests of a line."""

    def __init__(self, line: httpx.AsyncBaseTransport) -> None:
        self._line, self.paths = line, Counter[str]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        self.paths[request.url.path] += 1
        return await self._line.handle_async_request(request)


async def test_callers_that_share_requests_lose_and_invent_nothing(world: Real) -> None:
    """Many orders at once by one producer, whose requests and answers get lost, while the service is killed."""
    line = Noted(world.network.line(itertools.cycle(["", "", "", "lost", "", "unheard", ""])))
    producer = TransactionProducer(
        world.service.url, group="shop", barrier=world.barrier, transport=line, half_within_s=90.0
    )
    turns = asyncio.Semaphore(SHARING)

    async def one(number: int) -> None:
        async with turns:
            await world.order(producer, number, Attempt(unit=bool(number % 2), fails=number % 7 == 0))

    placed = asyncio.gather(*(one(number) for number in range(10 * SHARING)))
    async with asyncio.timeout(WITHIN_S):
        while not await world.column("orders"):
            await asyncio.sleep(0.02)
    await world.bounce()
    await placed
    await producer.close(grace_s=90.0)
    assert line.paths["/halves"] > 0
    assert line.paths["/ends"] > 0
    await world.ends_well()
    assert await world.column("orders")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(plan=st.lists(attempts, min_size=4, max_size=24), killed_at=st.sets(st.integers(0, 23), max_size=2))
async def test_nothing_is_lost_invented_or_taken_twice(world: Real, plan: list[Attempt], killed_at: set[int]) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, attempt: Attempt) -> None:
        async with turns:
            if number in killed_at:
                await asyncio.gather(world.bounce(), world.take(attempt))
            else:
                await world.take(attempt)

    await asyncio.gather(*(one(number, attempt) for number, attempt in enumerate(plan)))
    await world.ends_well()
