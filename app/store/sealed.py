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
IS_SEALED = "select exists (select from sealing)"
TURN_ON = "insert into sealing (one, since) values (true, $1) on conflict do nothing"

# By their primary keys; both tables are small. Locked as a PUT locks them, and for as long as a few rows take.
GROUPS = """
select name as at, name, secrets, '{}'::jsonb as credentials from producer_group
where name > $1 order by name limit $2 for no key update
"""
SUBSCRIPTIONS = """
select subscription_id as at, name, secrets, credentials from subscription
where subscription_id > $1 order by subscription_id limit $2 for no key update
"""
CHANGE_GROUP = "update producer_group set secrets = $2 where name = $1 and $3::jsonb is not null"
CHANGE_SUBSCRIPTION = "update subscription set secrets = $2, credentials = $3 where subscription_id = $1"

KEYS_IN_USE = """
select key, count(*) from (
  select secrets ->> 'key' as key from producer_group where jsonb_typeof(secrets) = 'object'
  union all select secrets ->> 'key' from subscription where jsonb_typeof(secrets) = 'object'
  union all select credentials ->> 'key' from subscription where credentials ? 'sealed'
) sealed group by key order by key
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A row with secrets: as JSON, sealed or not. `at` is its primary key."""

    at: Any
    name: str
    secrets: Any
    credentials: Any


# Returns a row as it shall be, or None if it may stay.
Resealed = Callable[[Row], Row | None]


async def must_seal(connection: Connection) -> bool:
    """Tell whether secrets are to be stored sealed; holds until the end of the caller's database transaction."""
    await connection.execute(SHARE)
    return bool(await connection.fetchval(IS_SEALED))


async def is_sealed(connection: Connection) -> bool:
    """Tell whether the database was sealed once."""
    return bool(await connection.fetchval(IS_SEALED))


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
    """From now on secrets are stored sealed. In a database transaction of the caller's."""
    await connection.execute(ALONE)
    await connection.execute(TURN_ON, now)


async def _change(connection: Connection, statement: str, rows: list[Row], resealed: Resealed) -> int:
    wanted = [row for row in map(resealed, rows) if row is not None]
    for row in wanted:
        await connection.execute(statement, row.at, _text(row.secrets), _text(row.credentials))
    return len(wanted)


def _row(row: Any) -> Row:
    return Row(row["at"], row["name"], msgspec.json.decode(row["secrets"]), msgspec.json.decode(row["credentials"]))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
