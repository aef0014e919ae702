"""A shop whose orders must give points, for the models: a producer with a barrier, a consumer with an inbox.

What stands between the two, the coordinator, is the model's.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from halfnote import BarrierRefused, CheckEndpoint, HalfFailed, Outgoing, TransactionProducer
from halfnote.barrier import AsyncBarrier
from halfnote.barrier_mark import marked
from halfnote.databases.asyncpg import Asyncpg
from halfnote.delivery import DeliveryEndpoint
from halfnote.inbox import AsyncInbox
from halfnote.message import Message
from halfnote.testing import SECRET
from hypothesis import strategies as st

from tests.sdk.crashes import Connections, Death, Network, killed

SCHEMA = "create table orders (number int primary key); create table points (number int)"
EMPTIED = "truncate orders, points, halfnote_barrier, halfnote_inbox"


@dataclass(frozen=True)
class Attempt:
    """One order: how its process fares, and the check and the delivery that come at the same time, if any.

    `unit`: by `producer.begin`, else by a block around the database transaction. `faults`: of the
    network, one a request.
    """

    unit: bool = False
    fails: bool = False
    dies: Death | None = None
    faults: list[str] = field(default_factory=list)
    check_dies: Death | None = None
    checked: bool = False
    delivery_dies: Death | None = None


# An order takes about ten awaits, more where requests are repeated; a check or a delivery somewhat less.
deaths = st.none() | st.builds(Death, st.integers(0, 15), st.booleans())
faults = st.lists(st.sampled_from(["", "", "lost", "unheard"]), max_size=6)
attempts = st.builds(Attempt, st.booleans(), st.booleans(), deaths, faults, deaths, st.booleans(), deaths)


class OutOfStock(Exception):
    """The local work fails."""


class World:
    """The shop and its consumer, in one database, and the coordinator's URL.

    `half_within_s`: how long a producer tries to post a half.
    """

    def __init__(self, shop: str, network: Network, halfnote: str, half_within_s: float) -> None:
        self.connections = Connections(shop)
        self.network, self._halfnote, self._half_within_s = network, halfnote, half_within_s
        database = Asyncpg(self.connections)
        self.barrier, self.inbox = AsyncBarrier(database), AsyncInbox(database, "points")
        self.checks = CheckEndpoint(self.barrier, group="shop", secrets=SECRET)
        self.deliveries = DeliveryEndpoint(self.give_points, secrets=SECRET, inbox=self.inbox)

    async def create_tables(self) -> None:
        """Make the barrier's and the inbox's."""
        await self.barrier.create_table()
        await self.inbox.create_table()

    async def give_points(self, message: Message, connection: Any) -> None:
        """Take a message."""
        await connection.execute("insert into points values ($1)", message.json())

    async def place(self, number: int, attempt: Attempt) -> bool:
        """Take an order in a process that may die; tell whether it ended before that."""
        line = self.network.line(attempt.faults)
        producer = TransactionProducer(
            self._halfnote,
            group="shop",
            barrier=self.barrier,
            transport=line,
            half_within_s=self._half_within_s,
            refused_within_s=self._half_within_s,
        )
        lived = await killed(self._placed(producer, number, attempt), attempt.dies)
        # Its background work died with it.
        for running in producer._driver._running.values():
            for task in list(running.background):
                task.cancel()
        await asyncio.sleep(0)
        return lived

    async def column(self, table: str) -> list[int]:
        """Return the numbers of the orders in a table."""
        async with self.connections.acquire() as connection:
            return [row[0] for row in await connection.fetch(f"select number from {table} order by number")]

    async def rested(self) -> None:
        """Wait until no message is in flight, and close the connections that dead processes left open."""
        await self.network.rested()
        await self.connections.close()

    async def _placed(self, producer: TransactionProducer, number: int, attempt: Attempt) -> None:
        await self.order(producer, number, attempt)
        if not attempt.faults:
            await producer.close()

    async def order(self, producer: TransactionProducer, number: int, attempt: Attempt) -> None:
        """Take an order."""
        order = Outgoing("order", number)
        try:
            async with self.connections.acquire() as connection:
                if attempt.unit:
                    async with producer.begin(order, connection):
                        await self._work(connection, number, attempt)
                else:
                    # Each way through this block enters, so its half may have the mark of one that enters by itself.
                    async with (
                        producer.transaction(order, context=marked(None)) as tx,
                        connection.transaction(),
                    ):
                        await self.barrier.enter(connection, tx)
                        await self._work(connection, number, attempt)
        except (OutOfStock, HalfFailed, BarrierRefused):
            pass

    async def _work(self, connection: Any, number: int, attempt: Attempt) -> None:
        await connection.execute("insert into orders values ($1)", number)
        if attempt.fails:
            raise OutOfStock
