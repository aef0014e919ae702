"""What the gauges of `/metrics` tell of the database."""

from dataclasses import dataclass
from datetime import datetime

from app.database import Connection

# check_back is small and read whole; each row is looked up in op by primary key, in its own day (LATERAL … OFFSET 0),
# because a verdict may have come since the row was written. The oldest is the one with the lowest id: ids carry time.
UNDECIDED = """
with undecided as materialized (
  select c.transaction_id, c.state from check_back c
  left join lateral (select true as decided from op o where o.transaction_id = c.transaction_id offset 0) o on true
  where o.decided is null
)
select count(*) filter (where u.state = 1) as in_doubt, count(*) filter (where u.state = 2) as parked,
  (select h.born_at from half h where h.position < 1 and h.transaction_id = (
    select transaction_id from undecided where state = 1 order by transaction_id limit 1
  )) as oldest_born_at
from undecided u
"""


@dataclass(frozen=True, slots=True)
class Undecided:
    """How many transactions are in doubt, how many parked, and when the oldest in doubt was born."""

    in_doubt: int
    parked: int
    oldest_born_at: datetime | None


async def undecided(connection: Connection) -> Undecided:
    """Count the transactions that are in doubt or parked and have no verdict."""
    row = await connection.fetchrow(UNDECIDED)
    assert row is not None
    return Undecided(**row)
