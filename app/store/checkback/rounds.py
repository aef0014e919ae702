"""SQL of rounds: a producer has started, and all checks of its group that were not answered are asked soon.

A round is stored in the row of its group until it is complete. A later start begins the round again. A round asks the
checks first for which rounds asked longest ago, so one that begins again goes on with those that the last one has left.
"""

from dataclasses import dataclass
from datetime import datetime

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection

# The checks that one statement asks.
AT_ONCE = 1000
# The rows that one statement reads for them, because some may be asked already. More than those that are due before a
# round waits (DUE_MOST), so these never keep it from the others.
READ_MOST = 5 * AT_ONCE
# While so many checks of a group are due, its round asks no more: a newer transaction waits behind these and one batch.
DUE_MOST = 2 * AT_ONCE
# Two rounds ask for two checks of one transaction at times that are so far apart, so that a fleet whose producers start
# one after the other does not ask a check for each.
URGED_APART_S = 10

# Primary key. `round_reached` is not null until a round is complete. Versions before revision 0039 keep the place of a
# round in it, and begin where it says.
BEGIN = "update producer_group set round_began_at = $2, round_reached = $2 where name = $1"
ROUND = "select name, round_began_at from producer_group where name = $1 and round_reached is not null"
# Served by producer_group_round. Those that follow a name, then the others. A round that began a moment after now is
# that of a process whose clock is ahead, and waits; one long after now began before the clock went back.
LEFT = f"""
with left_over as materialized (
  select name, round_began_at from producer_group
  where round_reached is not null and round_began_at <= $1
  union all
  select name, round_began_at from producer_group
  where round_reached is not null and round_began_at > $1::timestamptz + interval '{URGED_APART_S} seconds'
)
select * from left_over order by name <= $2, name limit $3
"""  # noqa: S608 -- constants
# Held until the database transaction ends. It is no lock of the group's row, because the statements that lock rows of
# check_back and of groups are others.
TAKE = f"select pg_try_advisory_xact_lock({AdvisoryLock.ROUNDS}, hashtext($1))"
# Served by check_back_due.
DUE = """
select count(*) from (
  select from check_back where producer_group = $1 and next_check_at <= $2
    and (leased_until is null or leased_until <= $2)
  order by next_check_at limit $3
) due
"""
# One that began again is not touched.
BEGIN_AGAIN = """
update producer_group set round_began_at = $3, round_reached = $3
where name = $1 and round_began_at = $2 and round_reached is not null
"""
COMPLETE = "update producer_group set round_reached = null where name = $1 and round_began_at = $2"

# For when the round asks: now, or later if an earlier round asked a moment ago. If that one put its check off to a time
# that is not over, that time stays, but a clock that went back puts no check off for longer than rounds do. `greatest`
# leaves out null.
_AT = f"""
case when c.urged_at > $2 then least(c.urged_at, $2 + interval '{URGED_APART_S} seconds')
else greatest($2, c.urged_at + interval '{URGED_APART_S} seconds') end
"""
# If another check follows the one in flight already, that one is this round's too, and keeps its time. The row moves
# behind those for which rounds asked longer ago, or it would keep a round from the rows behind it until its lease ends.
_URGED = f"case when c.leased_until > $2 and c.asked_at is not null then $2 else {_AT} end"
# Since when a check waits for a round: for when the last one asked, or since when its transaction is in doubt.
_SINCE = "coalesce(c.urged_at, c.swept_at)"
# Not those that this round asked for, nor those in doubt since it began: these were asked later. A check that was put
# off may have been asked before by a person, so another one is due at its time.
_NOT_URGED = f"({_SINCE} < $4 or {_SINCE} > $2)"
# Not answered, where rows are found by another index. `+ 0` keeps check_back_urged out. By statistics of a time at
# which all checks were answered, that index has no rows, and a plan would read it whole for each row that is looked up.
_IS_UNANSWERED = "c.state = 1 and c.unanswered + 0 > 0"


# The checks of a group that were not answered and are `picked`, up to AT_ONCE. Rows are locked in the order of ids, as
# every statement does that waits for several. One that had to be waited for is written only if it is `still` to be
# asked: another process may have done that, and the producers of a fleet start together. `asked_at` is that of a check
# which is in flight: SETTLE writes the time of the next one. If a round asked for that one (the two columns are equal),
# they stay equal, because SETTLE repeats an answered check otherwise.
def _ask_unanswered(picked: str, still: str, returned: str) -> str:
    return f"""
with {picked}, locked as materialized (
  select l.transaction_id from (select * from picked order by transaction_id) p cross join lateral (
    select c.transaction_id from check_back c
    where c.transaction_id = p.transaction_id and {_IS_UNANSWERED} and {_NOT_URGED} and {still}
    for update
  ) l
), asked as (
  update check_back c set urged_at = {_URGED},
    asked_at = case when c.leased_until > $2 and (c.asked_at is null or c.asked_at = c.urged_at) then {_URGED}
      else c.asked_at end,
    next_check_at = case when c.leased_until > $2 then c.next_check_at else least(c.next_check_at, {_AT}) end
  where c.transaction_id = any (array(select transaction_id from locked))
)
{returned}
"""  # noqa: S608 -- constants


