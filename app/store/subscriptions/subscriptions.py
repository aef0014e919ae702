"""Store subscriptions, with the checkpoint at which each one starts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from app.database.connection import Connection
from app.field_rules import rate_of_stored
from app.permissions import EVERYTHING, Within
from app.topic_patterns import TopicPatterns
from app.verdicts import OnDead, Ordered, SubscriptionState

# The type of destination whose messages consumers claim.
PULL = "pull"

# Statements here are formatted with names of columns only. The rate that a webhook granted limits the requested rate.
COLUMNS = """subscription_id, name, topics, filters, destination, secrets, credentials, start, ordered, on_dead, shards,
  max_in_flight, least(rate_per_s, granted_per_s) as rate_per_s, rate_per_s as asked_rate_per_s, granted_per_s,
  timeout_s, retry, expire_after_s, max_backlog, state, state_reason, created_at, updated_at, matches_since"""

# Safe under concurrency: subscription_name accepts one of two concurrent creators. The checkpoint is written with the
# row, so that each reader of the subscription sees its start. `start` needs no lock: every outbox row that this
# statement's snapshot does not show gets a higher offset than all rows that it shows (see RECORD_ENDS). So no message
# that is committed after the response is skipped.
CREATE = f"""
with made as (
  insert into subscription (name, topics, filters, destination, ordered, on_dead, shards, max_in_flight, rate_per_s,
    timeout_s, retry, expire_after_s, max_backlog, secrets, credentials, granted_per_s, start, state, created_at,
    updated_at, started_after, matches_since)
  values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, 'active', $19, $19, $18, $19)
  on conflict (name) where deleted_at is null do nothing
  returning {COLUMNS}
), placed as (
  insert into checkpoint (subscription_id, shards, shard, "offset", moved_at)
  select subscription_id, shards, shard, $18, $19 from made, generate_series(0, shards - 1) as shard
), claimable as (
  insert into pull_cursor (subscription_id, "offset") select subscription_id, $18 from made
  where destination ->> 'type' = 'pull'
)
select * from made
"""  # noqa: S608

# Served by subscription_name.
CHANGE = f"""
update subscription set topics = $2, filters = $3, destination = $4, ordered = $5, on_dead = $6, shards = $7,
  max_in_flight = $8, rate_per_s = $9, timeout_s = $10, retry = $11, expire_after_s = $12, max_backlog = $13,
  secrets = $14, credentials = $15, granted_per_s = $16, updated_at = $17,
  matches_since = case when topics = $2 and filters is not distinct from $3 then matches_since else $17 end
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

# Served by the primary key, once when a process starts.
OLDEST = "select name from subscription where deleted_at is null order by subscription_id limit $1"
# Served by subscription_name.
NAMED = f"select {COLUMNS} from subscription where deleted_at is null and name = any($1::text[])"  # noqa: S608

# Primary keys.
ACTIVE = f"""
select {COLUMNS} from subscription
where subscription_id = any($1::int[]) and deleted_at is null and state = 'active'
"""  # noqa: S608

# Each worker reads all subscriptions after a change of one; there are few. Every change of a row gives it another xmin.
STREAMED = f"""
select xmin::text as version, {COLUMNS} from subscription
where deleted_at is null and (state = 'active' or expire_after_s is not null or max_backlog is not null)
order by subscription_id
"""  # noqa: S608

# There are few subscriptions.
LIMITED_PULLED = f"""
select {COLUMNS} from subscription
where deleted_at is null and destination ->> 'type' = '{PULL}'
  and (expire_after_s is not null or max_backlog is not null)
order by subscription_id
"""  # noqa: S608

# Served by subscription_name. Only the state `disabled` keeps a reason.
SET_STATE = f"""
update subscription set state = $2, state_reason = null, updated_at = $3
where name = $1 and deleted_at is null and state <> $2
returning {COLUMNS}
"""  # noqa: S608

# Primary key. Workers close and open the streams of a subscription when its row has changed.
TOUCH = "update subscription set updated_at = $2 where subscription_id = $1"

# Primary key. A subscription that a person paused meanwhile stays paused, and one that was changed or resumed meanwhile
# stays active: what refused is the former destination, or was before the resumption.
DISABLE = """
update subscription set state = 'disabled', state_reason = $3, updated_at = $4
where subscription_id = $1 and updated_at = $2 and state = 'active' and deleted_at is null
returning 1
"""

