"""SQL of the sweeps, which find transactions without a verdict whose check immunity is over.

Each statement can be repeated without harm.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection

# The first check of a half comes at most this long after its birth (the longest check immunity).
LONGEST_IMMUNITY = timedelta(days=1)

BEGIN_MAIN = """
insert into sweep (name, reached, ran_at)
select 'main', coalesce((select min(day)::timestamp at time zone 'UTC' from day where state = 'open'), $1), $1
on conflict do nothing
"""

REACHED = "select reached from sweep where name = 'main'"

# The row of check_back is deleted with the verdict. The attempt keeps the record of the sweep, unless the day is being
# archived.
_NOTED = """noted as (
  insert into attempt (transaction_id, kind, at, outcome)
  select w.transaction_id, 'swept', w.swept_at, 'swept' from swept w
  where exists (select from day d where d.low <= w.transaction_id and d.high > w.transaction_id and d.state = 'open')
  order by w.transaction_id
)"""

# Halves of position 0 in order of their first check, from half_first_check of each partition, merged. The range of ids
# excludes the partitions of other days. WITH TIES is needed because the halves of one flush share their time: a batch
# that ended between them would skip the rest. Each half is looked up in op by primary key in its own partition (LATERAL
# ... OFFSET 0).
_SCANNED = f"""
with scanned as materialized (
  select h.transaction_id, h.producer_group, h.first_check_at
  from half h
  where h.position = 0 and h.first_check_at > $1 and h.first_check_at <= $2
    and h.transaction_id >= $3 and h.transaction_id < $4
  order by h.first_check_at fetch first $5 rows with ties
), swept as (
  insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at)
  select s.transaction_id, s.producer_group, 1, $6, $6
  from scanned s left join lateral (
    select true as decided from op o where o.transaction_id = s.transaction_id offset 0
  ) o on true
  where o.decided is null
  order by s.transaction_id
  on conflict do nothing
  returning transaction_id, swept_at
), {_NOTED}
"""  # noqa: S608

# The cursor moves to the last time scanned, or to the end of the range if no half is left. It never moves back, and
# only one replica at a time moves it. An idle service writes it at most every ten seconds.
SWEEP_MAIN = f"""{_SCANNED}, moved as (
  update sweep set ran_at = $6, reached = case
    when (select count(*) from scanned) < $5 then $2 else (select max(first_check_at) from scanned) end
  where name = 'main' and reached = $1
    and (exists (select from scanned) or reached < $2 - interval '10 seconds')
)
select (select count(*) from scanned) as scanned, (select count(*) from swept) as swept,
  (select max(first_check_at) from scanned) as reached
"""  # noqa: S608

# The first half that the main sweep has before it. Served by half_first_check of each partition; the ids exclude the
# partitions of earlier days.
NEXT_DUE = """
select first_check_at from half where position = 0 and first_check_at > $1 and transaction_id >= $2
order by first_check_at limit 1
"""

SWEEP_AGAIN = f"""{_SCANNED}
select (select count(*) from scanned) as scanned, (select count(*) from swept) as swept,
  (select max(first_check_at) from scanned) as reached
"""  # noqa: S608

# The primary key of half within the partition of one day, a range of ids at a time. Each half is looked up in op by
# primary key. `position < 1`, as in every statement that reads by id, keeps the planner from choosing half_first_check
# (ops.py explains it).
SWEEP_IDS = f"""
with slice as materialized (
  select transaction_id, producer_group, first_check_at from half
  where transaction_id > $1 and transaction_id < $2 and position < 1
  order by transaction_id limit $3
), swept as (
  insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at)
  select s.transaction_id, s.producer_group, 1, $4, $4
  from slice s left join lateral (
    select true as decided from op o where o.transaction_id = s.transaction_id offset 0
  ) o on true
  where s.first_check_at <= $4 and o.decided is null
  order by s.transaction_id
  on conflict do nothing
  returning transaction_id, swept_at
), {_NOTED}
select (select count(*) from slice) as scanned, (select count(*) from swept) as swept,
  (select transaction_id from slice order by transaction_id desc limit 1) as reached
"""  # noqa: S608

UNDECIDED_DAYS = "select low, high from day where not decided and state = 'open' and low < $1 order by day desc"

# A parked transaction is never claimed, so without this statement its row would stay after a verdict of a person or the
# producer. A row that another session has locked is left to the next pass: to wait for it could be a deadlock.
REMOVE_DECIDED = """
with slice as materialized (
  select c.transaction_id from check_back c where c.transaction_id > $1 order by c.transaction_id limit $2
), decided as (
  select s.transaction_id from slice s cross join lateral (
    select from op o where o.transaction_id = s.transaction_id offset 0
  ) o
), locked as materialized (
  select l.transaction_id from decided d cross join lateral (
    select c.transaction_id from check_back c where c.transaction_id = d.transaction_id for update skip locked
  ) l
), removed as (
  delete from check_back where transaction_id = any (array(select transaction_id from locked))
)
select (select count(*) from slice) as scanned, (select count(*) from locked) as removed,
  (select transaction_id from slice order by transaction_id desc limit 1) as reached
