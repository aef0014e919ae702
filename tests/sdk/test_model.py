"""Producer, barrier, coordinator, check, inbox and consumer as one, with deaths at every await and a lossy network.

What must hold in the end, whatever happened: the orders in the producer's database, the messages that were published
and the points in the consumer's database are the same, each once. None is lost, none invented, none taken twice.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from halfnote import CheckEndpoint, HalfFailed, Outgoing, TransactionProducer
from halfnote.barrier import AsyncBarrier
from halfnote.databases.asyncpg import Asyncpg
from halfnote.delivery import DeliveryEndpoint
from halfnote.inbox import AsyncInbox
from halfnote.message import Message
from halfnote.testing import SECRET, Coordinator
from halfnote.units import in_asyncpg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sdk.crashes import Connections, Network, killed
from tests.sdk.shop import fresh

SCHEMA = "create table orders (number int primary key); create table points (number int)"
EMPTIED = "truncate orders, points, halfnote_barrier, halfnote_inbox"

# An order takes about ten awaits, more where requests are repeated; a check or a delivery somewhat less.
deaths = st.none() | st.integers(0, 15)
faults = st.lists(st.sampled_from(["", "", "lost", "unheard"]), max_size=6)


@dataclass(frozen=True)
class Attempt:
    """One order: how its process fares, and the check and the delivery that come at the same time, if any."""

    unit: bool
    fails: bool
    dies_at: int | None
    faults: list[str]
    check_dies_at: int | None
    checked: bool
    delivery_dies_at: int | None


attempts = st.builds(Attempt, st.booleans(), st.booleans(), deaths, faults, deaths, st.booleans(), deaths)


class OutOfStock(Exception):
    """The local work fails."""


class World:
    """A shop, a coordinator and a consumer of points."""

    def __init__(self, url: str) -> None:
        self.connections = Connections(url)
        self.coordinator = Coordinator("shop")
        database = Asyncpg(self.connections)
        self.barrier, self.inbox = AsyncBarrier(database), AsyncInbox(database, "points")
        self.checks = CheckEndpoint(self.barrier, group="shop", secrets=SECRET)
        self.deliveries = DeliveryEndpoint(self.give_points, secrets=SECRET, inbox=self.inbox)

    async def give_points(self, message: Message, connection: Any) -> None:
        await connection.execute("insert into points values ($1)", message.json())

    async def place(self, number: int, attempt: Attempt) -> bool:
        """Take an order in a process of its own, which may die; tell whether it came to its end before."""
        network = Network(self.coordinator.transport(), iter(attempt.faults))
        producer = TransactionProducer("http://halfnote", group="shop", transport=network, half_within_s=0.3)
        lived = await killed(self._order(producer, number, attempt), attempt.dies_at)
        # What it had in the background died with it.
        for task in list(producer._driver._background):
            task.cancel()
        await asyncio.sleep(0)
        return lived

    async def _order(self, producer: TransactionProducer, number: int, attempt: Attempt) -> None:
        order = Outgoing("order", number)
        try:
            async with self.connections.acquire() as connection:
                if attempt.unit:
                    async with in_asyncpg(producer, connection, order) as tx:
                        await self._work(connection, tx, number, attempt)
                else:
                    async with producer.transaction(order) as tx, connection.transaction():
                        await self._work(connection, tx, number, attempt)
        except (OutOfStock, HalfFailed):
            pass
        if not attempt.faults:
            await producer.close()

    async def _work(self, connection: Any, tx: Any, number: int, attempt: Attempt) -> None:
        await self.barrier.enter(connection, tx)
        await connection.execute("insert into orders values ($1)", number)
        if attempt.fails:
            raise OutOfStock

    async def ends_well(self) -> None:
        """Let Halfnote ask and deliver until nothing is left to do."""
        while self.coordinator.undecided:
            await self.coordinator.check(self.checks)
        assert set(await self.coordinator.deliver(self.deliveries, again=True)) <= {200}

    async def column(self, table: str) -> list[int]:
        async with self.connections.acquire() as connection:
            return [row[0] for row in await connection.fetch(f"select number from {table} order by number")]


async def play(world: World, plan: list[Attempt]) -> bool:
    """Run a plan, and compare the three in the end; tell whether the last order's process lived."""
    lived = True
    async with world.connections.acquire() as connection:
        await connection.execute(EMPTIED)
    for number, attempt in enumerate(plan):
        beside = [world.place(number, attempt)]
        if attempt.checked:
            beside.append(killed(world.coordinator.check(world.checks), attempt.check_dies_at))
        lived, *_ = await asyncio.gather(*beside)
        await killed(world.coordinator.deliver(world.deliveries, again=True), attempt.delivery_dies_at)
    await world.ends_well()
    orders = await world.column("orders")
    assert sorted(message.json() for message in world.coordinator.published) == orders
    assert await world.column("points") == orders
    await world.connections.close()
    return lived


@pytest.fixture
async def url() -> str:
    """A database for both, with all tables."""
    url = fresh(SCHEMA)
    world = World(url)
    await world.barrier.create_table()
    await world.inbox.create_table()
    await world.connections.close()
    return url


MODEL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(MODEL, max_examples=25)
@given(plan=st.lists(attempts, min_size=1, max_size=4))
async def test_nothing_is_lost_invented_or_taken_twice(url: str, plan: list[Attempt]) -> None:
    await play(World(url), plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(MODEL, max_examples=600)
@given(plan=st.lists(attempts, min_size=1, max_size=6))
async def test_nothing_is_lost_invented_or_taken_twice_in_many_ways(url: str, plan: list[Attempt]) -> None:
    await play(World(url), plan)


@pytest.mark.parametrize("unit", [True, False])
async def test_a_death_at_each_await_in_turn(url: str, unit: bool) -> None:
    """One order after the other, the first dying at its first await, until one lives to its end."""
    dies_at = 0
    while not await play(World(url), [Attempt(unit, False, dies_at, [], None, False, dies_at)]):
        dies_at += 1
    # Each request, statement and connection has one at least.
    assert dies_at > 6
