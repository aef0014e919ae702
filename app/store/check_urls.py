"""How each check URL did last: what `GET /producer-groups` shows and the metric tells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database import Connection

# Primary key, in order. A URL that its group has no more is not written again by a check that was under way.
NOTE = """
insert into check_url as c (producer_group, url, last_ok_at, last_error_at, last_error)
select n.producer_group, n.url, n.ok_at, n.error_at, n.error
from unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::text[])
  as n(producer_group, url, ok_at, error_at, error)
join producer_group g on g.name = n.producer_group and n.url = any(g.check_urls)
order by n.producer_group, n.url
on conflict (producer_group, url) do update set
  last_ok_at = coalesce(excluded.last_ok_at, c.last_ok_at),
  last_error_at = coalesce(excluded.last_error_at, c.last_error_at),
  last_error = coalesce(excluded.last_error, c.last_error)
"""

OF_GROUPS = """
select producer_group, url, last_ok_at, last_error_at, last_error from check_url where producer_group = any($1)
"""

# A small table, read whole: one row for each URL of each group.
ALL = "select producer_group, url, last_ok_at, last_error_at, last_error from check_url"

FORGET = "delete from check_url where producer_group = $1 and url <> all($2)"


@dataclass(frozen=True, slots=True)
class CheckUrl:
    """A check URL and when it last answered and last failed."""

    producer_group: str
    url: str
    last_ok_at: datetime | None = None
    last_error_at: datetime | None = None
    last_error: str | None = None

    @classmethod
    def of(cls, producer_group: str, url: str, error: str | None, at: datetime) -> "CheckUrl":
        """Return the news of one call: it answered, or `error`."""
        if error is None:
            return cls(producer_group, url, last_ok_at=at)
        return cls(producer_group, url, last_error_at=at, last_error=error.replace("\x00", "\ufffd"))

    @property
    def up(self) -> bool:
        """Whether the last check or ping of this URL was answered."""
        if self.last_ok_at is None:
            return False
        return self.last_error_at is None or self.last_ok_at >= self.last_error_at


async def note_urls(connection: Connection, results: Sequence[CheckUrl]) -> None:
    """Write the newest result of each URL (distinct); what a result leaves None stays as it was."""
    columns = [(r.producer_group, r.url, r.last_ok_at, r.last_error_at, r.last_error) for r in results]
    await connection.execute(NOTE, *map(list, zip(*columns, strict=True)))


async def urls_of(connection: Connection, groups: Iterable[str]) -> dict[tuple[str, str], CheckUrl]:
    """Return what is known of the URLs of some groups, by (group, url)."""
    rows = await connection.fetch(OF_GROUPS, list(groups))
    return {(row["producer_group"], row["url"]): CheckUrl(**row) for row in rows}


async def all_urls(connection: Connection) -> list[CheckUrl]:
    """Return what is known of every URL."""
    return [CheckUrl(**row) for row in await connection.fetch(ALL)]


async def forget_urls(connection: Connection, group: str, kept: Sequence[str]) -> None:
    """Drop what is known of a group's URLs, but for those it keeps."""
    await connection.execute(FORGET, group, list(kept))
