"""SQL that finds out for which consumers that wait there is something to claim."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app.database.connection import Connection
from app.field_rules import rate_of_stored
from app.store.pull.ordered_claims import FULL
from app.topic_patterns import match_sql
from app.verdicts import OnDead, Ordered

# How many log entries after the cursor are looked at.
SPAN = 200

# One row for each subscription ($1) that is active. `due`: rows of delivery_retry, as many as its consumers would take
# ($2). Of the log only topics are compared; a claim applies the other filters. If a whole span has none of its topics,
# one claim moves the cursor on. Served by delivery_retry_due, delivery_retry_waiting, outbox_by_offset and primary
# keys.
CLAIMABLE = f"""
select a.subscription_id, d.due, s.ordered, s.on_dead, s.rate_per_s, k.paced_until,
  case when s.ordered = '{Ordered.KEY}' and {FULL.format("a.subscription_id", "$3")} then 0
    else l.taken + (l.taken = 0 and l.read >= {SPAN})::int end as logged,
  (
    select min(w.due_at) from (
      select 0 as replay union all
      select p.replay_id from replay p where p.subscription_id = a.subscription_id and p.state = 'running'
    ) r cross join lateral (
      select w.due_at from delivery_retry w
      where w.subscription_id = a.subscription_id and w.replay = r.replay and w.due_at > $3 and w.leased_until is null
      order by w.due_at limit 1
    ) w
  ) as next_at
from unnest($1::int[], $2::int[]) as a(subscription_id, most)
join subscription s on s.subscription_id = a.subscription_id and s.state = 'active' and s.deleted_at is null
join pull_cursor k on k.subscription_id = a.subscription_id
cross join lateral (
  select count(*) as due from (
    select 0 as replay union all
    select p.replay_id from replay p where p.subscription_id = a.subscription_id and p.state = 'running'
  ) r cross join lateral (
    select from delivery_retry d
    where d.subscription_id = a.subscription_id and d.replay = r.replay and d.due_at <= $3 and d.leased_until is null
    limit a.most
  ) d
) d
cross join lateral (
  select count(*) filter (where {match_sql("o.topic", "s.topics")}) as taken, count(*) as read from (
    select o.topic from outbox o where o."offset" > k."offset" order by o."offset" limit {SPAN}
  ) o
) l
"""  # noqa: S608 -- constants

# Which subscriptions ($1) are gone. Primary key.
REMOVED = """
select a.subscription_id from unnest($1::int[]) as a(subscription_id)
where not exists (select from subscription s where s.subscription_id = a.subscription_id and s.deleted_at is null)
"""


@dataclass(frozen=True, slots=True)
class Claimable:
    """What a subscription has to claim now: `due` rows of delivery_retry, and `logged` messages of the log.

    Rows of an ordered subscription may wait for their key. `next_at`: when the next row is due, if any. With a rate no
    message is claimed before `paced_until`.
    """

    subscription_id: int
    due: int
    ordered: Ordered
    on_dead: OnDead
    rate_per_s: float | None
    paced_until: datetime | None
    logged: int
    next_at: datetime | None


async def claimable(connection: Connection, limits: Mapping[int, int], now: datetime) -> list[Claimable]:
    """Return what may be claimed of these subscriptions; `limits`: how much their consumers would take."""
    rows = await connection.fetch(CLAIMABLE, list(limits), list(limits.values()), now)
    return [_claimable(row) for row in rows]


async def removed(connection: Connection, subscription_ids: Collection[int]) -> list[int]:
    """Return which of these subscriptions are gone."""
    rows = await connection.fetch(REMOVED, list(subscription_ids))
    return [row["subscription_id"] for row in rows]


def _claimable(row: Any) -> Claimable:
    words = {"ordered": Ordered(row["ordered"]), "on_dead": OnDead(row["on_dead"])}
    return Claimable(**{**row, **words, "rate_per_s": rate_of_stored(row["rate_per_s"])})
