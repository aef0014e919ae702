"""The ways to change a database and announce the change. Each function is all the code that a service needs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from halfnote import Outgoing, TransactionProducer
from halfnote.barrier import AsyncBarrier

from examples.order_1030.deaths import at
from examples.order_1030.pool import Pool

Write: TypeAlias = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Means:
    """A service's resources: its database and a producer. Only the last way uses the barrier."""

    pool: Pool
    producer: TransactionProducer
    barrier: AsyncBarrier


async def write_send_commit(means: Means, message: Outgoing, write: Write) -> None:
    """Send within the database transaction: if the send fails, nothing is written."""
    async with means.pool.acquire() as connection, connection.transaction():
        await write(connection)
        await means.producer.send_plain(message)
        at("before commit")
    at("after commit")


async def write_commit_send(means: Means, message: Outgoing, write: Write) -> None:
    """Send after the commit."""
    async with means.pool.acquire() as connection, connection.transaction():
        await write(connection)
        at("before commit")
    at("after commit")
    await means.producer.send_plain(message)


async def send_write(means: Means, message: Outgoing, write: Write) -> None:
    """Send first: a later crash cannot lose the sent message."""
    await means.producer.send_plain(message)
    async with means.pool.acquire() as connection, connection.transaction():
        await write(connection)
        at("before commit")
    at("after commit")


async def with_halfnote(means: Means, message: Outgoing, write: Write) -> None:
    """Half message, database transaction, end. The connection is held only for the database transaction."""
    async with means.producer.begin(message) as transaction:
        await write(transaction.connection)
        at("before commit")


@dataclass(frozen=True)
class Way:
    """One of the ways. `steps`: the steps at which its service is killed; `exact`: with barrier and inbox."""

    name: str
    title: str
    order: str
    announce: Callable[[Means, Outgoing, Write], Awaitable[None]]
    steps: tuple[str, ...]
    exact: bool = False


_SENT, _COMMITTED = ("before send", "after send"), ("before commit", "after commit")

WRITE_SEND_COMMIT = Way("wsc", "database first", "write, send, commit", write_send_commit, (*_SENT, *_COMMITTED))
WRITE_COMMIT_SEND = Way("wcs", "database first", "write, commit, send", write_commit_send, (*_COMMITTED, *_SENT))
SEND_WRITE = Way("sw", "message first", "send, then write", send_write, (*_SENT, *_COMMITTED))
HALFNOTE = Way(
    "halfnote",
    "Halfnote",
    "half, commit, end",
    with_halfnote,
    ("before half", "after half", "before commit", "before end", "after end"),
    exact=True,
)
WAYS = {way.name: way for way in (WRITE_SEND_COMMIT, WRITE_COMMIT_SEND, SEND_WRITE, HALFNOTE)}
