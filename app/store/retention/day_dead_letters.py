"""Make dead letters of the deliveries that the removal of a day cuts short, some in a statement.

No statement is long or holds many locks, however far behind a subscription is.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from app.database.connection import Connection
from app.store.retention.day_blockers import AT_ONCE, PLACE, matching_sql, of_route, replays_sql
from app.store.retention.days import Day, partition_name
from app.store.subscriptions.replays import Replay
from app.store.subscriptions.subscriptions import Subscription
from app.topic_patterns import reserved_sql
from app.verdicts import DeadLetterReason

# The most bytes of bodies that one statement writes, unless one body is larger.
BODY_BYTES_AT_ONCE = 32 * 2**20


# The first rows in an order whose bodies one statement writes, by the columns of `_summed`. The size of a body is known
# without reading it, and a large body is read when it is written.
_FIRST = f"(number = 1 or total <= {BODY_BYTES_AT_ONCE})"


def _summed(size: str, order: str) -> str:
    window = f"(order by {order} rows unbounded preceding)"
    return f"row_number() over {window} as number, sum({size}) over {window} as total"


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

# What the subscription has not settled is after its checkpoint. Served by outbox_by_offset, also if nothing is.
_UNSETTLED = f'o."offset" > greatest($8, {PLACE})'
# The relay skips a closed day and moves its checkpoint past it. So late entries, after the offset $9, count too. Served
# by outbox_by_offset, also if nothing is late.
_UNSETTLED_OR_LATE = f"""o."offset" > greatest($8, least({PLACE}, greatest($9::bigint, (
      select s.started_after from subscription s where s.subscription_id = $3
    ))))"""  # noqa: S608 -- constants


# A replay $9 that runs: what it has not read, up to its end. Its filters are $10 to $13, as in the relay's `wants`.
_UNREAD = """o."offset" > greatest($8, (select p."offset" from replay p where p.replay_id = $9))
    and o."offset" <= (select p.until from replay p where p.replay_id = $9 and p.state = 'running')"""
_WANTED = """ and ($10::text[] is null or o.topic = any($10)) and ($11::text[] is null or o.key = any($11))
    and ($12::text[] is null or o.tag = any($12)) and ($13::jsonb is null or exists (
      select from half h where h.transaction_id = o.transaction_id and h.position = o.position and h.headers @> $13
      offset 0
    ))"""


# The step of upkeep, whose time is given, may have begun before the message was committed or first sent.
def _bury(entries: str, replay: str = "0", wanted: str = "") -> str:
    return f"""
