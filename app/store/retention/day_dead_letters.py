"""Make dead letters of the deliveries that the removal of a day cuts short, some in a statement.

No statement is long or holds many locks, however far behind a subscription is.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database.connection import Connection
from app.store.retention.day_blockers import MATCHING_FEW, PLACE, RETRIES, of_route
from app.store.retention.days import Day
from app.store.subscriptions.subscriptions import Subscription
from app.topic_patterns import reserved_sql
from app.verdicts import DeadLetterReason

# The most log entries, retries or dead letters that one statement reads.
AT_ONCE = 1000

_COPY = "producer_group, tag, headers, content_type, body, body_digest, committed_at"
# half and outbox by primary key, one partition each (LATERAL … OFFSET 0).
_HALF = """cross join lateral (
    select h.producer_group, h.headers, h.content_type, h.body, h.body_digest from half h
    where h.transaction_id = w.transaction_id and h.position = w.position offset 0
  ) h"""
# The newest message that became a dead letter, and their number.
_NEWEST = f"""
left join lateral (
  select b.transaction_id, b.position, b.topic, b.key, b.attempts, b.error, count(*) over () as messages,
    count(*) filter (where not {reserved_sql("b.topic")}) over () as announced
  from buried b order by {reserved_sql("b.topic")}, b."offset" desc limit 1
) n on true
"""  # noqa: S608 -- a condition of ours
_RETURNING = 'transaction_id, position, "offset", topic, key, attempts, error'

# The next entries of the day ($1 and $2) in the log, after the offset $9: those after the checkpoint, and those that
# were committed at or after $7 even if the checkpoint is past them, because the relay skips a closed day. Those that
# nothing has settled become dead letters with their own bodies; a retry is left to BURY_RETRIES. A repetition inserts
# none. outbox_by_offset of the day's partition; primary keys otherwise.
BURY_LOG = f"""
with span as materialized (
  select o.transaction_id, o.position, o."offset", o.topic, o.key, o.tag, o.committed_at from outbox o
  where o.transaction_id >= $1 and o.transaction_id < $2 and o."offset" > $9
    and (o."offset" > {PLACE} or (o.committed_at >= $7 and o."offset" > (
      select s.started_after from subscription s where s.subscription_id = $3
    )))
  order by o."offset" limit {AT_ONCE}
), waiting as materialized (
  select o.* from span o where {MATCHING_FEW} and not exists (
    select from delivery_retry r where r.subscription_id = $3 and r.replay = 0
      and r.transaction_id = o.transaction_id and r.position = o.position offset 0
  )
), buried as (
  insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, reason,
    died_at, {_COPY})
  select $3, 0, w.transaction_id, w.position, w."offset", w.topic, w.key, 0, '{DeadLetterReason.DAY_LEFT}', $8,
    h.producer_group, w.tag, h.headers, h.content_type, h.body, h.body_digest, w.committed_at
  from waiting w {_HALF}
  on conflict do nothing
  returning {_RETURNING}
)
select s.reached, s.count >= {AT_ONCE} as more, n.*
from (select max("offset") as reached, count(*) from span) s {_NEWEST}
"""  # noqa: S608 -- constants

# The next retries of a closed day, of replays too, in the order of the primary key after ($5, $6, $7). No worker claims
# or settles them any more.
BURY_RETRIES = f"""
with waiting as materialized (
  select r.ctid as at, r.replay, r.transaction_id, r.position, r.attempts, r.first_at, r.last_error
  from {RETRIES} and (r.replay, r.transaction_id, r.position) > ($5::int, $6::uuid, $7::smallint)
  order by r.replay, r.transaction_id, r.position limit {AT_ONCE} for update of r
), gone as (
  delete from delivery_retry where ctid = any(array(select at from waiting))
), buried as (
  insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    reason, error, died_at, {_COPY})
  select $3, w.replay, w.transaction_id, w.position, o."offset", o.topic, o.key, w.attempts, w.first_at,
    '{DeadLetterReason.DAY_LEFT}', w.last_error, $4, h.producer_group, o.tag, h.headers, h.content_type, h.body,
    h.body_digest, o.committed_at
  from waiting w cross join lateral (
    select o."offset", o.topic, o.key, o.tag, o.committed_at from outbox o
    where o.transaction_id = w.transaction_id and o.position = w.position offset 0
  ) o {_HALF}
  on conflict do nothing
  returning {_RETURNING}
)
select l.replay as last_replay, l.transaction_id as last_id, l.position as last_position,
  (select count(*) from waiting) >= {AT_ONCE} as more, n.*
