"""SQL for messages without a subscription, and for the lag of subscriptions that are not active."""

from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.store.subscriptions.subscriptions import PULL
from app.topic_patterns import TopicPatterns

# Served by outbox_by_offset: a short range in each partition, merged up to the limit.
TOPICS_AFTER = """
with span as materialized (
  select o."offset", o.topic from outbox o where o."offset" > $1 order by o."offset" limit $2
)
select topic, count(*), max("offset") as reached from span group by topic
"""

# There are few subscriptions. For each one, outbox_by_offset is probed once in each partition, at its slowest
# checkpoint.
INACTIVE = f"""
select s.name, greatest(0, (select max("offset") from outbox) - c."offset") as behind, (
  select o.committed_at from outbox o where o."offset" > c."offset" order by o."offset" limit 1
) as oldest_at
from subscription s cross join lateral (
  select min(c."offset") as "offset" from checkpoint c where c.subscription_id = s.subscription_id
) c
where s.deleted_at is null and (s.state <> 'active' or s.destination ->> 'type' = '{PULL}')
"""  # noqa: S608 -- a constant

# One row, by primary key.
COUNTED = """select "offset", unrouted from routing_count where name = 'all'"""

# Primary key. A count of messages that another process counted meanwhile finds another offset and changes nothing.
COUNT = """
update routing_count set "offset" = $2, unrouted = unrouted + $3 where name = 'all' and "offset" = $1
returning unrouted
"""

TOPICS = "select distinct unnest(topics) as topic from subscription where deleted_at is null"


@dataclass(frozen=True, slots=True)
class Inactive:
    """A subscription that no worker delivers, because it is paused, disabled, or claimed by consumers: how many log
    entries follow its checkpoint, and the time of the first."""

    name: str
    behind: int
    oldest_at: datetime | None


@dataclass(frozen=True, slots=True)
class Counted:
    """How many of the messages up to an offset of the log no subscription takes, since the database was made."""

    offset: int
    unrouted: int


async def counted(connection: Connection) -> Counted:
    """Return the count that is stored."""
    row = await connection.fetchrow(COUNTED)
    assert row is not None, "a migration inserts the row"
    return Counted(row["offset"], row["unrouted"])


async def count(connection: Connection, after: int, reached: int, unrouted: int) -> int | None:
    """Add messages from `after` up to the offset `reached`; return the new total, None if they were counted already."""
    total: int | None = await connection.fetchval(COUNT, after, reached, unrouted)
    return total


async def topics_after(connection: Connection, after: int, at_most: int) -> tuple[dict[str, int], int]:
    """Return the next `at_most` messages of the log after an offset, counted by topic, and the offset reached."""
    rows = await connection.fetch(TOPICS_AFTER, after, at_most)
    return {row["topic"]: row["count"] for row in rows}, max((row["reached"] for row in rows), default=after)


async def subscribed_topics(connection: Connection) -> TopicPatterns:
    """Return the topic patterns of all subscriptions, in any state."""
    return TopicPatterns(row["topic"] for row in await connection.fetch(TOPICS))


async def inactive(connection: Connection) -> list[Inactive]:
    """Return the lag of each subscription that is paused, disabled, or claimed by consumers."""
    return [Inactive(row["name"], row["behind"] or 0, row["oldest_at"]) for row in await connection.fetch(INACTIVE)]
