"""SQL that tells whether a worker's last settle was committed, after the answer to its commit was lost.

A settle in a database transaction writes a number of its own into the row of the worker's presence. So it is there if
and only if the settle is, also after a crash or a failover. The server's own numbers of database transactions are not
enough: after a crash it gives out again those of which nothing was written.
"""

from random import getrandbits

from app.database.connection import Connection
from app.store.relay.leases import LeaseKind

# The epoch of a presence has no other use. Served by the primary key.
WRITE = "update lease set epoch = $2 where name = $1"
# The lock waits until the server has ended the settle, and its commit for the standbys that commits wait for. Served by
# the primary key.
LAST = "select epoch from lease where name = $1 for update"


async def number_settle(connection: Connection, owner: str) -> int:
    """Give a number to the settle of the open database transaction, and return it."""
    number = getrandbits(62)
    await connection.execute(WRITE, _presence(owner), number)
    return number


async def is_last_settle(connection: Connection, owner: str, number: int) -> bool:
    """Return whether the worker's last settle with a number has this one, so that it is committed.

    The worker must ask before it settles again.
    """
    last: int | None = await connection.fetchval(LAST, _presence(owner))
    return last == number


def _presence(owner: str) -> str:
    return f"{LeaseKind.WORKER}:{owner}"
