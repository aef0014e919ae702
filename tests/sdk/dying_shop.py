"""A shop that is killed (SIGKILL) after its commit and before its end.

Run as a program with a form, Halfnote's URL and the URL of the shop's database. Forms: `begin` and `sync begin`;
`forgotten` and `not awaited`, of a producer with a barrier; `without a barrier`.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import httpx
from halfnote import Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote.barrier import AsyncBarrier, Barrier
from halfnote.databases.sqlalchemy import AsyncSqlAlchemy, SqlAlchemy
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

ORDER = Outgoing("order", {"order": 1030})
INSERT = text("insert into orders values (1030)")


def die_at_the_end(request: httpx.Request) -> None:
    """Kill this process before it posts an end."""
    if request.url.path == "/end":
        os.kill(os.getpid(), signal.SIGKILL)


class Line(httpx.AsyncHTTPTransport):
    """The network up to the end."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        die_at_the_end(request)
        return await super().handle_async_request(request)


class SyncLine(httpx.HTTPTransport):
    """The same for the synchronous producer."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        die_at_the_end(request)
        return super().handle_request(request)


async def place(form: str, url: str, database: str) -> None:
    """Place an order, and die."""
    engine = create_async_engine(database.replace("postgresql://", "postgresql+asyncpg://", 1))
    barrier = AsyncBarrier(AsyncSqlAlchemy(engine))
    options: dict[str, Any] = {} if form == "without a barrier" else {"barrier": barrier}
    producer = TransactionProducer(url, group="shop", transport=Line(), **options)
    async with AsyncSession(engine) as session:
        if form == "begin":
            async with producer.begin(ORDER, session):
                await session.execute(INSERT)
            return
        async with producer.transaction(ORDER) as tx:
            async with session.begin():
                if form == "not awaited":
                    barrier.enter(session, tx)
                await session.execute(INSERT)
            # Before the end of the block, where the producer would read the barrier.
            os.kill(os.getpid(), signal.SIGKILL)


def place_sync(url: str, database: str) -> None:
    """Place an order without an event loop, and die."""
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://", 1))
    barrier = Barrier(SqlAlchemy(engine))
    producer = SyncTransactionProducer(url, group="shop", barrier=barrier, transport=SyncLine())
    with Session(engine) as session, producer.begin(ORDER, session):
        session.execute(INSERT)


if __name__ == "__main__":
    form, halfnote, shop = sys.argv[1:]
    if form == "sync begin":
        place_sync(halfnote, shop)
    else:
        asyncio.run(place(form, halfnote, shop))
