"""SQL that finds what consumers no longer hold, and moves the checkpoints of subscriptions that are claimed."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.database.connection import Connection
from app.store.pull.held_retries import Ctid
from app.store.relay.retries import OPEN

CLAIMS_AT_ONCE = 4
ROWS_AT_ONCE = 500
# Claims of which all that is left waits for a day that is being removed: so many are put off in one statement, because
# each is read whole, and they are looked at again after so long.
PUT_OFF_AT_ONCE = 100
LOOK_AGAIN_S = 30

# What of a claim {0} is not settled, and whether its day is being removed.
_LEFT = """unnest({0}.transaction_ids, {0}.positions) with ordinality as m(transaction_id, position, n)
cross join lateral (
  select exists (select from closing d where d.low <= m.transaction_id and d.high > m.transaction_id) as waits
) w"""

# Claims that are due and of which all that is not settled waits are looked at later, so that the index leads past them.
# Without a day that is being removed nothing is read. Served by pull_claim_sweep; other workers skip them.
PUT_OFF = f"""
with closing as materialized (
  select low, high from day where state = 'archiving'
), due as materialized (
  select c.* from pull_claim c
  where c.sweep_at <= $1 and exists (select from closing)
  order by c.sweep_at limit {PUT_OFF_AT_ONCE} for update skip locked
), waiting as materialized (
  select c.subscription_id, c.claim_id from due c
  where exists (select from {_LEFT.format("c")} where w.waits and m.n <> all(c.settled))
    and not exists (select from {_LEFT.format("c")} where not w.waits and m.n <> all(c.settled))
)
update pull_claim c set sweep_at = $1 + interval '{LOOK_AGAIN_S} s'
from waiting v
where c.subscription_id = v.subscription_id and c.claim_id = v.claim_id
"""  # noqa: S608 -- constants

# A claim whose time is over, or that lasts long: it is deleted, and the caller settles what it had in the same database
# transaction. Served by pull_claim_sweep; other workers skip it. Messages of a day that is being removed wait in their
# claim: upkeep makes dead letters of them, or opens the day again. The others are taken out of it. Messages of a day
# that is gone are left out.
TAKE_OVER = f"""
with closing as materialized (
  select low, high from day where state = 'archiving'
), over as materialized (
  select c.*, exists (select from {_LEFT.format("c")} where w.waits and m.n <> all(c.settled)) as waits
  from pull_claim c
  where c.sweep_at <= $1 and (
    exists (select from {_LEFT.format("c")} where not w.waits and m.n <> all(c.settled))
    or not exists (select from {_LEFT.format("c")} where w.waits and m.n <> all(c.settled))
  )
  order by c.sweep_at limit {CLAIMS_AT_ONCE} for update skip locked
), gone as (
  delete from pull_claim c using over v
  where c.subscription_id = v.subscription_id and c.claim_id = v.claim_id and not v.waits
), kept as (
  update pull_claim c set sweep_at = $1 + interval '{LOOK_AGAIN_S} s', settled = c.settled || array(
    select m.n::smallint from {_LEFT.format("v")} where not w.waits and m.n <> all(v.settled)
  )
  from over v
  where c.subscription_id = v.subscription_id and c.claim_id = v.claim_id and v.waits
)
select c.subscription_id, c.claim_id, c.claimed_at, c.held_until, o.transaction_id, o.position, o."offset", o.topic,
  o.key, o.due_at, o.committed_at
