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
