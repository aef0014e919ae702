"""What keeps a day, and what becomes of the deliveries that a leaving day cuts short."""

from dataclasses import dataclass
from datetime import date, datetime
from uuid import UUID

from app.database import Connection
from app.store.days import Day
from app.store.subscriptions import Route, Subscription

# check_back by primary key range, each row looked up in op; `unswept`: halves that no sweep found. Where a swept one
# is undecided already, the whole day need not be read.
UNDECIDED = """
with swept as materialized (
  select c.state, count(*) as n from check_back c
  left join lateral (select true as decided from op o where o.transaction_id = c.transaction_id offset 0) o on true
  where c.transaction_id >= $1 and c.transaction_id < $2 and o.decided is null group by c.state
)
select coalesce((select n from swept where state = 1), 0) as in_doubt,
  coalesce((select n from swept where state = 2), 0) as parked,
  case when $3 or not exists (select from swept) then (
    select count(*) from half h where h.transaction_id >= $1 and h.transaction_id < $2 and h.position = 0
      and not exists (
        select from op o where o.transaction_id >= $1 and o.transaction_id < $2 and o.transaction_id = h.transaction_id
      )
  ) end as undecided
"""

# Whether somebody may still write what no other can see: a database transaction that began before a time. The server's
# own clock on both sides, but for the margin that the caller leaves.
WRITERS = """
select exists (
  select from pg_stat_activity
  where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
    and xact_start < $1 and (backend_xid is not null or backend_xmin is not null)
)
"""

# How many sessions work on a snapshot that does not show the closing of the day: the row's xmin is the database
# transaction that closed it. backend_xmin counts as well as backend_xid: an End that read the day as open may not have
# an xid yet.
OLDER_SNAPSHOTS = """
select count(*) from pg_stat_activity a, day d
where d.day = $1 and a.datname = current_database() and a.backend_type = 'client backend'
  and a.pid <> pg_backend_pid() and greatest(age(a.backend_xmin), age(a.backend_xid)) >= age(d.xmin)
"""

# What a subscription takes ($4 exact topics, $5 prefixes, $6 tags, $7 headers, as in the relay's window) and of which
# there is no trace yet. A person's redelivery of a message whose day is closed leaves no receipt, and neither does a
# drop; that it was a person's says that it is not to be buried. Partition pruning by the id range; then the primary
# keys, and redelivery_transaction.
MINE = """
o.transaction_id >= $1 and o.transaction_id < $2
  and (o.topic = any($4::text[]) or o.topic ^@ any($5::text[]) and (not o.topic ^@ 'halfnote.' or o.topic ^@ any(
    array(select p from unnest($5::text[]) p where p ^@ 'halfnote.')
  )))
  and ($6::text[] is null or o.tag = any($6::text[]))
  and ($7::jsonb is null or exists (
    select from half h
    where h.transaction_id = o.transaction_id and h.position = o.position and h.headers @> $7::jsonb offset 0
  ))
  and not exists (
    select from receipt r
    where r.transaction_id = o.transaction_id and r.position = o.position and r.subscription_id = $3 and r.replay = 0
  )
  and not exists (
    select from dead_letter d where d.subscription_id = $3 and d.replay = 0
      and d.transaction_id = o.transaction_id and d.position = o.position
  )
  and not exists (
    select from redelivery x where x.transaction_id = o.transaction_id and x.position = o.position
      and x.subscription_id = $3 and x.replay = 0
  )
"""
# Where the slowest of its shards is.
PLACE = '(select coalesce(min(c."offset"), 0) from checkpoint c where c.subscription_id = $3)'

# Its retries of the day, those of replays as well; by the first column of the primary key. What carries a copy of its
# message needs the day no more.
RETRIES = """
delivery_retry r
where r.subscription_id = $3 and r.transaction_id >= $1 and r.transaction_id < $2 and r.body is null
"""

# Not settled: its retries, and what comes after its checkpoint.
UNDELIVERED = f"""
select exists (select from {RETRIES}) or exists (select from outbox o where o."offset" > {PLACE} and {MINE})
"""  # noqa: S608 -- constants of this module

# Whether a replay has still to read something of the day. Served by replay_running and outbox_by_offset.
REPLAYING = """
select exists (
  select from replay p where p.subscription_id = $3 and p.state = 'running' and exists (
    select from outbox o where o.transaction_id >= $1 and o.transaction_id < $2
      and o."offset" > p."offset" and o."offset" <= p.until
  )
)
"""

