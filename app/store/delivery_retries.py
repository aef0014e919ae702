"""Deliveries that are to be tried again, are due later, or wait for others of their key: claimed row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database import Connection
from app.store.relay import HASH, Outgoing

# How many rows of one key a claim takes at once: they are sent one after another.
RUN = 32

_FREE = "({0}.leased_until is null or {0}.leased_until <= $9)"
# A row of a day that is being archived is upkeep's, unless it carries a copy of its message.
_OPEN = """({0}.body is not null or exists (
    select from day y where y.low <= {0}.transaction_id and y.high > {0}.transaction_id and y.state = 'open'
  ))"""

# 1. `due`: served by delivery_retry_due, one range for each stream, oldest due first. SKIP LOCKED and the epoch of the
#    row: two workers that both believe they hold a stream never get the same row. With `ordered` a row is claimable
#    only if no lower offset of its key is outstanding: sent before, or fallen due (delivery_retry_key); with `hold`
#    neither if one is dead (dead_letter_key). A delayed message that is not due yet keeps nobody back.
# 2. `run`: with the first of a key come the next ones, up to the first that may not be claimed; they are sent one
#    after another.
# 3. By ctid, which the row lock holds in place: a join would be planned as a scan of the whole table. The condition is
#    repeated, because `run` locks nothing.
# The message comes from outbox and half by primary key, one partition each, or from the row's own copy.
CLAIM_RETRIES = f"""
with streams as materialized (
  select * from unnest($1::int[], $2::int[], $3::int[], $4::int[], $5::int[], $6::bool[], $7::bool[]) with ordinality
    as s(subscription_id, replay, shards, shard, room, ordered, hold, n)
), due as materialized (
  select d.*, s.ordered and not s.hold and d.key is not null as runs from streams s, lateral (
    select d.ctid as at, d.subscription_id, d.replay, d.key, d."offset" from delivery_retry d
    where d.subscription_id = s.subscription_id and d.replay = s.replay and d.due_at <= $9 and {_FREE.format("d")}
      and (s.shards = 1 or {HASH.format("d")} % s.shards = s.shard)
      and {_OPEN.format("d")}
      and (not s.ordered or d.key is null or not exists (
        select from delivery_retry b
        where b.subscription_id = d.subscription_id and b.replay = d.replay and b.key = d.key
          and b."offset" < d."offset" and (b.first_at is not null or b.due_at <= $9)
      ))
      and (not s.hold or d.key is null or not exists (
        select from dead_letter x
        where x.subscription_id = d.subscription_id and x.replay = d.replay and x.key = d.key
          and x."offset" < d."offset"
      ))
    order by d.due_at, d."offset" limit s.room for update skip locked
  ) d
), run as materialized (
  select f.at from due h, lateral (
    select n.at, bool_and(n.claimable) over (order by n."offset") as unbroken from (
      select n.ctid as at, n."offset", n.due_at <= $9 and {_FREE.format("n")} and {_OPEN.format("n")} as claimable
      from delivery_retry n
      where n.subscription_id = h.subscription_id and n.replay = h.replay and n.key = h.key
        and n."offset" > h."offset" and (n.first_at is not null or n.due_at <= $9)
      order by n."offset" limit {RUN}
    ) n
  ) f
  where h.runs and f.unbroken
), claimed as (
  update delivery_retry r set leased_until = $8, lease_epoch = r.lease_epoch + 1
  where r.ctid = any(array(select at from due union all select at from run)) and {_FREE.format("r")}
  returning r.*
)
select s.n::int, c."offset", c.transaction_id, c.position, c.topic, c.key, coalesce(c.tag, o.tag), o.due_at,
  coalesce(c.committed_at, o.committed_at), coalesce(c.producer_group, h.producer_group),
  coalesce(c.headers, h.headers), coalesce(c.content_type, h.content_type), coalesce(c.body, h.body),
  h.traceparent, c.attempts, c.first_at, c.lease_epoch
from claimed c
join streams s on s.subscription_id = c.subscription_id and s.replay = c.replay
  and (s.shards = 1 or {HASH.format("c")} % s.shards = s.shard)
left join lateral (
  select * from outbox o where o.transaction_id = c.transaction_id and o.position = c.position and c.body is null
  offset 0
) o on true left join lateral (
  select * from half h where h.transaction_id = c.transaction_id and h.position = c.position and c.body is null
  offset 0
) h on true
order by c."offset"
"""  # noqa: S608 -- expressions of ours


@dataclass(frozen=True, slots=True)
class Claimant:
    """A stream that has room for retries; `ordered` by key, `hold`: dead letters stop their keys."""

    subscription_id: int
    replay: int
    shards: int
    shard: int
    room: int
    ordered: bool
    hold: bool


async def claim_retries(
    connection: Connection, claimants: Sequence[Claimant], until: datetime, now: datetime
) -> list[list[Outgoing]]:
    """Claim what is due until `until`; return the messages of each claimant in offset order.

    They may be more than the room, by those that follow the first of a key.
    """
    columns = zip(
        *((c.subscription_id, c.replay, c.shards, c.shard, c.room, c.ordered, c.hold) for c in claimants), strict=True
    )
    rows = await connection.fetch(CLAIM_RETRIES, *columns, until, now)
    found: list[list[Outgoing]] = [[] for _ in claimants]
    for row in rows:
        found[row[0] - 1].append(Outgoing(*row[1:]))
    return found
