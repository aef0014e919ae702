"""Store API keys as SHA-256. Every change also changes the value of the switch `api_keys`, which processes poll."""

from collections.abc import Collection
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from app.database.connection import Connection
from app.field_rules import rate_of_stored

ApiKeyOrder = Literal["name", "used"]

CHANGED = "api_keys"
HIGHEST = 2**31 - 1
# How long processes keep an expired or revoked key in memory, so that they can answer with the reason.
KNOWN_AFTER_END = timedelta(days=30)

# To a version that knows no viewers, a viewer's key is one for metrics, which a viewer may read too (decision 0048).
COLUMNS = """key_id, name, prefix, digest, case when is_viewer and role = 'metrics' then 'viewer' else role end as role,
  producer_groups, topics, subscriptions, rate_per_s, bodies, created_at, created_by, rotated_from, expires_at,
  revoked_at, last_used_at"""
_STORED_ROLE = "case when {role}::text = 'viewer' then 'metrics' else {role}::text end"

# The lock on the row puts changes in order: a reader of the new value also sees every earlier change.
NOTE_CHANGE = """
insert into service_switch (name, value, changed_at) values ($1, '1', $2)
on conflict (name) do update
set value = (service_switch.value::bigint + 1)::text, changed_at = excluded.changed_at
"""
VERSION = "select value from service_switch where name = $1"

ADD = f"""
insert into api_key (name, prefix, digest, role, is_viewer, producer_groups, topics, subscriptions, rate_per_s,
  created_at, created_by, rotated_from, expires_at, bodies)
values ($1, $2, $3, {_STORED_ROLE.format(role="$4")}, $4::text = 'viewer', $5, $6, $7, $8, $9, $10, $11, $12, $13)
on conflict (digest) do nothing
returning {COLUMNS}
"""  # noqa: S608 -- names of columns

# Each process reads the whole result after a change. There are about as many keys as client programs.
KNOWN = f"""
select {COLUMNS} from api_key
where coalesce(revoked_at, 'infinity') > $1 and coalesce(expires_at, 'infinity') > $1
"""  # noqa: S608

# Primary key.
ONE = f"select {COLUMNS} from api_key where key_id = $1"  # noqa: S608
ONE_LOCKED = ONE + " for update"
# The whole table, which is small.
SUCCESSOR = f"select {COLUMNS} from api_key where rotated_from = $1 order by key_id limit 1"  # noqa: S608
PAGE = f"select {COLUMNS} from api_key where key_id < $1 order by key_id desc limit $2"  # noqa: S608
# The whole table is sorted, which is small. $1: how many rows come before the page.
RANKED: dict[ApiKeyOrder, str] = {
    "name": f"select {COLUMNS} from api_key order by name, key_id offset $1 limit $2",  # noqa: S608
    "used": f"select {COLUMNS} from api_key order by last_used_at desc nulls last, key_id desc offset $1 limit $2",  # noqa: S608
}
COUNT = "select count(*) from (select from api_key limit $1) k"

# Primary key. A revoked key never becomes valid again, and an overlap never extends a key.
REVOKE = f"""
update api_key set revoked_at = $2 where key_id = $1 and revoked_at is null returning {COLUMNS}
"""  # noqa: S608
EXPIRE = f"""
update api_key set expires_at = least(expires_at, $2) where key_id = $1 returning {COLUMNS}
"""  # noqa: S608
CHANGE = f"""
update api_key set name = $2, role = {_STORED_ROLE.format(role="$3")}, is_viewer = $3::text = 'viewer',
  producer_groups = $4, topics = $5, subscriptions = $6, rate_per_s = $7, bodies = $8, expires_at = $9
where key_id = $1 returning {COLUMNS}
"""  # noqa: S608

