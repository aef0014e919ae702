"""SQL of checkpoints: the start position of a shard's new holder, the number of shards, their rates and breakers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, TypeAlias

import asyncpg

from app.database.columns import Column, RowArrays
from app.database.connection import Connection
from app.database.pauses import IS_LIMITED
from app.store.relay.leases import Lease, LeaseKind
from app.store.relay.log import HASH

SHARDS = RowArrays(
    Column("subscription_id", "int"), Column("shards", "int"), Column("shard", "int"), Column("replay", "int")
)
# `delivered` and `failed` are in messages a second.
RATED_SHARDS = RowArrays(
    Column("delivered", "float8", given=True),
    Column("failed", "float8", given=True),
    Column("subscription_id", "int"),
    Column("shards", "int"),
    Column("shard", "int"),
)

# Up to the offset `settled_to`, a former holder may have settled messages after the checkpoint. Run it after the lease
# is committed, because from then on the former holder's settles change nothing. Served by the primary keys of
# checkpoint and replay, and by receipt_by_offset, delivery_retry_offset and dead_letter_offset (the last entry of each
# range).
START_POSITIONS = f"""
select a.n, coalesce(p."offset", c."offset") as "offset",
  c.opened_at, c.opened_because, case when {IS_LIMITED.format("c", "now()")} then c.limited_since end as limited_since,
  c.paused_until, greatest(
  (select max(r."offset") from receipt r where r.subscription_id = a.subscription_id and r.replay = a.replay),
  (select max(d."offset") from delivery_retry d where d.subscription_id = a.subscription_id),
  (select max(d."offset") from dead_letter d where d.subscription_id = a.subscription_id),
  0
) as settled_to
from {SHARDS.unnest("a", ordinality="n")}
join checkpoint c on c.subscription_id = a.subscription_id and c.shards = a.shards and c.shard = a.shard
left join replay p on p.replay_id = a.replay
"""  # noqa: S608 -- constants

# A former holder can settle nothing more, so its claims are freed. A holder that came too late to do it would free the
# claims of the next one. Served by delivery_retry_due.
FREE_CLAIMS = f"""
with held as materialized (
  select from lease where name = $5 and owner = $6 and epoch = $7 for share
), freed as (
  update delivery_retry r set leased_until = null, lease_epoch = r.lease_epoch + 1
  where r.subscription_id = $1 and r.replay = $2 and r.leased_until is not null
    and ($3::int = 1 or {HASH.format("r")} % $3 = $4::int) and exists (select from held)
)
select exists (select from held)
"""  # noqa: S608 -- constants

# The rows that block later messages of their key: they were sent before, or are due. Served by delivery_retry_key.
STORED_KEYS = f"""
select r.key, array_agg(r."offset") as offsets from delivery_retry r
where r.subscription_id = $1 and r.replay = $2 and r.key is not null
  and ($3::int = 1 or {HASH.format("r")} % $3 = $4::int) and (r.first_at is not null or r.due_at <= $5)
group by r.key
"""  # noqa: S608 -- constants

# Served by dead_letter_key. A subscription with `on_dead: hold` has few dead letters.
DEAD_KEYS = """
select distinct key from dead_letter where subscription_id = $1 and replay = $2 and key is not null
"""

# The whole table is read. There are few subscriptions.
SHARD_COUNTS = "select distinct subscription_id, shards from checkpoint"

# It differs after any change of what SHARD_COUNTS, subscriptions.STREAMED and replays.RUNNING return, but for the
# offset that a replay has reached. Every change of a subscription's row gives it another xmin. Rows of checkpoint are
# hashed by their keys, because a settle changes the rest of the row. A redelivery may run a canceled replay again, to
# an earlier end. Each worker asks once a second, and two hashes are far smaller than the rows.
DESIRED_VERSION = """
select
  (select bit_xor(hash_record_extended((subscription_id, xmin), 0)) from subscription) as subscriptions,
  (select bit_xor(hash_record_extended((subscription_id, shards, shard), 0)) from checkpoint) as shards,
  (select array_agg(array[replay_id, until] order by replay_id) from replay where state = 'running') as replays
