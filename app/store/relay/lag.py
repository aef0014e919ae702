"""SQL that finds offsets in the log by time, and the lag of subscriptions."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.database.connection import Connection
from app.database.pauses import IS_LIMITED
from app.store.relay.leases import HELD_SINCE, LeaseKind
from app.store.relay.log import HASH
from app.store.subscriptions.subscriptions import Subscription
from app.topic_patterns import match_sql
from app.verdicts import Ordered

# The margin for the conversion of a time to an offset, because clocks step.
MARGIN = timedelta(seconds=1)
# How long a shard's rates count after its holder last stored them.
RATES_HOLD_S = 15
# Dead letters are counted up to this number.
COUNTED_MOST = 100_000

# Served by outbox_by_offset, from either end of each partition.
LATEST = 'select coalesce(max("offset"), 0) from outbox'
EARLIEST = 'select coalesce(min("offset") - 1, 0) from outbox'

# Find the lowest offset whose message was committed at or after a time, by bisection. Each probe is one descent in
# outbox_by_offset. committed_at rises with the offset except at clock steps; the caller's margin covers those.
SINCE = """
with recursive bisect(low, high) as (
  select coalesce(min("offset"), 1), coalesce(max("offset"), 0) + 1 from outbox
  union all
  select case when p.late then b.low else (b.low + b.high) / 2 + 1 end,
    case when p.late then (b.low + b.high) / 2 else b.high end
  from bisect b, lateral (
    select coalesce((
      select o.committed_at >= $1 from outbox o where o."offset" >= (b.low + b.high) / 2 order by o."offset" limit 1
    ), true) as late
  ) p
  where b.low < b.high
)
select low - 1 from bisect where low = high
"""

# `waiting` counts, of the next offsets after the slowest shard's checkpoint, the messages that match the subscription,
# are after the checkpoint of their own shard, and are not settled (a shard may settle messages after its checkpoint).
# `held` counts messages of an ordered subscription that are due and were never tried, because they wait for their key.
# Served by outbox_by_offset, and by receipt_by_offset, delivery_retry_offset and dead_letter_offset over the same
# offsets, and joined by offset in memory: no more rows, whatever a subscription has received.
LAG = f"""
with checkpoints as materialized (
  select * from checkpoint c where c.subscription_id = $1
), slowest as materialized (
  select p."offset", p.moved_at, p.shards from checkpoints p order by p."offset", p.shard limit 1
), span as materialized (
  select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.committed_at
  from outbox o where o."offset" > (select p."offset" from slowest p) order by o."offset" limit $4
), reach as materialized (
  select max(s."offset") as last from span s
), settled as materialized (
  select r."offset" from receipt r where r.subscription_id = $1 and r.replay = 0
    and r."offset" > (select p."offset" from slowest p) and r."offset" <= (select p.last from reach p)
  union all
  select d."offset" from delivery_retry d where d.subscription_id = $1 and d.replay = 0
    and d."offset" > (select p."offset" from slowest p) and d."offset" <= (select p.last from reach p)
  union all
  select d."offset" from dead_letter d where d.subscription_id = $1 and d.replay = 0
    and d."offset" > (select p."offset" from slowest p) and d."offset" <= (select p.last from reach p)
), waiting as (
  select s."offset", s.committed_at from span s cross join slowest m
  where {match_sql("s.topic", "$2::text[]")}
    and ($3::text[] is null or s.tag = any($3::text[]))
    and (m.shards = 1 or s."offset" > (
      select p."offset" from checkpoints p where p.shard = {HASH.format("s")} % m.shards
    ))
    and not exists (select from settled e where e."offset" = s."offset")
), retry as (
  select count(*) filter (where not d.held) as retrying, count(*) filter (where d.held) as held from (
    select $5 and d.key is not null and d.first_at is null and d.due_at <= $6 as held
    from delivery_retry d where d.subscription_id = $1 and d.replay = 0
  ) d
), rate as (
  select coalesce(sum(p.delivered_per_s), 0) as delivered_per_s, coalesce(sum(p.failed_per_s), 0) as failed_per_s
  from checkpoints p where p.rated_at > $6::timestamptz - interval '{RATES_HOLD_S} s'
), breaker as (
  select p.opened_at, p.opened_because from checkpoints p where p.opened_at is not null order by p.opened_at limit 1
)
select m."offset", m.moved_at, (select count(*) from waiting) as waiting,
  (select min(committed_at) from waiting) as oldest_at, (select count(*) from span) as looked_at,
  r.retrying, r.held, t.delivered_per_s, t.failed_per_s, b.opened_at, b.opened_because,
  (
    select max(p.paused_until) from checkpoints p where p.opened_at is not null or {IS_LIMITED.format("p", "now()")}
  ) as paused_until,
  (select count(*) from (
    select from dead_letter d where d.subscription_id = $1 limit {COUNTED_MOST}
  ) d) as dead_letters,
  (select e.error from (
    (select d."offset", d.last_error as error from delivery_retry d
     where d.subscription_id = $1 and d.last_error is not null order by d."offset" desc limit 1)
    union all
    (select d."offset", coalesce(d.error, d.reason) from dead_letter d
     where d.subscription_id = $1 order by d."offset" desc limit 1)
  ) e order by e."offset" desc limit 1) as last_error,
  array(select p.replay_id from replay p where p.subscription_id = $1 and p.state = 'running' order by 1) as replays
