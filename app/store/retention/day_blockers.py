"""Find what keeps a day from being removed, and make dead letters of the deliveries that its removal cuts short."""

from dataclasses import dataclass
from datetime import date, datetime
from uuid import UUID

from app.database.connection import Connection
from app.store.retention.days import Day
from app.store.subscriptions.subscriptions import Route, Subscription
from app.topic_patterns import match_sql, reserved_sql
from app.verdicts import DeadLetterReason

# check_back by primary key range, with each row looked up in op. `unswept`: halves that no sweep has found. If a swept
# transaction is undecided, the rest of the day is not read.
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

# Rows may still become visible while a database transaction is open that began before a given time. Both times come
# from the server's clock; the caller adds a margin.
WRITERS = """
select exists (
  select from pg_stat_activity
  where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
    and xact_start < $1 and (backend_xid is not null or backend_xmin is not null)
)
"""

# How many sessions use a snapshot in which the day is still open. The row's xmin is the database transaction that
# closed the day. Both backend_xmin and backend_xid count: an End that read the day as open may not have an xid yet.
OLDER_SNAPSHOTS = """
select count(*) from pg_stat_activity a, day d
where d.day = $1 and a.datname = current_database() and a.backend_type = 'client backend'
  and a.pid <> pg_backend_pid() and greatest(age(a.backend_xmin), age(a.backend_xid)) >= age(d.xmin)
"""

# Messages that a subscription takes ($4 topic patterns, $5 tags, $6 headers, as in the relay's window) and that have no
# receipt, dead letter or redelivery. A redelivery or drop by a person on a closed day leaves no receipt, so the record
# in `redelivery` shows that a person decided about the message and that it must not become a dead letter again. The id
# range prunes the partitions; then the primary keys and redelivery_transaction serve.
MATCHING = f"""
o.transaction_id >= $1 and o.transaction_id < $2
  and {match_sql("o.topic", "$4::text[]")}
  and ($5::text[] is null or o.tag = any($5::text[]))
  and ($6::jsonb is null or exists (
    select from half h
    where h.transaction_id = o.transaction_id and h.position = o.position and h.headers @> $6::jsonb offset 0
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
"""  # noqa: S608 -- a condition of ours
# The offset of its slowest shard.
PLACE = '(select coalesce(min(c."offset"), 0) from checkpoint c where c.subscription_id = $3)'

# Its retries of the day, including those of replays; by the first column of the primary key. A retry with its own copy
# of the message does not need the day.
RETRIES = """
delivery_retry r
where r.subscription_id = $3 and r.transaction_id >= $1 and r.transaction_id < $2 and r.body is null
"""

# Not settled: its retries, and the messages after its checkpoint.
UNDELIVERED = f"""
select exists (select from {RETRIES}) or exists (select from outbox o where o."offset" > {PLACE} and {MATCHING})
"""  # noqa: S608 -- constants of this module

# Whether a running replay still has to read messages of the day. Served by replay_running and outbox_by_offset.
REPLAYING = """
select exists (
  select from replay p where p.subscription_id = $3 and p.state = 'running' and exists (
    select from outbox o where o.transaction_id >= $1 and o.transaction_id < $2
      and o."offset" > p."offset" and o."offset" <= p.until
  )
)
"""

# One statement turns the remaining deliveries of one subscription into dead letters with their own bodies. A repetition
# finds the rows and inserts none. $7: messages committed at or after this time count even below the checkpoint, because
# the relay skips a closed day.
BURY = f"""
with waiting as materialized (
  select o.transaction_id, o.position, 0 as replay, 0 as attempts, null::timestamptz as first_at, null as last_error
  from outbox o where (o."offset" > {PLACE} or o.committed_at >= $7) and {MATCHING}
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
    '{DeadLetterReason.DAY_LEFT}', w.last_error, $8, h.producer_group, o.tag, h.headers, h.content_type, h.body,
    h.body_digest, o.committed_at
  from waiting w
  join outbox o on o.transaction_id = w.transaction_id and o.position = w.position
  join half h on h.transaction_id = w.transaction_id and h.position = w.position
  where o.transaction_id >= $1 and o.transaction_id < $2 and h.transaction_id >= $1 and h.transaction_id < $2
  on conflict do nothing
  returning transaction_id, position, "offset", topic, key, attempts, error
)
select transaction_id, position, topic, key, attempts, error,
  count(*) over () as messages, count(*) filter (where not {reserved_sql("topic")}) over () as announced
from buried order by {reserved_sql("topic")}, "offset" desc limit 1
"""  # noqa: S608 -- constants of this module