with span as materialized (
  select o.transaction_id, o.position, o."offset", o.topic, o.key, o.tag, o.committed_at from {{outbox}} o
  where {entries}
  order by o."offset" limit {AT_ONCE}
), waiting as materialized (
  select w.*, h.producer_group, h.headers, h.content_type, h.body, h.body_digest,
    {_summed("octet_length(h.body)", 'w."offset"')}
  from (
    select o.* from span o where {matching_sql(replay)}{wanted} and not exists (
      select from delivery_retry r where r.subscription_id = $3 and r.replay = {replay}
        and r.transaction_id = o.transaction_id and r.position = o.position offset 0
    )
  ) w {_HALF}
), chosen as (
  select * from waiting where {_FIRST}
), buried as (
  insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, reason,
    died_at, {_COPY})
  select $3, {replay}, c.transaction_id, c.position, c."offset", c.topic, c.key, 0, '{DeadLetterReason.DAY_LEFT}',
    greatest($7::timestamptz, c.committed_at), c.producer_group, c.tag, c.headers, c.content_type, c.body,
    c.body_digest, c.committed_at
  from chosen c
  on conflict do nothing
  returning {_RETURNING}
)
select case when c.left then c.reached else s.reached end as reached, c.left or s.count >= {AT_ONCE} as more, n.*
from (select max("offset") as reached, count(*) from span) s cross join (
  select max("offset") filter (where {_FIRST}) as reached, count(*) > count(*) filter (where {_FIRST}) as left
  from waiting
) c {_NEWEST}
"""  # noqa: S608 -- constants


# The next entries of the day ($1 and $2) in the log, after the offset $8. Those that nothing has settled become dead
# letters with their own bodies; a retry is left to BURY_RETRIES. A repetition inserts none. The day's partition of the
# log is named: a plan for any day reads the partition whole in each step, by its primary key, and sorts it. Primary
# keys otherwise.
BURY_LOG = _bury(_UNSETTLED)
BURY_LATE = _bury(_UNSETTLED_OR_LATE)
BURY_UNREPLAYED = _bury(_UNREAD, "$9::int", _WANTED)

# The offset of the day's last entry that was committed before a time: later ones are late, for each subscription.
# committed_at rises with the offset except at clock steps; the caller's margin covers those. Served by
# outbox_by_offset, from its end.
LAST_BEFORE = """
select coalesce(max("offset"), 0) from {outbox} where committed_at < $1
"""

# The next retries of a closed day, of one replay or (0) of live delivery, in the order of the primary key after
# ($5, $6). No worker claims or settles them any more, but a new holder of the shard may free one meanwhile. `waiting`
# waits for that and returns the changed row, whose ctid this snapshot does not see. So rows are deleted by their key;
# the ids alone keep the plan from reading all rows of the subscription.
BURY_RETRIES = f"""
with span as materialized (
  select r.transaction_id, r.position, {_summed("coalesce(h.bytes, 0)", "r.transaction_id, r.position")} from (
    select r.transaction_id, r.position from delivery_retry r
    where r.subscription_id = $2 and r.replay = $3 and (r.transaction_id, r.position) > ($5::uuid, $6::smallint)
      and r.transaction_id < $1 and r.body is null
    order by r.transaction_id, r.position limit {AT_ONCE}
  ) r left join lateral (
    select octet_length(h.body) as bytes from half h
    where h.transaction_id = r.transaction_id and h.position = r.position offset 0
  ) h on true
), chosen as materialized (
  select transaction_id, position from span where {_FIRST} order by transaction_id, position
), waiting as materialized (
  select r.* from chosen c cross join lateral (
    select r.replay, r.transaction_id, r.position, r.attempts, r.first_at, r.last_error from delivery_retry r
    where r.subscription_id = $2 and r.replay = $3 and r.transaction_id = c.transaction_id
      and r.position = c.position and r.body is null
    for update
  ) r
), gone as (
  delete from delivery_retry r using waiting w
  where r.subscription_id = $2 and r.replay = $3 and r.transaction_id = any(array(select transaction_id from waiting))
    and r.transaction_id = w.transaction_id and r.position = w.position
), buried as (
  insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    reason, error, died_at, {_COPY})
  select $2, w.replay, w.transaction_id, w.position, o."offset", o.topic, o.key, w.attempts, w.first_at,
    '{DeadLetterReason.DAY_LEFT}', w.last_error, greatest($4::timestamptz, w.first_at, o.committed_at),
    h.producer_group, o.tag, h.headers, h.content_type, h.body, h.body_digest, o.committed_at
  from waiting w cross join lateral (
    select o."offset", o.topic, o.key, o.tag, o.committed_at from outbox o
    where o.transaction_id = w.transaction_id and o.position = w.position offset 0
  ) o {_HALF}
  on conflict do nothing
  returning {_RETURNING}
)
select l.transaction_id as last_id, l.position as last_position, l.transaction_id is not null and (
    (select count(*) from span) >= {AT_ONCE} or (select count(*) from span) > (select count(*) from chosen)
  ) as more, n.*
