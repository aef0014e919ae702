"""Store rules that processes share, and that the nightly proof reads, because it imports no code of the service."""

import math
from collections.abc import Mapping

from app.database.connection import Connection

# The largest `HALFNOTE_ID_SKEW_S` of all processes that ever started.
LONGEST_ID_SKEW = "longest_id_skew_s"

# Safe under concurrency: the last migration wins, and all replicas of one version write the same values.
WRITE = """
insert into shared_rule (name, value) select * from unnest($1::text[], $2::float8[]) order by 1
on conflict (name) do update set value = excluded.value
"""

# The value only grows, in whatever order writers run.
RAISE = """
insert into shared_rule as r (name, value) values ($1, $2)
on conflict (name) do update set value = excluded.value where r.value < excluded.value
"""

# Primary key.
READ = "select value from shared_rule where name = $1"


async def write_rules(connection: Connection, rules: Mapping[str, float]) -> None:
    """Store the rules; durations are in seconds."""
    await connection.execute(WRITE, list(rules), [float(value) for value in rules.values()])


async def raise_rule(connection: Connection, name: str, value: float) -> None:
    """Store a rule, unless the stored value is higher already."""
    await connection.execute(RAISE, name, value)


async def read_rule(connection: Connection, name: str) -> float | None:
    """Return a rule, or None if it was never stored."""
    value: float | None = await connection.fetchval(READ, name)
    return value


async def longest_id_skew_s(connection: Connection, own_s: int) -> int:
    """Return how far the time of any id may be from its half's birth: what any process permits, at least `own_s`."""
    shared_s = await read_rule(connection, LONGEST_ID_SKEW)
    return max(own_s, math.ceil(shared_s or 0))
