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

# `terminated` is null for one that is left.
END = f"""
select b.n::int, case when a.wait_event is distinct from 'SyncRep' then pg_terminate_backend(a.pid) end as terminated
from {BACKENDS.unnest("b", ordinality="n")}
join pg_stat_activity a on a.pid = b.pid and a.backend_start = b.began_at
"""  # noqa: S608 -- constants

_known: WeakKeyDictionary[Connection, Backend] = WeakKeyDictionary()


def note_backend(connection: Connection, backend: Backend) -> None:
    """Note which backend serves a connection."""
    _known[connection] = backend


async def end_backends(asking: Connection, connections: Sequence[Connection]) -> list[Connection]:
    """End the backends of other connections; return the connections whose backends wait for a synchronous standby.

    These are left: their database transaction is committed here and not yet there, and to end the wait would show it to
    all. What a standby does not have, a failover loses.
    """
    known = [(one, _known[one]) for one in connections if one in _known]
    rows = await asking.fetch(END, *BACKENDS.arrays([backend for _, backend in known]))
    return [known[row["n"] - 1][0] for row in rows if row["terminated"] is None]
