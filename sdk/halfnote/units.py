"""Blocks that send messages and run a database transaction, for drivers without events to bind to.

The half is posted first, then the database transaction begins; the end is posted after its commit has returned, or
after its rollback. Inside a database transaction that is open already it is a savepoint, and it is not known yet how
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
    """The state of one block's database transaction. `marked`: it will be rolled back in any case."""

    def __init__(self, *, hides_rollbacks: bool = False) -> None:
        self.state: DatabaseState = "none"
        self.hides_rollbacks = hides_rollbacks
        self.marked = False
        self._notify: Callable[[DatabaseState], None] | None = None

    def when_over(self, notify: Callable[[DatabaseState], None]) -> None:
        """Register `notify` for the end of an outer database transaction, if its end is observable."""
        self._notify = notify

    def release(self) -> None:
        """Do nothing: this watcher holds nothing."""

    def committed(self) -> None:
        """Record that the outermost commit has returned."""
        self.state = "committed"
        notify, self._notify = self._notify, None
        if notify is not None:
            notify("committed")

    def passed(self, *, nested: bool) -> None:
        """Record that the block ended without an exception."""
        self.state = "rolled_back" if self.marked else "open" if nested else "committed"

    def failed(self) -> None:
        """Record an exception: before the commit was tried it is a rollback, afterwards the outcome is unknown."""
        if self.state == "open":
            self.state = "rolled_back"


@asynccontextmanager
async def in_asyncpg(
    producer: TransactionProducer, connection: Any, messages: Messages, **half: Any
) -> AsyncIterator[OpenTransaction]:
    """Send messages with the block's work on a connection of asyncpg. Options as of `transaction()`."""
    nested = connection.is_in_transaction()
    async with _in_async(producer, messages, half, connection.transaction(), nested=nested) as transaction:
        yield transaction
        await connection.execute(STANDS)


@asynccontextmanager
async def in_async_psycopg(
    producer: TransactionProducer, connection: Any, messages: Messages, **half: Any
) -> AsyncIterator[OpenTransaction]:
    """Send messages with the block's work on an AsyncConnection of psycopg. Options as of `transaction()`."""
    nested = int(connection.info.transaction_status) != _IDLE
    async with _in_async(producer, messages, half, connection.transaction(), nested=nested) as transaction:
        yield transaction
        await connection.execute(STANDS)


@contextmanager
def in_psycopg(
    producer: SyncTransactionProducer, connection: Any, messages: Messages, **half: Any
) -> Iterator[OpenTransaction]:
    """Send messages with the block's work on a Connection of psycopg. Options as of `transaction()`."""
    nested = int(connection.info.transaction_status) != _IDLE
    with _in_sync(producer, messages, half, connection.transaction(), Unit(), nested=nested) as transaction:
        yield transaction
        connection.execute(STANDS)


@contextmanager
def in_django(
    producer: SyncTransactionProducer, messages: Messages, *, using: str = "default", **half: Any
) -> Iterator[OpenTransaction]:
    """Send messages with the block's work in Django's `atomic`. Options as of `transaction()`.

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
            # A marked transaction is rolled back at the block's end without an exception.
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
