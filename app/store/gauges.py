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

# The oldest row of each producer group that may be asked now (check_back_due), and of each subscription that may be
# delivered now (delivery_retry_due): one probe each, past what is leased, which in_flight bounds. What waits for its
# producer group, its subscription or others of its key waits for no worker, so it does not count.
OLDEST_DUE = """
select (
  select min(c.next_check_at) from producer_group g cross join lateral (
    select b.next_check_at from check_back b
    where b.producer_group = g.name and b.next_check_at <= $1 and (b.leased_until is null or b.leased_until <= $1)
    order by b.next_check_at limit 1
  ) c
  where g.held_until is null or g.held_until <= $1
) as check_at, (
  select min(d.due_at) from subscription s cross join lateral (
    select r.due_at from delivery_retry r
    where r.subscription_id = s.subscription_id and r.replay = 0 and r.due_at <= $1
      and (r.leased_until is null or r.leased_until <= $1)
      and (s.ordered = 'none' or r.key is null or r.first_at is not null)
    order by r.due_at limit 1
  ) d
  where s.deleted_at is null and s.state = 'active'
    and not exists (select from checkpoint p where p.subscription_id = s.subscription_id and p.opened_at is not null)
) as delivery_at
"""

# How many retries of one subscription are counted.
RETRIES_MOST = 10_000

# There are few subscriptions; each is one probe in delivery_retry_tried, which leaves out what was never tried (the
# producer's delays, of which there may be many), and a count in it up to a number. Whether they are due, leased or of a
# replay makes no difference: they were tried in vain and are not settled.
RETRIES = """
select s.name, (
  select r.first_at from delivery_retry r
  where r.subscription_id = s.subscription_id and r.first_at is not null
  order by r.first_at limit 1
) as oldest_at, (
  select count(*) from (
    select from delivery_retry r
    where r.subscription_id = s.subscription_id and r.first_at is not null limit $1
  ) tried
) as waiting
from subscription s where s.deleted_at is null
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


@dataclass(frozen=True, slots=True)
class OldestDue:
    """Since when the oldest check, and the oldest delivery after its first try, are due and not taken; None: none."""

    check_at: datetime | None
    delivery_at: datetime | None


async def oldest_due(connection: Connection, now: datetime) -> OldestDue:
    """Return what has waited longest for a worker."""
    row = await connection.fetchrow(OLDEST_DUE, now)
    assert row is not None
    return OldestDue(**row)


@dataclass(frozen=True, slots=True)
class Retries:
    """A subscription's messages that were tried in vain and are to be tried again: how many, counted up to
    RETRIES_MOST, and when the one that has failed for longest was first tried; None: there is none."""

    waiting: int
    oldest_at: datetime | None


async def retries_of(connection: Connection) -> dict[str, Retries]:
    """Return the retries of each subscription, also of those that have none, by its name."""
    rows = await connection.fetch(RETRIES, RETRIES_MOST)
    return {row["name"]: Retries(row["waiting"], row["oldest_at"]) for row in rows}
