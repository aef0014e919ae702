"""Switches that people turn while the service runs; every replica follows them."""

from dataclasses import dataclass
from datetime import datetime

from app.database import Connection

ACCEPT = "accept"

# Both served by the primary key; of two writers at once the last one stands.
READ = "select value, changed_at from service_switch where name = $1"
TURN = """
insert into service_switch (name, value, changed_at) values ($1, $2, $3)
on conflict (name) do update set value = excluded.value, changed_at = excluded.changed_at
"""


@dataclass(frozen=True, slots=True)
class Switch:
    """Where a switch stands and since when."""

    value: str
    changed_at: datetime


async def read(connection: Connection, name: str) -> Switch | None:
    """Return where a switch stands, or None if it was never turned."""
    row = await connection.fetchrow(READ, name)
    return Switch(row["value"], row["changed_at"]) if row else None


async def turn(connection: Connection, name: str, value: str, now: datetime) -> None:
    """Turn a switch; turning it to where it stands is a repeat."""
    await connection.execute(TURN, name, value, now)
