"""Delete rows of the small tables whose transaction or subscription is gone, and resolve findings of removed days."""

from dataclasses import dataclass
from datetime import date, datetime
from uuid import UUID

from app.database.connection import Connection
from app.store.relay.leases import LeaseKind
from app.store.retention.days import Day
from app.store.subscriptions.replays import clear_retries

# The most rows that one statement deletes, so that no statement takes long.
AT_ONCE = 10_000

# The next rows of a removed day, from the id $1, by primary key. An earlier step's rows stay in the index until a
# vacuum, so each step begins where the last one ended, at its last id: a transaction may have more than one row. A row
# that changes meanwhile is left to a later turn.
OF_GONE_DAY = {
    table: f"""
with span as materialized (
  select t.ctid as at, t.transaction_id from {table} t
  where t.transaction_id >= $1 and t.transaction_id < $2 order by t.transaction_id limit {AT_ONCE}
), gone as (
  delete from {table} where ctid = any(array(select at from span))
)
select transaction_id, (select count(*) from span) >= {AT_ONCE} as more
from span order by transaction_id desc limit 1
"""  # noqa: S608 -- names of tables
    for table in ("check_back", "postponement", "reissue")
}
# The same for each subscription and replay that has retries, from the id $5 of ($3, $4): before Postgres 18, conditions
# on a day without these first columns of the primary key read all retries. A retry with its own copy of the message
# continues without its day.
RETRIES_OF_GONE_DAY = f"""
with recursive streams as (
  select $3::int as subscription_id, $4::int as replay, $5::uuid as since
  union all
  select n.subscription_id, n.replay, $1::uuid from streams s, lateral (
    select r.subscription_id, r.replay from delivery_retry r
    where (r.subscription_id, r.replay) > (s.subscription_id, s.replay) order by r.subscription_id, r.replay limit 1
  ) n
), span as materialized (
  select t.* from streams s, lateral (
    select r.ctid as at, r.subscription_id, r.replay, r.transaction_id from delivery_retry r
    where r.subscription_id = s.subscription_id and r.replay = s.replay
      and r.transaction_id >= s.since and r.transaction_id < $2 and r.body is null
    order by r.transaction_id, r.position offset 0
  ) t limit {AT_ONCE}
), gone as (
  delete from delivery_retry where ctid = any(array(select at from span))
)
select subscription_id, replay, transaction_id, (select count(*) from span) >= {AT_ONCE} as more
from span order by subscription_id desc, replay desc, transaction_id desc limit 1
"""  # noqa: S608 -- a number of ours

# By the first column of the primary key, for the few subscriptions that are tombstones.
OF_DELETED_SUBSCRIPTIONS = {
    table: f"""
delete from {table} where ctid = any(array(
  select t.ctid from subscription s join {table} t using (subscription_id)
  where s.deleted_at is not null limit {AT_ONCE}
))"""  # noqa: S608 -- names of tables
    for table in ("checkpoint", "delivery_retry", "dead_letter", "replay", "pull_claim", "pull_cursor")
}

# The table is small: one lease per shard of each number of shards that was in use. A lease is deleted after it expires.
LEASES = f"""
delete from lease l using subscription s
where s.deleted_at is not null and starts_with(l.name, '{LeaseKind.SHARD}:' || s.subscription_id || ':')
  and l.expires_at < $1
"""  # noqa: S608 -- a constant

# The table replay is small, and the first columns of the primary key serve delivery_retry. The holder of a lease may
# have added or given back these retries while the replay was being canceled.
OF_CANCELLED_REPLAYS = f"""
with {clear_retries("(select * from replay where state = 'cancelled') p", "$1", f"limit {AT_ONCE}")}
select count(*) from cleared
"""  # noqa: S608 -- a number of ours

