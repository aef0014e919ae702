"""Any driver of Python's database API (PEP 249): psycopg, PyMySQL, mysqlclient, sqlite3 …"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, TypeVar

from halfnote.databases.base import Came, Dialect, NotInTransaction, Script, Statement, dialect_of, play

T = TypeVar("T")

_NO_SAVEPOINT = 1305


class DbApi:
    """A database that is reached by its connections.

    `connect` returns a connection, as `psycopg.connect` does; `release` is called with it afterward (default: close
    it). With a pool: `DbApi(pool.getconn, "postgresql", release=pool.putconn)`.
    """

    def __init__(
        self, connect: Callable[[], Any], dialect: str, *, release: Callable[[Any], Any] = lambda one: one.close()
    ) -> None:
        self._connect, self._release = connect, release
        self._dialect = dialect_of(dialect)
        self._mark = "?" if self._dialect == "sqlite" else "%s"

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return self._dialect

    @property
    def one_connection_a_thread(self) -> bool:
        """Whether callers have no connection to pass."""
        return False

    def run(self, script: Script[T]) -> T:
        """Run a script on a separate connection, and commit."""
        with self.begin() as connection:
            return self._play(connection, script)

    def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in the connection's database transaction. Raises NotInTransaction in autocommit mode."""
        if commits_by_itself(connection):
            raise NotInTransaction("the connection is in autocommit mode: begin a database transaction first")
        return self._play(connection, script)

    def unit(self, producer: Any, connection: Any, messages: Any, **half: Any) -> AbstractContextManager[Any]:
        """Return the block of `producer.begin`. It also commits what was written on the connection before.

        Not with psycopg: there the block is a savepoint after any statement, also a read, and the caller commits.
        """
        from halfnote.units import in_dbapi, in_psycopg

        if _is_of_psycopg(connection):
            return in_psycopg(producer, connection, messages, **half)
        return in_dbapi(producer, connection, messages, hides_rollbacks=self._dialect == "mysql", **half)

    @contextmanager
    def begin(self) -> Iterator[Any]:
        """Yield a connection; commit at the end, roll back what raises. In autocommit mode it begins by a statement."""
        from halfnote.units import committed

        connection = self._connect()
        try:
            # psycopg can refuse that the code commits a part of the work; other drivers cannot.
            whole = connection.transaction() if _is_of_psycopg(connection) else nullcontext()
            with committed(connection, self._dialect), whole:
                yield connection
        finally:
            self._release(connection)

    def _play(self, connection: Any, script: Script[T]) -> T:
        cursor = connection.cursor()
        try:
            return play(script, lambda statement: executed(cursor, statement, self._mark))
        finally:
            cursor.close()


def executed(cursor: Any, statement: Statement, mark: str) -> Came:
    """Execute a statement on a cursor."""
    sql = statement.rendered(lambda index: mark)
    cursor.execute(sql, statement.values) if statement.values else cursor.execute(sql)
    return Came(cursor.rowcount, cursor.fetchall() if cursor.description else ())


def _is_of_psycopg(connection: Any) -> bool:
    return type(connection).__module__.partition(".")[0] == "psycopg"


def commits_by_itself(connection: Any) -> bool:
    """Return whether the connection commits each statement by itself, for the known drivers."""
    if type(connection).__module__ == "sqlite3":
        # Since Python 3.12 also by `autocommit`.
        by_itself = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
        return by_itself and not connection.in_transaction
    autocommit = getattr(connection, "autocommit", False)
    info = getattr(connection, "info", None)
    if info is not None and hasattr(info, "transaction_status"):
        # psycopg: 0 is idle.
        return bool(autocommit) and int(info.transaction_status) == 0
    if hasattr(connection, "get_autocommit"):
        # PyMySQL, mysqlclient.
        return bool(connection.get_autocommit()) and not _keeps_savepoints(connection)
    if hasattr(connection, "in_transaction"):
        # MySQL Connector/Python.
        return bool(autocommit) and not connection.in_transaction
    return False


def _keeps_savepoints(connection: Any) -> bool:
    """Return whether a database transaction is open. MySQL and MariaDB have no other common way to find out."""
    with closing(connection.cursor()) as cursor:
        cursor.execute("savepoint halfnote_open")
        try:
            cursor.execute("release savepoint halfnote_open")
        except Exception as error:
            if error.args[:1] == (_NO_SAVEPOINT,):
                return False
            raise
    return True
