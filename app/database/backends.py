"""The server process of each connection: its backend, which goes on when only the client closes the connection.

A backend that runs a long statement, or waits for a lock, learns only at its end that its client is gone. Until then
it counts toward `max_connections`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from weakref import WeakKeyDictionary

import asyncpg

from app.database.columns import Column, RowArrays

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@dataclass(frozen=True, slots=True)
class Backend:
    """A server process. The number that a client gets at its login is a pooler's own, and numbers come again."""

    pid: int
    began_at: datetime


BACKENDS = RowArrays(Column("pid", "int"), Column("began_at", "timestamptz"))

# What a backend waits for that is surely not committing: a lock, its client, a sleep.
NOT_COMMITTING = "('Lock', 'Client', 'Timeout')"
# `terminated` is null for one that is left. One that has written and works may be anywhere in its commit. To end it
# there would end its wait for a synchronous standby, now or as soon as that wait begins. A pooler may have given the
# backend of a closed connection to this session.
END = f"""
select b.n::int, case when a.state is distinct from 'active' or a.backend_xid is null
    or a.wait_event_type in {NOT_COMMITTING} then pg_terminate_backend(a.pid) end as terminated
from {BACKENDS.unnest("b", ordinality="n")}
join pg_stat_activity a on a.pid = b.pid and a.backend_start = b.began_at
where a.pid <> pg_backend_pid()
"""  # noqa: S608 -- constants

_known: WeakKeyDictionary[Connection, Backend] = WeakKeyDictionary()


def note_backend(connection: Connection, backend: Backend) -> None:
    """Note which backend serves a connection."""
    _known[connection] = backend


async def end_backends(asking: Connection, connections: Sequence[Connection]) -> list[Connection]:
    """End the backends of other connections; return the connections whose backends may be committing.

    These are left. A commit may wait for a synchronous standby: it is on disk here and not yet there, and to end the
    wait would show it to all. What a standby does not have, a failover loses.
    """
    known = [(one, _known[one]) for one in connections if one in _known]
    rows = await asking.fetch(END, *BACKENDS.arrays([backend for _, backend in known]))
    return [known[row["n"] - 1][0] for row in rows if row["terminated"] is None]