"""

# Served by the first column of the primary key. Rows are locked in the order of the shards.
CLOSE_BREAKERS = """
with opened as (
  select shards, shard, opened_at from checkpoint
  where subscription_id = $1 and num_nonnulls(opened_at, limited_since) > 0 order by shards, shard for update
)
update checkpoint c set opened_at = null, opened_because = null, limited_since = null, paused_until = null from opened o
where c.subscription_id = $1 and c.shards = o.shards and c.shard = o.shard
returning o.opened_at
"""

# `resize` runs LEASES_OF, OLD_SHARDS, END_LEASES and RESIZE. LEASES_OF locks the leases of the old shards, which must
# have expired. OLD_SHARDS finds nothing if another worker has resized meanwhile: ending the leases of the new shards
# would deliver again what their holders have in flight. Leases are locked before checkpoints, as a settle does.
# END_LEASES gives the leases a new epoch, so their former holders can settle nothing more. RESIZE starts every new
# shard at the checkpoint of the slowest old one; START_POSITIONS finds what the others settled after it.
LEASES_OF = f"""
select name, expires_at > $2 as live from lease where starts_with(name, '{LeaseKind.SHARD}:' || $1 || ':')
order by name for update
"""  # noqa: S608 -- a constant
OLD_SHARDS = "select from checkpoint where subscription_id = $1 and shards <> $2 order by shard for update"
END_LEASES = f"""
update lease set epoch = epoch + 1, owner = '' where starts_with(name, '{LeaseKind.SHARD}:' || $1 || ':')
"""  # noqa: S608 -- a constant
RESIZE = """
with old as (
  delete from checkpoint where subscription_id = $1
  returning "offset", opened_at, opened_because, limited_since, paused_until
), slowest as (
  select min("offset") as "offset", min(opened_at) as opened_at, min(opened_because) as because,
    min(limited_since) as limited_since, max(paused_until) as paused_until
  from old
)
insert into checkpoint (
  subscription_id, shards, shard, "offset", moved_at, opened_at, opened_because, limited_since, paused_until
)
select $1, $2, shard, "offset", $3, opened_at, because, case when opened_at is null then limited_since end, paused_until
from slowest, generate_series(0, $2 - 1) as shard
where "offset" is not null
"""

# Served by the primary key. Only the holder of the shard can write.
SET_BREAKER = """
update checkpoint c set opened_at = $7, opened_because = $8, limited_since = $9, paused_until = $10 from (
  select from lease where name = $1 and owner = $2 and epoch = $3 for share
) held
where c.subscription_id = $4 and c.shards = $5 and c.shard = $6
  and (not $11 or (c.opened_at, c.limited_since) is not distinct from ($7, $9))
returning 1
"""

SET_RATES = f"""
update checkpoint c set delivered_per_s = a.delivered, failed_per_s = a.failed, rated_at = ${RATED_SHARDS.next}
from {RATED_SHARDS.unnest("a")}
where c.subscription_id = a.subscription_id and c.shards = a.shards and c.shard = a.shard
"""  # noqa: S608 -- constants

# A replay is done when all of it was read and settled and none of it is in retry. So is one that a person canceled and
# that ran again for a redelivery. It does not become `cancelled`, because upkeep clears retries of canceled replays,
# and another redelivery may be committed meanwhile. Served by replay_running and delivery_retry_due.
END_REPLAYS = """
update replay p set state = 'done', ended_at = $1
where p.state = 'running' and p."offset" >= p.until and not exists (
  select from delivery_retry r where r.subscription_id = p.subscription_id and r.replay = p.replay_id
)
"""

Version: TypeAlias = asyncpg.Record | None


class Shard(NamedTuple):
    """A part of a subscription that one worker holds: number `shard` of `shards`. `replay` 0: live delivery.

    A tuple, because each worker looks up all of its shards in dictionaries once a second.
    """

    subscription_id: int
    shards: int = 1
    shard: int = 0
    replay: int = 0

    @property
    def lease_name(self) -> str:
        """The name of the shard's lease. A replay has the lease of its shard."""
        return f"{LeaseKind.SHARD}:{self.subscription_id}:{self.shards}:{self.shard}"

    @property
    def divided_by(self) -> int:
        """The number of shards that divide the messages; 1 for a replay, which takes all of them."""
        return 1 if self.replay else self.shards

    @property
    def remainder(self) -> int:
        """The remainder that the hash of a key has when it is divided by `divided_by`."""
        return 0 if self.replay else self.shard


