"""SQL of the last messages of topics, from the end of the log."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection

# The entries at the end of the log that are looked at.
LOG_LOOKS_AT = 10_000

# outbox_by_offset from its end, in each partition. The log has no index on topics: one would cost each commit.
TRAFFIC = f"""
with span as materialized (
  select o."offset", o.topic, o.committed_at from outbox o order by o."offset" desc limit {LOG_LOOKS_AT}
)
select s.topic, count(*) as messages, max(s.committed_at) as last_at
from span s where s.topic = any($1::text[]) group by s.topic
"""  # noqa: S608 -- a constant

# The same range.
TRAFFIC_SPAN = f"""
select min(o.committed_at) as since, count(*) as looked_at
from (select o.committed_at from outbox o order by o."offset" desc limit {LOG_LOOKS_AT}) o
"""  # noqa: S608 -- a constant


@dataclass(frozen=True, slots=True)
class TopicTraffic:
    """Messages of a topic among the last LOG_LOOKS_AT of the log, and when the last one was committed."""

    messages: int
    last_at: datetime


async def traffic_of(connection: Connection, names: Sequence[str]) -> tuple[dict[str, TopicTraffic], datetime | None]:
    """Return the traffic of topics by name, and since when; None: the log is empty. Topics without any are left out."""
    rows = await connection.fetch(TRAFFIC, list(names))
    span = await connection.fetchrow(TRAFFIC_SPAN)
    assert span is not None
    return {row["topic"]: TopicTraffic(row["messages"], row["last_at"]) for row in rows}, span["since"]
