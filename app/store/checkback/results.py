"""SQL that settles checks. Each outcome is guarded by its lease."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

from app.database.columns import Column, RowArrays, insert, same
from app.database.connection import Connection
from app.verdicts import CheckOutcome, Source, Verdict

# The id of a transaction and the epoch of its lease.
Lease: TypeAlias = tuple[UUID, int]

# A lease is extended by this time while a policy's verdict is recorded. It is longer than the flush of an End.
HOLD_S = 120
# A day that is not open takes no verdict; the check is repeated after this time.
CLOSED_DAY_RETRY_S = 60

CHECKS = RowArrays(
    Column("transaction_id", "uuid"),
    Column("epoch", "bigint"),
    Column("number", "int"),
    Column("at", "timestamptz"),
    Column("outcome", "text"),
    Column("verdict", "smallint"),
    Column("source", "smallint"),
    Column("url", "text"),
    Column("status", "int"),
    Column("duration_ms", "int"),
    Column("error", "text"),
    Column("response", "text"),
    Column("noted", "bool"),
    Column("over", "bool"),
    Column("answered", "bool"),
    Column("unanswered", "bool"),
    Column("unsent", "bool"),
    Column("due_at", "timestamptz"),
    Column("next_check_at", "timestamptz"),
    Column("parked_reason", "text"),
)
ADJUSTMENTS = RowArrays(
    Column("name", "text"),
    Column("updated_at", "timestamptz"),
    Column("registered_at", "timestamptz"),
    Column("halve", "bool"),
    Column("grow", "int"),
    Column("held_until", "timestamptz"),
)

_CHECK_ATTEMPT = same(
    *("transaction_id", "at", "number", "outcome", "verdict", "source", "status", "duration_ms", "error", "response"),
    of="s",
) | {"kind": "'check'", "destination": "s.url"}
_NOW = f"${CHECKS.next}"

_HELD = "c.lease_epoch = s.epoch"
# Whether a settled row `s` is an answer that counts for its transaction `c`: each check counts once. The last answer
# that policy allows counts only while the lease is held, as with a verdict of policy: the later check is the last then.
_COUNTS = f"s.answered and s.writable and c.last_answered < s.number and ({_HELD} or s.parked_reason is null)"
# Whether it parks its transaction: not if the producer answered the check meanwhile.
_PARKS = f"{_HELD} and s.parked_reason is not null and s.writable and (not s.unanswered or c.last_answered < s.number)"

# Whether another check was asked for while this one was in flight: by a person, or by a round, which asks only if this
# one is not answered. The two columns are equal then.
_ASKED = "(c.asked_at is not null and (not s.answered or c.asked_at is distinct from c.urged_at))"

# One statement for a batch. `locked` locks the rows in the order of ids, as every statement does that locks several and
# waits, so that no two wait for each other. Each check writes an attempt, unless the statement of its verdict wrote it
# or its day is not open: an archive may hold the day already. Then an answer does not count and nothing is parked,
# because attempts prove both; the check is repeated in case the day is opened again. The row of a decided transaction
# is removed under any lease. An answer counts under any lease too, as one of `/end` does: its attempt is on record, and
# policy decides by the number of answers. So an `unknown` that does not count leaves no attempt: its lease was lost,
# and a later check was answered first, or policy would park by it, or the row is gone. The proof counts the attempts,
# and they would be more than policy has counted. Other columns are written only while the lease is held. A check that
# `/end` answered meanwhile (last_answered) counts once, and does not count as unanswered even if its call failed. One
# that was not sent leaves the count of unanswered checks as it is, and the time of their first. If no producer claimed
# it and its day takes no parking, that time is when it was due, because the next check is due later. A transaction that
# this statement parks (in doubt in its snapshot, and no verdict arrived meanwhile) is returned. It also gets an
# attempt, because its row is deleted with its verdict. A claim clears `asked_at`, so it is set if the next check was
# asked for while this one was in flight: then the next one is due at that time, also if the transaction is parked.
SETTLE = f"""
with s as materialized (
  select t.*, exists (
    select from day d where d.low <= t.transaction_id and d.high > t.transaction_id and d.state = 'open'
  ) as writable
  from {CHECKS.unnest("t")}
), locked as materialized (
  select l.transaction_id, s.over from (select * from s order by transaction_id) s
  cross join lateral (
    select c.transaction_id from check_back c
    where c.transaction_id = s.transaction_id and (s.over or {_HELD} or {_COUNTS}) for update
  ) l
), noted as (
  {insert("attempt", _CHECK_ATTEMPT, "from s")}
  where s.outcome is not null and not s.noted and s.writable
    and (s.outcome <> 'unknown' or s.over or exists (select from locked l where l.transaction_id = s.transaction_id))
  order by s.transaction_id
), removed as (
  delete from check_back where transaction_id = any (array(select transaction_id from locked where over))
), settled as (
  update check_back c set
    leased_until = case when {_HELD} then null else c.leased_until end,
    answered = c.answered + ({_COUNTS})::int,
    last_answered = case when {_COUNTS} then s.number else c.last_answered end,
    unanswered = case when {_COUNTS} then 0 when not {_HELD} then c.unanswered
      when s.unanswered and c.last_answered < s.number then c.unanswered + 1
      when s.unsent then c.unanswered else 0 end,
    unanswered_since = case when {_COUNTS} then null when not {_HELD} then c.unanswered_since
      when s.unanswered and c.last_answered < s.number then coalesce(c.unanswered_since, s.at)
      when s.unsent then coalesce(c.unanswered_since, case when not s.writable then s.due_at end) end,
    state = case when {_PARKS} then 2::smallint else c.state end,
    parked_at = case when {_PARKS} then {_NOW} else c.parked_at end,
    parked_reason = case when {_PARKS} then s.parked_reason else c.parked_reason end,
    asked_at = case when not {_HELD} then c.asked_at end,
    next_check_at = case when not {_HELD} then c.next_check_at
      when {_ASKED} and s.writable then least(greatest({_NOW}, c.asked_at), s.next_check_at)
      when c.state = 2 then null
      when not s.writable then {_NOW} + interval '{CLOSED_DAY_RETRY_S} seconds'
      when s.parked_reason is null then s.next_check_at
      when s.unanswered and c.last_answered >= s.number then {_NOW} end
  from s
  where c.transaction_id = any (array(select transaction_id from locked where not over))
    and c.transaction_id = s.transaction_id and ({_HELD} or {_COUNTS})
  returning c.transaction_id, c.state, s.parked_reason
), parked as materialized (
  select p.transaction_id, p.parked_reason
  from settled p
  where p.state = 2 and p.parked_reason is not null
    and exists (select from check_back b where b.transaction_id = p.transaction_id and b.state = 1 offset 0)
    and not exists (select from op o where o.transaction_id = p.transaction_id offset 0)
), park_noted as (
  insert into attempt (transaction_id, kind, at, outcome, error)
  select p.transaction_id, 'parked', {_NOW}, 'parked', p.parked_reason
  from parked p
  order by p.transaction_id
)
select transaction_id from parked
"""  # noqa: S608 -- constants

# The rows whose leases ($1 ids, $2 epochs) are still held. Served by the primary key, and locked in the order of ids.
LOCKED_LEASES = """
with asked as materialized (
  select * from unnest($1::uuid[], $2::bigint[]) as a(transaction_id, epoch) order by transaction_id
), locked as materialized (
  select l.transaction_id from asked a cross join lateral (
    select c.transaction_id from check_back c where c.transaction_id = a.transaction_id and c.lease_epoch = a.epoch
    for update
  ) l
)
"""

# Under the extended lease, no other replica decides or parks a transaction while its policy's verdict is recorded.
HOLD = f"""{LOCKED_LEASES}
update check_back c set leased_until = $3::timestamptz + make_interval(secs => $4)
where c.transaction_id = any (array(select transaction_id from locked)) and c.state = 1
returning c.transaction_id, c.lease_epoch
"""  # noqa: S608 -- a constant

# The epoch rises, so that a late result of this check cannot overwrite the result of a later check.
RELEASE = f"""{LOCKED_LEASES}
update check_back c set leased_until = null, lease_epoch = c.lease_epoch + 1
where c.transaction_id = any (array(select transaction_id from locked))
"""  # noqa: S608 -- a constant

# Each group's window has additive increase and multiplicative decrease, as in TCP. The answer of an old URL changes
# nothing: a change of the configuration has reset the window and the hold. Nor does a check from before the last
# registration hold the group: the producer has said since that it can answer. Rows are locked in the order of names.
ADJUST = f"""
with a as materialized (
  select * from {ADJUSTMENTS.unnest("a")}
), locked as materialized (
  select g.name from producer_group g where g.name = any (array(select name from a)) order by g.name for no key update
)
update producer_group g set
  check_window = greatest(1, least(g.check_max_in_flight,
    case when a.halve then g.check_window / 2 else g.check_window + a.grow end)),
  held_until = case when g.registered_at is not distinct from a.registered_at
    then greatest(g.held_until, a.held_until) else g.held_until end
