"""SQL of the order of producer groups in a list, and of how many there are."""

from typing import Literal

from app.database.connection import Connection
from app.permissions import EVERYTHING, Within

GroupOrder = Literal["undecided", "oldest"]

# The undecided transactions that are looked at for the order.
UNDECIDED_MOST = 100_000

_ORDERS: dict[GroupOrder, str] = {"undecided": "u.undecided desc nulls last", "oldest": "u.swept_at nulls last"}

# check_back is small: it is read up to a limit. Rows whose verdict arrived a moment ago still count for the order.
RANKED = {
    order: f"""
with undecided as materialized (
  select c.producer_group, count(*) as undecided, min(c.swept_at) as swept_at
  from (select r.producer_group, r.swept_at from check_back r limit {UNDECIDED_MOST}) c group by c.producer_group
)
select g.name from producer_group g left join undecided u on u.producer_group = g.name
where g.deleted_at is null and ($3::text[] is null or g.name = any($3) or g.name ^@ any($4::text[]))
order by {by}, g.name offset $1 limit $2
"""  # noqa: S608 -- constants
    for order, by in _ORDERS.items()
}
COUNT = """
select count(*) from (
  select from producer_group g
  where g.deleted_at is null and ($2::text[] is null or g.name = any($2) or g.name ^@ any($3::text[])) limit $1
) g
"""


async def ranked_groups(
    connection: Connection, order: GroupOrder, after: int, limit: int, within: Within = EVERYTHING
) -> list[str]:
    """Return the names of up to `limit` groups within a scope after the first `after` in an order.

    `undecided`: the most transactions in doubt and parked first; `oldest`: the one in doubt longest first.
    """
    return [row[0] for row in await connection.fetch(RANKED[order], after, limit, *within)]


async def count_groups(connection: Connection, most: int, within: Within = EVERYTHING) -> int:
    """Return how many groups are within a scope, up to `most`."""
    count: int = await connection.fetchval(COUNT, most, *within)
    return count
