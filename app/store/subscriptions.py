"""Subscriptions as they are stored, and where each one stands in the log."""

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from app.access import EVERYTHING, Within
from app.database import Connection

# Names of columns are all that is put into statements here. What a webhook granted bounds the rate that was asked for.
COLUMNS = """subscription_id, name, topics, filters, destination, secrets, credentials, start, ordered, on_dead, shards,
  max_in_flight, least(rate_per_s, granted_per_s) as rate_per_s, rate_per_s as asked_rate_per_s, granted_per_s,
  timeout_s, retry, state, state_reason, created_at, updated_at"""

# Safe under concurrency: subscription_name lets one of two creators in. The checkpoint is written with the row, so that
# whoever sees the subscription knows where it begins. `start` needs no lock: what this statement's snapshot does not
# show of the log gets a higher offset than all it shows (see RECORD_ENDS), so nothing that is committed after the
# answer is skipped.
CREATE = f"""
with made as (
  insert into subscription (name, topics, filters, destination, ordered, on_dead, shards, max_in_flight, rate_per_s,
    timeout_s, retry, secrets, credentials, granted_per_s, start, state, created_at, updated_at, started_after,
    matches_since)
  values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, 'active', $17, $17, $16, $17)
  on conflict (name) where deleted_at is null do nothing
  returning {COLUMNS}
), placed as (
  insert into checkpoint (subscription_id, shards, shard, "offset", moved_at)
  select subscription_id, shards, shard, $16, $17 from made, generate_series(0, shards - 1) as shard
)
select * from made
"""  # noqa: S608

# Served by subscription_name.
CHANGE = f"""
update subscription set topics = $2, filters = $3, destination = $4, ordered = $5, on_dead = $6, shards = $7,
  max_in_flight = $8, rate_per_s = $9, timeout_s = $10, retry = $11, secrets = $12, credentials = $13,
  granted_per_s = $14, updated_at = $15,
  matches_since = case when topics = $2 and filters is not distinct from $3 then matches_since else $15 end
where name = $1 and deleted_at is null
returning {COLUMNS}
"""  # noqa: S608

# Served by subscription_name.
ONE = f"select {COLUMNS} from subscription where name = $1 and deleted_at is null"  # noqa: S608
ONE_LOCKED = ONE + " for update"
PAGE = f"""
select {COLUMNS} from subscription where deleted_at is null and name > $1
  and ($3::text[] is null or name = any($3) or name ^@ any($4::text[]))
order by name limit $2
"""  # noqa: S608

# There are few subscriptions: read whole by each worker once a second. Every change of a row gives it another xmin.
ACTIVE = f"""
select xmin::text as version, {COLUMNS} from subscription where deleted_at is null and state = 'active'
order by subscription_id
"""  # noqa: S608

# Served by subscription_name. A reason is kept only by `disabled`.
SET_STATE = f"""
update subscription set state = $2, state_reason = null, updated_at = $3
where name = $1 and deleted_at is null and state <> $2
returning {COLUMNS}
"""  # noqa: S608

# Served by the primary key; a subscription that a person paused meanwhile stays paused.
DISABLE = """
update subscription set state = 'disabled', state_reason = $2, updated_at = $3
where subscription_id = $1 and state = 'active' and deleted_at is null
returning 1
"""

SET_SECRETS = "update subscription set secrets = $2, updated_at = $3 where name = $1 and deleted_at is null"

# A tombstone: what is in flight is still settled, and upkeep removes what belongs to it. Its replays end with it.
REMOVE = """
with removed as (
  update subscription set deleted_at = $2, updated_at = $2 where name = $1 and deleted_at is null
  returning subscription_id
), ended as (
  update replay p set state = 'cancelled', ended_at = $2 from removed r
  where p.subscription_id = r.subscription_id and p.state = 'running'
)
select 1 from removed
"""


