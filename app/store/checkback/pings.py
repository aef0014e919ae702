"""SQL that takes the producer groups whose ping is due; one replica takes each."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database.connection import Connection

# The table is small. Locked rows are skipped: another session takes or changes them, and they become due again later.
TAKE_DUE = """
update producer_group g set next_ping_at = $1 + make_interval(secs => g.ping_interval_s)
where g.name = any (array(
  select name from producer_group where deleted_at is null and next_ping_at <= $1
  order by next_ping_at limit $2
  for update skip locked
))
returning g.name, g.check_urls, g.check_timeout_s, g.secrets
"""


@dataclass(frozen=True, slots=True)
class DueGroup:
    """A group whose ping is due; `secrets` is JSON as stored."""

    name: str
    check_urls: list[str]
    check_timeout_s: int
    secrets: Any


async def take_due(connection: Connection, limit: int, now: datetime) -> list[DueGroup]:
    """Take up to `limit` groups whose ping is due; each is due again `ping_interval_s` later."""
    rows = await connection.fetch(TAKE_DUE, now, limit)
    return [DueGroup(row[0], row[1], row[2], msgspec.json.decode(row[3])) for row in rows]