# A person may redeliver a message at the moment at which its replay ends. The retry needs the replay to run.
REVIVE_REPLAYS = """
update replay p set state = 'running', ended_at = null
where p.state = 'done' and exists (
  select from delivery_retry r where r.subscription_id = p.subscription_id and r.replay = p.replay_id
)
"""


# One probe of finding_open for each day with open findings, and one of the primary key of day.
GONE_WITH_FINDINGS = """
with recursive opened as (
  (select f.day from finding f where f.resolved_at is null order by f.day limit 1)
  union all
  select n.day from opened o, lateral (
    select f.day from finding f where f.resolved_at is null and f.day > o.day order by f.day limit 1
  ) n
)
select o.day from opened o
where exists (select from day d where d.day = o.day and d.state = 'gone' and d.changed_at < $1 offset 0)
"""
# Served by finding_open. Rows that a run or an announcement is writing are skipped. What is broken in the audit is of
# no day and stays: the proof reports it once, for one day, and again if that finding were resolved.
RESOLVE_FINDINGS = f"""
update finding set resolved_at = $2 where ctid = any(array(
  select ctid from finding where day = $1 and resolved_at is null and kind <> 'audit_broken'
    and not (kind = 'subscription_differs' and detail ->> 'differs' ~ '(change without audit|audit without change): ')
  limit {AT_ONCE} for update skip locked
))"""  # noqa: S608 -- a number of ours


@dataclass(frozen=True, slots=True)
class RetryPlace:
    """A place in the primary key of delivery_retry."""

    subscription_id: int
    replay: int
    transaction_id: UUID


# Before every retry: ids of subscriptions are positive.
BEFORE_RETRIES = RetryPlace(0, 0, UUID(int=0))


async def clear_gone_day(connection: Connection, table: str, day: Day, since: UUID) -> UUID | None:
    """Delete up to AT_ONCE rows of a removed day's transactions, beginning with an id.

    Return the id to go on from, or None: these were the last.
    """
    row = await connection.fetchrow(OF_GONE_DAY[table], since, day.high)
    return row["transaction_id"] if row is not None and row["more"] else None


async def clear_gone_retries(connection: Connection, day: Day, since: RetryPlace) -> RetryPlace | None:
    """Delete up to AT_ONCE retries of a removed day's messages, but for those with an own copy, beginning with a place.

    Return the place to go on from, or None: these were the last.
    """
    place = (since.subscription_id, since.replay, since.transaction_id)
    row = await connection.fetchrow(RETRIES_OF_GONE_DAY, day.low, day.high, *place)
    return RetryPlace(*row[:3]) if row is not None and row["more"] else None


async def gone_days_with_findings(connection: Connection, before: datetime) -> list[date]:
    """Return the days that were removed before a time and have open findings."""
    return [row["day"] for row in await connection.fetch(GONE_WITH_FINDINGS, before)]


async def resolve_findings(connection: Connection, day: date, now: datetime) -> int:
    """Resolve up to AT_ONCE open findings of a day, but for those of the audit; return how many."""
    return _count(await connection.execute(RESOLVE_FINDINGS, day, now))


async def clear_deleted_subscriptions(connection: Connection, table: str) -> int:
    """Delete up to AT_ONCE rows of deleted subscriptions; return how many."""
    return _count(await connection.execute(OF_DELETED_SUBSCRIPTIONS[table]))


async def clear_leases(connection: Connection, now: datetime) -> None:
    """Delete the relay's leases of deleted subscriptions."""
    await connection.execute(LEASES, now)


async def clear_cancelled_replays(connection: Connection, now: datetime) -> int:
    """Clear up to AT_ONCE retries of canceled replays that no worker is sending, as a cancellation does.

    Return the number.
    """
    number: int = await connection.fetchval(OF_CANCELLED_REPLAYS, now)
    return number


async def revive_replays(connection: Connection) -> int:
    """Set replays that ended with messages in retry to running again; return how many."""
    return _count(await connection.execute(REVIVE_REPLAYS))


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])