from a join locked using (name)
where g.name = a.name and g.updated_at = a.updated_at
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class SettledCheck:
    """The outcome of one claimed transaction's check.

    `outcome` None: no check was sent, so no attempt is written. `noted`: its attempt was written with the verdict.
    `source`: of the verdict that the attempt names; another one than CHECK if the same verdict was recorded before.
    `unsent`: policy came before it, or no producer claimed it; then `due_at` is since when it was due.
    `over`: the transaction is decided, or its half is gone.
    Otherwise `parked_reason` parks it, or `next_check_at` is the time of its next check (a parked one stays parked and
    has none).
    """

    transaction_id: UUID
    epoch: int
    number: int
    at: datetime
    outcome: CheckOutcome | None = None
    verdict: Verdict | None = None
    source: Source = Source.CHECK
    url: str | None = None
    status: int | None = None
    duration_ms: int | None = None
    error: str | None = None
    response: str | None = None
    noted: bool = False
    over: bool = False
    answered: bool = False
    unanswered: bool = False
    unsent: bool = False
    due_at: datetime | None = None
    next_check_at: datetime | None = None
    parked_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A change of one group's window (halved, or one step larger) and the time until which the group is held.

    `updated_at`: of the configuration that the checks were sent with. `registered_at`: the last registration before.
    """

    name: str
    updated_at: datetime
    registered_at: datetime | None
    halve: bool
    grow: int
    held_until: datetime | None


async def settle(connection: Connection, checks: Sequence[SettledCheck], now: datetime) -> set[UUID]:
    """Write a batch (ids distinct); return the transactions that it parked.

    A row whose lease was lost is left to its new holder, but an answer counts.
    """
    rows = await connection.fetch(SETTLE, *CHECKS.arrays(checks), now)
    return {row["transaction_id"] for row in rows}


async def hold(connection: Connection, leases: Sequence[Lease], now: datetime) -> set[Lease]:
    """Make leases last HOLD_S more; return those that are still held and in doubt."""
    rows = await connection.fetch(HOLD, *map(list, zip(*leases, strict=True)), now, HOLD_S)
    return {(row["transaction_id"], row["lease_epoch"]) for row in rows}


async def release(connection: Connection, leases: Sequence[Lease]) -> None:
    """Release leases, so that another replica sends the check at once."""
    await connection.execute(RELEASE, *map(list, zip(*leases, strict=True)))


async def adjust(connection: Connection, adjustments: Sequence[Adjustment]) -> None:
    """Write the adjustments of groups (distinct), except of those whose configuration was changed meanwhile."""
    await connection.execute(ADJUST, *ADJUSTMENTS.arrays(adjustments))
