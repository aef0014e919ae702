"""Where each shard of a subscription stands: what a taker begins with, how shards are laid out, rates and breakers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from app.database import Connection
from app.store.leases import Lease
from app.store.relay import HASH

# $1…$3: subscription, shards, shard. Up to `settled_to` the log may hold what a former holder settled. Read after the
# lease was committed: from then on the former holder's settles change nothing. Served by the primary keys of checkpoint
# and replay, receipt_by_offset, delivery_retry_offset and dead_letter_offset (the last entry of each range).
PLACES = """
select a.n, coalesce(p."offset", c."offset") as "offset", c.opened_at, c.opened_because, greatest(
  (select max(r."offset") from receipt r where r.subscription_id = a.subscription_id and r.replay = a.replay),
  (select max(d."offset") from delivery_retry d where d.subscription_id = a.subscription_id),
  (select max(d."offset") from dead_letter d where d.subscription_id = a.subscription_id),
  0
) as settled_to
from unnest($1::int[], $2::int[], $3::int[], $4::int[]) with ordinality
  as a(subscription_id, shards, shard, replay, n)
join checkpoint c on c.subscription_id = a.subscription_id and c.shards = a.shards and c.shard = a.shard
left join replay p on p.replay_id = a.replay
"""

# What a former holder claimed is free again: it can settle nothing more. Served by delivery_retry_due.
FREE_CLAIMS = f"""
update delivery_retry r set leased_until = null, lease_epoch = r.lease_epoch + 1
where r.subscription_id = $1 and r.replay = $2 and r.leased_until is not null
  and ($3::int = 1 or {HASH.format("r")} % $3 = $4::int)
"""  # noqa: S608 -- an expression of ours

# The rows that keep later messages of their key back: sent before, or fallen due. Served by delivery_retry_key.
STORED_KEYS = f"""
select r.key, array_agg(r."offset") as offsets from delivery_retry r
where r.subscription_id = $1 and r.replay = $2 and r.key is not null
  and ($3::int = 1 or {HASH.format("r")} % $3 = $4::int) and (r.first_at is not null or r.due_at <= $5)
group by r.key
"""  # noqa: S608 -- an expression of ours

# Served by dead_letter_key; a subscription that holds keys for its dead letters has few of them.
DEAD_KEYS = """
select distinct key from dead_letter where subscription_id = $1 and replay = $2 and key is not null
"""

# There are few subscriptions.
LAYOUTS = "select distinct subscription_id, shards from checkpoint"

# $1: the subscription, $2: shards wanted. The leases of the old shards are locked and must be over: their holders are
# gone or see, by the new epoch, that they hold nothing any more. Every new shard begins where the slowest old one
# stood; what others settled after that is found by PLACES.
LEASES_OF = """
select name, expires_at > $2 as live from lease where starts_with(name, 'relay:' || $1 || ':') order by name for update
"""
END_LEASES = """
update lease set epoch = epoch + 1, owner = '' where starts_with(name, 'relay:' || $1 || ':')
"""
LAY_OUT = """
with old as (
  delete from checkpoint where subscription_id = $1 returning "offset", opened_at, opened_because
), slowest as (
  select min("offset") as "offset", min(opened_at) as opened_at, min(opened_because) as because from old
)
insert into checkpoint (subscription_id, shards, shard, "offset", moved_at, opened_at, opened_because)
select $1, $2, shard, "offset", $3, opened_at, because from slowest, generate_series(0, $2 - 1) as shard
where "offset" is not null
"""

# By the primary key; only by whoever holds the shard. Names of columns are constants.
SET_BREAKER = """
update checkpoint c set opened_at = $7, opened_because = $8 from (
  select from lease where name = $1 and owner = $2 and epoch = $3 for share
) held
where c.subscription_id = $4 and c.shards = $5 and c.shard = $6
returning 1
"""

SET_RATES = """
update checkpoint c set delivered_per_s = a.delivered, failed_per_s = a.failed, rated_at = $6
from unnest($1::int[], $2::int[], $3::int[], $4::float8[], $5::float8[])
  as a(subscription_id, shards, shard, delivered, failed)
