"""Which secrets are sealed, and sealing them anew: a few rows in one database transaction, in order of the primary key.

Until a database that older versions use is sealed once, secrets are stored in plain text, which they can read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database import Connection

# Shared by who writes secrets, and taken alone by who turns sealing on: then no write in plain text is under way.
_LOCK = 0x7365_616C
SHARE = f"select pg_advisory_xact_lock_shared({_LOCK})"
ALONE = f"select pg_advisory_xact_lock({_LOCK})"
# A table of one row.
PARTS = "select headers from sealing"
TURN_ON = """
insert into sealing (one, since, headers) values (true, $1, true) on conflict (one) do update set headers = true
"""

# By their primary keys; both tables are small. Locked as a PUT locks them, and for as long as a few rows take.
GROUPS = """
select name as at, name, secrets, '{}'::jsonb as credentials, '{}'::jsonb as destination from producer_group
where name > $1 order by name limit $2 for no key update
"""
SUBSCRIPTIONS = """
select subscription_id as at, name, secrets, credentials, destination from subscription
where subscription_id > $1 order by subscription_id limit $2 for no key update
"""
CHANGE_GROUP = """
update producer_group set secrets = $2 where name = $1 and $3::jsonb is not null and $4::jsonb is not null
"""
CHANGE_SUBSCRIPTION = """
update subscription set secrets = $2, credentials = $3, destination = $4 where subscription_id = $1
"""

KEYS_IN_USE = """
select key, count(*) from (
  select secrets ->> 'key' as key from producer_group where jsonb_typeof(secrets) = 'object'
  union all select secrets ->> 'key' from subscription where jsonb_typeof(secrets) = 'object'
  union all select credentials ->> 'key' from subscription where credentials ? 'sealed'
) sealed group by key order by key
"""


# Rows with something in plain text that is sealed otherwise.
PLAIN_ROWS = """
select (select count(*) from producer_group where jsonb_typeof(secrets) = 'array' and secrets <> '[]')
  + (select count(*) from subscription where (jsonb_typeof(secrets) = 'array' and secrets <> '[]')
      or (credentials <> '{}' and not credentials ? 'sealed') or destination ? 'headers')
"""


@dataclass(frozen=True, slots=True)
class Parts:
    """What is to be stored sealed: secrets and credentials, and webhooks' own headers."""

    secrets: bool
    headers: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A row with secrets: as JSON, sealed or not. `at` is its primary key."""

    at: Any
    name: str
    secrets: Any
    credentials: Any
    destination: Any


PRIVATE = ("secrets", "credentials", "destination")
# Returns a row as it shall be, or None if it may stay.
Resealed = Callable[[Row], Row | None]


async def must_seal(connection: Connection) -> Parts:
    """Return what is to be stored sealed; holds until the end of the caller's database transaction."""
    await connection.execute(SHARE)
    return await parts(connection)


async def parts(connection: Connection) -> Parts:
    """Return what is stored sealed at the moment."""
    headers: bool | None = await connection.fetchval(PARTS)
    return Parts(headers is not None, bool(headers))


async def is_sealed(connection: Connection) -> bool:
    """Tell whether the database was sealed once, everything that this version seals."""
    return (await parts(connection)).headers


async def plain_rows(connection: Connection) -> int:
    """Count the groups and subscriptions that have something in plain text."""
    count: int = await connection.fetchval(PLAIN_ROWS)
    return count


async def keys_in_use(connection: Connection) -> dict[str, int]:
    """Return by which keys secrets are sealed, with the number of columns."""
    return {row["key"]: row["count"] for row in await connection.fetch(KEYS_IN_USE)}


async def groups_resealed(connection: Connection, after: str, limit: int, resealed: Resealed) -> tuple[str | None, int]:
    """Seal the next groups after a name anew; return the last one's name (None: no more) and how many were changed.

    In a database transaction of the caller's.
    """
    rows = [_row(row) for row in await connection.fetch(GROUPS, after, limit)]
    changed = await _change(connection, CHANGE_GROUP, rows, resealed)
    return (rows[-1].at if rows else None), changed


async def subscriptions_resealed(
    connection: Connection, after: int, limit: int, resealed: Resealed
) -> tuple[int | None, int]:
    """Seal the next subscriptions after an id anew; return the last one's id (None: no more) and how many were changed.

    In a database transaction of the caller's.
    """
    rows = [_row(row) for row in await connection.fetch(SUBSCRIPTIONS, after, limit)]
    changed = await _change(connection, CHANGE_SUBSCRIPTION, rows, resealed)
    return (rows[-1].at if rows else None), changed


async def turn_on(connection: Connection, now: datetime) -> None:
    """From now on all secrets are stored sealed. In a database transaction of the caller's."""
    await connection.execute(ALONE)
    await connection.execute(TURN_ON, now)


async def _change(connection: Connection, statement: str, rows: list[Row], resealed: Resealed) -> int:
    wanted = [row for row in map(resealed, rows) if row is not None]
    for row in wanted:
        await connection.execute(statement, row.at, *map(_text, (row.secrets, row.credentials, row.destination)))
    return len(wanted)


def _row(row: Any) -> Row:
    return Row(row["at"], row["name"], *(msgspec.json.decode(row[name]) for name in PRIVATE))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
