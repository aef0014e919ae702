"""Fails a test if the service takes a second pool connection while it holds one, also in a task that it starts.

If as many such calls as the pool has connections run at once, they wait for each other until the pool's timeout.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from app.database.connection import Connection, Database

_lend = Database.connection
# The pools from which the caller holds a connection. A task inherits them from the task that starts it.
_held: ContextVar[frozenset[int]] = ContextVar("held", default=frozenset())


@asynccontextmanager
async def _lend_one(self: Database) -> AsyncIterator[Connection]:
    held = _held.get()
    assert id(self) not in held, "a second connection of the pool is taken while one is held"
    async with _lend(self) as connection:
        _held.set(held | {id(self)})
        try:
            yield connection
        finally:
            _held.set(held)


def lend_one_at_a_time() -> None:
    """Make every pool of this process refuse a second connection to a caller that holds one."""
    Database.connection = _lend_one  # type: ignore[method-assign]
