"""SQL of the figures by the minute: one row for each minute in which a process did something or a worker looked."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta

from app.database.connection import Connection


@dataclass(frozen=True, slots=True)
class Activity:
    """What was done in some time. Deliveries are attempts that delivered; a failed attempt did not."""

    halves: int = 0
    commits: int = 0
    rollbacks: int = 0
    deliveries: int = 0
    failed_attempts: int = 0
    checks: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands open at a moment. Counts may be limits (app/store/admin/figures.py:COUNTED_MOST)."""

    in_doubt: int
    parked: int
    dead_letters: int
    open_breakers: int
    lag_messages: int
    lag_s: float
    database_bytes: int


@dataclass(frozen=True, slots=True)
class ActivityWindow:
    """What was done in the minutes that begin after `after`."""

    after: datetime
    activity: Activity


DONE = tuple(field.name for field in fields(Activity))
STANDS = tuple(field.name for field in fields(Standing))

# By primary key. Any number of processes add to the row of a minute; each waits only for the others' short statements.
ADD = f"""
insert into stats_minute as s (minute, {", ".join(DONE)})
values (date_trunc('minute', $1::timestamptz), {", ".join(f"${at}" for at, _ in enumerate(DONE, 2))})
on conflict (minute) do update set {", ".join(f"{name} = s.{name} + excluded.{name}" for name in DONE)}
"""  # noqa: S608 -- names of columns

# By primary key. One worker at a time writes; the last one of a minute stays.
SET = f"""
insert into stats_minute as s (minute, {", ".join(STANDS)})
values (date_trunc('minute', $1::timestamptz), {", ".join(f"${at}" for at, _ in enumerate(STANDS, 2))})
on conflict (minute) do update set {", ".join(f"{name} = excluded.{name}" for name in STANDS)}
"""  # noqa: S608

# A range of the primary key for each window: at most a row for each minute.
WINDOWS = f"""
select w.after, s.* from unnest($1::timestamptz[]) as w(after)
cross join lateral (
  select {", ".join(f"coalesce(sum(s.{name}), 0)::bigint as {name}" for name in DONE)}
  from stats_minute s where s.minute > w.after and s.minute <= $2
) s
order by w.after desc
"""  # noqa: S608

# A range of the primary key. Within a step what was done is summed, and of what stood open the most counts.
SERIES = f"""
select date_bin($3, s.minute, $1) as at, {", ".join(f"sum(s.{name})::bigint as {name}" for name in DONE)},
  {", ".join(f"max(s.{name}) as {name}" for name in STANDS)}
from stats_minute s where s.minute >= $1 and s.minute < $2 group by 1 order by 1
"""  # noqa: S608

FIRST = "select min(minute) from stats_minute"

# A range of the primary key: the rows that became too old since the last call.
FORGET = "delete from stats_minute where minute < $1"


async def add_activity(connection: Connection, done: Activity, now: datetime) -> None:
    """Add what a process did to the row of this minute."""
    await connection.execute(ADD, now, *asdict(done).values())


async def set_standing(connection: Connection, stands: Standing, now: datetime) -> None:
    """Write what stands open to the row of this minute."""
    await connection.execute(SET, now, *asdict(stands).values())


async def windows(connection: Connection, after: Sequence[datetime], now: datetime) -> list[ActivityWindow]:
    """Return what was done since each of these times, the latest first. A minute counts if it begins after the time."""
    rows = await connection.fetch(WINDOWS, list(after), now)
    return [ActivityWindow(row["after"], Activity(*(row[name] for name in DONE))) for row in rows]


async def series(
    connection: Connection, since: datetime, until: datetime, step: timedelta
) -> dict[datetime, Mapping[str, float | None]]:
    """Return the figures by the begin of each step that has any: what was done is summed, of the others the most.

    Minutes count that begin in [since, until).
    """
    rows = await connection.fetch(SERIES, since, until, step)
    return {row["at"]: {name: row[name] for name in (*DONE, *STANDS)} for row in rows}


async def first_minute(connection: Connection) -> datetime | None:
    """Return the first minute that has figures."""
    found: datetime | None = await connection.fetchval(FIRST)
    return found


async def forget_before(connection: Connection, at: datetime) -> None:
    """Remove the rows of minutes before `at`."""
    await connection.execute(FORGET, at)
