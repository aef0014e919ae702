"""SQLAlchemy 2, synchronous and asynchronous, over any driver of PostgreSQL, MySQL, MariaDB or SQLite."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from halfnote.databases.base import Came, Dialect, NotInTransaction, Script, Statement, dialect_of, play, play_async

T = TypeVar("T")


class SqlAlchemy:
    """A database by its engine; callers' database transactions by their Session or Connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._dialect = dialect_of(engine.dialect.name)

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return self._dialect

    def run(self, script: Script[T]) -> T:
        """Run a script on a connection of its own, and commit."""
        with self._engine.begin() as connection:
            return self.within(connection, script)

    def within(self, connection: Session | Connection, script: Script[T]) -> T:
        """Run a script in the database transaction of a session or connection, which begins if there is none.

        Raises NotInTransaction in SQLAlchemy's isolation level AUTOCOMMIT.
        """
        _refuse_autocommit(connection if isinstance(connection, Connection) else connection.connection())
        return play(script, lambda statement: _came(connection.execute(*_rendered(statement))))

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """Yield a Session; commit at the end, roll back what raises."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session


class AsyncSqlAlchemy:
    """The same with an asynchronous engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._dialect = dialect_of(engine.dialect.name)

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return self._dialect

    async def run(self, script: Script[T]) -> T:
        """Run a script on a connection of its own, and commit."""
        async with self._engine.begin() as connection:
            return await self.within(connection, script)

    async def within(self, connection: AsyncSession | AsyncConnection, script: Script[T]) -> T:
        """Run a script in the database transaction of a session or connection, which begins if there is none.

        Raises NotInTransaction in SQLAlchemy's isolation level AUTOCOMMIT.
        """
        used = connection if isinstance(connection, AsyncConnection) else await connection.connection()
        _refuse_autocommit(used.sync_connection)

        async def execute(statement: Statement) -> Came:
            return _came(await connection.execute(*_rendered(statement)))

        return await play_async(script, execute)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        """Yield an AsyncSession; commit at the end, roll back what raises."""
        async with AsyncSession(self._engine, expire_on_commit=False) as session, session.begin():
            yield session


def _refuse_autocommit(connection: Connection | None) -> None:
    if connection is not None and connection._is_autocommit_isolation():
        raise NotInTransaction("the isolation level is AUTOCOMMIT: use an engine with database transactions")


def _rendered(statement: Statement) -> tuple[Any, dict[str, Any]]:
    names = {f"p{index}": value for index, value in enumerate(statement.values)}
    return text(statement.rendered(lambda index: f":p{index}")), names


def _came(result: Any) -> Came:
    assert isinstance(result, CursorResult)
    rows = result.fetchall() if result.returns_rows else ()
    return Came(result.rowcount, [tuple(row) for row in rows])
