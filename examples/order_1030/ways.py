"""The ways to change a database and tell others of it. Each is the whole of what a service has to write for it."""

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
    """What a service has: its database and a producer. The barrier is for the last way alone."""

    pool: Pool
    producer: TransactionProducer
    barrier: AsyncBarrier


async def write_send_commit(means: Means, message: Outgoing, write: Write) -> None:
    """Send within the database transaction: what fails to be sent is not written."""
    async with means.pool.acquire() as connection, connection.transaction():
        await write(connection)
        await means.producer.send_plain(message)
        at("before commit")
    at("after commit")


async def write_commit_send(means: Means, message: Outgoing, write: Write) -> None:
    """Send what was committed."""
    async with means.pool.acquire() as connection, connection.transaction():
        await write(connection)
        at("before commit")
    at("after commit")
    await means.producer.send_plain(message)


async def send_write(means: Means, message: Outgoing, write: Write) -> None:
    """Send first: what others know cannot be forgotten."""
    await means.producer.send_plain(message)
    async with means.pool.acquire() as connection, connection.transaction():
        await write(connection)
        at("before commit")
    at("after commit")


async def with_halfnote(means: Means, message: Outgoing, write: Write) -> None:
    """Half message, database transaction, end. The connection is held for the database transaction alone."""
    async with means.producer.transaction(message) as transaction:
        async with means.pool.acquire() as connection, connection.transaction():
            await means.barrier.enter(connection, transaction)
            await write(connection)
            at("before commit")
        at("after commit")


@dataclass(frozen=True)
class Way:
    """One of them. `steps`: where its service is killed; `exact`: with barrier and inbox."""

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
    ("before half", "after half", *_COMMITTED, "before end", "after end"),
    exact=True,
)
WAYS = {way.name: way for way in (WRITE_SEND_COMMIT, WRITE_COMMIT_SEND, SEND_WRITE, HALFNOTE)}
