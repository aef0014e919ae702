"""Read the runs and days that the nightly proof recorded: small tables, one row per run and one row per day."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from app.database.connection import Connection
from app.verdicts import ReconciledDayState, RunState

RUN = "run_id, state, engine, source, seen_at, started_at, ended_at, days, open, new, resolved, seconds, error"
DAY = "day, run_id, state, reconciled_at, counts, found, score"

# Each by primary key, backwards.
RUNS = f"select {RUN} from reconciliation_run where run_id < $1 order by run_id desc limit $2"  # noqa: S608
DAYS = f"select {DAY} from reconciliation_day where day < $1 order by day desc limit $2"  # noqa: S608
ONE_DAY = f"select {DAY}, figures from reconciliation_day where day = $1"  # noqa: S608
# By primary key, backwards, until enough runs are found. There are a few runs each day, and some contain the given day.
RUNS_OF = f"select {RUN} from reconciliation_run where $1 = any(days) order by run_id desc limit $2"  # noqa: S608

# Runs: by primary key, backwards, until the first run in state `proved`. Days: both tables whole, one row per day. No
# run reads a removed day again, so it does not count.
STANDING = """
select (select ended_at from reconciliation_run where state = 'proved' order by run_id desc limit 1) as proved_at,
  count(*) filter (where r.state = 'provisional') as provisional, count(*) filter (where r.state = 'final') as final
from reconciliation_day r
where not exists (select from day d where d.day = r.day and d.state = 'gone')
"""
# Served by finding_open, which holds only open findings.
OPEN = "select kind, count(*) as open from finding where resolved_at is null group by kind order by kind"

# Above every run.
FIRST_RUN = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the proof. `open`, `new` and `resolved` count findings of its `days`; `seconds` is JSON text."""

    run_id: int
    state: RunState
    engine: str
    source: str
    seen_at: datetime | None
    started_at: datetime
    ended_at: datetime
    days: list[date]
    open: int
    new: int
    resolved: int
    seconds: str
    error: str | None


@dataclass(frozen=True, slots=True)
class ReconciledDay:
    """A day as the last run that covered it recorded it; `counts`, `found`, `score` and `figures` are JSON text."""

    day: date
    run_id: int
    state: ReconciledDayState
    reconciled_at: datetime
    counts: str
    found: str
    score: str
    figures: str = "{}"


@dataclass(frozen=True, slots=True)
class ProofState:
    """When a run last ended without findings, and how many days that are not removed are provisional and final."""

    proved_at: datetime | None
    provisional: int
    final: int


async def list_runs(connection: Connection, below: int, limit: int) -> tuple[list[Run], int | None]:
    """Return up to `limit` runs below an id, newest first, and where the next page begins (None: there is none)."""
    rows = [_run(row) for row in await connection.fetch(RUNS, below, limit + 1)]
    return rows[:limit], rows[limit - 1].run_id if len(rows) > limit else None


async def list_days(connection: Connection, below: date, limit: int) -> tuple[list[ReconciledDay], date | None]:
    """Return up to `limit` days before one, newest first, and where the next page begins (None: there is none)."""
    rows = [_reconciled_day(row) for row in await connection.fetch(DAYS, below, limit + 1)]
    return rows[:limit], rows[limit - 1].day if len(rows) > limit else None


async def one_day(connection: Connection, day: date) -> ReconciledDay | None:
    """Return a day with its figures, or None if no run has covered it."""
    row = await connection.fetchrow(ONE_DAY, day)
    return _reconciled_day(row) if row else None


async def runs_of(connection: Connection, day: date, limit: int) -> list[Run]:
    """Return the newest `limit` runs that covered a day, newest first."""
    return [_run(row) for row in await connection.fetch(RUNS_OF, day, limit)]


async def standing(connection: Connection) -> ProofState:
    """Return the state of the proof over all days."""
    row = await connection.fetchrow(STANDING)
    assert row is not None
    return ProofState(**row)


async def open_findings(connection: Connection) -> dict[str, int]:
    """Return how many findings of each kind are open; kinds without any are left out."""
    return {row["kind"]: row["open"] for row in await connection.fetch(OPEN)}


def _run(row: Any) -> Run:
    return Run(**{**row, "state": RunState(row["state"])})


def _reconciled_day(row: Any) -> ReconciledDay:
    return ReconciledDay(**{**row, "state": ReconciledDayState(row["state"])})
