"""SQL for transactions in doubt or parked: checks that are due at once, and an `unknown` from `/end`."""

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from app.database.connection import Connection

# An `unknown` from `/end` counts as the answer to the newest check, unless that check has an answer already. The lease
# does not change, so a check in flight settles as usual. Each answer that counts has an attempt, because policy decides
# by their number. A day that takes no attempt takes no answer.
ANSWER_UNKNOWN = """
with answered as (
  update check_back
  set answered = answered + 1, last_answered = asked, unanswered = 0, unanswered_since = null
  where transaction_id = $1 and state = 1 and asked > last_answered
    and exists (select from day d where d.low <= $1 and d.high > $1 and d.state = 'open')
  returning transaction_id, asked
)
insert into attempt (transaction_id, kind, at, number, outcome, source)
select transaction_id, 'check', $2, asked, 'unknown', 1 from answered
"""

# Primary keys, one partition each (LATERAL … OFFSET 0). A transaction that is not in doubt yet is swept now. A parked
# one becomes due and stays parked, so that the policy never decides it. `asked_at` keeps the request until the check in
# flight, if there is one, is settled: SETTLE writes the time of the next check. Rows are locked in the order of ids, so
# two calls cannot deadlock. `xmax = 0` marks an inserted row; an updated row has an xmax.
ASK_NOW = """
with asked as (
  insert into check_back as c (transaction_id, producer_group, state, swept_at, next_check_at)
  select h.transaction_id, h.producer_group, 1, $2, $2
  from unnest($1::uuid[]) w (transaction_id) cross join lateral (
    select h.transaction_id, h.producer_group from half h
    where h.transaction_id = w.transaction_id and h.position < 1
      and not exists (select from op o where o.transaction_id = w.transaction_id offset 0)
    offset 0
  ) h
  order by w.transaction_id
  on conflict (transaction_id) do update set next_check_at = least(c.next_check_at, $2), asked_at = $2
  returning c.transaction_id, c.swept_at, c.xmax = 0 as swept
), noted as (
  insert into attempt (transaction_id, kind, at, outcome)
  select a.transaction_id, 'swept', a.swept_at, 'swept' from asked a
  where a.swept
    and exists (select from day d where d.low <= a.transaction_id and d.high > a.transaction_id and d.state = 'open')
)
select a.transaction_id from asked a
"""

AT_ONCE = 1000


# The checks of a group that were not answered and are `picked`, up to AT_ONCE. Rows are locked in the order of ids, as
# every statement does that waits for several. One that had to be waited for is written only if it is `still` to be
# asked: another registration may have done that, and the producers of a fleet start together.
def _ask_unanswered(picked: str, still: str) -> str:
    return f"""
with picked as materialized (
  select c.transaction_id from check_back c
  where c.producer_group = $1 and c.state = 1 and c.unanswered > 0 and {picked} limit $3
), locked as materialized (
  select l.transaction_id from (select * from picked order by transaction_id) p cross join lateral (
    select c.transaction_id from check_back c
    where c.transaction_id = p.transaction_id and c.state = 1 and c.unanswered > 0 and {still} for update
  ) l
), asked as (
  update check_back c set asked_at = $2,
    next_check_at = case when c.leased_until > $2 then c.next_check_at else least(c.next_check_at, $2) end
  where c.transaction_id = any (array(select transaction_id from locked))
)
select count(*) from picked
"""  # noqa: S608 -- constants


# Served by check_back_leased. One that is being settled has its back-off once its lock is free.
ASK_IN_FLIGHT = _ask_unanswered(
    "c.leased_until > $2 and c.asked_at is null",
    "case when c.leased_until > $2 then c.asked_at is null else c.next_check_at > $2 end",
)
# Served by check_back_due: those that wait for their next try. One that was claimed meanwhile is asked already.
_WAITS = "c.next_check_at > $2 and (c.leased_until is null or c.leased_until <= $2)"
ASK_WAITING = _ask_unanswered(f"{_WAITS} order by c.next_check_at", _WAITS)


async def answer_unknown(connection: Connection, transaction_id: UUID, now: datetime) -> None:
    """Count an `unknown` from `/end` as the answer to the newest check."""
    await connection.execute(ANSWER_UNKNOWN, transaction_id, now)


async def ask_now(connection: Connection, transaction_id: UUID, now: datetime) -> bool:
    """Make one transaction's check due at once, whether it is in doubt, parked or still in its check immunity.

    Return False if the half does not exist or is decided already.
    """
    return bool(await ask_all_now(connection, [transaction_id], now))


async def ask_all_now(connection: Connection, transaction_ids: Iterable[UUID], now: datetime) -> list[UUID]:
    """Make the checks of transactions due at once, as `ask_now` does for one; return those that were asked, by id."""
    rows = await connection.fetch(ASK_NOW, sorted(set(transaction_ids)), now)
    return sorted(row["transaction_id"] for row in rows)


async def ask_in_flight(connection: Connection, group: str, now: datetime) -> int:
    """Have checks of a group that are in flight followed by another at once, where the last one was not answered.

    Up to AT_ONCE; return how many were found. First checks are left out.
    """
    found: int = await connection.fetchval(ASK_IN_FLIGHT, group, now, AT_ONCE)
    return found


async def ask_waiting(connection: Connection, group: str, now: datetime) -> int:
    """Make checks of a group due at once that were not answered and wait for their next try.

    Up to AT_ONCE, those first that would be due first; return how many were found.
    """
    found: int = await connection.fetchval(ASK_WAITING, group, now, AT_ONCE)
    return found
