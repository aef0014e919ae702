"""SQL of topics. A topic is stored when a half first uses it, or when it is declared."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.topic_patterns import TopicPatterns, match_sql, reserved_sql

# The switch whose change notifies every process that the set of declared topics changed.
CHANGED = "topics"

# Served by topic's primary key; there are few subscriptions. Those of a page's topics are found by a hash of their
# patterns, and only the patterns that end in `*` are compared with each topic (`match_sql` says the same of one row).
_SHOWN = """
with shown as materialized (
  select t.name, t.first_seen_at, t.declared_at from topic t {chosen}
), wanted as materialized (
  select s.name as subscription, p.pattern, right(p.pattern, 1) = '*' as is_beginning
  from subscription s cross join lateral unnest(s.topics) as p(pattern) where s.deleted_at is null
), taken as (
  select t.name, w.subscription from shown t join wanted w on w.pattern = t.name
  union
  select t.name, w.subscription from shown t join wanted w on w.is_beginning and t.name ^@ left(w.pattern, -1)
    and (not {reserved_topic} or {reserved_pattern})
), listed as (
  select k.name, array_agg(k.subscription order by k.subscription) as subscriptions from taken k group by k.name
)
select t.name as topic, t.first_seen_at, t.declared_at, coalesce(l.subscriptions, '{{}}') as subscriptions
from shown t left join listed l on l.name = t.name order by t.name
"""
_RESERVED = {"reserved_topic": reserved_sql("t.name"), "reserved_pattern": reserved_sql("w.pattern")}
PAGE = _SHOWN.format(
    chosen=f"""
  where t.name > $1 and ($3::text[] is null or {match_sql("t.name", "$3::text[]")}) order by t.name limit $2""",
    **_RESERVED,
)
NAMED = _SHOWN.format(chosen="where t.name = any($1::text[])", **_RESERVED)

DECLARED = "select name from topic where declared_at is not null"
# A scan of the table, once when a process starts.
OLDEST = "select name from topic order by first_seen_at, name limit $1"
# Primary key.
UNDECLARED = """
select n.name from unnest($1::text[]) as n(name)
left join topic t on t.name = n.name and t.declared_at is not null where t.name is null
"""
# Primary key. To declare a topic again changes nothing.
DECLARE = """
insert into topic (name, first_seen_at, declared_at) values ($1, $2, $2)
on conflict (name) do update set declared_at = excluded.declared_at where topic.declared_at is null
returning true
"""
UNDECLARE = "update topic set declared_at = null where name = $1 and declared_at is not null returning true"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic with the subscriptions whose topics match it; their tags and headers are ignored."""

    topic: str
    first_seen_at: datetime
    declared_at: datetime | None
    subscriptions: list[str]


async def page(connection: Connection, after: str, limit: int, within: TopicPatterns | None = None) -> list[Topic]:
    """Return up to `limit` topics in order of name: those after the name `after` that `within` matches (None: all)."""
    patterns = None if within is None else within.patterns
    return [Topic(**row) for row in await connection.fetch(PAGE, after, limit, patterns)]


async def of_names(connection: Connection, names: Sequence[str]) -> list[Topic]:
    """Return the topics of these names, in this order; those that do not exist are left out."""
    found = {row["topic"]: Topic(**row) for row in await connection.fetch(NAMED, names)}
    return [found[name] for name in names if name in found]


async def declared(connection: Connection) -> frozenset[str]:
    """Return every declared topic."""
    return frozenset(row[0] for row in await connection.fetch(DECLARED))


async def oldest(connection: Connection, at_most: int) -> list[str]:
    """Return the topics that were used or declared first, oldest first."""
    return [row[0] for row in await connection.fetch(OLDEST, at_most)]


async def undeclared(connection: Connection, names: Collection[str]) -> list[str]:
    """Return those of these topics that are not declared."""
    return [row[0] for row in await connection.fetch(UNDECLARED, list(names))]


async def declare(connection: Connection, name: str, now: datetime) -> bool:
    """Declare a topic; False if it was declared before."""
    return bool(await connection.fetchval(DECLARE, name, now))


async def undeclare(connection: Connection, name: str) -> bool:
    """Undo a topic's declaration; False if it was not declared."""
    return bool(await connection.fetchval(UNDECLARE, name))