from over c cross join lateral {_LEFT.format("c")} cross join lateral (
  select * from outbox o where o.transaction_id = m.transaction_id and o.position = m.position offset 0
) o
where not w.waits and m.n <> all(c.settled)
order by c.subscription_id, o."offset"
"""  # noqa: S608 -- constants

# Rows whose time is over. Only rows of these subscriptions are held by consumers. Upkeep owns the rows of a day that is
# not open: a row that changes while upkeep makes a dead letter of it would stay beside the dead letter. Served by
# delivery_retry_due, one range for each replay that has rows.
LAPSED = f"""
with recursive waiting as (
  (select d.subscription_id, d.replay from delivery_retry d
   where d.subscription_id = any($2::int[]) order by d.subscription_id, d.replay limit 1)
  union all
  select n.* from waiting w, lateral (
    select d.subscription_id, d.replay from delivery_retry d
    where d.subscription_id = any($2::int[]) and (d.subscription_id, d.replay) > (w.subscription_id, w.replay)
    order by d.subscription_id, d.replay limit 1
  ) n
)
select d.* from waiting w cross join lateral (
  select r.subscription_id, r.replay, r.transaction_id, r.position, r."offset", r.topic, r.key, r.attempts, r.first_at,
    r.ctid as at
  from delivery_retry r
  where r.subscription_id = w.subscription_id and r.replay = w.replay and r.due_at <= $1 and r.leased_until <= $1
    and {OPEN.format("r")}
  order by r.due_at limit {ROWS_AT_ONCE} for update skip locked
) d
"""  # noqa: S608 -- a number of ours

# Before the lowest offset that is claimed and not settled. One snapshot: a claim moves the cursor in its own statement,
# so a later one has only higher offsets. Served by pull_claim_lowest, a probe for each subscription.
MOVE_CHECKPOINTS = """
update checkpoint c set "offset" = n."offset", moved_at = $1
from (
  select k.subscription_id, least(k."offset", (
    select p.lowest - 1 from pull_claim p where p.subscription_id = k.subscription_id order by p.lowest limit 1
  )) as "offset"
  from pull_cursor k
) n
where c.subscription_id = n.subscription_id and c."offset" < n."offset"
"""

# Each subscription that consumers claim has a cursor, and no other has. Served by the primary keys. `offset 0`: without
# statistics, a join would begin with all subscriptions.
PULLED = """
select s.subscription_id, s.name, s.retry
from pull_cursor k cross join lateral (
  select s.* from subscription s where s.subscription_id = k.subscription_id and s.deleted_at is null offset 0
) s
"""
# With a row of nulls if there is any claim, of a deleted subscription too. One statement, because each worker asks once
# a second, also where no one claims.
WATCHED = f"""{PULLED}
union all
select null, null, null where exists (select from pull_claim)
"""  # noqa: S608 -- a constant


@dataclass(frozen=True, slots=True)
class OverClaimed:
    """A message whose claim was taken over: its consumer may hold it until `held_until`."""

    subscription_id: int
    claim_id: int
    claimed_at: datetime
    held_until: datetime
    transaction_id: UUID
    position: int
    offset: int
    topic: str
    key: str | None
    due_at: datetime | None
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class LapsedRetry:
    """A row of delivery_retry that a consumer did not settle in time. `at`: its ctid, while it is locked."""

    subscription_id: int
    replay: int
    transaction_id: UUID
    position: int
    offset: int
    topic: str
    key: str | None
    attempts: int
    first_at: datetime
    at: Ctid


@dataclass(frozen=True, slots=True)
class Pulled:
    """A subscription that consumers claim from, and its schedule."""

    subscription_id: int
    name: str
    retry: Sequence[float]


async def pulled(connection: Connection) -> dict[int, Pulled]:
    """Return the subscriptions that consumers claim from, by id."""
    return {row["subscription_id"]: Pulled(**row) for row in await connection.fetch(PULLED)}


async def watched(connection: Connection) -> tuple[dict[int, Pulled], bool]:
    """Return what `pulled` does, and whether there is any claim, of a deleted subscription too."""
    rows = await connection.fetch(WATCHED)
    found = {row["subscription_id"]: Pulled(**row) for row in rows if row["subscription_id"] is not None}
    return found, len(found) < len(rows)


async def put_off(connection: Connection, now: datetime) -> int:
    """Put off claims of which all that is not settled waits for a day that is being removed; return how many."""
    return int((await connection.execute(PUT_OFF, now)).rpartition(" ")[2])


async def take_over(connection: Connection, now: datetime) -> list[OverClaimed]:
    """Delete claims that are over or last long; return what they had. Needs a database transaction."""
    return [OverClaimed(**row) for row in await connection.fetch(TAKE_OVER, now)]


async def lapsed(connection: Connection, subscription_ids: Sequence[int], now: datetime) -> list[LapsedRetry]:
    """Lock rows whose time is over, and return them. Needs a database transaction."""
    return [LapsedRetry(**row) for row in await connection.fetch(LAPSED, now, subscription_ids)]


async def move_checkpoints(connection: Connection, now: datetime) -> None:
    """Move the checkpoints forward."""
    await connection.execute(MOVE_CHECKPOINTS, now)
