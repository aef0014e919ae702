"""Closes streams whose claim of retries may be committed without its answer: then no one knows the rows it took."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import asyncpg

from app.database.connection import Connection
from app.relay.stream import Stream


@contextmanager
def closing_if_lost(
    connection: Connection, streams: Iterable[Stream], close: Callable[[Stream], None]
) -> Iterator[None]:
    """Close the streams if the claims of this block get no answer; the next holder of their shards frees the rows.

    Otherwise the rows, and with `ordered: key` all later messages of their keys, would wait until the claim expires.
    The block is one statement.
    """
    try:
        yield
    except BaseException as error:
        # An error of the server on a connection that lives on means that nothing was committed.
        if connection.is_closed() or not isinstance(error, asyncpg.PostgresError):
            for stream in streams:
                close(stream)
        raise
