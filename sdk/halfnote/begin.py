"""The blocks of `producer.begin`: on a connection of the caller, or on a new one of the barrier's database."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from halfnote.block import OpenTransaction
from halfnote.databases.base import AsyncDatabase, Database
from halfnote.producer import Messages, TransactionProducer
from halfnote.sync_producer import SyncTransactionProducer
from halfnote.units import Unit, in_async, in_sync


def unit_of(
    producer: TransactionProducer, database: AsyncDatabase, messages: Messages, connection: Any, half: dict[str, Any]
) -> AbstractAsyncContextManager[OpenTransaction]:
    """Return the block of `producer.begin`."""
    if connection is not None:
        return database.unit(producer, connection, messages, **half)
    return _in_new_async(producer, database, messages, half)


def sync_unit_of(
    producer: SyncTransactionProducer, database: Database, messages: Messages, connection: Any, half: dict[str, Any]
) -> AbstractContextManager[OpenTransaction]:
    """Return the block of `producer.begin`."""
    if connection is not None or database.one_connection_a_thread:
        return database.unit(producer, connection, messages, **half)
    return _in_new_sync(producer, database, messages, half)


@asynccontextmanager
async def _in_new_async(
    producer: TransactionProducer, database: AsyncDatabase, messages: Messages, half: dict[str, Any]
) -> AsyncIterator[OpenTransaction]:
    """Take the connection only when the half is stored, so that none waits for Halfnote."""
    unit = Unit(hides_rollbacks=database.dialect == "mysql")
    async with in_async(producer, messages, half, None, database.begin(), nested=False, unit=unit) as transaction:
        yield transaction


@contextmanager
def _in_new_sync(
    producer: SyncTransactionProducer, database: Database, messages: Messages, half: dict[str, Any]
) -> Iterator[OpenTransaction]:
    unit = Unit(hides_rollbacks=database.dialect == "mysql")
    with in_sync(producer, messages, half, None, database.begin(), unit, nested=False) as transaction:
        yield transaction
