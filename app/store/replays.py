"""Replays: a second pass over a part of the log for one subscription, beside its live delivery."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database import Connection

# Served by replay_running: there are few.
RUNNING = """
select replay_id, subscription_id, after, until, "offset", filters from replay where state = 'running'
order by replay_id
"""

COLUMNS = """replay_id, subscription_id, after, until, "offset", filters, state, actor, reason, created_at, moved_at,
  ended_at"""

# The caller has locked the subscription's row, so that no two of them count at once. Served by replay_running.
START = f"""
insert into replay (subscription_id, after, until, "offset", filters, actor, reason, state, created_at, moved_at)
select $1, $2, $3, $2, $4, $5, $6, 'running', $7, $7
where $8 > (select count(*) from replay where subscription_id = $1 and state = 'running')
returning {COLUMNS}
"""  # noqa: S608 -- names of columns

# Served by replay_subscription.
PAGE = f"""
select {COLUMNS} from replay where subscription_id = $1 and replay_id < $2 order by replay_id desc limit $3
"""  # noqa: S608 -- names of columns

ONE = f"select {COLUMNS} from replay where subscription_id = $1 and replay_id = $2"  # noqa: S608 -- names of columns

# Served by receipt_by_offset, delivery_retry_due and dead_letter's primary key: what the replay has of each.
OUTCOMES = """
select
  (select count(*) from receipt r
   where r.subscription_id = $1 and r.replay = $2 and r.outcome = 'delivered') as delivered,
  (select count(*) from delivery_retry r where r.subscription_id = $1 and r.replay = $2) as retrying,
  (select count(*) from dead_letter d where d.subscription_id = $1 and d.replay = $2) as dead
"""

# What waits for a retry goes with it; what a worker has claimed is settled first, and upkeep removes what is left.
CANCEL = """
with ended as (
  update replay set state = 'cancelled', ended_at = $3
  where subscription_id = $1 and replay_id = $2 and state = 'running'
  returning replay_id
), dropped as (
  delete from delivery_retry r using ended e
  where r.subscription_id = $1 and r.replay = e.replay_id and (r.leased_until is null or r.leased_until <= $3)
)
select 1 from ended
"""

# Days that are being archived are upkeep's. One descent in outbox_by_offset of each open day's partition.
OLDEST = """
select min(o."offset") from day d, lateral (
  select o."offset" from outbox o where o.transaction_id >= d.low and o.transaction_id < d.high
  order by o."offset" limit 1
) o where d.state = 'open'
"""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay under way: from `after` (exclusive) to `until`, come to `offset`; `filters`: the JSON that HTTP took."""

    replay_id: int
    subscription_id: int
    after: int
    until: int
    offset: int
    filters: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class StoredReplay(Replay):
    """A replay, over or under way, and who asked for it why."""

    state: str
    actor: str | None
    reason: str | None
    created_at: datetime
    moved_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A replay that is to be run."""

    subscription_id: int
    after: int
    until: int
    filters: dict[str, Any] | None
    actor: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came of a replay's messages so far."""

    delivered: int
    retrying: int
    dead: int


async def running(connection: Connection) -> list[Replay]:
    """Return the replays that are under way."""
    return [Replay(**_fields(row)) for row in await connection.fetch(RUNNING)]


async def start(connection: Connection, asked: Asked, at_most: int, now: datetime) -> StoredReplay | None:
    """Store a replay of a subscription (locked by `one`); None if it has `at_most` running already."""
    filters = None if asked.filters is None else msgspec.json.encode(asked.filters).decode()
    row = await connection.fetchrow(
        START, asked.subscription_id, asked.after, asked.until, filters, asked.actor, asked.reason, now, at_most
    )
    return StoredReplay(**_fields(row)) if row else None


async def page(connection: Connection, subscription_id: int, before: int, limit: int) -> list[StoredReplay]:
    """Return replays of a subscription, newest first, those before an id."""
    return [StoredReplay(**_fields(row)) for row in await connection.fetch(PAGE, subscription_id, before, limit)]


async def one(connection: Connection, subscription_id: int, replay_id: int) -> StoredReplay | None:
    """Return a replay of a subscription."""
    row = await connection.fetchrow(ONE, subscription_id, replay_id)
    return StoredReplay(**_fields(row)) if row else None


async def outcomes(connection: Connection, replay: Replay) -> Outcomes:
    """Count what came of a replay's messages."""
    row = await connection.fetchrow(OUTCOMES, replay.subscription_id, replay.replay_id)
    assert row is not None  # counts are always there
    return Outcomes(**row)


async def cancel(connection: Connection, subscription_id: int, replay_id: int, now: datetime) -> bool:
    """End a replay that is under way; False if none is."""
    return await connection.fetchval(CANCEL, subscription_id, replay_id, now) is not None


async def oldest(connection: Connection) -> int | None:
    """Return the lowest offset that a replay can still read, None if there is none."""
    offset: int | None = await connection.fetchval(OLDEST)
    return offset


def _fields(row: Any) -> dict[str, Any]:
    fields = dict(row)
    fields["filters"] = None if fields["filters"] is None else msgspec.json.decode(fields["filters"])
    return fields
