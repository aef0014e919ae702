"""Store replays: a replay delivers a range of the outbox to one subscription again, beside its live delivery."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database.connection import Connection
from app.store.subscriptions.subscriptions import Subscription
from app.topic_patterns import match_sql
from app.verdicts import DeadLetterReason, ReplayState

# Served by replay_running; few replays run at a time.
RUNNING = """
select replay_id, subscription_id, after, until, "offset", filters, created_at from replay where state = 'running'
order by replay_id
"""

COLUMNS = """replay_id, subscription_id, after, until, "offset", filters, state, actor, reason, created_at, moved_at,
  ended_at"""

# The caller has locked the subscription's row, so that two requests cannot count at the same time. Served by
# replay_running.
START = f"""
insert into replay (subscription_id, after, until, "offset", filters, actor, reason, state, created_at, moved_at)
select $1, $2, $3, $2, $4, $5, $6, 'running', $7, $7
where $8 > (select count(*) from replay where subscription_id = $1 and state = 'running')
returning {COLUMNS}
"""  # noqa: S608 -- names of columns

# How long a request that is repeated after a lost answer may be late.
REPEATED_WITHIN = "10 minutes"

# The caller has locked the subscription's row, so that two equal requests cannot look at the same time. A replay that
# has read its part of the log, and waits for retries only, counts for a while after its beginning. Served by
# replay_running.
SAME = f"""
select {COLUMNS} from replay
where subscription_id = $1 and state = 'running' and after = $2 and ($3::bigint is null or until = $3)
  and filters is not distinct from $4::jsonb
  and ("offset" < until or created_at > now() - interval '{REPEATED_WITHIN}')
order by replay_id limit 1
"""  # noqa: S608 -- constants

# Served by replay_subscription.
PAGE = f"""
select {COLUMNS} from replay where subscription_id = $1 and replay_id < $2 order by replay_id desc limit $3
"""  # noqa: S608 -- names of columns

ONE = f"select {COLUMNS} from replay where subscription_id = $1 and replay_id = $2"  # noqa: S608 -- names of columns

# The replay's messages by result. Served by receipt_by_offset, delivery_retry_due and the primary key of dead_letter.
OUTCOMES = """
select
  (select count(*) from receipt r
   where r.subscription_id = $1 and r.replay = $2 and r.outcome = 'delivered') as delivered,
  (select count(*) from delivery_retry r where r.subscription_id = $1 and r.replay = $2) as retrying,
  (select count(*) from dead_letter d where d.subscription_id = $1 and d.replay = $2) as dead
"""

# A worker that adds messages of the replay has locked it, and CANCEL must see them: a statement of its own, before it.
LOCKED = "select from replay where subscription_id = $1 and replay_id = $2 for update"

# Why the retry {0} was a dead letter before a person redelivered it; null if it was not. By redelivery_transaction,
# one probe a retry: with EXISTS a plan may read all redeliveries.
_DIED_BECAUSE = """(
    select x.died_because from redelivery x
    where x.transaction_id = {0}.transaction_id and x.position = {0}.position
      and x.subscription_id = {0}.subscription_id and x.replay = {0}.replay and x.what = 'redelivered'
    order by x.redelivery_id desc limit 1
  )"""
_KEPT = """subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    producer_group, tag, headers, content_type, body, body_digest, committed_at"""


def clear_retries(replays: str, now: str, limit: str = "") -> str:
    """Return the parts of a statement that delete the retries of replays `p` that no worker is sending: `cleared`.

    A retry that a person redelivered was a dead letter and becomes one again, for the reason of its death. Attempts are
    those since the redelivery, as in each dead letter. Only redeliveries have their own copy of the message, so one
    with a copy was a dead letter even if the record of it is no longer kept. Without a copy it needs its day: upkeep
    makes dead letters of the retries of a day that is not open, or opens the day again. The lease is looked at again
    when the row is locked. Primary keys otherwise.
    """
    free = f"({{0}}.leased_until is null or {{0}}.leased_until <= {now})"
    return f"""cleared as (
  delete from delivery_retry c where {free.format("c")} and c.ctid = any(array(
    select r.ctid from {replays}
    join delivery_retry r on r.subscription_id = p.subscription_id and r.replay = p.replay_id
    where {free.format("r")} and (
      r.body is not null or {_DIED_BECAUSE.format("r")} is null or exists (
        select from day d where d.low <= r.transaction_id and d.high > r.transaction_id and d.state = 'open'
      )
    ) {limit}
  ))
  returning {_KEPT}, last_error, {_DIED_BECAUSE.format("c")} as died_because
), dead_again as (
  insert into dead_letter ({_KEPT}, reason, error, died_at)
  select {_KEPT}, coalesce(died_because, '{DeadLetterReason.DAY_LEFT}'), last_error,
    greatest({now}::timestamptz, first_at)
  from cleared where died_because is not null or body is not null
  on conflict do nothing
)"""  # noqa: S608 -- constants


# The statement clears the replay's waiting retries. Retries that a worker has claimed are settled first; upkeep clears
# the rest.
CANCEL = f"""
with ended as (
  update replay set state = 'cancelled', ended_at = $3, cancelled_at = $3
  where subscription_id = $1 and replay_id = $2 and state = 'running'
  returning subscription_id, replay_id
), {clear_retries("ended p", "$3")}
select 1 from ended
"""  # noqa: S608 -- constants

# The log entries of a replay that are counted before it begins.
COUNTED_MOST = 20_000

# A bounded range of outbox_by_offset. Headers are not compared, as in LAG. The relay skips days that are not open.
COUNT = f"""
with closing as materialized (
  select low, high from day where state = 'archiving'
)
select count(*) as looked_at, count(*) filter (
  where {match_sql("o.topic", "$3::text[]")} and ($4::text[] is null or o.tag = any($4))
    and ($5::text[] is null or o.topic = any($5)) and ($6::text[] is null or o.key = any($6))
    and ($7::text[] is null or o.tag = any($7)) and not exists (
      select from closing d where d.low <= o.transaction_id and d.high > o.transaction_id
    )
) as messages
from (
  select o.transaction_id, o.topic, o.key, o.tag from outbox o where o."offset" > $1 and o."offset" <= $2
  order by o."offset" limit $8
) o
"""  # noqa: S608 -- a condition of ours

# Only open days: upkeep may remove the others at any time. One probe of outbox_by_offset in the partition of each day.
OLDEST = """
select min(o."offset") from day d, lateral (
  select o."offset" from outbox o where o.transaction_id >= d.low and o.transaction_id < d.high
  order by o."offset" limit 1
) o where d.state = 'open'
"""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay of the offsets from `after` (exclusive) to `until`, which has reached `offset`.

    `filters` is the JSON of the request.
    """

    replay_id: int
    subscription_id: int
    after: int
    until: int
    offset: int
    filters: dict[str, Any] | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class StoredReplay(Replay):
    """A replay with its state, and the person and reason of the request."""

    state: ReplayState
    actor: str | None
    reason: str | None
    moved_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewReplay:
    """A replay to store."""

    subscription_id: int
    after: int
    until: int
    filters: dict[str, Any] | None
    actor: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A replay's messages so far, counted by result."""

    delivered: int
    retrying: int
    dead: int


