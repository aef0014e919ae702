"""The shop: accepts orders over HTTP, writes each with its lines, takes its pieces from stock, and announces it."""

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from halfnote import Outgoing
from pydantic import BaseModel

from examples.order_1030.service import Options, Service

ARTICLES = 20
KNOWN, UNKNOWN = "kim", "robin"

SCHEMA = f"""
create table customer (name text primary key);
insert into customer values ('{KNOWN}'), ('nemo');
create table stock (article int primary key, pieces int not null check (pieces >= 0));
insert into stock select article, 1000 from generate_series(0, {ARTICLES - 1}) article;
create table orders (
  number int primary key,
  -- The commit checks this deferred constraint, so the commit can fail, as it can with serializable transactions.
  customer text not null references customer deferrable initially deferred
);
create table order_line (
  number int references orders, line int, article int not null references stock,
  pieces int not null, cents int not null, primary key (number, line)
);
"""  # noqa: S608 - numbers and names of ours


class Line(BaseModel):
    """A number of pieces of an article, with the price of each."""

    article: int
    pieces: int
    cents: int


class Order(BaseModel):
    """A customer's order."""

    number: int
    customer: str
    lines: list[Line]


def create_app(options: Options) -> FastAPI:
    """Return the shop's HTTP: customers post /orders and read them; Halfnote asks at /halfnote/check."""
    service = Service(options)
    app, pool = service.app, service.pool

    @app.post("/orders", status_code=201)
    async def place(order: Order, request: Request) -> dict[str, int]:
        async def write(connection: Any) -> None:
            await write_order(connection, order)

        await service.announce(request, message_of(order, options.group), write)
        return {"number": order.number}

    @app.get("/orders/{number}")
    async def read(number: int) -> dict[str, Any]:
        async with pool.acquire() as connection:
            lines = await connection.fetch("select article, pieces, cents from order_line where number = $1", number)
        if not lines:
            raise HTTPException(404, "the order does not exist")
        return {"number": number, "lines": [dict(line) for line in lines]}

    return app


def message_of(order: Order, topic: str) -> Outgoing:
    """Return the message about an order."""
    return Outgoing(topic, order.model_dump(), key=f"order-{order.number}", tag="created")


async def write_order(connection: Any, order: Order) -> None:
    """Write an order and its lines, and take the pieces from stock; raises if there are not enough."""
    await connection.execute("insert into orders values ($1, $2)", order.number, order.customer)
    # In the order of the articles, so that two orders cannot deadlock.
    for position, line in enumerate(sorted(order.lines, key=lambda line: line.article)):
        await connection.execute(
            "insert into order_line values ($1, $2, $3, $4, $5)",
            *(order.number, position, line.article, line.pieces, line.cents),
        )
        await connection.execute("update stock set pieces = pieces - $2 where article = $1", line.article, line.pieces)
