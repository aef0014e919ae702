"""SQL of what stands open now: counts that stop at a limit, each with the oldest."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.database.connection import Connection
from app.verdicts import CheckBackState

# Up to this number what still counts is looked up row by row. Above it rows are counted, up to the second number, so
# that the time to answer is bounded.
LOOKED_UP_MOST = 1000
COUNTED_MOST = 100_000
# Open breakers that are named.
NAMED_MOST = 20

# check_back is small, so `rows` reads it. `looked_at` takes it in the order of its primary key, up to a limit for each
# state, and looks up each row in op by primary key, in the row's own day (LATERAL … OFFSET 0), because a verdict may
# have arrived after the row was written. Ids contain their time, so the row with the lowest id is the oldest. If all
# that were looked at have a verdict and there may be more rows, those are no older than the last one that was looked
# at. RECORD_ENDS says why the condition is `position < 1`.
OF_STATE = "(select transaction_id, state from check_back where state = {} order by transaction_id limit $1)"
UNDECIDED = f"""
with rows as materialized (
  select c.state, count(*) as rows from (select state from check_back limit $2) c group by c.state
), looked_at as materialized (
  select c.transaction_id, c.state, o.decided
  from ({OF_STATE.format(CheckBackState.IN_DOUBT)} union all {OF_STATE.format(CheckBackState.PARKED)}) c
  left join lateral (select true as decided from op o where o.transaction_id = c.transaction_id offset 0) o on true
), counted as materialized (
  select l.state, count(*) filter (where l.decided is null) as undecided, count(*) as looked_at,
    (array_agg(l.transaction_id order by l.transaction_id) filter (where l.decided is null))[1] as oldest,
    (array_agg(l.transaction_id order by l.transaction_id desc))[1] as last
  from looked_at l group by l.state
), bounds as materialized (
  select c.*, coalesce(c.oldest, case when c.looked_at >= $1 then c.last end) as no_younger from counted c
)
select b.state, b.undecided, b.looked_at, b.oldest as transaction_id,
  coalesce((select r.rows from rows r where r.state = b.state), 0) as rows,
  (select h.born_at from half h where h.position < 1 and h.transaction_id = b.no_younger) as born_at
from bounds b
"""  # noqa: S608 -- constants

# Served by dead_letter_died. Upkeep removes the dead letters of a deleted subscription, so they do not count.
LIVE = "d.subscription_id not in (select s.subscription_id from subscription s where s.deleted_at is not null)"
DEAD = f"""
select (select count(*) from (select from dead_letter d where {LIVE} limit $1) d) as live,
  (select count(*) from (select from dead_letter d limit $2) d) as rows,
  (select d.died_at from dead_letter d where {LIVE} order by d.died_at limit 1) as oldest_at
"""  # noqa: S608

# checkpoint is small: a row for each shard. The breaker of a subscription is open if that of any shard is.
OPEN_BREAKERS = """
with opened as materialized (
  select distinct on (p.subscription_id) p.subscription_id, p.opened_at, p.opened_because from checkpoint p
  where p.opened_at is not null order by p.subscription_id, p.opened_at
)
select s.name, o.opened_at, o.opened_because as because, count(*) over () as total
from opened o join subscription s on s.subscription_id = o.subscription_id
where s.deleted_at is null and s.state = 'active' order by o.opened_at, s.name limit $1
"""

# There are few subscriptions.
STOPPED = """
select count(*) filter (where state = 'active') as active, count(*) filter (where state = 'paused') as paused,
  count(*) filter (where state = 'disabled') as disabled
from subscription where deleted_at is null
"""


@dataclass(frozen=True, slots=True)
class Undecided:
    """Transactions of one state: how many (`exact` False: rows, up to COUNTED_MOST), and the oldest.

    Without `transaction_id`, `born_at` is a bound: the oldest was not found, and is not older.
    """

    count: int = 0
    exact: bool = True
    transaction_id: UUID | None = None
    born_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters: how many (`exact` False: rows, up to COUNTED_MOST), and when the oldest died."""

    count: int
    exact: bool
    oldest_at: datetime | None


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """The open circuit breaker of a subscription, and the error that opened it."""

    subscription: str
    opened_at: datetime
    because: str | None


@dataclass(frozen=True, slots=True)
class OpenBreakers:
    """How many breakers are open, and those that opened first, at most NAMED_MOST."""

    count: int
    first: list[OpenBreaker]


@dataclass(frozen=True, slots=True)
class SubscriptionStates:
    """How many subscriptions there are of each state."""

    active: int
    paused: int
    disabled: int


async def undecided_by_state(connection: Connection, *, most: int = LOOKED_UP_MOST) -> dict[CheckBackState, Undecided]:
    """Return the transactions in doubt and the parked ones, exactly if each are at most `most`."""
    # One more than the limit, so that exactly `most` rows are known to be all.
    found = {}
    for row in await connection.fetch(UNDECIDED, most + 1, COUNTED_MOST):
        exact = row["looked_at"] <= most
        count = row["undecided"] if exact else max(row["rows"], row["undecided"])
        found[CheckBackState(row["state"])] = Undecided(count, exact, row["transaction_id"], row["born_at"])
    return {state: found.get(state, Undecided()) for state in CheckBackState}


async def count_dead_letters(connection: Connection, *, most: int = LOOKED_UP_MOST) -> DeadLetters:
    """Return the dead letters, exactly if they are at most `most`."""
    row = await connection.fetchrow(DEAD, most + 1, COUNTED_MOST)
    assert row is not None
    exact = row["live"] <= most
    return DeadLetters(row["live"] if exact else max(row["live"], row["rows"]), exact, row["oldest_at"])


async def first_open_breakers(connection: Connection) -> OpenBreakers:
    """Return the open breakers of active subscriptions."""
    rows = await connection.fetch(OPEN_BREAKERS, NAMED_MOST)
    named = [OpenBreaker(row["name"], row["opened_at"], row["because"]) for row in rows]
    return OpenBreakers(rows[0]["total"] if rows else 0, named)


async def subscription_states(connection: Connection) -> SubscriptionStates:
    """Return how many subscriptions are active, paused and disabled."""
    row = await connection.fetchrow(STOPPED)
    assert row is not None
    return SubscriptionStates(**row)