# One statement: what is left of one subscription's deliveries becomes dead letters with bodies of their own. A repeat
# finds its rows. $8: from when on the checkpoint says nothing, because the relay passes over a closed day.
BURY = f"""
with waiting as materialized (
  select o.transaction_id, o.position, 0 as replay, 0 as attempts, null::timestamptz as first_at, null as last_error
  from outbox o where (o."offset" > {PLACE} or o.committed_at >= $8) and {MINE}
    and not exists (
      select from delivery_retry r where r.subscription_id = $3 and r.replay = 0
        and r.transaction_id = o.transaction_id and r.position = o.position
    )
  union all
  select r.transaction_id, r.position, r.replay, r.attempts, r.first_at, r.last_error from {RETRIES}
), gone as (
  delete from {RETRIES}
), buried as (
  insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    reason, error, died_at, producer_group, tag, headers, content_type, body, body_digest, committed_at)
  select $3, w.replay, o.transaction_id, o.position, o."offset", o.topic, o.key, w.attempts, w.first_at,
    'day_left', w.last_error, $9, h.producer_group, o.tag, h.headers, h.content_type, h.body, h.body_digest,
    o.committed_at
  from waiting w
  join outbox o on o.transaction_id = w.transaction_id and o.position = w.position
  join half h on h.transaction_id = w.transaction_id and h.position = w.position
  where o.transaction_id >= $1 and o.transaction_id < $2 and h.transaction_id >= $1 and h.transaction_id < $2
  on conflict do nothing
  returning transaction_id, position, "offset", topic, key, attempts, error
)
select transaction_id, position, topic, key, attempts, error,
  count(*) over () as messages, count(*) filter (where not topic ^@ 'halfnote.') over () as told
from buried order by topic ^@ 'halfnote.', "offset" desc limit 1
"""  # noqa: S608 -- constants of this module

# dead_letter is small; half and outbox by primary key. A delivery that was confirmed while its message was buried is
# no dead letter.
UNBURY = """
delete from dead_letter d using receipt r
where d.transaction_id >= $1 and d.transaction_id < $2 and d.reason = 'day_left'
  and r.transaction_id = d.transaction_id and r.position = d.position and r.subscription_id = d.subscription_id
  and r.replay = d.replay
"""
KEEP_BODIES = """
update dead_letter d set producer_group = h.producer_group, tag = h.tag, headers = h.headers,
  content_type = h.content_type, body = h.body, body_digest = h.body_digest, committed_at = o.committed_at
from half h, outbox o
where d.transaction_id >= $1 and d.transaction_id < $2 and d.body is null
  and h.transaction_id = d.transaction_id and h.position = d.position
  and h.transaction_id >= $1 and h.transaction_id < $2
  and o.transaction_id = d.transaction_id and o.position = d.position
  and o.transaction_id >= $1 and o.transaction_id < $2
"""


@dataclass(frozen=True, slots=True)
class Undecided:
    """What has no verdict in a day: swept ones by state, and all of them where the whole day was read (else None)."""

    in_doubt: int
    parked: int
    undecided: int | None

    @property
    def count(self) -> int:
        """How many there are, as far as that was read."""
        return max(self.undecided or 0, self.in_doubt + self.parked)


@dataclass(frozen=True, slots=True)
class Buried:
    """The newest of the messages that were made dead letters (an operational one only if there is no other), how many
    they were, and how many of them were a producer's."""

    transaction_id: UUID
    position: int
    topic: str
    key: str | None
    attempts: int
    error: str | None
    messages: int
    told: int


async def undecided(connection: Connection, day: Day, *, whole: bool = False) -> Undecided:
    """Count what has no verdict; `whole` reads the day even if swept ones show already that there is some."""
    row = await connection.fetchrow(UNDECIDED, day.low, day.high, whole)
    assert row is not None
    return Undecided(**row)


async def writers_since_before(connection: Connection, at: datetime) -> bool:
    """Tell whether a database transaction that began before `at` is still open."""
    return bool(await connection.fetchval(WRITERS, at))


async def older_snapshots(connection: Connection, day: date) -> int:
    """Count the sessions that may still see the day as open."""
    count: int = await connection.fetchval(OLDER_SNAPSHOTS, day)
    return count


async def undelivered(connection: Connection, day: Day, subscription: Subscription) -> bool:
    """Tell whether the day holds a committed message that the subscription takes and has not settled."""
    mine = _mine(subscription.route)
    return bool(await connection.fetchval(UNDELIVERED, day.low, day.high, subscription.subscription_id, *mine))


async def replaying(connection: Connection, day: Day, subscription: Subscription) -> bool:
    """Tell whether a replay of the subscription has still to read something of the day."""
    return bool(await connection.fetchval(REPLAYING, day.low, day.high, subscription.subscription_id))


async def bury(
    connection: Connection, day: Day, subscription: Subscription, late_since: datetime, now: datetime
) -> Buried | None:
    """Make dead letters of what the subscription has not settled, and of what its replays retry; None: of nothing.

    What was committed at or after `late_since` counts whatever the checkpoint says.
    """
    row = await connection.fetchrow(
        BURY, day.low, day.high, subscription.subscription_id, *_mine(subscription.route), late_since, now
    )
    return None if row is None else Buried(**row)


def _mine(route: Route) -> tuple[list[str], list[str], list[str] | None, str | None]:
    return route.exact, route.prefixes, route.tags, route.headers


async def unbury(connection: Connection, day: Day) -> None:
    """Take back the dead letters whose delivery was confirmed meanwhile."""
    await connection.execute(UNBURY, day.low, day.high)


async def keep_bodies(connection: Connection, day: Day) -> None:
    """Give the day's dead letters bodies of their own."""
    await connection.execute(KEEP_BODIES, day.low, day.high)
