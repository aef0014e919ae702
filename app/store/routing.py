"""What of the log finds no subscription, and how far those are behind that nobody delivers to just now."""

from dataclasses import dataclass
from datetime import datetime

from app.database import Connection

# Served by outbox_by_offset: a short range in each partition, merged up to the limit.
TOPICS_AFTER = """
with span as materialized (
  select o."offset", o.topic from outbox o where o."offset" > $1 order by o."offset" limit $2
)
select topic, count(*), max("offset") as reached from span group by topic
"""

# Subscriptions are few; each is one probe in outbox_by_offset of each partition, from where its slowest shard stands.
RESTING = """
select s.name, greatest(0, (select max("offset") from outbox) - c."offset") as behind, (
  select o.committed_at from outbox o where o."offset" > c."offset" order by o."offset" limit 1
) as oldest_at
from subscription s cross join lateral (
  select min(c."offset") as "offset" from checkpoint c where c.subscription_id = s.subscription_id
) c
where s.deleted_at is null and s.state <> 'active'
"""

TOPICS = "select distinct unnest(topics) as topic from subscription where deleted_at is null"


@dataclass(frozen=True, slots=True)
class Resting:
    """A subscription that is not delivered to: how many log entries follow its checkpoint, and how old the first is."""

    name: str
    behind: int
    oldest_at: datetime | None


async def topics_after(connection: Connection, after: int, at_most: int) -> tuple[dict[str, int], int]:
    """Count the messages of each topic among the next `at_most` of the log; also the offset that was reached."""
    rows = await connection.fetch(TOPICS_AFTER, after, at_most)
    return {row["topic"]: row["count"] for row in rows}, max((row["reached"] for row in rows), default=after)


async def subscribed_topics(connection: Connection) -> list[str]:
    """Return the topics (names, or beginnings with a trailing `*`) of all subscriptions, whatever their state."""
    return [row["topic"] for row in await connection.fetch(TOPICS)]


async def resting(connection: Connection) -> list[Resting]:
    """Return where the subscriptions stand that are paused or disabled."""
    return [Resting(row["name"], row["behind"] or 0, row["oldest_at"]) for row in await connection.fetch(RESTING)]