@dataclass(frozen=True, slots=True)
class Route:
    """Which messages a subscription takes: topics by name or prefix, tags (None: any), headers (JSON text, or None)."""

    exact: list[str]
    prefixes: list[str]
    tags: list[str] | None
    headers: str | None


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription; `filters`, `destination` and `start` are the JSON that HTTP took, what is secret apart.

    `secrets` and `credentials` are JSON as stored: `app.sealing` opens it.

    `rate_per_s` is what holds: the lower of what was asked for and what a webhook granted.
    """

    subscription_id: int
    name: str
    topics: list[str]
    filters: dict[str, Any] | None
    destination: dict[str, Any]
    secrets: Any
    credentials: Any
    start: Any
    ordered: str
    on_dead: str
    shards: int
    max_in_flight: int
    rate_per_s: float | None
    asked_rate_per_s: float | None
    granted_per_s: float | None
    timeout_s: float
    retry: list[float]
    state: str
    state_reason: str | None
    created_at: datetime
    updated_at: datetime

    @property
    def route(self) -> Route:
        """Which messages it takes; a topic with a trailing `*` is a prefix."""
        filters = self.filters or {}
        headers = filters.get("headers")
        return Route(
            [topic for topic in self.topics if not topic.endswith("*")],
            [topic[:-1] for topic in self.topics if topic.endswith("*")],
            filters.get("tags") or None,
            msgspec.json.encode(headers).decode() if headers else None,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a subscription is to be, as HTTP asked for it."""

    name: str
    topics: list[str]
    filters: dict[str, Any] | None
    destination: dict[str, Any]
    start: Any
    ordered: str
    on_dead: str
    shards: int
    max_in_flight: int
    rate_per_s: float | None
    timeout_s: float
    retry: list[float]

    @classmethod
    def of(cls, stored: "Subscription") -> "Wanted":
        """Return what a stored subscription was asked to be."""
        same = {field.name: getattr(stored, field.name) for field in fields(cls)}
        return cls(**{**same, "rate_per_s": stored.asked_rate_per_s})


@dataclass(frozen=True, slots=True)
class Private:
    """What a subscription has that no answer shows, as it is stored. And what its webhook granted."""

    secrets: Any
    credentials: Any
    granted_per_s: float | None = None

    @classmethod
    def of(cls, stored: "Subscription") -> "Private":
        """Return what a stored subscription has of it."""
        return cls(stored.secrets, stored.credentials, stored.granted_per_s)


def _encode(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _subscription(row: Any) -> Subscription:
    fields = dict(row)
    for name in ("filters", "destination", "secrets", "credentials", "start"):
        fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
    fields.pop("version", None)
    return Subscription(**fields)


async def create(
    connection: Connection, wanted: Wanted, private: Private, after: int, now: datetime
) -> Subscription | None:
    """Store a subscription that begins after an offset; None if there is one of this name."""
    row = await connection.fetchrow(CREATE, *_shape(wanted, private), _encode(wanted.start), after, now)
    return _subscription(row) if row else None


async def change(connection: Connection, wanted: Wanted, private: Private, now: datetime) -> Subscription:
    """Store what a subscription (locked by `one`) is to be from now on, but for its start and state.

    Another number of shards takes effect once the holders of the old ones have let go.
    """
    row = await connection.fetchrow(CHANGE, *_shape(wanted, private), now)
    return _subscription(row)


def _shape(wanted: Wanted, private: Private) -> tuple[Any, ...]:
    return (
        wanted.name,
        wanted.topics,
        _encode(wanted.filters),
        _encode(wanted.destination),
        wanted.ordered,
        wanted.on_dead,
        wanted.shards,
        wanted.max_in_flight,
        wanted.rate_per_s,
        wanted.timeout_s,
        wanted.retry,
        _encode(private.secrets),
        _encode(private.credentials),
        private.granted_per_s,
    )


async def one(connection: Connection, name: str, *, lock: bool = False) -> Subscription | None:
    """Return a subscription by name; `lock` keeps others from changing it until the database transaction ends."""
    row = await connection.fetchrow(ONE_LOCKED if lock else ONE, name)
    return _subscription(row) if row else None


async def page(connection: Connection, after: str, limit: int, within: Within = EVERYTHING) -> list[Subscription]:
    """Return subscriptions by name, those after a name and within a scope."""
    return [_subscription(row) for row in await connection.fetch(PAGE, after, limit, *within)]


Known: TypeAlias = dict[tuple[int, str], Subscription]


async def active(connection: Connection, known: Known) -> list[Subscription]:
    """Return every subscription that is to be delivered to.

    `known` keeps what was read, by id and version of the row, so that what did not change is not decoded again.
    """
    fresh: Known = {}
    for row in await connection.fetch(ACTIVE):
        key = row["subscription_id"], row["version"]
        fresh[key] = known.get(key) or _subscription(row)
    known.clear()
    known.update(fresh)
    return list(fresh.values())


async def set_state(connection: Connection, name: str, state: str, now: datetime) -> Subscription | None:
    """Set a state; None if there is no such subscription or it is in that state already."""
    row = await connection.fetchrow(SET_STATE, name, state, now)
    return _subscription(row) if row else None


async def disable(connection: Connection, subscription_id: int, reason: str, now: datetime) -> bool:
    """Stop a subscription because its destination wants no more; False if it was not active."""
    return await connection.fetchval(DISABLE, subscription_id, reason, now) is not None


async def set_secrets(connection: Connection, name: str, secrets: Any, now: datetime) -> None:
    """Store the secrets after a rotation."""
    await connection.execute(SET_SECRETS, name, _encode(secrets), now)


async def remove(connection: Connection, name: str, now: datetime) -> bool:
    """Delete a subscription; False if there is none."""
    return await connection.fetchval(REMOVE, name, now) is not None
