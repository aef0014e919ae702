"""Store switches that people set while the service runs. Every replica follows them."""

from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection

ACCEPT = "accept"

# Both are served by the primary key. Of two concurrent writers, the last one wins.
READ = "select value, changed_at from service_switch where name = $1"
TURN = """
insert into service_switch (name, value, changed_at) values ($1, $2, $3)
on conflict (name) do update set value = excluded.value, changed_at = excluded.changed_at
where service_switch.value <> excluded.value
returning changed_at
"""


@dataclass(frozen=True, slots=True)
class Switch:
    """The value of a switch and the time of its last change."""

    value: str
    changed_at: datetime


async def read(connection: Connection, name: str) -> Switch | None:
    """Return a switch, or None if it was never set."""
    row = await connection.fetchrow(READ, name)
    return Switch(row["value"], row["changed_at"]) if row else None


async def turn(connection: Connection, name: str, value: str, now: datetime) -> bool:
    """Set a switch; return whether that changed it."""
    return await connection.fetchval(TURN, name, value, now) is not None
