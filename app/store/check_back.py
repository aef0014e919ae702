"""Transactions in doubt or parked, one at a time: asked for by a person, answered by their producer's `/end`."""

from datetime import datetime
from uuid import UUID

from app.database import Connection

# An `unknown` that comes by `/end`: it is the newest check's answer, unless that check has its answer already. The
# lease is left alone, so a check in flight settles as it would.
ANSWER_UNKNOWN = """
update check_back
set answered = answered + 1, last_answered = asked, unanswered = 0, unanswered_since = null
where transaction_id = $1 and state = 1 and asked > last_answered
"""

# Served by primary keys, one partition each. A transaction that is not in doubt yet is swept in now; a parked one
# becomes due without leaving its state, so that policy still never decides it. An inserted row has no xmax, an updated
# one has.
ASK_NOW = """
with asked as (
  insert into check_back as c (transaction_id, producer_group, state, swept_at, next_check_at)
  select h.transaction_id, h.producer_group, 1, $2, $2
  from half h
  where h.transaction_id = $1 and h.position < 1
    and not exists (select from op o where o.transaction_id = $1)
  on conflict (transaction_id) do update set next_check_at = least(c.next_check_at, $2)
  returning c.transaction_id, c.swept_at, c.xmax = 0 as swept
), noted as (
  insert into attempt (transaction_id, kind, at, outcome)
  select a.transaction_id, 'swept', a.swept_at, 'swept' from asked a
  where a.swept
    and exists (select from day d where d.low <= a.transaction_id and d.high > a.transaction_id and d.state = 'open')
)
select true from asked
"""


async def answer_unknown(connection: Connection, transaction_id: UUID, now: datetime) -> None:
    """Count a producer's own `unknown` as the answer to the check that is open."""
    await connection.execute(ANSWER_UNKNOWN, transaction_id)


async def ask_now(connection: Connection, transaction_id: UUID, now: datetime) -> bool:
    """Make one transaction's check due at once, whether it is in doubt, parked or still left alone.

    Returns False if there is no such half or its verdict stands already.
    """
    return bool(await connection.fetchval(ASK_NOW, transaction_id, now))
