"""Where subscriptions begin and where they stand in the log."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.database import Connection
from app.store.relay import HASH
from app.store.subscriptions import Subscription

# Time to offset looks this much earlier, because clocks step.
MARGIN = timedelta(seconds=1)
# How long a shard's rates count after its holder last told them.
RATES_HOLD_S = 15

# Served by outbox_by_offset, from either end of each partition.
LATEST = 'select coalesce(max("offset"), 0) from outbox'
EARLIEST = 'select coalesce(min("offset") - 1, 0) from outbox'

# The lowest offset whose message was committed at or after a time, by halving: each probe is one descent in
# outbox_by_offset. committed_at rises with the offset but for steps of the clock, which the caller's margin covers.
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

# Where it stands. `waiting`: what of the next offsets after the slowest shard is its own, lies after its shard's
# checkpoint and is not settled; a shard that is ahead has settled some of them. Served by outbox_by_offset and, for
# each match, receipt's primary key; delivery_retry and dead_letter by their indexes on the subscription. `held`: never
# tried, and past the time when it was due, in an order by key.
STANDING = f"""
with place as materialized (
  select * from checkpoint c where c.subscription_id = $1
), slowest as materialized (
  select p."offset", p.moved_at, p.shards from place p order by p."offset", p.shard limit 1
), span as materialized (
  select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.committed_at
  from outbox o where o."offset" > (select p."offset" from slowest p) order by o."offset" limit $5
), waiting as (
  select s."offset", s.committed_at from span s cross join slowest m
  where (s.topic = any($2::text[]) or s.topic ^@ any($3::text[]) and (not s.topic ^@ 'halfnote.' or s.topic ^@ any(
      array(select p from unnest($3::text[]) p where p ^@ 'halfnote.')
    )))
    and ($4::text[] is null or s.tag = any($4::text[]))
    and (m.shards = 1 or s."offset" > (select p."offset" from place p where p.shard = {HASH.format("s")} % m.shards))
    and not exists (
      select from receipt r
      where r.transaction_id = s.transaction_id and r.position = s.position and r.subscription_id = $1 and r.replay = 0
    )
    and not exists (
      select from delivery_retry d
      where d.subscription_id = $1 and d.replay = 0 and d.transaction_id = s.transaction_id and d.position = s.position
    )
    and not exists (
      select from dead_letter d
      where d.subscription_id = $1 and d.replay = 0 and d.transaction_id = s.transaction_id and d.position = s.position
    )
), retry as (
  select count(*) filter (where not d.held) as retrying, count(*) filter (where d.held) as held from (
    select $6 and d.key is not null and d.first_at is null and d.due_at <= $7 as held
    from delivery_retry d where d.subscription_id = $1 and d.replay = 0
  ) d
), rate as (
  select coalesce(sum(p.delivered_per_s), 0) as delivered_per_s, coalesce(sum(p.failed_per_s), 0) as failed_per_s
  from place p where p.rated_at > $7::timestamptz - interval '{RATES_HOLD_S} s'
), breaker as (
  select p.opened_at, p.opened_because from place p where p.opened_at is not null order by p.opened_at limit 1
)
select m."offset", m.moved_at, (select count(*) from waiting) as waiting,
  (select min(committed_at) from waiting) as oldest_at, (select count(*) from span) as looked_at,
  r.retrying, r.held, t.delivered_per_s, t.failed_per_s, b.opened_at, b.opened_because,
  (select count(*) from dead_letter d where d.subscription_id = $1) as dead_letters,
  (select e.error from (
    (select d."offset", d.last_error as error from delivery_retry d
     where d.subscription_id = $1 and d.last_error is not null order by d."offset" desc limit 1)
    union all
    (select d."offset", coalesce(d.error, d.reason) from dead_letter d
     where d.subscription_id = $1 order by d."offset" desc limit 1)
  ) e order by e."offset" desc limit 1) as last_error,
  array(select p.replay_id from replay p where p.subscription_id = $1 and p.state = 'running' order by 1) as replays
from slowest m cross join retry r cross join rate t left join breaker b on true
"""  # noqa: S608 -- an expression and a number of ours

# By the primary keys of checkpoint and lease: a few rows.
HOLDERS = """
select c.shard, c."offset", l.owner as holder, l.expires_at as held_until
from checkpoint c left join lease l on l.name = 'relay:' || c.subscription_id || ':' || c.shards || ':' || c.shard
  and l.expires_at > $2 and l.owner <> ''
where c.subscription_id = $1 order by c.shard
"""

# By the primary key's first column.
OPENED = """
select distinct on (subscription_id) subscription_id, opened_because from checkpoint
where subscription_id = any($1::int[]) and opened_at is not null order by subscription_id, opened_at
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a subscription stands: `waiting` of the next `looked_at` log entries are its own and unsettled.

    `offset`, `moved_at`: of its slowest shard. `opened_at`: since when the first of its open breakers is open.
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
    dead_letters: int
    last_error: str | None
    replays: list[int]


@dataclass(frozen=True, slots=True)
class Holding:
    """Where a shard stands, and the worker that has its lease until when."""

    shard: int
    offset: int
    holder: str | None
    held_until: datetime | None


async def latest(connection: Connection) -> int:
    """Return the offset after which everything is newer than this statement."""
    offset: int = await connection.fetchval(LATEST)
    return offset


async def earliest(connection: Connection) -> int:
    """Return the offset after which everything that is still there follows."""
    offset: int = await connection.fetchval(EARLIEST)
    return offset


async def since(connection: Connection, at: datetime) -> int:
    """Return the offset before the lowest one that was committed at a time, less a second for clocks that step."""
    offset: int = await connection.fetchval(SINCE, at - MARGIN)
    return offset


async def until(connection: Connection, at: datetime) -> int:
    """Return the offset of the last message that was committed at a time or before, and up to a second after."""
    offset: int = await connection.fetchval(SINCE, at + MARGIN)
    return offset


async def standing(connection: Connection, subscription: Subscription, look_at: int, now: datetime) -> Standing:
    """Return where a subscription stands, looking at most `look_at` log entries ahead of its slowest shard.

    Header filters are not judged: what they leave out counts as waiting until the relay has passed it.
    """
    route, ordered = subscription.route, subscription.ordered == "key"
    row = await connection.fetchrow(
        STANDING, subscription.subscription_id, route.exact, route.prefixes, route.tags, look_at, ordered, now
    )
    assert row is not None  # the checkpoint is made with the subscription
    return Standing(**row)


async def holders(connection: Connection, subscription_id: int, now: datetime) -> list[Holding]:
    """Return who delivers each shard of the layout in force."""
    return [Holding(**row) for row in await connection.fetch(HOLDERS, subscription_id, now)]


async def opened(connection: Connection, subscription_ids: Sequence[int]) -> dict[int, str]:
    """Return those of the subscriptions that have an open breaker, and what opened it first."""
    rows = await connection.fetch(OPENED, subscription_ids)
    return {row["subscription_id"]: row["opened_because"] or "" for row in rows}
