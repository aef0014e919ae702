"""Records the statements that a service runs on its pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncpg.connection import LoggedQuery
from sqlalchemy import event

from app.database.connection import Database


@contextmanager
def recorded(database: Database) -> Iterator[list[str]]:
    """Record each statement that the pool's connections run, in order, until the block ends."""
    statements: list[str] = []
    with recorded_queries(database, lambda query: statements.append(query.query)):
        yield statements


@contextmanager
def recorded_queries(database: Database, note: Callable[[LoggedQuery], None]) -> Iterator[None]:
    """Note each statement that the pool's connections run, with its arguments, until the block ends."""
    watched = set()

    def watch(connection: Any, *_: Any) -> None:
        raw = connection.driver_connection
        raw.add_query_logger(note)
        watched.add(raw)

    event.listen(database.engine.sync_engine, "checkout", watch)
    try:
        yield
    finally:
        event.remove(database.engine.sync_engine, "checkout", watch)
        for raw in watched:
            raw.remove_query_logger(note)
