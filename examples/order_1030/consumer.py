"""The consumers of orders and transfers: delivery, points, billing and bank B, each with its own database.

With an inbox, a consumer runs each message once; without an inbox, at every delivery. Both verify signatures.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from halfnote.databases.asyncpg import Asyncpg
from halfnote.delivery import DeliveryEndpoint
from halfnote.inbox import AsyncInbox, Reject
from halfnote.message import Message
from pydantic import BaseModel

from examples.order_1030.bank import SCHEMA_B
from examples.order_1030.deaths import die
from examples.order_1030.pool import Pool

# One row per effect of this consumer on an order or transfer.
LEDGER = """
create table ledger (number int not null, amount int not null, at timestamptz not null default clock_timestamp());
"""
ACCOUNTLESS = "create table without_account (customer text); insert into without_account values ('nemo');"
SCHEMAS = {
    "delivery": LEDGER,
    "points": LEDGER,
    "billing": LEDGER + ACCOUNTLESS,
    "bank-b": LEDGER + SCHEMA_B,
}

_dies: ContextVar[bool] = ContextVar("dies", default=False)


class Fault(BaseModel):
    """Die on this order, after the commit and before the answer."""

    number: int


@dataclass(frozen=True)
class Options:
    """The options of a consumer; `once`: with an inbox."""

    name: str
    database: str
    secret: str
    once: bool


def create_app(options: Options) -> FastAPI:
    """Return a consumer's HTTP: Halfnote posts to /deliveries."""
    pool = Pool(options.database)
    inbox = AsyncInbox(Asyncpg(pool), options.name)
    take, armed = TAKES[options.name], set[int]()

    async def handle(message: Message, connection: Any) -> None:
        body = message.json()
        await take(connection, body)
        _dies.set(body["number"] in armed)

    async def handle_each(message: Message) -> None:
        async with pool.acquire() as connection, connection.transaction():
            await handle(message, connection)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await pool.open()
        if options.once:
            await inbox.create_table()
        yield
        await pool.close()

    app = FastAPI(lifespan=lifespan)
    if options.once:
        endpoint = DeliveryEndpoint(handle, secrets=options.secret, inbox=inbox)
    else:
        endpoint = DeliveryEndpoint(handle_each, secrets=options.secret)
    deliveries: Any = Unanswered(endpoint.asgi())
    app.add_route("/deliveries", deliveries)

    @app.post("/fault", status_code=204)
    async def arm(fault: Fault) -> None:
        armed.add(fault.number)

    return app


class Unanswered:
    """An ASGI app that kills its process before it answers a delivery marked as its last."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        """Answer, or die."""

        async def send_or_die(event: MutableMapping[str, Any]) -> None:
            if _dies.get():
                die()
            await send(event)

        await self._inner(scope, receive, send_or_die)


async def deliver(connection: Any, order: dict[str, Any]) -> None:
    """Send a parcel."""
    await note(connection, order["number"], sum(line["pieces"] for line in order["lines"]))


async def give_points(connection: Any, order: dict[str, Any]) -> None:
    """Give a point for each euro."""
    await note(connection, order["number"], cents_of(order) // 100)


async def bill(connection: Any, order: dict[str, Any]) -> None:
    """Bill the customer, if the customer has an account."""
    if await connection.fetchval("select true from without_account where customer = $1", order["customer"]):
        raise Reject(f"customer {order['customer']} has no account")
    await note(connection, order["number"], cents_of(order))


async def credit(connection: Any, transfer: dict[str, Any]) -> None:
    """Credit what bank A has debited."""
    await connection.execute("update account set amount = amount + $1", transfer["amount"])
    await note(connection, transfer["number"], transfer["amount"])


async def note(connection: Any, number: int, amount: int) -> None:
    """Write into the consumer's ledger."""
    await connection.execute("insert into ledger values ($1, $2)", number, amount)


def cents_of(order: dict[str, Any]) -> int:
    """Return the price of an order."""
    return sum(int(line["pieces"] * line["cents"]) for line in order["lines"])


TAKES = {"delivery": deliver, "points": give_points, "billing": bill, "bank-b": credit}