# What a statement reads: the former rows, and the later ones. Served by check_back_urged, in its order if sorts are off
# (`probe`): each range ends after READ_MOST. What is asked leaves the front of its range, so a batch does not read what
# earlier ones asked.
def _walked(name: str, since: str) -> str:
    return f"""{name} as materialized (
  select c.transaction_id, c.leased_until, c.next_check_at, c.asked_at, c.urged_at, c.swept_at from check_back c
  where c.producer_group = $1 and c.state = 1 and c.unanswered > 0 and {since}
  order by {_SINCE} limit {READ_MOST}
)"""  # noqa: S608 -- constants


# No row is in both ranges, also in a round that began after now by the clock of another process.
_RANGES = f"{_walked('former', f'{_SINCE} < $4')}, {_walked('later', f'{_SINCE} > $2 and {_SINCE} >= $4')}"
_READ = "(select * from former union all select * from later)"
# `left`: others may be left.
_FOUND = f"""
select count(*) as found, count(*) >= $3 or greatest(
  (select count(*) from former), (select count(*) from later)
) >= {READ_MOST} as left
from picked
"""  # noqa: S608 -- constants

# Whether one is in flight and to be asked. If another one follows it, only until its `urged_at` is now. So each batch
# leaves fewer, also in a round that began after now by the clock of another process.
_ASKED_IN_FLIGHT = f"c.leased_until > $2 and (c.asked_at is null or {_SINCE} < least($2, $4))"
# check_back_leased would read all that are in flight for each batch. One that is being settled has its back-off once
# its lock is free.
ASK_IN_FLIGHT = _ask_unanswered(
    f"""
{_RANGES}, picked as materialized (
  select c.transaction_id from {_READ} c where {_ASKED_IN_FLIGHT} order by {_SINCE} limit $3
)
""",  # noqa: S608 -- constants
    f"case when c.leased_until > $2 then {_ASKED_IN_FLIGHT} else c.next_check_at > {_AT} end",
    _FOUND,
)
# Those that wait for their next try. One that was claimed meanwhile is asked already.
_WAITS = f"c.next_check_at > {_AT} and (c.leased_until is null or c.leased_until <= $2)"
ASK_WAITING = _ask_unanswered(
    f"""
{_RANGES}, picked as materialized (
  select c.transaction_id from {_READ} c where {_WAITS} order by {_SINCE} limit $3
)
""",  # noqa: S608 -- constants
    _WAITS,
    _FOUND,
)


@dataclass(frozen=True, slots=True)
class AskingRound:
    """A round that is not complete."""

    group: str
    began_at: datetime


@dataclass(frozen=True, slots=True)
class AskedBatch:
    """How many checks a statement found to ask, and whether others may be left."""

    found: int
    left: bool


async def begin_round(connection: Connection, group: str, now: datetime) -> None:
    """Begin a round of a group, or begin it again."""
    await connection.execute(BEGIN, group, now)


async def round_of(connection: Connection, group: str) -> AskingRound | None:
    """Return the round of a group; None if it is complete."""
    row = await connection.fetchrow(ROUND, group)
    return None if row is None else AskingRound(*row)


async def rounds_left(connection: Connection, now: datetime, after: str, at_most: int) -> list[AskingRound]:
    """Return rounds that are not complete and have begun, or began long after now, as by a clock that went back.

    In the order of their groups: first those whose names follow `after`, then the others.
    """
    return [AskingRound(*row) for row in await connection.fetch(LEFT, now, after, at_most)]


async def take_round(connection: Connection, group: str) -> bool:
    """Take the round of a group until the database transaction ends; return False if another process has it."""
    taken: bool = await connection.fetchval(TAKE, group)
    return taken


async def many_due(connection: Connection, group: str, now: datetime) -> bool:
    """Return whether DUE_MOST checks of a group, or more, are due and not in flight."""
    due: int = await connection.fetchval(DUE, group, now, DUE_MOST)
    return due >= DUE_MOST


async def begin_again(connection: Connection, one: AskingRound, now: datetime) -> None:
    """Begin a round again that is not complete, unless it has begun again."""
    await connection.execute(BEGIN_AGAIN, one.group, one.began_at, now)


async def complete_round(connection: Connection, one: AskingRound) -> None:
    """Write that a round is complete, unless it has begun again."""
    await connection.execute(COMPLETE, one.group, one.began_at)


async def ask_in_flight(connection: Connection, one: AskingRound, now: datetime) -> AskedBatch:
    """Have checks of a group that are in flight followed by another if they are not answered, nor was the last one.

    Up to AT_ONCE, those first for which rounds asked longest ago. First checks are left out. One that another one
    follows already is found once a round.
    """
    return await _asked(connection, ASK_IN_FLIGHT, one, now)


async def ask_waiting(connection: Connection, one: AskingRound, now: datetime) -> AskedBatch:
    """Make checks of a group due that were not answered and wait for their next try.

    Up to AT_ONCE, those first for which rounds asked longest ago.
    """
    return await _asked(connection, ASK_WAITING, one, now)


async def _asked(connection: Connection, statement: str, one: AskingRound, now: datetime) -> AskedBatch:
    row = await connection.fetchrow(statement, one.group, now, AT_ONCE, one.began_at)
    assert row is not None
    return AskedBatch(**row)
