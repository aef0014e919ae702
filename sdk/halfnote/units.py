"""Blocks that send messages and run a database transaction, for drivers without events to bind to.

The half is posted first, then the database transaction begins; the end is posted after its commit has returned, or
after its rollback. Inside a database transaction that is open already it is a savepoint, and it is not known yet how
that ends: `unknown` is posted and a check asked for. With Django the end then follows by `transaction.on_commit`. The
blocks of a producer with a barrier enter it by themselves.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
)
from functools import partial
from typing import TYPE_CHECKING, Any

from halfnote.block import DatabaseState, OpenTransaction
from halfnote.databases.base import STANDS, NotInTransaction, Script
from halfnote.databases.dbapi import commits_by_itself
from halfnote.errors import NotCommitted
from halfnote.producer import Messages, TransactionProducer
from halfnote.sync_producer import SyncTransactionProducer
from halfnote.verdicts import Verdict

if TYPE_CHECKING:
    from halfnote.barrier import AsyncBarrier, Barrier

_IDLE = 0
_IN_TRANSACTION = 2
log = logging.getLogger("halfnote")


class Unit:
    """The state of one block's database transaction. `marked`: it will be rolled back in any case.

    `around_is_open`: whether the caller's database transaction, around a block that is a savepoint, is still open.
    """

    def __init__(self, *, hides_rollbacks: bool = False, around_is_open: Callable[[], bool] = lambda: True) -> None:
        self.state: DatabaseState = "none"
        self.hides_rollbacks = hides_rollbacks
        self._around_is_open = around_is_open
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
        """Record that the block ended without an exception, or that the driver took one for a wish to roll back.

        So does psycopg with `psycopg.Rollback`: then the commit was not tried.
        """
        if self.state == "open" or self.marked:
            self.state = "open"
            self.failed(nested=nested)
        else:
            self.state = "open" if nested else "committed"

    def failed(self, *, nested: bool) -> None:
        """Record an exception: before the commit was tried it is a rollback, afterwards the outcome is unknown.

        Code that ended the caller's database transaction before it raised may have committed it.
        """
        if self.state == "open":
            self.state = "undone" if nested and self._around_is_open() else "rolled_back"


@asynccontextmanager
async def in_asyncpg(
    producer: TransactionProducer, connection: Any, messages: Messages, **half: Any
) -> AsyncIterator[OpenTransaction]:
    """Send messages with the block's work on a connection of asyncpg. Options as of `transaction()`."""
    nested, unit = connection.is_in_transaction(), Unit(around_is_open=connection.is_in_transaction)
    begun = connection.transaction()
    async with in_async(producer, messages, half, connection, begun, nested=nested, unit=unit) as transaction:
        yield transaction
        if producer.barrier is None:
            await connection.execute(STANDS)


@asynccontextmanager
async def in_async_psycopg(
    producer: TransactionProducer, connection: Any, messages: Messages, **half: Any
) -> AsyncIterator[OpenTransaction]:
    """Send messages with the block's work on an AsyncConnection of psycopg. Options as of `transaction()`."""
    nested = int(connection.info.transaction_status) != _IDLE
    unit = Unit(around_is_open=partial(_is_whole, connection))
    begun = connection.transaction()
    async with in_async(producer, messages, half, connection, begun, nested=nested, unit=unit) as transaction:
        yield transaction
        if producer.barrier is None:
            await connection.execute(STANDS)


@contextmanager
def in_psycopg(
    producer: SyncTransactionProducer, connection: Any, messages: Messages, **half: Any
) -> Iterator[OpenTransaction]:
    """Send messages with the block's work on a Connection of psycopg. Options as of `transaction()`."""
    nested = int(connection.info.transaction_status) != _IDLE
    unit = Unit(around_is_open=partial(_is_whole, connection))
    with in_sync(producer, messages, half, connection, connection.transaction(), unit, nested=nested) as transaction:
        yield transaction
        if producer.barrier is None:
            connection.execute(STANDS)


def _is_whole(connection: Any) -> bool:
    """Return whether psycopg's transaction is open after the savepoint was rolled back.

    It has failed if the savepoint was none of it, because the code has ended the one before.
    """
    return int(connection.info.transaction_status) == _IN_TRANSACTION


@contextmanager
def in_dbapi(
    producer: SyncTransactionProducer, connection: Any, messages: Messages, *, hides_rollbacks: bool, **half: Any
) -> Iterator[OpenTransaction]:
    """Send messages with the block's work on a connection of another DB-API driver. Options as of `transaction()`."""
    unit = Unit(hides_rollbacks=hides_rollbacks)
    database_transaction = committed(connection, "mysql" if hides_rollbacks else None)
    with in_sync(producer, messages, half, connection, database_transaction, unit, nested=False) as transaction:
        yield transaction
        if producer.barrier is None and not hides_rollbacks:
            _execute(connection, STANDS)