from (values (1)) one (row)
left join (select * from waiting order by replay desc, transaction_id desc, position desc limit 1) l on true {_NEWEST}
"""  # noqa: S608 -- constants

# Deletes the dead letters whose delivery was confirmed while they were written. Primary keys.
UNBURY = f"""
with span as materialized (
  select d.ctid as at, d.replay, d.transaction_id, d.position from dead_letter d
  where d.subscription_id = $3 and d.transaction_id >= $1 and d.transaction_id < $2
    and d.reason = '{DeadLetterReason.DAY_LEFT}'
    and (d.replay, d.transaction_id, d.position) > ($4::int, $5::uuid, $6::smallint)
  order by d.replay, d.transaction_id, d.position limit {AT_ONCE}
), gone as (
  delete from dead_letter where ctid = any(array(
    select s.at from span s where exists (
      select from receipt r where r.transaction_id = s.transaction_id and r.position = s.position
        and r.subscription_id = $3 and r.replay = s.replay offset 0
    )
  ))
)
select replay, transaction_id, position, (select count(*) from span) >= {AT_ONCE} as more
from span order by replay desc, transaction_id desc, position desc limit 1
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


@dataclass(frozen=True, slots=True)
class LogStep:
    """A step through the log of a day: the offset that it reached, and whether more may follow."""

    reached: int
    more: bool
    buried: Buried | None


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A place in the primary key of delivery_retry or dead_letter of one subscription."""

    replay: int
    transaction_id: UUID
    position: int


@dataclass(frozen=True, slots=True)
class RowStep:
    """A step through the rows of a subscription: the place that it reached, None if no row is left."""

    place: RowPlace | None
    buried: Buried | None = None


START = RowPlace(-1, UUID(int=0), -1)


async def bury_log(
    connection: Connection,
    day: Day,
    subscription: Subscription,
    after: int,
    late_since: datetime | None,
    now: datetime,
) -> LogStep:
    """Make dead letters of what the subscription has not settled of the day's next log entries.

    Entries that were committed at or after `late_since` count even below the checkpoint.
    """
    row = await connection.fetchrow(
        BURY_LOG,
        day.low,
        day.high,
        subscription.subscription_id,
        *of_route(subscription.route),
        late_since,
        now,
        after,
    )
    assert row is not None
    return LogStep(after if row["reached"] is None else row["reached"], row["more"], _buried(row, 2))


async def bury_retries(
    connection: Connection, day: Day, subscription: Subscription, after: RowPlace, now: datetime
) -> RowStep:
    """Make dead letters of the next retries of the day, which must be closed."""
    row = await connection.fetchrow(
        BURY_RETRIES,
        day.low,
        day.high,
        subscription.subscription_id,
        now,
        after.replay,
        after.transaction_id,
        after.position,
    )
    assert row is not None
    return RowStep(RowPlace(*row[:3]) if row["more"] else None, _buried(row, 4))


async def drop_confirmed(
    connection: Connection, day: Day, subscription: Subscription, after: RowPlace
) -> RowPlace | None:
    """Delete those of the next dead letters whose delivery was confirmed meanwhile; None: these were the last."""
    row = await connection.fetchrow(
        UNBURY, day.low, day.high, subscription.subscription_id, after.replay, after.transaction_id, after.position
    )
    return RowPlace(*row[:3]) if row is not None and row["more"] else None


async def keep_bodies(connection: Connection, day: Day) -> int:
    """Copy the messages of up to BODIES_AT_ONCE of the day's dead letters into them; return how many it copied."""
    done: str = await connection.execute(KEEP_BODIES, day.low, day.high)
    return int(done.rpartition(" ")[2])


def _buried(row: Any, first: int) -> Buried | None:
    return None if row["messages"] is None else Buried(*row[first:])
