"""The interface of databases for the barrier and the inbox: run a script of statements in one database transaction.

A script is a generator of statements, so that one script serves plain and asynchronous drivers.
"""

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from halfnote.errors import HalfnoteError

T = TypeVar("T")

Dialect: TypeAlias = Literal["postgresql", "mysql", "sqlite"]


# If a statement has failed, PostgreSQL answers COMMIT with a rollback and without an error. Any other statement raises
# an error there.
STANDS = "select 1"


class NotInTransaction(HalfnoteError):
    """The connection has no open database transaction, so a row would be committed apart from the business rows."""


@dataclass(frozen=True)
class Statement:
    """SQL with the placeholders `{0}`, `{1}` … for the values."""

    sql: str
    values: tuple[Any, ...] = ()

    def rendered(self, mark: Callable[[int], str]) -> str:
        """Return the SQL with the placeholders of a driver."""
        return self.sql.format(*(mark(index) for index in range(len(self.values))))


@dataclass(frozen=True)
class Came:
    """The result of a statement: how many rows it wrote, or the rows that it read."""

    count: int
    rows: Sequence[Sequence[Any]] = ()


Script: TypeAlias = Generator[Statement, Came, T]


class Database(Protocol):
    """A database with a plain driver."""

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""

    @property
    def one_connection_a_thread(self) -> bool:
        """Whether callers have no connection to pass, because the library keeps one for each thread."""

    def run(self, script: Script[T]) -> T:
        """Run a script in a database transaction of its own, and commit."""

    def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the caller's open database transaction. Raises NotInTransaction."""

    def unit(self, producer: Any, connection: Any, messages: Any, **half: Any) -> AbstractContextManager[Any]:
        """Return the block of `producer.begin`: half, database transaction, barrier, commit, end."""

    def begin(self) -> AbstractContextManager[Any]:
        """Begin a database transaction and yield its connection; commit at the end, roll back what raises."""


class AsyncDatabase(Protocol):
    """A database with an asynchronous driver."""

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""

    async def run(self, script: Script[T]) -> T:
        """Run a script in a database transaction of its own, and commit."""

    async def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the caller's open database transaction. Raises NotInTransaction."""

    def unit(self, producer: Any, connection: Any, messages: Any, **half: Any) -> AbstractAsyncContextManager[Any]:
        """Return the block of `producer.begin`: half, database transaction, barrier, commit, end."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """Begin a database transaction and yield its connection; commit at the end, roll back what raises."""


def require_kind(database: Any, *, asynchronous: bool, user: str) -> None:
    """Raise TypeError unless a database is of the kind that its user needs."""
    run = getattr(database, "run", None)
    if run is None or iscoroutinefunction(run) != asynchronous:
        kind = "an asynchronous" if asynchronous else "a plain"
        raise TypeError(f"{user} needs {kind} database of halfnote.databases, not {type(database).__name__}")


def play(script: Script[T], execute: Callable[[Statement], Came]) -> T:
    """Run a script; the exception of a statement is raised inside the script."""
    try:
        statement = next(script)
        while True:
            try:
                came = execute(statement)
            except Exception as error:
                statement = script.throw(error)
            else:
                statement = script.send(came)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def play_async(script: Script[T], execute: Callable[[Statement], Awaitable[Came]]) -> T:
    """Run a script with an asynchronous driver."""
    try:
        statement = next(script)
        while True:
            try:
                came = await execute(statement)
            except Exception as error:
                statement = script.throw(error)
            else:
                statement = script.send(came)
    except StopIteration as stop:
        result: T = stop.value
        return result


def dialect_of(name: str) -> Dialect:
    """Return the dialect for a library's name. Raises ValueError."""
    if name in ("postgresql", "postgres"):
        return "postgresql"
    if name in ("mysql", "mariadb"):
        return "mysql"
    if name == "sqlite":
        return "sqlite"
    raise ValueError(f"Halfnote's tables are for PostgreSQL, MySQL, MariaDB and SQLite, not for {name}")


def waits_for_another(error: BaseException) -> bool:
    """Return whether a statement gave up waiting for another database transaction that is still open."""
    return any(code in ("55P03", 1205, "locked") for cause in _causes(error) for code in _codes(cause))


def is_to_be_tried_again(error: BaseException) -> bool:
    """Return whether the database transaction can be retried: a deadlock, or a serialization failure."""
    return any(code in ("40001", "40P01", 1213, 1020) for cause in _causes(error) for code in _codes(cause))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that libraries wrapped in it."""
    current: BaseException | None = error
    for _ in range(8):
        if current is None:
            return
        yield current
        current = getattr(current, "orig", None) or current.__cause__


def _codes(error: BaseException) -> list[object]:
    """Return the code of an error: an SQLSTATE, MySQL's number, or `locked` of SQLite."""
    locked = type(error).__module__ == "sqlite3" and str(error).startswith("database") and "locked" in str(error)
    return [
        getattr(error, "sqlstate", None) or getattr(error, "pgcode", None),
        error.args[0] if error.args else None,
        "locked" if locked else None,
    ]