@contextmanager
def committed(connection: Any, dialect: str | None) -> Iterator[None]:
    """Begin a database transaction unless the driver does; commit at the end, roll back after an exception."""
    # In autocommit mode `commit()` of psycopg2 and sqlite3 does nothing, also after a `begin`; that of MySQL's drivers
    # commits, and takes what was not read.
    by_statement = getattr(connection, "autocommit", None) is True and dialect != "mysql"
    commit, rollback = connection.commit, connection.rollback
    if by_statement:
        commit, rollback = partial(_execute, connection, "commit"), partial(_execute, connection, "rollback")
    if commits_by_itself(connection):
        _execute(connection, "begin")
    try:
        yield
        commit()
    except BaseException:
        try:
            rollback()
        except Exception as error:
            # Such as a database that has rolled back by itself. The caller sees the error that came first.
            log.warning("the rollback failed: %s", error)
        raise


def _execute(connection: Any, statement: str) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)
        if cursor.description:
            # Some drivers refuse to close a cursor with rows that were not read.
            cursor.fetchall()


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
    with in_sync(producer, messages, half, None, transaction.atomic(using=using), unit, nested=nested) as opened:
        # Inside, so that it goes with the savepoint if that is rolled back.
        transaction.on_commit(unit.committed, using=using)
        yield opened
        if connections[using].needs_rollback:
            # A marked transaction is rolled back at the block's end without an exception.
            unit.marked = True
        elif producer.barrier is None and connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:
                cursor.execute(STANDS)


@asynccontextmanager
async def in_async(
    producer: TransactionProducer,
    messages: Messages,
    half: dict[str, Any],
    connection: Any,
    database_transaction: AbstractAsyncContextManager[Any],
    *,
    nested: bool,
    unit: Unit | None = None,
) -> AsyncIterator[OpenTransaction]:
    """Run one block. With a barrier, the database transaction enters it first.

    `connection`: None if the database transaction yields it.
    """
    unit = unit or Unit()
    async with producer.watched(unit, messages, **half) as transaction:
        try:
            async with database_transaction as begun:
                unit.state = "open"
                transaction.connection = begun if connection is None else connection
                if producer.barrier is not None:
                    barrier = producer.barrier
                    await barrier.database.within(transaction.connection, barrier.entering(transaction, barrier.settle))
                yield transaction
                if producer.barrier is not None and not unit.marked:
                    await _verify_async(producer.barrier, transaction)
                    unit.hides_rollbacks = unit.hides_rollbacks and nested
                unit.state = "doubtful"
        except BaseException:
            unit.failed(nested=nested)
            raise
        unit.passed(nested=nested)


@contextmanager
def in_sync(
    producer: SyncTransactionProducer,
    messages: Messages,
    half: dict[str, Any],
    connection: Any,
    database_transaction: AbstractContextManager[Any],
    unit: Unit,
    *,
    nested: bool,
) -> Iterator[OpenTransaction]:
    """Run one block. With a barrier, the database transaction enters it first.

    `connection`: None if the database transaction yields it.
    """
    with producer.watched(unit, messages, **half) as transaction:
        try:
            with database_transaction as begun:
                unit.state = "open"
                transaction.connection = begun if connection is None else connection
                if producer.barrier is not None:
                    barrier = producer.barrier
                    barrier.database.within(transaction.connection, barrier.entering(transaction, barrier.settle))
                yield transaction
                if producer.barrier is not None and not unit.marked:
                    _verify(producer.barrier, transaction)
                    unit.hides_rollbacks = unit.hides_rollbacks and nested
                unit.state = "doubtful"
        except BaseException:
            unit.failed(nested=nested)
            raise
        unit.passed(nested=nested)


def _before_commit(barrier: "Barrier | AsyncBarrier", transaction: OpenTransaction) -> Script[bool]:
    """Return whether the commit that comes next is that of the barrier's row, or of the wish to drop the messages.

    The code may have rolled back, and may have worked on; MySQL does so by itself at a deadlock.
    """
    if transaction.rolled_back is None:
        return (yield from barrier.standing(transaction.transaction_id))
    # So that a check knows, too, if this process ends before its end is posted.
    yield from barrier.dropping(transaction.transaction_id)
    return True


def _verify(barrier: "Barrier", transaction: OpenTransaction) -> None:
    """Raise NotCommitted unless the block's database transaction has the barrier's row, or was committed with it."""
    try:
        stands = barrier.database.within(transaction.connection, _before_commit(barrier, transaction))
    except NotInTransaction:
        # The code has ended it by itself.
        stands = transaction.rolled_back is not None or (barrier.settle(transaction.transaction_id) is Verdict.COMMIT)
    if not stands:
        raise NotCommitted(transaction.transaction_id, still_open=False, begun=True)


async def _verify_async(barrier: "AsyncBarrier", transaction: OpenTransaction) -> None:
    """Raise NotCommitted unless the block's database transaction has the barrier's row, or was committed with it."""
    try:
        stands = await barrier.database.within(transaction.connection, _before_commit(barrier, transaction))
    except NotInTransaction:
        # The code has ended it by itself.
        stands = transaction.rolled_back is not None or (
            await barrier.settle(transaction.transaction_id) is Verdict.COMMIT
        )
    if not stands:
        raise NotCommitted(transaction.transaction_id, still_open=False, begun=True)
