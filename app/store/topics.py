"""Topics: named when a half first uses them."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from app.access import EVERYTHING, Within
from app.database import Connection

# The switch by which every process sees that topics were declared, or are not any more.
CHANGED = "topics"

# Served by topic's primary key; there are few subscriptions. A subscription's topic with a trailing `*` is a prefix;
# `halfnote.…` is taken only by what begins so itself.
PAGE = """
select t.name as topic, t.first_seen_at, t.declared_at, array(
  select s.name from subscription s
  where s.deleted_at is null and exists (
    select from unnest(s.topics) as p(pattern)
    where case when right(p.pattern, 1) = '*' then t.name ^@ left(p.pattern, -1) else t.name = p.pattern end
      and (p.pattern ^@ 'halfnote.' or not t.name ^@ 'halfnote.')
  ) order by s.name
) as subscriptions
from topic t where t.name > $1 and ($3::text[] is null or t.name = any($3) or t.name ^@ any($4::text[]))
order by t.name limit $2
"""

DECLARED = "select name from topic where declared_at is not null"
# Primary key.
UNDECLARED = """
select n.name from unnest($1::text[]) as n(name)
left join topic t on t.name = n.name and t.declared_at is not null where t.name is null
"""
# Primary key. To declare one again changes nothing.
DECLARE = """
insert into topic (name, first_seen_at, declared_at) values ($1, $2, $2)
on conflict (name) do update set declared_at = excluded.declared_at where topic.declared_at is null
returning true
"""
UNDECLARE = "update topic set declared_at = null where name = $1 and declared_at is not null returning true"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, when it was first used or declared, and which subscriptions take it (their tags and headers aside)."""

    topic: str
    first_seen_at: datetime
    declared_at: datetime | None
    subscriptions: list[str]


async def page(connection: Connection, after: str, limit: int, within: Within = EVERYTHING) -> list[Topic]:
    """Return topics by name, those after a name and within a scope."""
    return [Topic(**row) for row in await connection.fetch(PAGE, after, limit, *within)]


async def declared(connection: Connection) -> frozenset[str]:
    """Return every declared topic."""
    return frozenset(row[0] for row in await connection.fetch(DECLARED))


async def undeclared(connection: Connection, names: Collection[str]) -> list[str]:
    """Return those of these topics that are not declared."""
    return [row[0] for row in await connection.fetch(UNDECLARED, list(names))]


async def declare(connection: Connection, name: str, now: datetime) -> bool:
    """Declare a topic; False if it was declared before."""
    return bool(await connection.fetchval(DECLARE, name, now))


async def undeclare(connection: Connection, name: str) -> bool:
    """Let a topic be no longer declared; False if it was not."""
    return bool(await connection.fetchval(UNDECLARE, name))