@dataclass(frozen=True, slots=True)
class StoredBreaker:
    """The circuit breaker of a shard: since when its destination counts as down, and why, or limits its rate.

    `paused_until`: the end of the pause that the destination last asked for.
    """

    opened_at: datetime | None = None
    because: str | None = None
    limited_since: datetime | None = None
    paused_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The start position of a new holder: after `offset`. Up to `settled_to` some messages may be settled already.

    `stored`: offsets in delivery_retry, by key, that block later messages of the key. `dead`: keys that a dead letter
    blocks. Both are empty unless the subscription is ordered.
    """

    offset: int
    settled_to: int = 0
    breaker: StoredBreaker = StoredBreaker()
    stored: dict[str, list[int]] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()


async def start_positions(connection: Connection, shards: Sequence[Shard]) -> dict[Shard, StartPosition]:
    """Return the start position of a new holder of each shard; shards that no longer exist are left out."""
    rows = await connection.fetch(START_POSITIONS, *SHARDS.arrays(shards)) if shards else []
    return {
        shards[n - 1]: StartPosition(offset, settled_to, StoredBreaker(*breaker))
        for n, offset, *breaker, settled_to in rows
    }


async def free_claims(connection: Connection, lease: Lease, shard: Shard) -> bool:
    """Free the retries that a former holder of a shard claimed; False if the caller lost the shard."""
    held: bool = await connection.fetchval(
        FREE_CLAIMS,
        shard.subscription_id,
        shard.replay,
        shard.divided_by,
        shard.remainder,
        lease.name,
        lease.owner,
        lease.epoch,
    )
    return held


async def stored_keys(connection: Connection, shard: Shard, now: datetime) -> dict[str, list[int]]:
    """Return the offsets, by key, of the shard's retries that block later messages of their key."""
    rows = await connection.fetch(
        STORED_KEYS, shard.subscription_id, shard.replay, shard.divided_by, shard.remainder, now
    )
    return {row["key"]: row["offsets"] for row in rows}


async def dead_keys(connection: Connection, shard: Shard) -> frozenset[str]:
    """Return the keys of a subscription's dead letters."""
    rows = await connection.fetch(DEAD_KEYS, shard.subscription_id, shard.replay)
    return frozenset(row["key"] for row in rows)


async def shard_counts(connection: Connection) -> dict[int, int]:
    """Return how many shards the checkpoints of each subscription have."""
    return {row["subscription_id"]: row["shards"] for row in await connection.fetch(SHARD_COUNTS)}


async def desired_version(connection: Connection) -> Version:
    """Return the version of all that a worker's assignments follow from. Two versions are only compared."""
    return await connection.fetchrow(DESIRED_VERSION)


async def resize(connection: Connection, subscription_id: int, shards: int, now: datetime) -> bool:
    """Change the number of shards of a subscription. Needs the caller's database transaction.

    False, and nothing changed, while a worker holds an old shard, and if another worker has changed the number already.
    """
    leases = await connection.fetch(LEASES_OF, str(subscription_id), now)
    if any(row["live"] for row in leases) or not await connection.fetch(OLD_SHARDS, subscription_id, shards):
        return False
    await connection.execute(END_LEASES, str(subscription_id))
    await connection.execute(RESIZE, subscription_id, shards, now)
    return True


async def set_breaker(
    connection: Connection, lease: Lease, shard: Shard, breaker: StoredBreaker, *, only_pause: bool = False
) -> bool:
    """Record the state of a shard's breaker; False if the caller lost the shard.

    With `only_pause`, change nothing unless the breaker is still open as the caller knows it.
    """
    row = await connection.fetchval(
        SET_BREAKER,
        lease.name,
        lease.owner,
        lease.epoch,
        shard.subscription_id,
        shard.shards,
        shard.shard,
        breaker.opened_at,
        breaker.because,
        breaker.limited_since,
        breaker.paused_until,
        only_pause,
    )
    return row is not None


async def close_breakers(connection: Connection, subscription_id: int) -> list[datetime | None]:
    """Close the breakers of a subscription's shards; return since when each was open. Changes nothing if none is.

    It is None of a shard whose destination limited its rate. The holders of the shards notice it when the row of the
    subscription changes.
    """
    rows = await connection.fetch(CLOSE_BREAKERS, subscription_id)
    return [row["opened_at"] for row in rows]


async def set_rates(connection: Connection, rates: dict[Shard, tuple[float, float]], now: datetime) -> None:
    """Record the rates of each shard: deliveries and failures, in messages a second."""
    delivered, failed = zip(*rates.values(), strict=True)
    await connection.execute(SET_RATES, *RATED_SHARDS.arrays(list(rates), delivered=delivered, failed=failed), now)


async def end_replays(connection: Connection, now: datetime) -> None:
    """Mark finished replays as done."""
    await connection.execute(END_REPLAYS, now)
