"""SQL of the order of subscriptions in a list, and of how many there are."""

from typing import Literal

from app.database.connection import Connection
from app.permissions import EVERYTHING, Within

SubscriptionOrder = Literal["lag", "dead", "state", "changed"]

# The dead letters of each subscription that count for the order.
DEAD_MOST = 1000

# The primary key of checkpoint, a row for each shard; dead_letter_of, up to a limit for each subscription.
_PLACE = 'select min(c."offset") from checkpoint c where c.subscription_id = s.subscription_id'
_DEAD = f"""select count(*) from (
  select from dead_letter d where d.subscription_id = s.subscription_id limit {DEAD_MOST}
) d"""  # noqa: S608 -- a constant
_OPEN = "exists (select from checkpoint c where c.subscription_id = s.subscription_id and c.opened_at is not null)"
_ORDERS: dict[SubscriptionOrder, str] = {
    "lag": f"({_PLACE})",
    "dead": f"({_DEAD}) desc",
    "state": f"s.state = 'active', s.state, not {_OPEN}",
    "changed": "s.updated_at desc",
}

# There are few subscriptions, so all are read and sorted.
RANKED = {
    order: f"""
select s.name from subscription s
where s.deleted_at is null and ($3::text[] is null or s.name = any($3) or s.name ^@ any($4::text[]))
order by {by}, s.name offset $1 limit $2
"""  # noqa: S608 -- constants
    for order, by in _ORDERS.items()
}
COUNT = """
select count(*) from (
  select from subscription s
  where s.deleted_at is null and ($2::text[] is null or s.name = any($2) or s.name ^@ any($3::text[])) limit $1
) s
"""


async def ranked_subscriptions(
    connection: Connection, order: SubscriptionOrder, after: int, limit: int, within: Within = EVERYTHING
) -> list[str]:
    """Return the names of up to `limit` subscriptions within a scope after the first `after` in an order.

    `lag`: the slowest shard furthest behind in the log first; `dead`: the most dead letters first; `state`: stopped
    ones and those with an open breaker first; `changed`: the last change first.
    """
    return [row[0] for row in await connection.fetch(RANKED[order], after, limit, *within)]


async def count_subscriptions(connection: Connection, most: int, within: Within = EVERYTHING) -> int:
    """Return how many subscriptions are within a scope, up to `most`."""
    count: int = await connection.fetchval(COUNT, most, *within)
    return count
