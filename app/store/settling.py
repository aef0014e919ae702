"""What the relay writes about deliveries: one statement records the outcomes of all streams of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from app.database import Connection
from app.store.leases import Lease
from app.store.relay import Outgoing

# `held` locks the lease rows against a takeover until this is committed, by name so that two workers never wait for
# each other, and has only streams whose epoch is not stale and whose shard is of the layout in force; everything else
# reads it, so a stale holder writes nothing.
# A message that came from delivery_retry is settled only if its own lease (`claim`) is still the one it was claimed
# with. What is repeated after a lost answer finds its rows and changes nothing more. A day that upkeep took meanwhile
# is upkeep's: its rows are left out, but for those that carry a copy of their message: they go on without their day,
# and no receipt can be written for them.
# What the log's messages mostly come to, delivered at the first try, has arrays of its own ($30…): most columns are of
# no use to it, and each costs the client more than all else here.
# Served by the primary keys throughout.
SETTLE = """
with held as materialized (
  select s.* from unnest(
    $3::text[], $4::bigint[], $5::int[], $6::int[], $7::int[], $8::int[], $9::bigint[], $10::text[]
  ) with ordinality as s(name, epoch, subscription_id, replay, shards, shard, target, address, n)
  join lease l on l.name = s.name and l.owner = $1 and l.epoch = s.epoch
  join checkpoint c on c.subscription_id = s.subscription_id and c.shards = s.shards and c.shard = s.shard
  order by s.name for share of l
), asked as materialized (
  select a.*, h.subscription_id, h.replay, h.address, exists (
    select from day d where d.low <= a.transaction_id and d.high > a.transaction_id and d.state = 'open'
  ) as open
  from held h join unnest(
    $11::int[], $12::uuid[], $13::smallint[], $14::bigint[], $15::text[], $16::text[], $17::bigint[], $18::text[],
    $19::int[], $20::timestamptz[], $21::timestamptz[], $22::bytea[], $23::text[], $24::int[], $25::int[], $26::text[],
    $27::text[], $28::text[], $29::timestamptz[]
  ) as a(n, transaction_id, position, "offset", topic, key, claim, result, attempts, first_at, due_at, digest, what,
    status, duration_ms, error, response, reason, at) on a.n = h.n
), finished as (
  delete from delivery_retry r using asked a
  where r.subscription_id = a.subscription_id and r.replay = a.replay and r.transaction_id = a.transaction_id
    and r.position = a.position and r.lease_epoch = a.claim and a.result in ('delivered', 'dead')
    and (a.open or r.body is not null)
  returning a.n, r.transaction_id, r.position, r.producer_group, r.tag, r.headers, r.content_type, r.body,
    r.body_digest, r.committed_at
), postponed as (
  update delivery_retry r set attempts = a.attempts, first_at = a.first_at, due_at = a.due_at, leased_until = null,
    last_error = coalesce(a.error, r.last_error)
  from asked a
  where r.subscription_id = a.subscription_id and r.replay = a.replay and r.transaction_id = a.transaction_id
    and r.position = a.position and r.lease_epoch = a.claim and r.leased_until is not null and a.result = 'retry'
    and (a.open or r.body is not null)
  returning a.n, r.transaction_id, r.position
), added as (
  insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts,
    first_at, due_at, last_error)
  select subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at, due_at, error
  from asked where claim is null and result = 'retry' and open on conflict do nothing
  returning subscription_id, replay, transaction_id, position
), settled as (
  select a.*, f.producer_group, f.tag, f.headers, f.content_type, f.body, f.body_digest, f.committed_at
  from asked a left join finished f using (n, transaction_id, position)
  where a.result in ('delivered', 'dead')
    and case when a.claim is null then a.open else f.transaction_id is not null end
), received as (
  insert into receipt (transaction_id, position, subscription_id, replay, "offset", outcome, attempts, first_at,
    duration_ms, status, digest, settled_at)
  select transaction_id, position, subscription_id, replay, "offset", 'delivered', attempts, first_at, duration_ms,
    status, digest, $2::timestamptz
  from settled where result = 'delivered' and open
  union all
  select p.transaction_id, p.position, h.subscription_id, h.replay, p."offset", 'delivered', 1, p.first_at,
    p.duration_ms, p.status, p.digest, $2::timestamptz
  from held h join unnest(
    $30::int[], $31::uuid[], $32::smallint[], $33::bigint[], $34::timestamptz[], $35::bytea[], $36::int[], $37::int[]
  ) as p(n, transaction_id, position, "offset", first_at, digest, status, duration_ms) on p.n = h.n
  where exists (
    select from day d where d.low <= p.transaction_id and d.high > p.transaction_id and d.state = 'open'
  )
  on conflict do nothing
), died as (
  insert into dead_letter (subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at,
    reason, status, error, response, died_at, producer_group, tag, headers, content_type, body, body_digest,
    committed_at)
  select subscription_id, replay, transaction_id, position, "offset", topic, key, attempts, first_at, reason, status,
    error, response, $2, producer_group, tag, headers, content_type, body, body_digest, committed_at
  from settled where result = 'dead' on conflict do nothing
  returning subscription_id, replay, transaction_id, position
), noted as (
  insert into attempt (transaction_id, kind, at, number, outcome, position, subscription_id, destination, status,
    duration_ms, error, response, replay)
  select a.transaction_id, 'delivery', a.at, a.attempts + (a.what in ('postponed', 'gone', 'probe'))::int, a.what,
    a.position, a.subscription_id, a.address, a.status, a.duration_ms, a.error, a.response, nullif(a.replay, 0)
  from asked a
  where a.what is not null and a.open and (a.result = 'note' or exists (
    select from postponed p where p.n = a.n and p.transaction_id = a.transaction_id and p.position = a.position
  ) or exists (
    select from (select * from added union all select * from died) b
    where b.subscription_id = a.subscription_id and b.replay = a.replay and b.transaction_id = a.transaction_id
      and b.position = a.position
  ))
), moved as (
  update checkpoint c set "offset" = h.target, moved_at = $2 from held h
  where c.subscription_id = h.subscription_id and c.shards = h.shards and c.shard = h.shard and h.replay = 0
    and c."offset" < h.target
), replayed as (
  update replay p set "offset" = h.target, moved_at = $2 from held h
  where p.replay_id = h.replay and p."offset" < h.target
)
select n::int from held
"""

Result = Literal["delivered", "retry", "dead", "note"]


@dataclass(slots=True)
class Settlement:
    """What is to be recorded of one message: a receipt, a (further) retry, a dead letter, or only the attempt (`note`).

    `attempts`: tries used up. `what`: the word for the attempt's record, None if nothing was sent or it was delivered.
    `digest`: the SHA-256 of the body that was delivered, computed from what was sent, for the receipt.
    """

    message: Outgoing
    result: Result
    attempts: int
    at: datetime
    first_at: datetime | None = None
    due_at: datetime | None = None
    what: str | None = None
    status: int | None = None
    duration_ms: int | None = None
    error: str | None = None
    response: str | None = None
    reason: str | None = None
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one stream settles: under which lease, for which subscription and replay (0: live), shard `shard` of
    `shards`; `target` is where its checkpoint moves, None to leave it; `address` is where its messages went."""

    lease: Lease
    subscription_id: int
    replay: int
    shards: int
    shard: int
    target: int | None
    address: str
    settlements: Sequence[Settlement]


