"""API keys: stored as SHA-256. Every change gives the switch `api_keys` another value, which processes look at."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.database import Connection

CHANGED = "api_keys"
HIGHEST = 2**31 - 1
# For how long a key that is over is still told from one that never was.
TOLD_FOR = timedelta(days=30)

COLUMNS = """key_id, name, prefix, digest, role, producer_groups, topics, subscriptions, rate_per_s, created_at,
  created_by, rotated_from, expires_at, revoked_at, last_used_at"""

# The row's lock lets one change follow another, so that who sees the new value sees every change before it as well.
NOTE_CHANGE = """
insert into service_switch (name, value, changed_at) values ($1, '1', $2)
on conflict (name) do update
set value = (service_switch.value::bigint + 1)::text, changed_at = excluded.changed_at
"""
VERSION = "select value from service_switch where name = $1"

ADD = f"""
insert into api_key (name, prefix, digest, role, producer_groups, topics, subscriptions, rate_per_s, created_at,
  created_by, rotated_from, expires_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
returning {COLUMNS}
"""  # noqa: S608 -- names of columns

# Read whole by each process when it changed: there are as many keys as there are programs.
KNOWN = f"""
select {COLUMNS} from api_key
where coalesce(revoked_at, 'infinity') > $1 and coalesce(expires_at, 'infinity') > $1
"""  # noqa: S608

# Primary key.
ONE = f"select {COLUMNS} from api_key where key_id = $1"  # noqa: S608
ONE_LOCKED = ONE + " for update"
PAGE = f"select {COLUMNS} from api_key where key_id < $1 order by key_id desc limit $2"  # noqa: S608

# Primary key. A key is revoked once, and never again valid; an overlap never makes one last longer.
REVOKE = f"""
update api_key set revoked_at = $2 where key_id = $1 and revoked_at is null returning {COLUMNS}
"""  # noqa: S608
EXPIRE = f"""
update api_key set expires_at = least(expires_at, $2) where key_id = $1 returning {COLUMNS}
"""  # noqa: S608

# Primary key; touches no index.
USED = """
update api_key set last_used_at = $2
where key_id = any($1::int[]) and (last_used_at is null or last_used_at < $2)
"""


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key to be stored; scopes are names, or beginnings with a `*`."""

    name: str
    prefix: str
    digest: bytes
    role: str
    producer_groups: list[str]
    topics: list[str]
    subscriptions: list[str]
    rate_per_s: float | None = None
    created_by: str | None = None
    rotated_from: int | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. `last_used_at` is true to the minute."""

    key_id: int
    name: str
    prefix: str
    digest: bytes
    role: str
    producer_groups: list[str]
    topics: list[str]
    subscriptions: list[str]
    rate_per_s: float | None
    created_at: datetime
    created_by: str | None
    rotated_from: int | None
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


async def note_change(connection: Connection, what: str, now: datetime) -> None:
    """Say that keys (or topics) were changed; belongs in the database transaction of the change, before it."""
    await connection.execute(NOTE_CHANGE, what, now)


async def version(connection: Connection, what: str) -> str | None:
    """Return what tells whether there is news; None: there never was any. Read it before what it tells of."""
    value: str | None = await connection.fetchval(VERSION, what)
    return value


async def add(connection: Connection, key: NewApiKey, now: datetime) -> ApiKey:
    """Store a key."""
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
    )
    assert row is not None
    return ApiKey(**row)


async def known(connection: Connection, now: datetime) -> list[ApiKey]:
    """Return every key that is valid or was until lately."""
    return [ApiKey(**row) for row in await connection.fetch(KNOWN, now - TOLD_FOR)]


async def one(connection: Connection, key_id: int, *, lock: bool = False) -> ApiKey | None:
    """Return a key, or None."""
    row = await connection.fetchrow(ONE_LOCKED if lock else ONE, key_id)
    return ApiKey(**row) if row else None


async def page(connection: Connection, below: int, limit: int) -> list[ApiKey]:
    """Return keys, the newest first, with ids below one."""
    return [ApiKey(**row) for row in await connection.fetch(PAGE, below, limit)]


async def revoke(connection: Connection, key_id: int, now: datetime) -> ApiKey | None:
    """End a key at once; None if it is not there or was revoked before."""
    row = await connection.fetchrow(REVOKE, key_id, now)
    return ApiKey(**row) if row else None


async def expire(connection: Connection, key_id: int, at: datetime) -> ApiKey:
    """Let a key end at a time, if it does not end before."""
    row = await connection.fetchrow(EXPIRE, key_id, at)
    assert row is not None
    return ApiKey(**row)


async def note_used(connection: Connection, key_ids: Collection[int], now: datetime) -> None:
    """Write down that these keys were used."""
    await connection.execute(USED, list(key_ids), now)
