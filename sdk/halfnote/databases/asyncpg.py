"""asyncpg, for PostgreSQL."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from halfnote.databases.base import Came, Dialect, NotInTransaction, Script, Statement, play_async

T = TypeVar("T")


class _Pool(Protocol):
    def acquire(self) -> Any: ...


class Asyncpg:
    """A database by its pool; callers' database transactions by their connection."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return "postgresql"

    async def run(self, script: Script[T]) -> T:
        """Run a script on a connection of the pool, and commit."""
        async with self.begin() as connection:
            return await _played(connection, script)

    def unit(self, producer: Any, connection: Any, messages: Any, **half: Any) -> AbstractAsyncContextManager[Any]:
        """Return the block of `producer.begin`."""
        from halfnote.units import in_asyncpg

        return in_asyncpg(producer, connection, messages, **half)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """Yield a connection of the pool; commit at the end, roll back what raises."""
        async with self._pool.acquire() as connection, connection.transaction():
            yield connection

    async def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the connection's database transaction. Raises NotInTransaction."""
        if not connection.is_in_transaction():
            raise NotInTransaction("the connection has no transaction open: use `async with connection.transaction()`")
        return await _played(connection, script)


async def _played(connection: Any, script: Script[T]) -> T:
    async def execute(statement: Statement) -> Came:
        sql = statement.rendered(lambda index: f"${index + 1}")
        if sql.startswith("select"):
            rows = [tuple(row) for row in await connection.fetch(sql, *statement.values)]
            return Came(len(rows), rows)
        # As `INSERT 0 1`.
        count = (await connection.execute(sql, *statement.values)).rpartition(" ")[2]
        return Came(int(count) if count.isdigit() else -1)

    return await play_async(script, execute)
