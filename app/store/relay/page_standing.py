"""SQL of the lag and the last error of each subscription on a page, in bounded time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.store.relay.unsettled import unsettled_sql
from app.topic_patterns import match_sql

# The log entries after the checkpoint of each subscription, and its dead letters, that are looked at.
ENTRIES_MOST = 100
DEAD_MOST = 1000

# For each subscription a bounded range of outbox_by_offset after its slowest shard. Receipt, delivery_retry and
# dead_letter are probed by primary key for each match, and their indexes on the subscription give the last error.
# Header filters are ignored, as in LAG. Without OFFSET 0 each use of `waits` would look again.
PAGE_STANDING = f"""
select s.subscription_id, w.waiting, w.oldest_at, w.looked_at,
  (select count(*) from (
    select from dead_letter d where d.subscription_id = s.subscription_id limit {DEAD_MOST + 1}
  ) d) as dead_letters,
  (select e.error from (
    (select d."offset", d.last_error as error from delivery_retry d
     where d.subscription_id = s.subscription_id and d.last_error is not null order by d."offset" desc limit 1)
    union all
    (select d."offset", coalesce(d.error, d.reason) from dead_letter d
     where d.subscription_id = s.subscription_id order by d."offset" desc limit 1)
  ) e order by e."offset" desc limit 1) as last_error
from subscription s
cross join lateral (
  select min(c."offset") as "offset" from checkpoint c where c.subscription_id = s.subscription_id
) m
cross join lateral (
  select count(*) as looked_at, count(*) filter (where e.waits) as waiting,
    min(e.committed_at) filter (where e.waits) as oldest_at
  from (
    select o.committed_at, {match_sql("o.topic", "s.topics")}
      and (s.filters -> 'tags' is null or s.filters -> 'tags' in ('null', '[]') or s.filters -> 'tags' ? o.tag)
      and {unsettled_sql("o")} as waits
    from (
      select o."offset", o.transaction_id, o.position, o.topic, o.tag, o.committed_at from outbox o
      where o."offset" > m."offset" order by o."offset" limit {ENTRIES_MOST}
    ) o offset 0
  ) e
) w
where s.subscription_id = any($1::int[])
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class PageStanding:
    """The state of a subscription. `exact` False: at least so many messages wait, or are dead letters."""

    waiting: int
    oldest_at: datetime | None
    dead_letters: int
    exact: bool
    last_error: str | None


async def page_standing(connection: Connection, subscription_ids: Sequence[int]) -> dict[int, PageStanding]:
    """Return the state of each subscription, by id."""
    rows = await connection.fetch(PAGE_STANDING, list(subscription_ids))
    return {
        row["subscription_id"]: PageStanding(
            row["waiting"],
            row["oldest_at"],
            min(row["dead_letters"], DEAD_MOST),
            row["looked_at"] < ENTRIES_MOST and row["dead_letters"] <= DEAD_MOST,
            row["last_error"],
        )
        for row in rows
    }
