"""Django's database connections, which belong to threads: callers' database transactions are `atomic` blocks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from django.db import connections, transaction

from halfnote.databases.base import Dialect, NotInTransaction, Script, dialect_of, play
from halfnote.databases.dbapi import executed

T = TypeVar("T")


class Django:
    """The database with the name `using` in Django's settings. Pass None wherever a connection is a parameter."""

    def __init__(self, using: str = "default") -> None:
        self._using = using

    @property
    def dialect(self) -> Dialect:
        """Which SQL it speaks."""
        return dialect_of(connections[self._using].vendor)

    @property
    def one_connection_a_thread(self) -> bool:
        """Whether callers have no connection to pass."""
        return True

    def run(self, script: Script[T]) -> T:
        """Run a script in its own database transaction, and commit. Raises RuntimeError inside `atomic`."""
        with self.begin():
            return self._play(script)

    def unit(self, producer: Any, connection: Any, messages: Any, **half: Any) -> AbstractContextManager[Any]:
        """Return the block of `producer.begin`."""
        from halfnote.units import in_django

        self._close_if_lost()
        return in_django(producer, messages, **half, using=self._using)

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Begin an outermost `atomic` block; commit at its end, or roll back. Raises RuntimeError inside one."""
        self._close_if_lost()
        with transaction.atomic(using=self._using, durable=True):
            yield

    def within(self, connection: Any, script: Script[T]) -> T:
        """Run a script in this thread's `atomic` block. Raises NotInTransaction outside of one."""
        if not connections[self._using].in_atomic_block:
            raise NotInTransaction("there is no database transaction: use `with transaction.atomic()`")
        return self._play(script)

    def _close_if_lost(self) -> None:
        """Close a connection that is lost, as Django does at each request: a worker thread has none.

        One that is only old stays: a cursor, a lock or a setting of the session may be in use.
        """
        connection = connections[self._using]
        if not connection.in_atomic_block and connection.errors_occurred and not connection.is_usable():
            connection.close()

    def _play(self, script: Script[T]) -> T:
        with connections[self._using].cursor() as cursor:
            return play(script, lambda statement: executed(cursor, statement, "%s"))
