"""SQLAlchemy 2, synchronous and asynchronous, over any driver of PostgreSQL, MySQL, MariaDB or SQLite."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from halfnote.databases.base import Came, Dialect, NotInTransaction, Script, Statement, dialect_of, play, play_async

T = TypeVar("T")


class SqlAlchemy:
    """A database by its engine; callers' database transactions by their Session or Connection."""

    def __init__(self, engine: Engine) -> None:
        _refuse_kind(engine, Engine, "an Engine (create_engine)")
        self.engine = engine
        self._dialect = dialect_of(engine.dialect.name)

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return self._dialect

    @property
    def one_connection_a_thread(self) -> bool:
        """Whether callers have no connection to pass."""
        return False

    def run(self, script: Script[T]) -> T:
        """Run a script on a connection of its own, and commit."""
        with self.engine.begin() as connection:
            return self.within(connection, script)

    def within(self, connection: Session | Connection, script: Script[T]) -> T:
        """Run a script in the database transaction of a session or connection, which begins if there is none.

        Raises NotInTransaction in SQLAlchemy's isolation level AUTOCOMMIT, and where the code has ended the database
        transaction of a `with` block that is still open.
        """
        with _not_ended(connection):
            _refuse_autocommit(connection if isinstance(connection, Connection) else connection.connection())
            return play(script, lambda statement: _came(connection.execute(*_rendered(statement))))

    def unit(
        self, producer: Any, connection: Session | Connection, messages: Any, **half: Any
    ) -> AbstractContextManager[Any]:
        """Return the block of `producer.begin`. Raises TypeError for another kind of connection."""
        from halfnote.sqlalchemy_units import in_connection, in_session

        if isinstance(connection, Session):
            return in_session(producer, connection, messages, **half)
        _refuse_kind(connection, Connection, "a Session or Connection")
        return in_connection(producer, connection, messages, **half)

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """Yield a Session; commit at the end, roll back what raises."""
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session


class AsyncSqlAlchemy:
    """The same with an asynchronous engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        _refuse_kind(engine, AsyncEngine, "an AsyncEngine (create_async_engine)")
        self.engine = engine
        self._dialect = dialect_of(engine.dialect.name)

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return self._dialect

    async def run(self, script: Script[T]) -> T:
        """Run a script on a connection of its own, and commit."""
        async with self.engine.begin() as connection:
            return await self.within(connection, script)

    async def within(self, connection: AsyncSession | AsyncConnection, script: Script[T]) -> T:
        """Run a script in the database transaction of a session or connection, which begins if there is none.

        Raises NotInTransaction in SQLAlchemy's isolation level AUTOCOMMIT, and where the code has ended the database
        transaction of an `async with` block that is still open.
        """

        async def execute(statement: Statement) -> Came:
            return _came(await connection.execute(*_rendered(statement)))

        with _not_ended(connection):
            used = connection if isinstance(connection, AsyncConnection) else await connection.connection()
            _refuse_autocommit(used.sync_connection)
            return await play_async(script, execute)

    def unit(
        self, producer: Any, connection: AsyncSession | AsyncConnection, messages: Any, **half: Any
    ) -> AbstractAsyncContextManager[Any]:
        """Return the block of `producer.begin`. Raises TypeError for another kind of connection."""
        from halfnote.sqlalchemy_units import in_async_connection, in_async_session

        if isinstance(connection, AsyncSession):
            return in_async_session(producer, connection, messages, **half)
        _refuse_kind(connection, AsyncConnection, "an AsyncSession or AsyncConnection")
        return in_async_connection(producer, connection, messages, **half)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        """Yield an AsyncSession; commit at the end, roll back what raises."""
        async with AsyncSession(self.engine, expire_on_commit=False) as session, session.begin():
            yield session


def is_of(database: Any, connection: Connection) -> bool:
    """Return whether a connection is of a database; a database without an engine is taken to have all connections."""
    engine = _engine_of(database)
    return engine is None or connection.engine.pool is engine.pool or connection.engine.url == engine.url


def connect(session: Session, database: Any) -> None:
    """Have a session begin its database transaction on a database's connection now."""
    engine = _engine_of(database)
    if session.bind is None and engine is not None:
        # Only mappers have engines, so the session does not know which one to take.
        session.connection(bind_arguments={"bind": engine})
    else:
        session.connection()


def run_on(connection: Connection, script: Script[T]) -> T:
    """Run a script in a connection's open database transaction. Raises NotInTransaction if it commits by itself."""
    _refuse_autocommit(connection)
    return play(script, lambda statement: _came(connection.execute(*_rendered(statement))))


def _engine_of(database: Any) -> Engine | None:
    if isinstance(database, AsyncSqlAlchemy):
        return database.engine.sync_engine
    return database.engine if isinstance(database, SqlAlchemy) else None


def _refuse_kind(connection: Any, kind: type, wanted: str) -> None:
    if not isinstance(connection, kind):
        raise TypeError(f"{wanted} is expected, not {type(connection).__name__}")


@contextmanager
def _not_ended(connection: Session | Connection | AsyncSession | AsyncConnection) -> Iterator[None]:
    """Raise NotInTransaction in place of SQLAlchemy's general error if no database transaction is open."""
    try:
        yield
    except InvalidRequestError as error:
        if connection.in_transaction():
            raise
        raise NotInTransaction("the code has ended the database transaction already") from error


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