async def count_messages(
    connection: Connection,
    subscription: Subscription,
    after: int,
    until: int,
    filters: dict[str, Any],
    *,
    most: int = COUNTED_MOST,
) -> tuple[int, bool]:
    """Return how many messages a replay of this part of the log would send, and whether all of it was counted.

    At most `most` entries of the log are counted.
    """
    route = subscription.route
    row = await connection.fetchrow(
        COUNT,
        after,
        until,
        route.topics.patterns,
        route.tags,
        *(filters.get(name) for name in ("topics", "keys", "tags")),
        most + 1,
    )
    assert row is not None
    return row["messages"], row["looked_at"] <= most


async def running(connection: Connection) -> list[Replay]:
    """Return the replays that run."""
    return [Replay(**_fields(row)) for row in await connection.fetch(RUNNING)]


async def same_running(connection: Connection, asked: NewReplay, *, to_newest: bool) -> StoredReplay | None:
    """Return a running replay of the same part and filters as the one asked for, whose subscription is locked.

    `to_newest`: it was asked for up to the newest message. The same request meant an earlier end before, so the end is
    not compared.
    """
    until = None if to_newest else asked.until
    row = await connection.fetchrow(SAME, asked.subscription_id, asked.after, until, _json(asked.filters))
    return _stored(row) if row else None


async def start(connection: Connection, asked: NewReplay, at_most: int, now: datetime) -> StoredReplay | None:
    """Store a replay of a subscription (locked by `one`); None if `at_most` of its replays run already."""
    filters = _json(asked.filters)
    row = await connection.fetchrow(
        START, asked.subscription_id, asked.after, asked.until, filters, asked.actor, asked.reason, now, at_most
    )
    return _stored(row) if row else None


async def page(connection: Connection, subscription_id: int, before: int, limit: int) -> list[StoredReplay]:
    """Return replays of a subscription with ids below a given one, newest first."""
    return [_stored(row) for row in await connection.fetch(PAGE, subscription_id, before, limit)]


async def one(connection: Connection, subscription_id: int, replay_id: int) -> StoredReplay | None:
    """Return a replay of a subscription."""
    row = await connection.fetchrow(ONE, subscription_id, replay_id)
    return _stored(row) if row else None


async def outcomes(connection: Connection, replay: Replay) -> Outcomes:
    """Count a replay's messages by result."""
    row = await connection.fetchrow(OUTCOMES, replay.subscription_id, replay.replay_id)
    assert row is not None  # A statement of counts always returns a row.
    return Outcomes(**row)


async def cancel(connection: Connection, subscription_id: int, replay_id: int, now: datetime) -> bool:
    """Cancel a running replay; False if it does not run. Needs a database transaction."""
    await connection.execute(LOCKED, subscription_id, replay_id)
    return await connection.fetchval(CANCEL, subscription_id, replay_id, now) is not None


async def oldest(connection: Connection) -> int | None:
    """Return the lowest offset that a replay can still read, or None if there is none."""
    offset: int | None = await connection.fetchval(OLDEST)
    return offset


def _json(filters: dict[str, Any] | None) -> str | None:
    return None if filters is None else msgspec.json.encode(filters).decode()


def _fields(row: Any) -> dict[str, Any]:
    fields = dict(row)
    fields["filters"] = None if fields["filters"] is None else msgspec.json.decode(fields["filters"])
    return fields


def _stored(row: Any) -> StoredReplay:
    return StoredReplay(**{**_fields(row), "state": ReplayState(row["state"])})
