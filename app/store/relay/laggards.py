"""SQL that finds the subscriptions whose messages wait longest, without the lag of every subscription."""

from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.store.relay.unsettled import unsettled_sql
from app.topic_patterns import match_sql

# The subscriptions that are looked at, furthest behind first, and the log entries after the checkpoint of each.
SUBSCRIPTIONS_MOST = 20
ENTRIES_MOST = 100
# The subscriptions whose lag is worth measuring.
NAMED_MOST = 3

# The slowest shards, from checkpoint, which is small. Then a bounded range of outbox_by_offset for each, and receipt,
# delivery_retry and dead_letter by primary key. Header filters are ignored, as in LAG.
LAGGARDS = f"""
with slowest as materialized (
  select s.subscription_id, s.name, s.topics, s.filters -> 'tags' as tags, min(c."offset") as "offset"
  from subscription s join checkpoint c on c.subscription_id = s.subscription_id
  where s.state = 'active' and s.deleted_at is null
  group by s.subscription_id having min(c."offset") < (select max(o."offset") from outbox o)
  order by min(c."offset") limit {SUBSCRIPTIONS_MOST}
)
select s.name, e.committed_at as waits_since from slowest s
cross join lateral (
  select e.committed_at from (
    select o."offset", o.transaction_id, o.position, o.topic, o.tag, o.committed_at from outbox o
    where o."offset" > s."offset" order by o."offset" limit {ENTRIES_MOST}
  ) e
  where {match_sql("e.topic", "s.topics")}
    and (s.tags is null or s.tags = 'null' or s.tags = '[]' or s.tags ? e.tag)
    and {unsettled_sql("e")}
  order by e."offset" limit 1
) e
order by e.committed_at limit {NAMED_MOST}
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class Laggard:
    """A subscription, and a time before which none of its messages waits."""

    name: str
    waits_since: datetime


async def laggards(connection: Connection) -> list[Laggard]:
    """Return the active subscriptions with the oldest waiting messages, the oldest first."""
    return [Laggard(**row) for row in await connection.fetch(LAGGARDS)]