from (values (1)) one (row)
left join (select * from chosen order by transaction_id desc, position desc limit 1) l on true {_NEWEST}
"""  # noqa: S608 -- constants

# Deletes the dead letters of one replay, or (0) of live delivery, whose delivery was confirmed while they were written.
# Primary keys: those of other days are not read.
UNBURY = f"""
with span as materialized (
  select d.ctid as at, d.transaction_id, d.position, d.reason from dead_letter d
  where d.subscription_id = $2 and d.replay = $3 and (d.transaction_id, d.position) > ($4::uuid, $5::smallint)
    and d.transaction_id < $1
  order by d.transaction_id, d.position limit {AT_ONCE}
), gone as (
  delete from dead_letter where ctid = any(array(
    select s.at from span s where s.reason = '{DeadLetterReason.DAY_LEFT}' and exists (
      select from receipt r where r.transaction_id = s.transaction_id and r.position = s.position
        and r.subscription_id = $2 and r.replay = $3 offset 0
    )
  ))
)
select transaction_id, position, (select count(*) from span) >= {AT_ONCE} as more
from span order by transaction_id desc, position desc limit 1
"""  # noqa: S608 -- a constant

# The replays of a subscription's rows, with 0 for live delivery. Conditions on a day without the replay would read the
# rows of all days.
REPLAYS = {
    table: f"with recursive {replays_sql(table)} select replay from found"  # noqa: S608 -- names of tables
    for table in ("delivery_retry", "dead_letter")
}

# The most dead letters that one statement copies.
BODIES_AT_ONCE = 1000
# Dead letters can be many, so one statement copies some: it finds them by dead_letter_uncopied, locks those that it
# copies by primary key, reads half and outbox by primary key, and updates by ctid, because a join would be planned as a
# scan of the whole table. It begins where the last one ended: the index keeps the entries of those that were copied
# until a vacuum.
KEEP_BODIES = f"""
with uncopied as materialized (
  select d.*, {_summed("d.bytes", "d.transaction_id, d.position, d.subscription_id, d.replay")} from (
    select d.subscription_id, d.replay, d.transaction_id, d.position, h.bytes from dead_letter d cross join lateral (
      select octet_length(h.body) as bytes from half h
      where h.transaction_id = d.transaction_id and h.position = d.position offset 0
    ) h
    where d.transaction_id >= $1 and d.transaction_id < $2 and d.body is null
      and exists (
        select from outbox o where o.transaction_id = d.transaction_id and o.position = d.position offset 0
      )
    order by d.transaction_id, d.position limit {BODIES_AT_ONCE}
  ) d
), chosen as materialized (
  select * from uncopied where {_FIRST} order by transaction_id, position, subscription_id, replay
), locked as materialized (
  select l.at from chosen c cross join lateral (
    select d.ctid as at from dead_letter d
    where d.subscription_id = c.subscription_id and d.replay = c.replay and d.transaction_id = c.transaction_id
      and d.position = c.position and d.body is null
    for update
  ) l
), copied as (
  update dead_letter d set (producer_group, tag, headers, content_type, body, body_digest) = (
      select h.producer_group, h.tag, h.headers, h.content_type, h.body, h.body_digest
      from half h where h.transaction_id = d.transaction_id and h.position = d.position
    ), committed_at = (
      select o.committed_at from outbox o where o.transaction_id = d.transaction_id and o.position = d.position
    )
  where d.ctid = any(array(select at from locked))
)
select transaction_id,
  (select count(*) from uncopied) >= {BODIES_AT_ONCE} or
  (select count(*) from uncopied) > (select count(*) from chosen) as more
from chosen order by transaction_id desc, position desc limit 1
"""  # noqa: S608 -- constants


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

    @classmethod
    def before(cls, day: Day, replay: int) -> "RowPlace":
        """Return the place before the first row of a day."""
        return cls(replay, day.low, -1)


@dataclass(frozen=True, slots=True)
class RowStep:
    """A step through the rows of a subscription: the place that it reached, None if no row is left."""

    place: RowPlace | None
    buried: Buried | None = None


async def last_before(connection: Connection, day: Day, at: datetime) -> int:
    """Return the last offset of the day's log that was committed before `at`, or 0."""
    offset: int = await connection.fetchval(LAST_BEFORE.format(outbox=partition_name("outbox", day.day)), at)
    return offset


