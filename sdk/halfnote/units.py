"""Blocks that are a message's and a database transaction's at once, for drivers that have no events to be bound to.

The half is posted first, then the database transaction begins; the end is posted after its commit has returned, or
after its rollback. Inside a database transaction that is open already it is a savepoint, and nobody can know yet how
that ends: `unknown` is posted and a check asked for. With Django the end then follows by `transaction.on_commit`.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from halfnote.block import DatabaseState, OpenTransaction
from halfnote.databases.base import STANDS
from halfnote.producer import Messages, TransactionProducer
from halfnote.sync_producer import SyncTransactionProducer

_IDLE = 0


class Unit:
    """Where the database transaction of one block stands. `marked`: it will be rolled back in any case."""

    def __init__(self, *, hides_rollbacks: bool = False) -> None:
        self.state: DatabaseState = "none"
        self.hides_rollbacks = hides_rollbacks
        self.marked = False
        self._tell: Callable[[DatabaseState], None] | None = None

    def when_over(self, tell: Callable[[DatabaseState], None]) -> None:
        """Tell when an outer database transaction is over, if anybody hears of that here."""
        self._tell = tell

    def release(self) -> None:
        """Nothing is held."""

    def committed(self) -> None:
        """The outermost commit has returned."""
        self.state = "committed"
        tell, self._tell = self._tell, None
        if tell is not None:
            tell("committed")

    def passed(self, *, nested: bool) -> None:
        """The block was left without an exception."""
        self.state = "rolled_back" if self.marked else "open" if nested else "committed"

    def failed(self) -> None:
        """Something left the block: before the commit was tried it is a rollback, afterwards nobody knows."""
        if self.state == "open":
            self.state = "rolled_back"


@asynccontextmanager
async def in_asyncpg(
    producer: TransactionProducer, connection: Any, messages: Messages, **half: Any
) -> AsyncIterator[OpenTransaction]:
    """Send messages with what is done in the block on a connection of asyncpg. Options as of `transaction()`."""
    nested = connection.is_in_transaction()
    async with _in_async(producer, messages, half, connection.transaction(), nested=nested) as transaction:
        yield transaction
        await connection.execute(STANDS)


@asynccontextmanager
async def in_async_psycopg(
    producer: TransactionProducer, connection: Any, messages: Messages, **half: Any
) -> AsyncIterator[OpenTransaction]:
    """Send messages with what is done in the block on an AsyncConnection of psycopg. Options as of `transaction()`."""
    nested = int(connection.info.transaction_status) != _IDLE
    async with _in_async(producer, messages, half, connection.transaction(), nested=nested) as transaction:
        yield transaction
        await connection.execute(STANDS)


@contextmanager
def in_psycopg(
    producer: SyncTransactionProducer, connection: Any, messages: Messages, **half: Any
) -> Iterator[OpenTransaction]:
    """Send messages with what is done in the block on a Connection of psycopg. Options as of `transaction()`."""
    nested = int(connection.info.transaction_status) != _IDLE
    with _in_sync(producer, messages, half, connection.transaction(), Unit(), nested=nested) as transaction:
        yield transaction
        connection.execute(STANDS)


@contextmanager
def in_django(
    producer: SyncTransactionProducer, messages: Messages, *, using: str = "default", **half: Any
) -> Iterator[OpenTransaction]:
    """Send messages with what is done in the block, which is an `atomic` one. Options as of `transaction()`.

    In an outer `atomic` block, as with ATOMIC_REQUESTS, the end follows that one's commit.
    """
    from django.db import connections, transaction

    unit = Unit(hides_rollbacks=connections[using].vendor == "mysql")
    nested = bool(connections[using].in_atomic_block)
    with _in_sync(producer, messages, half, transaction.atomic(using=using), unit, nested=nested) as opened:
        # Inside, so that it goes with the savepoint if that is rolled back.
        transaction.on_commit(unit.committed, using=using)
        yield opened
        if connections[using].needs_rollback:
            # What is marked so is rolled back at the block's end without an exception.
            unit.marked = True
        elif connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:
                cursor.execute(STANDS)


@asynccontextmanager
async def _in_async(
    producer: TransactionProducer,
    messages: Messages,
    half: dict[str, Any],
    database_transaction: AbstractAsyncContextManager[Any],
    *,
    nested: bool,
) -> AsyncIterator[OpenTransaction]:
    unit = Unit()
    async with producer.transaction(messages, binding=unit, **half) as transaction:
        try:
            async with database_transaction:
                unit.state = "open"
                yield transaction
                unit.state = "doubtful"
        except BaseException:
            unit.failed()
            raise
        unit.passed(nested=nested)


@contextmanager
def _in_sync(
    producer: SyncTransactionProducer,
    messages: Messages,
    half: dict[str, Any],
    database_transaction: AbstractContextManager[Any],
    unit: Unit,
    *,
    nested: bool,
) -> Iterator[OpenTransaction]:
    with producer.transaction(messages, binding=unit, **half) as transaction:
        try:
            with database_transaction:
                unit.state = "open"
                yield transaction
                unit.state = "doubtful"
        except BaseException:
            unit.failed()
            raise
        unit.passed(nested=nested)