def _row(n: int, s: Settlement) -> tuple[object, ...]:
    m = s.message
    return (
        n,
        m.transaction_id,
        m.position,
        m.offset,
        m.topic,
        m.key,
        m.claim,
        s.result,
        s.attempts,
        s.first_at,
        s.due_at,
        s.digest,
        s.what,
        s.status,
        s.duration_ms,
        s.error,
        s.response,
        s.reason,
        s.at,
    )


def _plain_row(n: int, s: Settlement) -> tuple[object, ...]:
    m = s.message
    return n, m.transaction_id, m.position, m.offset, s.first_at, s.digest, s.status, s.duration_ms


def _is_plain(s: Settlement) -> bool:
    """Tell whether a message of the log was delivered at its first try: nothing else is to be written but a receipt."""
    return s.result == "delivered" and s.attempts == 1 and s.message.claim is None and s.what is None


COLUMNS, PLAIN_COLUMNS = 19, 8


async def settle(connection: Connection, owner: str, batches: Sequence[Batch], now: datetime) -> list[bool]:
    """Record outcomes and move checkpoints forward; return for each batch whether its lease is still the owner's.

    Nothing of a batch whose lease is another's by now is written.
    """
    streams = [
        (b.lease.name, b.lease.epoch, b.subscription_id, b.replay, b.shards, b.shard, b.target, b.address)
        for b in batches
    ]
    rows, plain = [], []
    for n, batch in enumerate(batches, 1):
        for one in batch.settlements:
            if _is_plain(one):
                plain.append(_plain_row(n, one))
            else:
                rows.append(_row(n, one))
    columns = [*_columns(rows, COLUMNS), *_columns(plain, PLAIN_COLUMNS)]
    held = await connection.fetch(SETTLE, owner, now, *zip(*streams, strict=True), *columns)
    found = {row[0] for row in held}
    return [n in found for n in range(1, len(batches) + 1)]


def _columns(rows: Sequence[tuple[object, ...]], count: int) -> Sequence[tuple[object, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * count
