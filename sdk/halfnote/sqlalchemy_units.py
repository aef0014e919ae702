"""The blocks of `producer.begin` with SQLAlchemy. `halfnote.units` has those of other drivers.

A session's database transaction that began by itself, at a statement before the block, is committed by the block. One
that the caller began is the caller's to commit: the end is left to check-back, and for a session it follows.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransactionOrigin

from halfnote.block import OpenTransaction
from halfnote.databases.sqlalchemy import connect
from halfnote.producer import Messages, TransactionProducer
from halfnote.sync_producer import SyncTransactionProducer
from halfnote.units import Unit, in_async, in_sync

_HIDES_ROLLBACKS = ("mysql", "mariadb")


@contextmanager
def in_session(
    producer: SyncTransactionProducer, session: Session, messages: Messages, **half: object
) -> Iterator[OpenTransaction]:
    """Send messages with the block's work in a Session. Options as of `transaction()`."""
    assert producer.barrier is not None
    with producer.bind(session).transaction(messages, **half) as transaction, _committed(session):
        connect(session, producer.barrier.database)
        transaction.connection = session
        yield transaction


@asynccontextmanager
async def in_async_session(
    producer: TransactionProducer, session: AsyncSession, messages: Messages, **half: object
) -> AsyncIterator[OpenTransaction]:
    """Send messages with the block's work in an AsyncSession. Options as of `transaction()`."""
    assert producer.barrier is not None
    database = producer.barrier.database
    async with producer.bind(session).transaction(messages, **half) as transaction, _async_committed(session):
        await session.run_sync(connect, database)
        transaction.connection = session
        yield transaction


@contextmanager
def in_connection(
    producer: SyncTransactionProducer, connection: Connection, messages: Messages, **half: object
) -> Iterator[OpenTransaction]:
    """Send messages with the block's work on a Connection. Options as of `transaction()`."""
    nested, unit = connection.in_transaction(), _unit(connection)
    begun = _begun(connection, nested=nested)
    with in_sync(producer, messages, half, connection, begun, unit, nested=nested) as transaction:
        yield transaction


@asynccontextmanager
async def in_async_connection(
    producer: TransactionProducer, connection: AsyncConnection, messages: Messages, **half: object
) -> AsyncIterator[OpenTransaction]:
    """Send messages with the block's work on an AsyncConnection. Options as of `transaction()`."""
    nested, unit = connection.in_transaction(), _unit(connection)
    begun = connection.begin_nested() if nested else connection.begin()
    async with in_async(producer, messages, half, connection, begun, nested=nested, unit=unit) as transaction:
        yield transaction


def _unit(connection: Connection | AsyncConnection) -> Unit:
    around = connection.get_transaction()

    def around_is_open() -> bool:
        # Code that commits by itself may have begun another one since.
        return around is not None and around.is_active and connection.get_transaction() is around

    return Unit(hides_rollbacks=connection.dialect.name in _HIDES_ROLLBACKS, around_is_open=around_is_open)


@contextmanager
def _begun(connection: Connection, *, nested: bool) -> Iterator[None]:
    """Begin only at the entry: if the half fails before that, nothing may stay open on the caller's connection."""
    with connection.begin_nested() if nested else connection.begin():
        yield


@contextmanager
def _committed(session: Session) -> Iterator[None]:
    """Begin a session's database transaction and commit it, unless the caller began it."""
    if not session.in_transaction():
        with session.begin():
            yield
    elif _began_by_itself(session):
        try:
            yield
            session.commit()
        except BaseException:
            session.rollback()
            raise
    else:
        yield


@asynccontextmanager
async def _async_committed(session: AsyncSession) -> AsyncIterator[None]:
    if not session.in_transaction():
        async with session.begin():
            yield
    elif _began_by_itself(session.sync_session):
        try:
            yield
            await session.commit()
        except BaseException:
            await session.rollback()
            raise
    else:
        yield


def _began_by_itself(session: Session) -> bool:
    begun = session.get_transaction()
    return begun is not None and begun.origin is SessionTransactionOrigin.AUTOBEGIN
