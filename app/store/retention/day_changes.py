"""Find whether a day or its archive changed since an earlier look at it."""

from dataclasses import dataclass
from datetime import date, datetime

from app.database.connection import Connection
from app.models import DAY_TABLES
from app.store.retention.days import partition_name

# Primary key of day, and of each of the day's tables, attached or not, what Postgres counts of it: no row is read. The
# counts are of committed changes. A session may report them some seconds after its commit, and a server that crashed
# counts from 0.
CHANGES = """
select concat_ws(' ', d.changed_at, d.archive, d.archived_at, md5(d.archive_manifest::text), (
  select string_agg(concat_ws(' ', c.oid, pg_relation_filenode(c.oid), pg_stat_get_tuples_inserted(c.oid),
    pg_stat_get_tuples_updated(c.oid), pg_stat_get_tuples_deleted(c.oid)), ' ' order by c.oid)
  from unnest($2::text[]) as n(name) join pg_class c on c.oid = to_regclass(n.name)
)) from day d where d.day = $1
"""


@dataclass(frozen=True, slots=True)
class DayLook:
    """A look at a day: its `changes` and whether it was to be removed by force, the time, and what keeps it."""

    seen: tuple[str, bool]
    at: datetime
    causes: tuple[str, ...]


async def changes(connection: Connection, day: date) -> str:
    """Return a text that changes with the rows of the day's tables, its archive and its close."""
    text: str = await connection.fetchval(CHANGES, day, [partition_name(table, day) for table in DAY_TABLES])
    return text