where c.subscription_id = a.subscription_id and c.shards = a.shards and c.shard = a.shard
"""

# A replay is over when all of it was read and settled and none of it is to be tried again. Served by replay_running
# and delivery_retry_due.
END_REPLAYS = """
update replay p set state = 'done', ended_at = $1
where p.state = 'running' and p."offset" >= p.until and not exists (
  select from delivery_retry r where r.subscription_id = p.subscription_id and r.replay = p.replay_id
)
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a subscription that one worker holds: `shard` of `shards`, of the live delivery or of a replay."""

    subscription_id: int
    shards: int = 1
    shard: int = 0
    replay: int = 0

    @property
    def lease_name(self) -> str:
        """The lease that its holder has; a replay goes under its shard's."""
        return f"relay:{self.subscription_id}:{self.shards}:{self.shard}"

    @property
    def part(self) -> tuple[int, int]:
        """Into how many parts the messages are divided, and which it takes: a replay is not divided, it takes all."""
        return (1, 0) if self.replay else (self.shards, self.shard)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a taker begins: after `offset`; up to `settled_to` some may be settled already.

    `opened_at`, `because`: its breaker. `stored`: key → offsets in delivery_retry that keep later messages of the key
    back; `dead`: keys that a dead letter stops. Both empty unless the subscription is ordered.
    """

    offset: int
    settled_to: int = 0
    opened_at: datetime | None = None
    because: str | None = None
    stored: dict[str, list[int]] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()


async def places(connection: Connection, shards: Sequence[Shard]) -> dict[Shard, Place]:
    """Return where a taker of each shard begins; a shard that is not of the layout in force is left out."""
    columns = zip(*((s.subscription_id, s.shards, s.shard, s.replay) for s in shards), strict=True)
    rows = await connection.fetch(PLACES, *columns) if shards else []
    return {
        shards[row["n"] - 1]: Place(row["offset"], row["settled_to"], row["opened_at"], row["opened_because"])
        for row in rows
    }


async def free_claims(connection: Connection, shard: Shard) -> None:
    """Free the retries that a former holder of a shard had claimed. For whoever holds the shard."""
    await connection.execute(FREE_CLAIMS, shard.subscription_id, shard.replay, *shard.part)


async def stored_keys(connection: Connection, shard: Shard, now: datetime) -> dict[str, list[int]]:
    """Return the offsets, by key, of the shard's retries that keep later messages of their key back."""
    rows = await connection.fetch(STORED_KEYS, shard.subscription_id, shard.replay, *shard.part, now)
    return {row["key"]: row["offsets"] for row in rows}


async def dead_keys(connection: Connection, shard: Shard) -> frozenset[str]:
    """Return the keys of a subscription's dead letters."""
    rows = await connection.fetch(DEAD_KEYS, shard.subscription_id, shard.replay)
    return frozenset(row["key"] for row in rows)


async def layouts(connection: Connection) -> dict[int, int]:
    """Return into how many shards each subscription is laid out now."""
    return {row["subscription_id"]: row["shards"] for row in await connection.fetch(LAYOUTS)}


async def lay_out(connection: Connection, subscription_id: int, shards: int, now: datetime) -> bool:
    """Divide a subscription into another number of shards; False, with nothing changed, while an old one is held.

    In a database transaction of the caller's.
    """
    leases = await connection.fetch(LEASES_OF, str(subscription_id), now)
    if any(row["live"] for row in leases):
        return False
    await connection.execute(END_LEASES, str(subscription_id))
    await connection.execute(LAY_OUT, subscription_id, shards, now)
    return True


async def set_breaker(
    connection: Connection, lease: Lease, shard: Shard, opened_at: datetime | None, because: str | None
) -> bool:
    """Record that a shard's breaker opened or, with None, closed; False if the shard is another's by now."""
    row = await connection.fetchval(
        SET_BREAKER,
        lease.name,
        lease.owner,
        lease.epoch,
        shard.subscription_id,
        shard.shards,
        shard.shard,
        opened_at,
        because,
    )
    return row is not None


async def set_rates(connection: Connection, rates: dict[Shard, tuple[float, float]], now: datetime) -> None:
    """Record how many messages a second each shard lately delivered and failed to deliver."""
    rows = [(s.subscription_id, s.shards, s.shard, *rate) for s, rate in rates.items()]
    await connection.execute(SET_RATES, *zip(*rows, strict=True), now)


async def end_replays(connection: Connection, now: datetime) -> None:
    """Mark the replays that are over."""
    await connection.execute(END_REPLAYS, now)