# dead_letter is small; half and outbox are read by primary key. If a delivery was confirmed while its message became a
# dead letter, the dead letter is deleted.
UNBURY = f"""
delete from dead_letter d using receipt r
where d.transaction_id >= $1 and d.transaction_id < $2 and d.reason = '{DeadLetterReason.DAY_LEFT}'
  and r.transaction_id = d.transaction_id and r.position = d.position and r.subscription_id = d.subscription_id
  and r.replay = d.replay
"""  # noqa: S608 -- a constant

# Dead letters can be many, so one statement copies some: it finds them by dead_letter_uncopied, reads half and outbox
# by primary key, and updates by ctid, because a join would be planned as a scan of the whole table.
BODIES_AT_ONCE = 1000
KEEP_BODIES = f"""
with uncopied as materialized (
  select d.ctid as at from dead_letter d
  where d.transaction_id >= $1 and d.transaction_id < $2 and d.body is null
    and exists (
      select from half h where h.transaction_id = d.transaction_id and h.position = d.position offset 0
    ) and exists (
      select from outbox o where o.transaction_id = d.transaction_id and o.position = d.position offset 0
    )
  order by d.transaction_id, d.position limit {BODIES_AT_ONCE} for update of d
)
update dead_letter d set (producer_group, tag, headers, content_type, body, body_digest) = (
    select h.producer_group, h.tag, h.headers, h.content_type, h.body, h.body_digest
    from half h where h.transaction_id = d.transaction_id and h.position = d.position
  ), committed_at = (
    select o.committed_at from outbox o where o.transaction_id = d.transaction_id and o.position = d.position
  )
where d.ctid = any(array(select at from uncopied))
"""  # noqa: S608 -- a constant


@dataclass(frozen=True, slots=True)
class DayUndecided:
    """A day's transactions without a verdict: swept ones by state, and all if the whole day was read (else None)."""

    in_doubt: int
    parked: int
    undecided: int | None

    @property
    def count(self) -> int:
        """How many transactions without a verdict the read found."""
        return max(self.undecided or 0, self.in_doubt + self.parked)


@dataclass(frozen=True, slots=True)
class Buried:
    """The newest message that became a dead letter (an operational message only if there is no other).

    `messages` counts all messages that became dead letters, `announced` only those of producers, which are announced.
    """

    transaction_id: UUID
    position: int
    topic: str
    key: str | None
    attempts: int
    error: str | None
    messages: int
    announced: int


async def undecided(connection: Connection, day: Day, *, whole: bool = False) -> DayUndecided:
    """Count the transactions without a verdict; `whole` reads the day even if a swept one is already undecided."""
    row = await connection.fetchrow(UNDECIDED, day.low, day.high, whole)
    assert row is not None
    return DayUndecided(**row)


async def writers_since_before(connection: Connection, at: datetime) -> bool:
    """Return whether a database transaction that began before `at` is still open."""
    return bool(await connection.fetchval(WRITERS, at))


async def older_snapshots(connection: Connection, day: date) -> int:
    """Count the sessions that may still see the day as open."""
    count: int = await connection.fetchval(OLDER_SNAPSHOTS, day)
    return count


async def undelivered(connection: Connection, day: Day, subscription: Subscription) -> bool:
    """Return whether the day holds a committed message that the subscription takes and has not settled."""
    mine = _mine(subscription.route)
    return bool(await connection.fetchval(UNDELIVERED, day.low, day.high, subscription.subscription_id, *mine))


async def replaying(connection: Connection, day: Day, subscription: Subscription) -> bool:
    """Return whether a replay of the subscription still has to read messages of the day."""
    return bool(await connection.fetchval(REPLAYING, day.low, day.high, subscription.subscription_id))


async def bury(
    connection: Connection, day: Day, subscription: Subscription, late_since: datetime, now: datetime
) -> Buried | None:
    """Make dead letters of messages that the subscription has not settled and its replays retry; None: there are none.

    Messages committed at or after `late_since` count even below the checkpoint.
    """
    row = await connection.fetchrow(
        BURY, day.low, day.high, subscription.subscription_id, *_mine(subscription.route), late_since, now
    )
    return None if row is None else Buried(**row)


def _mine(route: Route) -> tuple[tuple[str, ...], list[str] | None, str | None]:
    return route.topics.patterns, route.tags, route.headers


async def drop_confirmed(connection: Connection, day: Day) -> None:
    """Delete the dead letters whose delivery was confirmed meanwhile."""
    await connection.execute(UNBURY, day.low, day.high)


async def keep_bodies(connection: Connection, day: Day) -> int:
    """Copy the messages of up to BODIES_AT_ONCE of the day's dead letters into them; return how many it copied."""
    done: str = await connection.execute(KEEP_BODIES, day.low, day.high)
    return int(done.rpartition(" ")[2])
