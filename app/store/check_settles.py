"""Settling checks: what each one came to, guarded by its lease."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from uuid import UUID

from app.database import Connection

# What a policy's verdict needs beyond the lease it has: the time of an End flush, with room to spare.
HOLD_S = 120

# One statement for a batch. Each check leaves an attempt, unless its day is gone. A transaction that is over (a verdict
# stands) is removed whoever holds it; anything else is written only while the lease is still ours. A check that `/end`
# answered meanwhile (last_answered) counts once, and is not unanswered whatever the call came to. Whoever is parked by
# this (in doubt in the statement's snapshot, without a verdict that has raced it) keeps that on record, because the row
# itself goes with the verdict, and is returned.
SETTLE = """
with s as materialized (
  select * from unnest($1::uuid[], $2::bigint[], $3::int[], $4::timestamptz[], $5::text[], $6::smallint[],
    $7::text[], $8::int[], $9::int[], $10::text[], $11::text[], $12::bool[], $13::bool[], $14::bool[],
    $15::timestamptz[], $16::text[])
  as s(transaction_id, epoch, number, at, outcome, verdict, url, status, duration_ms, error, response, over, answered,
    unanswered, next_check_at, parked_reason)
), noted as (
  insert into attempt (transaction_id, kind, at, number, outcome, verdict, source, destination, status, duration_ms,
    error, response)
  select s.transaction_id, 'check', s.at, s.number, s.outcome, s.verdict, 1, s.url, s.status, s.duration_ms, s.error,
    s.response
  from s where s.outcome is not null and exists (
    select from day d where d.low <= s.transaction_id and d.high > s.transaction_id and d.state <> 'gone'
  )
  order by s.transaction_id
), removed as (
  delete from check_back where transaction_id = any (array(select transaction_id from s where over))
), settled as (
  update check_back c set
    leased_until = null,
    answered = c.answered + (s.answered and c.last_answered < s.number)::int,
    last_answered = case when s.answered then greatest(c.last_answered, s.number) else c.last_answered end,
    unanswered = case when s.unanswered and c.last_answered < s.number then c.unanswered + 1 else 0 end,
    unanswered_since =
      case when s.unanswered and c.last_answered < s.number then coalesce(c.unanswered_since, s.at) end,
    state = case when s.parked_reason is not null and (not s.unanswered or c.last_answered < s.number)
      then 2::smallint else c.state end,
    parked_at = case when s.parked_reason is not null and (not s.unanswered or c.last_answered < s.number)
      then $17 else c.parked_at end,
    parked_reason = case when s.parked_reason is not null and (not s.unanswered or c.last_answered < s.number)
      then s.parked_reason else c.parked_reason end,
    next_check_at = case when c.state = 2 then null
      when s.parked_reason is null then s.next_check_at
      when s.unanswered and c.last_answered >= s.number then $17 end
  from s
  where c.transaction_id = any (array(select transaction_id from s where not over))
    and c.transaction_id = s.transaction_id and c.lease_epoch = s.epoch
  returning c.transaction_id, c.state, s.parked_reason
), parked as materialized (
  select p.transaction_id, p.parked_reason
  from settled p
  where p.state = 2 and p.parked_reason is not null
    and exists (select from check_back b where b.transaction_id = p.transaction_id and b.state = 1 offset 0)
    and not exists (select from op o where o.transaction_id = p.transaction_id offset 0)
), kept as (
  insert into attempt (transaction_id, kind, at, outcome, error)
  select p.transaction_id, 'parked', $17, 'parked', p.parked_reason
  from parked p
  where exists (
    select from day d where d.low <= p.transaction_id and d.high > p.transaction_id and d.state <> 'gone'
  )
  order by p.transaction_id
)
select transaction_id from parked
"""

# Makes sure that nobody else decides or parks a transaction while its policy's verdict is recorded.
HOLD = """
update check_back c set leased_until = $3::timestamptz + make_interval(secs => $4)
from unnest($1::uuid[], $2::bigint[]) as h(transaction_id, epoch)
where c.transaction_id = any ($1) and c.transaction_id = h.transaction_id and c.lease_epoch = h.epoch and c.state = 1
returning c.transaction_id
"""

# The epoch goes up, so that what comes of the check after all is not settled over a later one.
RELEASE = """
update check_back c set leased_until = null, lease_epoch = c.lease_epoch + 1
from unnest($1::uuid[], $2::bigint[]) as r(transaction_id, epoch)
where c.transaction_id = any ($1) and c.transaction_id = r.transaction_id and c.lease_epoch = r.epoch
"""

# What a batch taught of each group. Additive increase, multiplicative decrease, as TCP does.
ADJUST = """
update producer_group g set
  check_window = greatest(1, least(g.check_max_in_flight,
    case when a.halve then g.check_window / 2 else g.check_window + a.grow end)),
  held_until = greatest(g.held_until, a.held_until)
from unnest($1::text[], $2::bool[], $3::int[], $4::timestamptz[]) as a(name, halve, grow, held_until)
where g.name = a.name
"""


@dataclass(frozen=True, slots=True)
class SettledCheck:
    """What becomes of one claimed transaction. Fields are in the order of the statement.

    `outcome` (commit, rollback, unknown, unanswered, lost) None: no check was asked, so no attempt is written. `over`:
    a verdict stands, or the half is gone. Otherwise `parked_reason` parks it, or `next_check_at` is its next check (a
    parked one stays parked and has none).
    """

    transaction_id: UUID
    epoch: int
    number: int
    at: datetime
    outcome: str | None = None
    verdict: int | None = None
    url: str | None = None
    status: int | None = None
    duration_ms: int | None = None
    error: str | None = None
    response: str | None = None
    over: bool = False
    answered: bool = False
    unanswered: bool = False
    next_check_at: datetime | None = None
    parked_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What a batch taught of one group: its window is halved or grows, and it may be held until a time."""

    name: str
    halve: bool
    grow: int
    held_until: datetime | None


# dataclasses.astuple copies deeply, which costs more than the rest of a settle.
_check_row = attrgetter(*(field.name for field in fields(SettledCheck)))
_adjustment_row = attrgetter(*(field.name for field in fields(Adjustment)))


async def settle(connection: Connection, checks: Sequence[SettledCheck], now: datetime) -> set[UUID]:
    """Write a batch (ids distinct); return the transactions that it parked.

    A row whose lease was lost is left to whoever holds it now.
    """
    rows = await connection.fetch(SETTLE, *map(list, zip(*map(_check_row, checks), strict=True)), now)
    return {row["transaction_id"] for row in rows}


async def hold(connection: Connection, leases: Sequence[tuple[UUID, int]], now: datetime) -> set[UUID]:
    """Make leases (id, epoch) last HOLD_S more; return those that are still ours and in doubt."""
    rows = await connection.fetch(HOLD, *map(list, zip(*leases, strict=True)), now, HOLD_S)
    return {row["transaction_id"] for row in rows}


async def release(connection: Connection, leases: Sequence[tuple[UUID, int]]) -> None:
    """Give leases (id, epoch) back, so that another replica asks at once."""
    await connection.execute(RELEASE, *map(list, zip(*leases, strict=True)))


async def adjust(connection: Connection, adjustments: Sequence[Adjustment]) -> None:
    """Write what a batch taught of its groups (names distinct)."""
    await connection.execute(ADJUST, *map(list, zip(*map(_adjustment_row, adjustments), strict=True)))
