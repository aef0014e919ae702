"""SQL of the last result of each check URL, which `GET /producer-groups` and a metric show."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database.columns import Column, RowArrays
from app.database.connection import Connection

RESULTS = RowArrays(
    Column("producer_group", "text"),
    Column("url", "text"),
    Column("last_ok_at", "timestamptz"),
    Column("last_error_at", "timestamptz"),
    Column("last_error", "text"),
)

# Primary key, in order. The join drops the results of calls in flight to a URL that its group no longer has. A change
# or a deletion of the group holds its row until it is committed, so the lock waits for it and then reads the new row.
# The change has deleted the results of former URLs by then, and nothing would delete one that came later.
NOTE = f"""
insert into check_url as c (producer_group, url, last_ok_at, last_error_at, last_error)
select n.producer_group, n.url, n.last_ok_at, n.last_error_at, n.last_error
from {RESULTS.unnest("n")}
join producer_group g on g.name = n.producer_group and n.url = any(g.check_urls) and g.deleted_at is null
order by n.producer_group, n.url
for key share of g
on conflict (producer_group, url) do update set
  last_ok_at = coalesce(excluded.last_ok_at, c.last_ok_at),
  last_error_at = coalesce(excluded.last_error_at, c.last_error_at),
  last_error = coalesce(excluded.last_error, c.last_error)
"""  # noqa: S608 -- constants

OF_GROUPS = """
select producer_group, url, last_ok_at, last_error_at, last_error from check_url where producer_group = any($1)
"""

# Reads the whole table, which is small: one row per URL of each group. The join leaves out results that an earlier
# version wrote after their URL or their group was gone.
ALL = """
select u.producer_group, u.url, u.last_ok_at, u.last_error_at, u.last_error
from check_url u join producer_group g on g.name = u.producer_group and u.url = any(g.check_urls)
where g.deleted_at is null
"""

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
        """Return the result of one call: it answered (`error` None), or failed."""
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
    """Write the newest result of each URL (distinct). A field that is None in the result keeps its stored value.

    Results of URLs that a registered group does not have are dropped.
    """
    await connection.execute(NOTE, *RESULTS.arrays(results))


async def urls_of(connection: Connection, groups: Iterable[str]) -> dict[tuple[str, str], CheckUrl]:
    """Return the results of the URLs of some groups, by (group, url)."""
    rows = await connection.fetch(OF_GROUPS, list(groups))
    return {(row["producer_group"], row["url"]): CheckUrl(**row) for row in rows}


async def all_urls(connection: Connection) -> list[CheckUrl]:
    """Return the results of all URLs of registered groups."""
    return [CheckUrl(**row) for row in await connection.fetch(ALL)]


async def forget_urls(connection: Connection, group: str, current: Sequence[str]) -> None:
    """Delete the results of a group's URLs except those in `current`."""
    await connection.execute(FORGET, group, list(current))
