"""Topics: named when a half first uses them."""

from dataclasses import dataclass
from datetime import datetime

from app.database import Connection

# Served by topic's primary key; there are few subscriptions. A subscription's topic with a trailing `*` is a prefix;
# `halfnote.…` is taken only by what begins so itself.
PAGE = """
select t.name as topic, t.first_seen_at, array(
  select s.name from subscription s
  where s.deleted_at is null and exists (
    select from unnest(s.topics) as p(pattern)
    where case when right(p.pattern, 1) = '*' then t.name ^@ left(p.pattern, -1) else t.name = p.pattern end
      and (p.pattern ^@ 'halfnote.' or not t.name ^@ 'halfnote.')
  ) order by s.name
) as subscriptions
from topic t where t.name > $1 order by t.name limit $2
"""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, when it was first used, and which subscriptions take it (their tags and headers aside)."""

    topic: str
    first_seen_at: datetime
    subscriptions: list[str]


async def page(connection: Connection, after: str, limit: int) -> list[Topic]:
    """Return topics by name, those after a name."""
    return [Topic(**row) for row in await connection.fetch(PAGE, after, limit)]
