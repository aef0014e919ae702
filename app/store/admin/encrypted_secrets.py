"""Count the stored secrets by the key that sealed them, and seal rows again in small database transactions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from app.database.connection import Connection

# Served by the primary keys; both tables are small. The lock is the one that a PUT takes. It is short, because one
# database transaction changes only a few rows.
GROUPS = """
select name as at, name, secrets, '{}'::jsonb as credentials from producer_group
where name > $1 order by name limit $2 for no key update
"""
SUBSCRIPTIONS = """
select subscription_id as at, name, secrets, credentials from subscription
where subscription_id > $1 order by subscription_id limit $2 for no key update
"""
# Served by the primary keys. The statements above have locked the rows.
CHANGE_GROUP = "update producer_group set secrets = $2 where name = $1"
CHANGE_SUBSCRIPTION = "update subscription set secrets = $2, credentials = $3 where subscription_id = $1"

# Reads both whole tables, which are small.
KEYS_IN_USE = """
select key, count(*) from (
  select secrets ->> 'key' as key from producer_group where jsonb_typeof(secrets) = 'object'
  union all select secrets ->> 'key' from subscription where jsonb_typeof(secrets) = 'object'
  union all select credentials ->> 'key' from subscription where credentials ? 'sealed'
) sealed group by key order by key
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A row's secrets and credentials as the JSON that is stored. `at` is its primary key."""

    at: Any
    name: str
    secrets: Any
    credentials: Any


# Returns a row with other secrets, or None to leave it unchanged.
Resealed = Callable[[Row], Row | None]


async def keys_in_use(connection: Connection) -> dict[str, int]:
    """Return how many columns each key has sealed, by the key's id."""
    return {row["key"]: row["count"] for row in await connection.fetch(KEYS_IN_USE)}


async def reseal_groups(connection: Connection, after: str, limit: int, resealed: Resealed) -> tuple[str | None, int]:
    """Seal again the groups that follow a name. Return the last group's name (None: no more) and how many changed.

    Runs in a database transaction of the caller.
    """
    rows = [_row(row) for row in await connection.fetch(GROUPS, after, limit)]
    changed = _changed(rows, resealed)
    for row in changed:
        await connection.execute(CHANGE_GROUP, row.at, _text(row.secrets))
    return (rows[-1].at if rows else None), len(changed)


async def reseal_subscriptions(
    connection: Connection, after: int, limit: int, resealed: Resealed
) -> tuple[int | None, int]:
    """Seal again the subscriptions that follow an id. Return the last one's id (None: no more) and how many changed.

    Runs in a database transaction of the caller.
    """
    rows = [_row(row) for row in await connection.fetch(SUBSCRIPTIONS, after, limit)]
    changed = _changed(rows, resealed)
    for row in changed:
        await connection.execute(CHANGE_SUBSCRIPTION, row.at, _text(row.secrets), _text(row.credentials))
    return (rows[-1].at if rows else None), len(changed)


def _changed(rows: list[Row], resealed: Resealed) -> list[Row]:
    return [row for row in map(resealed, rows) if row is not None]


def _row(row: Any) -> Row:
    return Row(row["at"], row["name"], *(msgspec.json.decode(row[name]) for name in ("secrets", "credentials")))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
