"""Store days: the partitions of the large tables, and the `day` rows that say which partitions may still change.

A partition is made by CREATE TABLE (LIKE …) and ATTACH. `PARTITION OF` would wait for a lock on the parent behind any
open reader, and every request would wait behind that lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection
from app.ids import day_bounds
from app.verdicts import DayState

COLUMNS = "day, low, high, state, decided, archive, held, changed_at"

DAYS = f"select {COLUMNS} from day order by day"  # noqa: S608 -- names of columns
GONE_DAYS = f"select {COLUMNS} from day where state = 'gone' and changed_at > $1 order by day"  # noqa: S608
# A person who ends a day by hand may set its state alone.
HELD_DAYS = f"select {COLUMNS} from day where held <> '{{}}' and state <> 'gone' order by day"  # noqa: S608

# Served by day_high. The row contains the whole id range of the day, so one probe answers for any id.
DAY_OF = f"select {COLUMNS} from day where low <= $1 and high > $1 order by low desc"  # noqa: S608

# Safe under concurrency: the first insert wins. The row is written after the partitions, so a day on record has them.
ADD_DAY = "insert into day (day, low, high, state, changed_at) values ($1, $2, $3, 'open', $4) on conflict do nothing"

# Each by primary key. Only upkeep changes a day, one replica at a time. States only move forward, except that REOPENED
# reopens a day that turns out to be unfinished.
DECIDED = "update day set decided = true, changed_at = greatest(changed_at, $2) where day = $1 and not decided"
HELD = "update day set held = $2 where day = $1 and held is distinct from $2"
CLOSED = "update day set state = 'archiving', changed_at = $2 where day = $1 and state = 'open'"
# From `changed_at` on an open day surely accepts receipts. The step that reopens it may have begun long before, and a
# statement that began before the commit still finds the day closed.
REOPENED = """
update day set state = 'open', decided = false,
  changed_at = greatest($2::timestamptz, clock_timestamp()) + interval '5 seconds'
where day = $1 and state = 'archiving'
"""
GONE = "update day set state = 'gone', held = '{}', changed_at = $2 where day = $1 and state = 'archiving'"

# A day on record lacks partitions only if a person or an incomplete restore took them away. A few days, one probe of
# pg_inherits for each table. A partition that is being detached counts as attached.
INCOMPLETE = """
select d.day, t.name from day d cross join unnest($2::text[]) with ordinality t (name, place)
where d.day = any($1::date[]) and d.state = 'open' and not exists (
  select from pg_inherits
  where inhrelid = to_regclass(t.name || '_' || to_char(d.day, 'YYYYMMDD')) and inhparent = to_regclass(t.name)
)
order by d.day, t.place
"""

# By primary key. Until the database transaction ends the day cannot be closed, so that no partition is attached again
# that its removal has detached.
KEPT_OPEN = "select true from day where day = $1 and state = 'open' for share"

ATTACHED = "select exists (select from pg_inherits where inhrelid = to_regclass($1) and inhparent = to_regclass($2))"


@dataclass(frozen=True, slots=True)
class Day:
    """A UTC day of the large tables: half-open id range, state (open, archiving, gone), and the place of its archive.

    `decided`: every half of the day has an Op. `held`: the reasons that keep it although its retention is over.
    `changed_at`: of a closed day by the database's clock, see `close_day`.
    """

    day: date
    low: UUID
    high: UUID
    state: DayState
    decided: bool
    archive: str | None
    held: list[str]
    changed_at: datetime


def partition_name(table: str, day: date) -> str:
    """Return the name of a table's partition of a day, as `half_20261121`."""
    return f"{table}_{day:%Y%m%d}"


async def days(connection: Connection) -> list[Day]:
    """Return every day on record, oldest first."""
    return [_day(row) for row in await connection.fetch(DAYS)]


async def held_days(connection: Connection) -> list[Day]:
    """Return the days that are kept past their retention, oldest first."""
    return [_day(row) for row in await connection.fetch(HELD_DAYS)]


async def gone_days(connection: Connection, since: datetime) -> list[Day]:
    """Return the days that were removed after a time, oldest first."""
    return [_day(row) for row in await connection.fetch(GONE_DAYS, since)]


async def day_of(connection: Connection, transaction_id: UUID) -> Day | None:
    """Return the day that an id belongs to, or None if it never had a partition."""
    row = await connection.fetchrow(DAY_OF, transaction_id)
    return _day(row) if row else None


async def lock_days(connection: Connection) -> None:
    """Lock days, so that one replica at a time makes or ends them, until the database transaction ends."""
    await connection.execute(f"select pg_advisory_xact_lock({AdvisoryLock.DAYS})")


async def take_upkeep(connection: Connection) -> bool:
    """Make this session the only one that does upkeep, until it ends; False if another session does."""
    return bool(await connection.fetchval(f"select pg_try_advisory_lock({AdvisoryLock.UPKEEP})"))


async def incomplete(connection: Connection, wanted: Sequence[date], tables: Sequence[str]) -> list[tuple[date, str]]:
    """Return the partitions that open days on record lack: day and table, by day and in the order of `tables`."""
    return [(row["day"], row["name"]) for row in await connection.fetch(INCOMPLETE, wanted, tables)]


async def keep_open(connection: Connection, day: date) -> bool:
    """Keep an open day from being closed until the database transaction ends; False if the day is not open."""
    return bool(await connection.fetchval(KEPT_OPEN, day))


async def attach(connection: Connection, table: str, day: date) -> None:
    """Make and attach one table's partition of a day, if it does not exist. Needs a database transaction.

    Raises asyncpg.LockNotAvailableError (the caller sets `lock_timeout` and tries again), because a waiting ATTACH
    would block the requests behind it.
    """
    name = partition_name(table, day)
    if await connection.fetchval(ATTACHED, name, table):
        return
    low, high = day_bounds(day)
    await connection.execute(f"create table if not exists {name} (like {table} including all)")
    await connection.execute(f"alter table {table} attach partition {name} for values from ('{low}') to ('{high}')")


async def add_day(connection: Connection, day: date, now: datetime) -> None:
    """Write the day's row in state `open`."""
    low, high = day_bounds(day)
    await connection.execute(ADD_DAY, day, low, high, now)


async def set_decided(connection: Connection, day: date, now: datetime) -> None:
    """Record that every half of the day has an Op."""
    await connection.execute(DECIDED, day, now)


async def set_held(connection: Connection, day: date, causes: Sequence[str]) -> None:
    """Record what keeps the day; the row is written only if this changed."""
    await connection.execute(HELD, day, sorted(causes))


async def close_day(connection: Connection, day: date, late_since: datetime) -> None:
    """Close the day for verdicts: statements that begin after the commit refuse them.

    `late_since` becomes its `changed_at`: messages that become visible only after the close were committed since then.
    """
    await connection.execute(CLOSED, day, late_since)


async def reopen_day(connection: Connection, day: date, now: datetime) -> None:
    """Reopen the day for verdicts, because it turned out to be unfinished."""
    await connection.execute(REOPENED, day, now)


async def set_gone(connection: Connection, day: date, now: datetime) -> None:
    """Record that the day's tables are gone, in the database transaction that drops them."""
    await connection.execute(GONE, day, now)


def _day(row: Any) -> Day:
    return Day(**{**row, "state": DayState(row["state"])})