async def bury_log(
    connection: Connection,
    day: Day,
    subscription: Subscription,
    after: int,
    late_after: int | None,
    now: datetime,
) -> LogStep:
    """Make dead letters of what the subscription has not settled of the day's next log entries.

    Entries after the offset `late_after` count even below the checkpoint.
    """
    statement = (BURY_LOG if late_after is None else BURY_LATE).format(outbox=partition_name("outbox", day.day))
    arguments = [day.low, day.high, subscription.subscription_id, *of_route(subscription.route), now, after]
    row = await connection.fetchrow(statement, *arguments, *([] if late_after is None else [late_after]))
    assert row is not None
    return LogStep(after if row["reached"] is None else row["reached"], row["more"], _buried(row, 2))


async def bury_unreplayed(
    connection: Connection, day: Day, subscription: Subscription, replay: Replay, after: int, now: datetime
) -> LogStep:
    """Make dead letters of what a running replay has not read of the day's next log entries."""
    filters = replay.filters or {}
    headers = filters.get("headers")
    row = await connection.fetchrow(
        BURY_UNREPLAYED.format(outbox=partition_name("outbox", day.day)),
        *(day.low, day.high, subscription.subscription_id, *of_route(subscription.route), now, after),
        replay.replay_id,
        *(filters.get(name) or None for name in ("topics", "keys", "tags")),
        msgspec.json.encode(headers).decode() if headers else None,
    )
    assert row is not None
    return LogStep(after if row["reached"] is None else row["reached"], row["more"], _buried(row, 2))


async def replays_of_retries(connection: Connection, subscription: Subscription) -> list[int]:
    """Return the replays that have retries, and 0 if live delivery has."""
    return [row[0] for row in await connection.fetch(REPLAYS["delivery_retry"], subscription.subscription_id)]


async def replays_of_dead_letters(connection: Connection, subscription: Subscription) -> list[int]:
    """Return the replays that have dead letters, and 0 if live delivery has."""
    return [row[0] for row in await connection.fetch(REPLAYS["dead_letter"], subscription.subscription_id)]


async def bury_retries(
    connection: Connection, day: Day, subscription: Subscription, after: RowPlace, now: datetime
) -> RowStep:
    """Make dead letters of the next retries of the day, which must be closed, in the replay of the place."""
    arguments = [day.high, subscription.subscription_id, after.replay, now, after.transaction_id, after.position]
    row = await connection.fetchrow(BURY_RETRIES, *arguments)
    assert row is not None
    return RowStep(RowPlace(after.replay, *row[:2]) if row["more"] else None, _buried(row, 3))


async def drop_confirmed(
    connection: Connection, day: Day, subscription: Subscription, after: RowPlace
) -> RowPlace | None:
    """Delete those of the next dead letters whose delivery was confirmed meanwhile, in the replay of the place.

    None: these were the last.
    """
    arguments = [day.high, subscription.subscription_id, after.replay, after.transaction_id, after.position]
    row = await connection.fetchrow(UNBURY, *arguments)
    return RowPlace(after.replay, *row[:2]) if row is not None and row["more"] else None


async def keep_bodies(connection: Connection, day: Day, since: UUID) -> UUID | None:
    """Copy the messages of the day's next dead letters into them, beginning with an id.

    Up to BODIES_AT_ONCE, and up to BODY_BYTES_AT_ONCE of bodies or one. Return the id to go on from, or None: these
    were the last.
    """
    row = await connection.fetchrow(KEEP_BODIES, since, day.high)
    return row["transaction_id"] if row is not None and row["more"] else None


def _buried(row: Any, first: int) -> Buried | None:
    return None if row["messages"] is None else Buried(*row[first:])