"""

# The clocks of two replicas differ by less. A later time is from before the database's clock stepped back.
CLOCKS_APART_S = 10

# The first replica that finds a run of a pass due takes it. No row is written or locked before the run is due.
TAKE_RUN = f"""
insert into sweep as s (name, reached, ran_at)
select $1, $2::timestamptz, $2
where not exists (
  select from sweep where name = $1 and ran_at > $2 - make_interval(secs => $3)
    and ran_at <= $2 + interval '{CLOCKS_APART_S} seconds'
)
on conflict (name) do update set ran_at = $2, reached = $2
where s.ran_at <= $2 - make_interval(secs => $3) or s.ran_at > $2 + interval '{CLOCKS_APART_S} seconds'
returning true
"""  # noqa: S608 -- a constant

# Only the run that was taken at that time: another process may have taken the next one.
RETURN_RUN = "update sweep set ran_at = ran_at - make_interval(secs => $3) where name = $1 and ran_at = $2"

TAKE_TURN = f"select pg_try_advisory_xact_lock({AdvisoryLock.SWEEP})"


@dataclass(frozen=True, slots=True)
class Swept:
    """One batch of a sweep: halves scanned, rows added to check_back, and the time reached (None: no halves)."""

    scanned: int
    swept: int
    reached: datetime | None


@dataclass(frozen=True, slots=True)
class SweptIds:
    """One batch of a pass by ids; `reached` is the last id."""

    scanned: int
    swept: int
    reached: UUID | None


@dataclass(frozen=True, slots=True)
class Range:
    """Times of first checks: after `since`, up to `until`. `skew_s`: how far an id's time may be from its birth."""

    since: datetime
    until: datetime
    skew_s: int

    def ids(self) -> tuple[UUID, UUID]:
        """Return the half-open range of ids whose first check can lie in this range."""
        return self.low, _lowest(self.until + timedelta(seconds=self.skew_s + 60))

    @property
    def low(self) -> UUID:
        """The lowest id whose first check can lie in this range."""
        return _lowest(self.since - LONGEST_IMMUNITY - timedelta(seconds=self.skew_s + 60))


async def take_turn(connection: Connection) -> bool:
    """Take the main sweep for this database transaction; False if another replica has it."""
    mine: bool = await connection.fetchval(TAKE_TURN)
    return mine


async def reached_main(connection: Connection, now: datetime) -> datetime:
    """Return the main sweep's cursor. The first time it starts at the oldest open day."""
    reached: datetime | None = await connection.fetchval(REACHED)
    if reached is None:
        await connection.execute(BEGIN_MAIN, now)
        reached = await connection.fetchval(REACHED)
        assert reached is not None
    return reached


async def sweep_main(connection: Connection, times: Range, limit: int, now: datetime) -> Swept:
    """Sweep the next halves after the cursor and move it."""
    row = await connection.fetchrow(SWEEP_MAIN, times.since, times.until, *times.ids(), limit, now)
    assert row is not None
    return Swept(**row)


async def next_due(connection: Connection, times: Range) -> datetime | None:
    """Return the first time of a first check after `times.since`, also beyond `times.until`; None if there is none."""
    due: datetime | None = await connection.fetchval(NEXT_DUE, times.since, times.low)
    return due


async def sweep_again(connection: Connection, times: Range, limit: int, now: datetime) -> Swept:
    """Sweep halves behind the cursor, because some may have become visible since."""
    row = await connection.fetchrow(SWEEP_AGAIN, times.since, times.until, *times.ids(), limit, now)
    assert row is not None
    return Swept(**row)


async def sweep_ids(connection: Connection, after: UUID, high: UUID, limit: int, now: datetime) -> SweptIds:
    """Sweep the halves with ids between `after` and `high` (both exclusive) whose first check is due."""
    row = await connection.fetchrow(SWEEP_IDS, after, high, limit, now)
    assert row is not None
    return SweptIds(**row)


async def undecided_days(connection: Connection, now: datetime, skew_s: int) -> list[tuple[UUID, UUID]]:
    """Return the id ranges of the days that may hold undecided transactions, newest first."""
    rows = await connection.fetch(UNDECIDED_DAYS, _lowest(now + timedelta(seconds=skew_s)))
    return [(row["low"], row["high"]) for row in rows]


async def remove_decided(connection: Connection, after: UUID, limit: int) -> SweptIds:
    """Remove rows of check_back whose transaction has its verdict; `swept` counts them."""
    row = await connection.fetchrow(REMOVE_DECIDED, after, limit)
    assert row is not None
    return SweptIds(row["scanned"], row["removed"], row["reached"])


async def take_run(connection: Connection, name: str, every_s: float, now: datetime) -> bool:
    """Take the next run of a pass if it is due; True for one replica only."""
    return bool(await connection.fetchval(TAKE_RUN, name, now, every_s))


async def return_run(connection: Connection, name: str, every_s: float, taken_at: datetime) -> None:
    """Make a run that was taken at that time due again, for another process."""
    await connection.execute(RETURN_RUN, name, taken_at, every_s)


def _lowest(at: datetime) -> UUID:
    milliseconds = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    return UUID(int=max(0, milliseconds) << 80)