# Primary key. The update changes no indexed column. Keys whose rows another session has locked are returned, and not
# waited for: the caller also reads revoked keys.
USED = """
with free as materialized (
  select key_id from api_key where key_id = any($1::int[]) for no key update skip locked
), noted as (
  update api_key k set last_used_at = $2
  from free where k.key_id = free.key_id and (k.last_used_at is null or k.last_used_at < $2)
)
select key_id from api_key where key_id = any($1::int[]) and key_id <> all (array(select key_id from free))
"""


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key to store; scopes are names, or prefixes that end in `*`."""

    name: str
    prefix: str
    digest: bytes
    role: str
    producer_groups: list[str]
    topics: list[str]
    subscriptions: list[str]
    rate_per_s: float | None = None
    bodies: bool | None = None
    created_by: str | None = None
    rotated_from: int | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyRights:
    """What a PUT gives a key, in the order of the statement."""

    name: str
    role: str
    producer_groups: list[str]
    topics: list[str]
    subscriptions: list[str]
    rate_per_s: float | None
    bodies: bool | None
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. `last_used_at` is exact to the minute."""

    key_id: int
    name: str
    prefix: str
    digest: bytes
    role: str
    producer_groups: list[str]
    topics: list[str]
    subscriptions: list[str]
    rate_per_s: float | None
    bodies: bool | None
    created_at: datetime
    created_by: str | None
    rotated_from: int | None
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


async def note_change(connection: Connection, what: str, now: datetime) -> None:
    """Change the switch of keys (or topics). Call it in the database transaction of the change, before the change."""
    await connection.execute(NOTE_CHANGE, what, now)


async def version(connection: Connection, what: str) -> str | None:
    """Return the switch of keys (or topics), or None if they never changed. Read the switch before the rows."""
    value: str | None = await connection.fetchval(VERSION, what)
    return value


async def add(connection: Connection, key: NewApiKey, now: datetime) -> ApiKey | None:
    """Store a key; None if it exists, valid or not."""
    row = await connection.fetchrow(
        ADD,
        key.name,
        key.prefix,
        key.digest,
        key.role,
        key.producer_groups,
        key.topics,
        key.subscriptions,
        key.rate_per_s,
        now,
        key.created_by,
        key.rotated_from,
        key.expires_at,
        key.bodies,
    )
    return _key_of(row) if row else None


async def known(connection: Connection, now: datetime) -> list[ApiKey]:
    """Return every key that is valid or ended less than KNOWN_AFTER_END ago."""
    return [_key_of(row) for row in await connection.fetch(KNOWN, now - KNOWN_AFTER_END)]


async def one(connection: Connection, key_id: int, *, lock: bool = False) -> ApiKey | None:
    """Return a key, or None."""
    row = await connection.fetchrow(ONE_LOCKED if lock else ONE, key_id)
    return _key_of(row) if row else None


async def successor(connection: Connection, key_id: int) -> ApiKey | None:
    """Return the first key that a rotation made for a key, or None."""
    row = await connection.fetchrow(SUCCESSOR, key_id)
    return _key_of(row) if row else None


async def page(connection: Connection, below: int, limit: int) -> list[ApiKey]:
    """Return keys with ids below `below`, newest first."""
    return [_key_of(row) for row in await connection.fetch(PAGE, below, limit)]


async def ranked(connection: Connection, order: ApiKeyOrder, rank: int, limit: int) -> list[ApiKey]:
    """Return keys in another order, from a rank on."""
    return [_key_of(row) for row in await connection.fetch(RANKED[order], rank, limit)]


async def count_keys(connection: Connection, most: int) -> int:
    """Return how many keys there are, up to `most`."""
    count: int = await connection.fetchval(COUNT, most)
    return count


async def revoke(connection: Connection, key_id: int, now: datetime) -> ApiKey | None:
    """Revoke a key at once; None if it does not exist or was revoked before."""
    row = await connection.fetchrow(REVOKE, key_id, now)
    return _key_of(row) if row else None


async def expire(connection: Connection, key_id: int, at: datetime) -> ApiKey:
    """Set the time at which a key expires, unless it expires earlier."""
    row = await connection.fetchrow(EXPIRE, key_id, at)
    assert row is not None
    return _key_of(row)


async def change(connection: Connection, key_id: int, rights: KeyRights, now: datetime) -> ApiKey:
    """Give a key (locked by `one`) other rights."""
    row = await connection.fetchrow(CHANGE, key_id, *astuple(rights))
    assert row is not None
    return _key_of(row)


async def note_used(connection: Connection, key_ids: Collection[int], now: datetime) -> set[int]:
    """Store when these keys were last used; return those that are left out because another session has locked them."""
    return {row["key_id"] for row in await connection.fetch(USED, list(key_ids), now)}


def _key_of(row: Any) -> ApiKey:
    return ApiKey(**{**row, "rate_per_s": rate_of_stored(row["rate_per_s"])})
