"""Days: the partitions of the big tables, and the `day` rows that say which of them may still change.

Partitions come by CREATE TABLE (LIKE …) and ATTACH: `PARTITION OF` would take a lock on the parent that waits behind
any open reader, and every request would wait behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from uuid import UUID

from app.database import Connection
from app.ids import day_bounds

# Replicas that make the same day take turns; only one of them at a time does upkeep.
DAY_LOCK = 7003
UPKEEP_LOCK = 7004

COLUMNS = "day, low, high, state, decided, archive, held, changed_at"

DAYS = f"select {COLUMNS} from day order by day"  # noqa: S608 -- names of columns
HELD_DAYS = f"select {COLUMNS} from day where held <> '{{}}' order by day"  # noqa: S608

# Served by day_low; the row stands for the whole day, so one probe answers for any id.
DAY_OF = f"select {COLUMNS} from day where low <= $1 and high > $1 order by low desc"  # noqa: S608

# Safe under concurrency: the first insert wins, and the row is written in the transaction that made the partitions.
ADD_DAY = "insert into day (day, low, high, state, changed_at) values ($1, $2, $3, 'open', $4) on conflict do nothing"

# Each by primary key. Only upkeep changes a day, one replica at a time; the states only go forward, but for a day that
# turns out not to be over.
DECIDED = "update day set decided = true, changed_at = $2 where day = $1 and not decided"
HELD = "update day set held = $2 where day = $1 and held is distinct from $2"
CLOSED = "update day set state = 'archiving', changed_at = $2 where day = $1 and state = 'open'"
REOPENED = "update day set state = 'open', decided = false, changed_at = $2 where day = $1 and state = 'archiving'"
GONE = "update day set state = 'gone', held = '{}', changed_at = $2 where day = $1 and state = 'archiving'"

ATTACHED = "select exists (select from pg_inherits where inhrelid = to_regclass($1) and inhparent = to_regclass($2))"


@dataclass(frozen=True, slots=True)
class Day:
    """A UTC day of the big tables: half-open id range, state (open, archiving, gone), and where it is archived.

    `decided`: every half of it has an op. `held`: what keeps it although its retention is over.
    """

    day: date
    low: UUID
    high: UUID
    state: str
    decided: bool
    archive: str | None
    held: list[str]
    changed_at: datetime


def partition_name(table: str, day: date) -> str:
    """Return the name of a table's partition of a day, as `half_20261121`."""
    return f"{table}_{day:%Y%m%d}"


async def days(connection: Connection) -> list[Day]:
    """Return every day on record, oldest first."""
    return [Day(**row) for row in await connection.fetch(DAYS)]


async def held_days(connection: Connection) -> list[Day]:
    """Return the days that something keeps past their retention, oldest first."""
    return [Day(**row) for row in await connection.fetch(HELD_DAYS)]


async def day_of(connection: Connection, transaction_id: UUID) -> Day | None:
    """Return the day that an id belongs to, or None if there never was a partition for it."""
    row = await connection.fetchrow(DAY_OF, transaction_id)
    return Day(**row) if row else None


async def lock_days(connection: Connection) -> None:
    """Let one replica at a time make or end days, until the database transaction ends."""
    await connection.execute(f"select pg_advisory_xact_lock({DAY_LOCK})")


async def take_upkeep(connection: Connection) -> bool:
    """Make this session the one that does upkeep, until it ends; False if another one is."""
    return bool(await connection.fetchval(f"select pg_try_advisory_lock({UPKEEP_LOCK})"))


async def attach(connection: Connection, table: str, day: date) -> None:
    """Make and attach one table's partition of a day, if it is not there; needs a database transaction.

    Raises asyncpg.LockNotAvailableError (the caller sets `lock_timeout` and tries again): a waiting ATTACH would hold
    up the requests behind it.
    """
    name = partition_name(table, day)
    if await connection.fetchval(ATTACHED, name, table):
        return
    low, high = day_bounds(day)
    await connection.execute(f"create table if not exists {name} (like {table} including all)")
    await connection.execute(f"alter table {table} attach partition {name} for values from ('{low}') to ('{high}')")


async def add_day(connection: Connection, day: date, now: datetime) -> None:
    """Write the day's row, open."""
    low, high = day_bounds(day)
    await connection.execute(ADD_DAY, day, low, high, now)


async def set_decided(connection: Connection, day: date, now: datetime) -> None:
    """Write down that every half of the day has an op."""
    await connection.execute(DECIDED, day, now)


async def set_held(connection: Connection, day: date, causes: Sequence[str]) -> None:
    """Write down what keeps the day; the row is touched only if that changed."""
    await connection.execute(HELD, day, sorted(causes))


async def close_day(connection: Connection, day: date, now: datetime) -> None:
    """Take no more verdicts for the day: statements that begin from now on refuse it."""
    await connection.execute(CLOSED, day, now)


async def reopen_day(connection: Connection, day: date, now: datetime) -> None:
    """Take verdicts for the day again, because it was not over after all."""
    await connection.execute(REOPENED, day, now)


async def set_gone(connection: Connection, day: date, now: datetime) -> None:
    """Write down that the day's tables are gone, in the database transaction that drops them."""
    await connection.execute(GONE, day, now)
