"""SQL of the order of topics in a list, and of how many there are."""

from typing import Literal

from app.database.connection import Connection
from app.store.coordinator.topic_traffic import LOG_LOOKS_AT
from app.topic_patterns import TopicPatterns, match_sql

TopicOrder = Literal["messages", "first_seen"]

_ORDERS: dict[TopicOrder, str] = {"messages": "m.messages desc nulls last", "first_seen": "t.first_seen_at desc"}

# outbox_by_offset from its end, in each partition; topics are few beside messages, so all are read and sorted.
RANKED = {
    order: f"""
with span as materialized (
  select o.topic from outbox o order by o."offset" desc limit {LOG_LOOKS_AT}
), sent as (
  select s.topic, count(*) as messages from span s group by s.topic
)
select t.name from topic t left join sent m on m.topic = t.name
where $3::text[] is null or {match_sql("t.name", "$3::text[]")}
order by {by}, t.name offset $1 limit $2
"""  # noqa: S608 -- constants
    for order, by in _ORDERS.items()
}
COUNT = f"""
select count(*) from (
  select from topic t where $2::text[] is null or {match_sql("t.name", "$2::text[]")} limit $1
) t
"""  # noqa: S608 -- a condition of ours


async def ranked_topics(
    connection: Connection, order: TopicOrder, after: int, limit: int, within: TopicPatterns | None = None
) -> list[str]:
    """Return up to `limit` topics that `within` matches (None: all), after the first `after` in an order.

    `messages`: the most among the last messages of the log first; `first_seen`: the newest topic first.
    """
    patterns = None if within is None else within.patterns
    return [row[0] for row in await connection.fetch(RANKED[order], after, limit, patterns)]


async def count_topics(connection: Connection, most: int, within: TopicPatterns | None = None) -> int:
    """Return how many topics `within` matches (None: all), up to `most`."""
    count: int = await connection.fetchval(COUNT, most, None if within is None else within.patterns)
    return count