from slowest m cross join retry r cross join rate t left join breaker b on true
"""  # noqa: S608 -- constants

# Served by the primary keys of checkpoint and lease; a few rows.
HOLDERS = f"""
select c.shard, c."offset", l.owner as holder, l.expires_at as held_until, {HELD_SINCE} as held_since
from checkpoint c left join lease l
  on l.name = '{LeaseKind.SHARD}:' || c.subscription_id || ':' || c.shards || ':' || c.shard
  and l.expires_at > $2 and l.owner <> ''
where c.subscription_id = $1 order by c.shard
"""  # noqa: S608 -- a constant

# Served by the first column of the primary key.
OPENED = """
select distinct on (subscription_id) subscription_id, opened_because from checkpoint
where subscription_id = any($1::int[]) and opened_at is not null order by subscription_id, opened_at
"""


@dataclass(frozen=True, slots=True)
class SubscriptionLag:
    """The lag of a subscription: `waiting` of the next `looked_at` log entries match it and are unsettled.

    `offset`, `moved_at`: of its slowest shard. `opened_at`: when the first of its open breakers opened.
    """

    offset: int
    moved_at: datetime
    waiting: int
    oldest_at: datetime | None
    looked_at: int
    retrying: int
    held: int
    delivered_per_s: float
    failed_per_s: float
    opened_at: datetime | None
    opened_because: str | None
    paused_until: datetime | None
    dead_letters: int
    last_error: str | None
    replays: list[int]


@dataclass(frozen=True, slots=True)
class ShardHolder:
    """A shard's checkpoint, and the worker that has its lease until `held_until`."""

    shard: int
    offset: int
    holder: str | None
    held_until: datetime | None
    held_since: datetime | None


async def latest(connection: Connection) -> int:
    """Return the last offset of the log. Messages that are committed after this call have higher offsets."""
    offset: int = await connection.fetchval(LATEST)
    return offset


async def earliest(connection: Connection) -> int:
    """Return the offset before the first message of the log."""
    offset: int = await connection.fetchval(EARLIEST)
    return offset


def _moved(at: datetime, by: timedelta) -> datetime:
    try:
        return at + by
    except OverflowError:
        # A client may name the first or the last second of `datetime`. No message was committed near them.
        return at


async def since(connection: Connection, at: datetime) -> int:
    """Return the offset before the first message that was committed at `at` or later, with MARGIN to spare."""
    offset: int = await connection.fetchval(SINCE, _moved(at, -MARGIN))
    return offset


async def until(connection: Connection, at: datetime) -> int:
    """Return the offset of the last message that was committed at `at` or before, with MARGIN to spare."""
    offset: int = await connection.fetchval(SINCE, _moved(at, MARGIN))
    return offset


async def subscription_lag(
    connection: Connection, subscription: Subscription, look_at: int, now: datetime
) -> SubscriptionLag:
    """Return the lag of a subscription, from at most `look_at` log entries after its slowest shard.

    Header filters are ignored: a message that they exclude counts as waiting until the relay has passed it.
    """
    route, ordered = subscription.route, subscription.ordered is Ordered.KEY
    row = await connection.fetchrow(
        LAG, subscription.subscription_id, route.topics.patterns, route.tags, look_at, ordered, now
    )
    assert row is not None  # the checkpoint is stored with its subscription
    return SubscriptionLag(**row)


async def holders(connection: Connection, subscription_id: int, now: datetime) -> list[ShardHolder]:
    """Return the holder of each shard."""
    return [ShardHolder(**row) for row in await connection.fetch(HOLDERS, subscription_id, now)]


async def opened(connection: Connection, subscription_ids: Sequence[int]) -> dict[int, str]:
    """Return the reason of the first open breaker of each subscription that has one."""
    rows = await connection.fetch(OPENED, subscription_ids)
    return {row["subscription_id"]: row["opened_because"] or "" for row in rows}
