"""What the barrier and the inbox ask of a database: to run a script of statements in one database transaction.

A script is a generator of statements, so that it is written once for drivers that are awaited and those that are not.
"""

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from halfnote.errors import HalfnoteError

T = TypeVar("T")

Dialect: TypeAlias = Literal["postgresql", "mysql", "sqlite"]


# PostgreSQL answers the COMMIT of a database transaction in which a statement has failed by a rollback, without an
# error; any other statement raises there.
STANDS = "select 1"


class NotInTransaction(HalfnoteError):
    """The connection has no database transaction open: a row would be committed on its own, beside what it is about."""


@dataclass(frozen=True)
class Statement:
    """SQL in which `{0}`, `{1}` … stand for the values."""

    sql: str
    values: tuple[Any, ...] = ()

    def rendered(self, mark: Callable[[int], str]) -> str:
        """Return the SQL with a driver's marks."""
        return self.sql.format(*(mark(index) for index in range(len(self.values))))


@dataclass(frozen=True)
class Came:
    """What a statement brought: how many rows it wrote, or the rows it read."""

    count: int
    rows: Sequence[Sequence[Any]] = ()


Script: TypeAlias = Generator[Statement, Came, T]


class Database(Protocol):
    """A database with a plain driver."""

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""

    def run(self, script: Script[T]) -> T:
        """Run a script in a database transaction of its own, and commit."""

    def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the caller's open database transaction. Raises NotInTransaction."""

    def begin(self) -> AbstractContextManager[Any]:
        """Begin a database transaction and yield its connection; commit at the end, roll back what raises."""


class AsyncDatabase(Protocol):
    """A database with a driver that is awaited."""

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""

    async def run(self, script: Script[T]) -> T:
        """Run a script in a database transaction of its own, and commit."""

    async def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the caller's open database transaction. Raises NotInTransaction."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """Begin a database transaction and yield its connection; commit at the end, roll back what raises."""


def play(script: Script[T], execute: Callable[[Statement], Came]) -> T:
    """Run a script; what a statement raises is raised in it."""
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
    """Run a script with a driver that is awaited."""
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
    """Return the dialect that a library calls so. Raises ValueError."""
    if name in ("postgresql", "postgres"):
        return "postgresql"
    if name in ("mysql", "mariadb"):
        return "mysql"
    if name == "sqlite":
        return "sqlite"
    raise ValueError(f"Halfnote's tables are for PostgreSQL, MySQL, MariaDB and SQLite, not for {name}")


def waits_for_another(error: BaseException) -> bool:
    """Tell whether a statement gave up waiting for another database transaction that is still open."""
    return any(code in ("55P03", 1205, "locked") for cause in _causes(error) for code in _codes(cause))


def is_to_be_tried_again(error: BaseException) -> bool:
    """Tell whether the database asks to try again: a deadlock, or a conflict of serializable transactions."""
    return any(code in ("40001", "40P01", 1213, 1020) for cause in _causes(error) for code in _codes(cause))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what libraries wrapped in it."""
    current: BaseException | None = error
    for _ in range(8):
        if current is None:
            return
        yield current
        current = getattr(current, "orig", None) or current.__cause__


def _codes(error: BaseException) -> list[object]:
    """Return what tells its kind: an SQLSTATE, MySQL's number, `locked` of SQLite."""
    locked = type(error).__module__ == "sqlite3" and str(error).startswith("database") and "locked" in str(error)
    return [
        getattr(error, "sqlstate", None) or getattr(error, "pgcode", None),
        error.args[0] if error.args else None,
        "locked" if locked else None,
    ]
