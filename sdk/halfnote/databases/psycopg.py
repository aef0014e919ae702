"""psycopg 3, asynchronous. `DbApi` serves synchronous psycopg."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from halfnote.databases.base import Came, Dialect, NotInTransaction, Script, Statement, play_async
from halfnote.databases.dbapi import commits_by_itself

T = TypeVar("T")


class AsyncPsycopg:
    """A database by its connections; `connection` returns one as an asynchronous context, like a pool's method."""

    def __init__(self, connection: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._connection = connection

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return "postgresql"

    async def run(self, script: Script[T]) -> T:
        """Run a script on a separate connection, and commit."""
        async with self.begin() as connection:
            return await _played(connection, script)

    def unit(self, producer: Any, connection: Any, messages: Any, **half: Any) -> AbstractAsyncContextManager[Any]:
        """Return the block of `producer.begin`."""
        from halfnote.units import in_async_psycopg

        return in_async_psycopg(producer, connection, messages, **half)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """Yield a connection; commit at the end, roll back what raises."""
        async with self._connection() as connection, connection.transaction():
            yield connection

    async def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the connection's database transaction. Raises NotInTransaction in autocommit mode."""
        if commits_by_itself(connection):
            raise NotInTransaction("the connection is in autocommit mode: use `async with connection.transaction()`")
        return await _played(connection, script)


async def _played(connection: Any, script: Script[T]) -> T:
    async with connection.cursor() as cursor:

        async def execute(statement: Statement) -> Came:
            await cursor.execute(statement.rendered(lambda index: "%s"), statement.values or None)
            return Came(cursor.rowcount, await cursor.fetchall() if cursor.description else ())

        return await play_async(script, execute)
