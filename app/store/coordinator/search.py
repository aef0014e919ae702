"""SQL that finds topics, producer groups and subscriptions by a part of their names."""

from dataclasses import dataclass
from typing import Literal

from app.database.connection import Connection

# The three tables are small: rows change when people configure, or when a topic is new. Letters match in either case.
# A name that equals the text comes first, then those that begin with it.
_MATCHES = "position(lower($1) in lower(name)) > 0"
_ORDER = "name = $1 desc, starts_with(lower(name), lower($1)) desc, name"
NAMED = f"""
(select 'topic' as kind, name from topic where {_MATCHES} order by {_ORDER} limit $2)
union all
(select 'producer_group', name from producer_group where deleted_at is null and {_MATCHES} order by {_ORDER} limit $2)
union all
(select 'subscription', name from subscription where deleted_at is null and {_MATCHES} order by {_ORDER} limit $2)
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class NamedPlace:
    """A topic, a producer group or a subscription."""

    kind: Literal["topic", "producer_group", "subscription"]
    name: str


async def find_named(connection: Connection, text: str, limit: int) -> list[NamedPlace]:
    """Return up to `limit` names of each kind that contain the text."""
    return [NamedPlace(**row) for row in await connection.fetch(NAMED, text, limit)]
