"""Producer, barrier, coordinator in memory, check, inbox and consumer as one: deaths at every await, a lossy network.

What must hold in the end, whatever happened: the orders in the producer's database, the messages that were published
and the points in the consumer's database are the same, each once. None is lost, none invented, none taken twice.
"""

import asyncio

import pytest
from halfnote.testing import Coordinator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sdk.crashes import Death, Network, killed
from tests.sdk.shop import fresh
from tests.sdk.worlds import EMPTIED, SCHEMA, Attempt, World, attempts
from tests.support.examples import examples


class InMemory(World):
    """With a coordinator in memory, which checks and delivers on command."""

    def __init__(self, shop: str) -> None:
        self.coordinator = Coordinator("shop")
        super().__init__(shop, Network(self.coordinator.transport()), "http://halfnote", half_within_s=0.3)

    async def ends_well(self) -> None:
        """Let Halfnote ask and deliver until nothing is left to do."""
        while self.coordinator.undecided:
            await self.coordinator.check(self.checks)
        assert set(await self.coordinator.deliver(self.deliveries, again=True)) <= {200}


async def play(world: InMemory, plan: list[Attempt]) -> bool:
    """Run a plan, and compare the three in the end; tell whether the last order's process lived."""
    lived = True
    async with world.connections.acquire() as connection:
        await connection.execute(EMPTIED)
    for number, attempt in enumerate(plan):
        beside = [world.place(number, attempt)]
        if attempt.checked:
            beside.append(killed(world.coordinator.check(world.checks), attempt.check_dies))
        lived, *_ = await asyncio.gather(*beside)
        await killed(world.coordinator.deliver(world.deliveries, again=True), attempt.delivery_dies)
    await world.rested()
    await world.ends_well()
    orders = await world.column("orders")
    assert sorted(message.json() for message in world.coordinator.published) == orders
    assert await world.column("points") == orders
    await world.rested()
    return lived


@pytest.fixture
async def url() -> str:
    """A database for both, with all tables."""
    url = fresh(SCHEMA)
    world = InMemory(url)
    await world.create_tables()
    await world.rested()
    return url


MODEL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(MODEL, max_examples=examples(25))
@given(plan=st.lists(attempts, min_size=1, max_size=4))
async def test_nothing_is_lost_invented_or_taken_twice(url: str, plan: list[Attempt]) -> None:
    await play(InMemory(url), plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(MODEL, max_examples=600)
@given(plan=st.lists(attempts, min_size=1, max_size=6))
async def test_nothing_is_lost_invented_or_taken_twice_in_many_ways(url: str, plan: list[Attempt]) -> None:
    await play(InMemory(url), plan)


@pytest.mark.parametrize(
    ("unit", "during"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
async def test_a_death_at_each_await_in_turn(url: str, unit: bool, during: bool) -> None:
    """One order after the other, the first dying at its first await, until one lives to its end."""
    at = 0
    while not await play(InMemory(url), [Attempt(unit, dies=Death(at, during), delivery_dies=Death(at))]):
        at += 1
    # Each request, statement and connection has one at least.
    assert at > 6
