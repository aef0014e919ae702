"""The connections that read a snapshot, beside the one that holds it, through Arrow's driver (ADBC)."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from adbc_driver_postgresql import dbapi
from psycopg.conninfo import make_conninfo

# JDBC's connections use these statements too (spark/sources/frames.py). Time limits of a role or a database would end
# the read. With JIT Postgres would compile the expressions of each range of ids, which takes longer than to run them.
# The readers share the cores already: parallel workers for each range would pass every row through a queue, and double
# the processor time of Postgres.
IN_SNAPSHOT = (
    "set transaction isolation level repeatable read, read only",
    "set transaction snapshot '{}'",
    "set local statement_timeout = 0",
    "set local idle_in_transaction_session_timeout = 0",
    "set local jit = off",
    "set local max_parallel_workers_per_gather = 0",
)
# The other options choose a server, which is already chosen, or need a newer libpq than the driver may have.
OPTIONS = ("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "channel_binding", "gssencmode", "krbsrvname")
STRICT_STANDBY = """
select from pg_settings
where name = 'default_transaction_isolation' and reset_val = 'serializable' and pg_is_in_recovery()
"""
LEVEL = r"-c default_transaction_isolation=read\ committed"
# How long a read that was ended may go on.
ENDS_WITHIN_S = 30.0


class Readers:
    """Connections to the server of a connection, each in the snapshot that it exported as `name`.

    Before the driver's first connection it reads the types and columns of the whole database, which takes longer than
    to read a small table. The connections share what it read; the first one stays open for that, and is idle.
    """

    def __init__(self, holder: "psycopg.Connection[Any]", name: str) -> None:
        self._holder = holder
        self._name = name
        self._first: Any = None
        self._lent = 0
        self._closed = False
        # ADBC allows one call at a time of what its connections share.
        self._sharing = threading.Condition()

    @contextmanager
    def cursor(self) -> Iterator[Any]:
        """Lend a cursor of a new connection whose statements read the snapshot. Several threads may ask at once.

        Raises OSError after `close`.
        """
        with self._sharing:
            if self._closed:
                raise OSError("The read of the snapshot was ended.")
            if self._first is None:
                self._first = dbapi.connect(_reach(self._holder))
            connection = self._first.adbc_clone()
            self._lent += 1
        try:
            with closing(connection.cursor()) as cursor:
                for statement in IN_SNAPSHOT:
                    cursor.execute(statement.format(self._name))
                yield cursor
        finally:
            with self._sharing:
                connection.close()
                self._lent -= 1
                self._sharing.notify_all()

    def close(self) -> None:
        """Close the first connection once the others are closed.

        A signal may end the wait for threads that still read. What they share is freed with the first connection, so a
        read that goes on for longer keeps it.
        """
        with self._sharing:
            self._closed = True
            if self._first is not None and self._sharing.wait_for(lambda: not self._lent, ENDS_WITHIN_S):
                self._first.close()


def session_options(connection: "psycopg.Connection[Any]") -> dict[str, str]:
    """Return libpq's parameter `options` for other sessions like a connection's, if they need it.

    A driver's own statements come before it can be told of a level, and a standby refuses the strictest one, which a
    database or a role may have. Otherwise there are none, because a pooler may refuse them.
    """
    row = connection.execute(STRICT_STANDBY).fetchone()
    return {} if row is None else {"options": LEVEL}


def _reach(connection: "psycopg.Connection[Any]") -> str:
    """Return libpq's parameters for the same server that a connection uses."""
    info = connection.info
    given = info.get_parameters()
    return make_conninfo(
        host=info.host,
        port=info.port,
        dbname=info.dbname,
        user=info.user,
        password=info.password,
        application_name="halfnote proof",
        connect_timeout=10,
        keepalives_idle=30,
        keepalives_interval=10,
        keepalives_count=3,
        **{name: given[name] for name in OPTIONS if name in given},
        **session_options(connection),
    )