SET_SECRETS = "update subscription set secrets = $2, updated_at = $3 where name = $1 and deleted_at is null"

# The row becomes a tombstone: deliveries in flight are still settled, and upkeep removes the subscription's other rows.
# Its replays end in the same statement.
REMOVE = """
with removed as (
  update subscription set deleted_at = $2, updated_at = $2 where name = $1 and deleted_at is null
  returning subscription_id
), ended as (
  update replay p set state = 'cancelled', ended_at = $2, cancelled_at = $2 from removed r
  where p.subscription_id = r.subscription_id and p.state = 'running'
)
select 1 from removed
"""


@dataclass(frozen=True, slots=True)
class Route:
    """The messages that a subscription takes: topic patterns, tags (None: any) and headers (JSON text; None: any)."""

    topics: TopicPatterns
    tags: list[str] | None
    headers: str | None


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription. `filters`, `destination` and `start` are the JSON of the request, without its secrets.

    `secrets` and `credentials` are JSON as stored; `app.secrets.vault` decrypts them. `rate_per_s` is the rate in
    force: the lower of `asked_rate_per_s` and `granted_per_s` (the rate that a webhook granted). `matches_since`: the
    last change of topics or filters.
    """

    subscription_id: int
    name: str
    topics: list[str]
    filters: dict[str, Any] | None
    destination: dict[str, Any]
    secrets: Any
    credentials: Any
    start: Any
    ordered: Ordered
    on_dead: OnDead
    shards: int
    max_in_flight: int
    rate_per_s: float | None
    asked_rate_per_s: float | None
    granted_per_s: float | None
    timeout_s: float
    retry: list[float]
    expire_after_s: float | None
    max_backlog: int | None
    state: SubscriptionState
    state_reason: str | None
    created_at: datetime
    updated_at: datetime
    matches_since: datetime

    @property
    def is_pulled(self) -> bool:
        """Whether consumers claim its messages, and no worker sends them."""
        return bool(self.destination.get("type") == PULL)

    @property
    def route(self) -> Route:
        """The messages that it takes."""
        filters = self.filters or {}
        headers = filters.get("headers")
        return Route(
            TopicPatterns(self.topics),
            filters.get("tags") or None,
            msgspec.json.encode(headers).decode() if headers else None,
        )


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """The configuration that a request gives a subscription."""

    name: str
    topics: list[str]
    filters: dict[str, Any] | None
    destination: dict[str, Any]
    start: Any
    ordered: Ordered
    on_dead: OnDead
    shards: int
    max_in_flight: int
    rate_per_s: float | None
    timeout_s: float
    retry: list[float]
    expire_after_s: float | None
    max_backlog: int | None

    @classmethod
    def of(cls, stored: "Subscription") -> "SubscriptionSpec":
        """Return the configuration that was requested for a stored subscription."""
        same = {field.name: getattr(stored, field.name) for field in fields(cls)}
        return cls(**{**same, "rate_per_s": stored.asked_rate_per_s})


@dataclass(frozen=True, slots=True)
class Private:
    """The stored secrets of a subscription, which no response shows, and the rate that its webhook granted."""

    secrets: Any
    credentials: Any
    granted_per_s: float | None = None

    @classmethod
    def of(cls, stored: "Subscription") -> "Private":
        """Return this part of a stored subscription."""
        return cls(stored.secrets, stored.credentials, stored.granted_per_s)


def _encode(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def subscription_of(row: Any) -> Subscription:
    """Return the subscription of a row of COLUMNS."""
    fields = dict(row)
    for name in ("filters", "destination", "secrets", "credentials", "start"):
        fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
    fields.pop("version", None)
    for name, words in (("state", SubscriptionState), ("ordered", Ordered), ("on_dead", OnDead)):
        fields[name] = words(fields[name])
    for name in ("rate_per_s", "asked_rate_per_s"):
        fields[name] = rate_of_stored(fields[name])
    return Subscription(**fields)


async def create(
    connection: Connection, wanted: SubscriptionSpec, private: Private, after: int, now: datetime
) -> Subscription | None:
    """Store a subscription that begins after an offset; None if the name exists already."""
    row = await connection.fetchrow(CREATE, *_shape(wanted, private), _encode(wanted.start), after, now)
    return subscription_of(row) if row else None


async def change(connection: Connection, wanted: SubscriptionSpec, private: Private, now: datetime) -> Subscription:
    """Change a subscription (locked by `one`), except its start and its state.

    A new number of shards takes effect after the leases of the old shards are released.
    """
    row = await connection.fetchrow(CHANGE, *_shape(wanted, private), now)
    return subscription_of(row)


def _shape(wanted: SubscriptionSpec, private: Private) -> tuple[Any, ...]:
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
        wanted.expire_after_s,
        wanted.max_backlog,
        _encode(private.secrets),
        _encode(private.credentials),
        private.granted_per_s,
    )


async def one(connection: Connection, name: str, *, lock: bool = False) -> Subscription | None:
    """Return a subscription by name; `lock` keeps others from changing it until the database transaction ends."""
    row = await connection.fetchrow(ONE_LOCKED if lock else ONE, name)
    return subscription_of(row) if row else None


async def page(connection: Connection, after: str, limit: int, within: Within = EVERYTHING) -> list[Subscription]:
    """Return the subscriptions within a scope whose names come after a given one, by name."""
    return [subscription_of(row) for row in await connection.fetch(PAGE, after, limit, *within)]


async def of_names(connection: Connection, names: Sequence[str]) -> list[Subscription]:
    """Return the subscriptions of these names, in this order; those that do not exist are left out."""
    found = {row["name"]: subscription_of(row) for row in await connection.fetch(NAMED, names)}
    return [found[name] for name in names if name in found]


async def oldest(connection: Connection, at_most: int) -> list[str]:
    """Return the names of the subscriptions that were made first, oldest first."""
    return [row[0] for row in await connection.fetch(OLDEST, at_most)]


async def active(connection: Connection, subscription_ids: Sequence[int]) -> dict[int, Subscription]:
    """Return those of these subscriptions that are active, by id."""
    found = [subscription_of(row) for row in await connection.fetch(ACTIVE, subscription_ids)]
    return {one.subscription_id: one for one in found}


async def limited_pulled(connection: Connection) -> list[Subscription]:
    """Return the subscriptions whose messages consumers claim and can expire, in any state."""
    return [subscription_of(row) for row in await connection.fetch(LIMITED_PULLED)]


Known: TypeAlias = dict[tuple[int, str], Subscription]


async def streamed(connection: Connection, known: Known) -> list[Subscription]:
    """Return every active subscription, and the others whose messages can expire.

    `known` caches subscriptions by id and version of the row, so that an unchanged row is not decoded again.
    """
    fresh: Known = {}
    for row in await connection.fetch(STREAMED):
        key = row["subscription_id"], row["version"]
        fresh[key] = known.get(key) or subscription_of(row)
    known.clear()
    known.update(fresh)
    return list(fresh.values())


async def set_state(connection: Connection, name: str, state: SubscriptionState, now: datetime) -> Subscription | None:
    """Set a state; None if the subscription does not exist or is in that state already."""
    row = await connection.fetchrow(SET_STATE, name, state, now)
    return subscription_of(row) if row else None


async def disable(connection: Connection, sent_for: Subscription, reason: str, now: datetime) -> bool:
    """Disable a subscription because its destination refuses all further messages.

    False if it is not active, or not as it was when the messages were sent.
    """
    given = sent_for.subscription_id, sent_for.updated_at, reason, now
    return await connection.fetchval(DISABLE, *given) is not None


async def touch(connection: Connection, subscription_id: int, now: datetime) -> None:
    """Have the workers close and open the streams of a subscription, without a change of its settings."""
    await connection.execute(TOUCH, subscription_id, now)


async def set_secrets(connection: Connection, name: str, secrets: Any, now: datetime) -> None:
    """Store the secrets after a rotation."""
    await connection.execute(SET_SECRETS, name, _encode(secrets), now)


async def remove(connection: Connection, name: str, now: datetime) -> bool:
    """Delete a subscription; False if it does not exist."""
    return await connection.fetchval(REMOVE, name, now) is not None
