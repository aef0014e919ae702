"""What the service goes by and the nightly proof, which imports nothing of it, reads."""

from collections.abc import Mapping

from app.database import Connection

# Safe under concurrency: whoever migrates last has the last word, and of one version all say the same.
WRITE = """
insert into shared_rule (name, value) select * from unnest($1::text[], $2::float8[]) order by 1
on conflict (name) do update set value = excluded.value
"""

# A rule that only grows, whoever writes last.
RAISE = """
insert into shared_rule as r (name, value) values ($1, $2)
on conflict (name) do update set value = excluded.value where r.value < excluded.value
"""

# By its primary key.
READ = "select value from shared_rule where name = $1"


async def write_rules(connection: Connection, rules: Mapping[str, float]) -> None:
    """Write down what the rules are; durations in seconds."""
    await connection.execute(WRITE, list(rules), [float(value) for value in rules.values()])


async def raise_rule(connection: Connection, name: str, value: float) -> None:
    """Write down a rule unless it says more already."""
    await connection.execute(RAISE, name, value)


async def read_rule(connection: Connection, name: str) -> float | None:
    """Return a rule, or None if nobody wrote it."""
    value: float | None = await connection.fetchval(READ, name)
    return value
