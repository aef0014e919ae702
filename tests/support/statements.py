"""Records the statements that a service runs on its pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncpg.connection import LoggedQuery
from sqlalchemy import event

from app.database.connection import Database


@contextmanager
def recorded(database: Database) -> Iterator[list[str]]:
    """Record each statement that the pool's connections run, in order, until the block ends."""
    statements: list[str] = []
    watched = set()

    def note(query: LoggedQuery) -> None:
        statements.append(query.query)

    def watch(connection: Any, *_: Any) -> None:
        raw = connection.driver_connection
        raw.add_query_logger(note)
        watched.add(raw)

    event.listen(database.engine.sync_engine, "checkout", watch)
    try:
        yield statements
    finally:
        event.remove(database.engine.sync_engine, "checkout", watch)
        for raw in watched:
            raw.remove_query_logger(note)
