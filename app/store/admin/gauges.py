"""Read the values of the gauges of `/metrics` from the database."""

from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.database.pauses import IS_LIMITED
from app.models import DAY_TABLES

# The oldest row of each producer group that can be called now (check_back_due), and of each subscription that can be
# delivered to now (delivery_retry_due). Each is one index probe, which skips leased rows; their number is limited by
# in_flight. A row that waits for its producer group, its subscription or other messages of its key does not wait for a
# worker, so it does not count.
OLDEST_DUE = f"""
select (
  select min(c.next_check_at) from producer_group g cross join lateral (
    select b.next_check_at from check_back b
    where b.producer_group = g.name and b.next_check_at <= $1 and (b.leased_until is null or b.leased_until <= $1)
    order by b.next_check_at limit 1
  ) c
  where g.held_until is null or g.held_until <= $1
) as check_at, (
  select min(d.due_at) from subscription s cross join lateral (
    select r.due_at from delivery_retry r
    where r.subscription_id = s.subscription_id and r.replay = 0 and r.due_at <= $1
      and (r.leased_until is null or r.leased_until <= $1)
      and (s.ordered = 'none' or r.key is null or r.first_at is not null)
    order by r.due_at limit 1
  ) d
  where s.deleted_at is null and s.state = 'active' and s.destination ->> 'type' is distinct from 'pull'
    and not exists (
      select from checkpoint p
      where p.subscription_id = s.subscription_id and (p.opened_at is not null or {IS_LIMITED.format("p", "$1")})
    )
) as delivery_at
"""  # noqa: S608 -- a constant

# Counting stops at this number of retries per subscription.
RETRIES_MOST = 10_000

# There are few subscriptions. Each takes one probe and one bounded count in delivery_retry_tried. That index leaves out
# messages without an attempt (there may be many that a producer delayed). Rows that are due, leased or part of a replay
# all count: an attempt failed, and they are not settled.
RETRIES = """
select s.name, (
  select r.first_at from delivery_retry r
  where r.subscription_id = s.subscription_id and r.first_at is not null
  order by r.first_at limit 1
) as oldest_at, (
  select count(*) from (
    select from delivery_retry r
    where r.subscription_id = s.subscription_id and r.first_at is not null limit $1
  ) tried
) as waiting
from subscription s where s.deleted_at is null
"""


# There are few subscriptions, each with few shards. A shard of a former layout has no holder and no breaker.
BREAKERS = """
select s.name, exists (
  select from checkpoint p where p.subscription_id = s.subscription_id and p.opened_at is not null
) as open_now
from subscription s where s.deleted_at is null
"""

# One row for each partition in the catalog; each size reads the sizes of its files, not its rows. `day` names the
# partitions, also those that are detached and not dropped yet.
DAY_SIZES = """
select d.day, coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as size
from day d
left join pg_class c on c.relnamespace = current_schema()::regnamespace and c.relkind = 'r'
  and c.relname = any (select t || to_char(d.day, '_YYYYMMDD') from unnest($1::text[]) t)
where d.state <> 'gone'
group by d.day
"""
DATABASE_SIZE = "select pg_database_size(current_database())"


@dataclass(frozen=True, slots=True)
class OldestDue:
    """The times at which the oldest check, and the oldest delivery after its first attempt, became due (None: none)."""

    check_at: datetime | None
    delivery_at: datetime | None


async def oldest_due(connection: Connection, now: datetime) -> OldestDue:
    """Return the oldest due times of rows that wait for a worker."""
    row = await connection.fetchrow(OLDEST_DUE, now)
    assert row is not None
    return OldestDue(**row)


@dataclass(frozen=True, slots=True)
class Retries:
    """A subscription's messages that wait for a retry: how many, up to RETRIES_MOST, and the oldest first attempt.

    `oldest_at` is None if there are none.
    """

    waiting: int
    oldest_at: datetime | None


async def retries_of(connection: Connection) -> dict[str, Retries]:
    """Return the retries of every subscription by its name."""
    rows = await connection.fetch(RETRIES, RETRIES_MOST)
    return {row["name"]: Retries(row["waiting"], row["oldest_at"]) for row in rows}


async def open_breakers(connection: Connection) -> dict[str, bool]:
    """Return for each subscription whether the breaker of any of its shards is open."""
    return {row["name"]: row["open_now"] for row in await connection.fetch(BREAKERS)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on disk: of the database, and of the tables of each day that is not removed."""

    database: int
    days: dict[str, int]


async def sizes(connection: Connection) -> Sizes:
    """Return the sizes on disk."""
    days = {row["day"].isoformat(): row["size"] for row in await connection.fetch(DAY_SIZES, list(DAY_TABLES))}
    return Sizes(await database_size(connection), days)


async def database_size(connection: Connection) -> int:
    """Return the size of the database on disk (bytes)."""
    size: int = await connection.fetchval(DATABASE_SIZE)
    return size
