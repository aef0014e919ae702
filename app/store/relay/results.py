"""SQL that records the outcomes of deliveries: one statement for all streams of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import asyncpg

from app.database.columns import Column, RowArrays, insert, listed, same, selected
from app.database.connection import Connection
from app.store.relay.leases import Lease
from app.store.relay.log import Outgoing
from app.verdicts import DeliveryOutcome


class SettlementResult(StrEnum):
    """What a settlement records: a receipt, a (further) retry, a dead letter, or only the attempt."""

    DELIVERED = "delivered"
    RETRY = "retry"
    DEAD = "dead"
    NOTE = "note"


# For the code that runs for each message: to read a member from its class takes several times as long.
DELIVERED, RETRY, DEAD, NOTE = (
    SettlementResult.DELIVERED,
    SettlementResult.RETRY,
    SettlementResult.DEAD,
    SettlementResult.NOTE,
)


@dataclass(slots=True)
class Settlement:
    """The record of one message.

    `attempts`: tries used up. `what`: the outcome in the attempt's record, None if nothing was sent or it was
    delivered.
    `queued`: whether the next message of its key waits for it.
    `digest`: the SHA-256 of the body that was delivered, computed from the bytes that were sent.
    """

    message: Outgoing
    result: SettlementResult
    attempts: int
    at: datetime
    first_at: datetime | None = None
    due_at: datetime | None = None
    what: DeliveryOutcome | None = None
    status: int | None = None
    duration_ms: int | None = None
    error: str | None = None
    response: str | None = None
    reason: str | None = None
    digest: bytes | None = None
    queued: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """The settlements of one stream under its lease: of shard `shard` of `shards`, live (`replay` 0) or of a replay.

    `target` is the new checkpoint, None to leave it. It moves only if the subscription's topics and filters are still
    those of the time `matches_since`. `address` is the destination's, for the attempts; `since` is the start of the
    replay.
    """

    lease: Lease
    subscription_id: int
    replay: int
    shards: int
    shard: int
    target: int | None
    matches_since: datetime
    address: str
    settlements: Sequence[Settlement]
    since: datetime | None = None


# Parameters 1 and 2 are the owner and the time; then come two groups of arrays, and a third one in SETTLE.
STREAMS = RowArrays(
    Column("name", "text", "lease.name"),
    Column("epoch", "bigint", "lease.epoch"),
    Column("subscription_id", "int"),
    Column("replay", "int"),
    Column("shards", "int"),
    Column("shard", "int"),
    Column("target", "bigint"),
    Column("matches_since", "timestamptz"),
    Column("address", "text"),
    Column("since", "timestamptz"),
    first=3,
)
# `n` is the number of the row's stream, from 1.
# Most messages of the log are delivered at the first try. They have arrays of their own, because they need few columns,
# and building the arrays is most of the client's work here.
FIRST_TRIES = RowArrays(
    Column("n", "int", given=True),
    Column("transaction_id", "uuid", "message.transaction_id"),
    Column("position", "smallint", "message.position"),
    Column("offset", "bigint", "message.offset"),
    Column("first_at", "timestamptz"),
    Column("digest", "bytea"),
    Column("status", "int"),
    Column("duration_ms", "int"),
    first=STREAMS.next,
)
OUTCOMES = RowArrays(
    Column("n", "int", given=True),
    Column("transaction_id", "uuid", "message.transaction_id"),
    Column("position", "smallint", "message.position"),
    Column("offset", "bigint", "message.offset"),
    Column("topic", "text", "message.topic"),
    Column("key", "text", "message.key"),
    Column("claim", "bigint", "message.claim"),
    Column("waits_from", "timestamptz", "message.waits_from"),
    Column("result", "text"),
    Column("attempts", "int"),
    Column("first_at", "timestamptz"),
    Column("due_at", "timestamptz"),
    Column("digest", "bytea"),
    Column("what", "text"),
    Column("status", "int"),
    Column("duration_ms", "int"),
    Column("error", "text"),
    Column("response", "text"),
    Column("reason", "text"),
    Column("at", "timestamptz"),
    first=FIRST_TRIES.next,
)

_MESSAGE = ("subscription_id", "replay", "transaction_id", "position")
# A delivery_retry row may carry a copy of its message; a dead letter takes it over.
_COPY = ("producer_group", "tag", "headers", "content_type", "body", "body_digest", "committed_at")
# The end of a delivery. Another worker may have made the first attempt, or the clock may have been set back since.
_AT = "greatest($2::timestamptz, {})"
_RETRY = same(*_MESSAGE, "offset", "topic", "key", "attempts", "first_at", "due_at") | {
    "last_error": "error",
    # A replay's messages wait from its start at the earliest; live delivery has no `since`.
    "waiting_since": "greatest(waits_from, since)",
}
_DEAD_LETTER = same(
    *_MESSAGE, "offset", "topic", "key", "attempts", "first_at", "reason", "status", "error", "response", *_COPY
) | {"died_at": _AT.format("first_at")}
_RECEIPT = same(*_MESSAGE, "offset", "attempts", "first_at", "duration_ms", "status", "digest") | {
    "outcome": "'delivered'",
    "settled_at": _AT.format("first_at"),
}
_FIRST_TRY_RECEIPT = (
    same("transaction_id", "position", "offset", "first_at", "duration_ms", "status", "digest", of="p")
    | same("subscription_id", "replay", of="h")
    | {"attempts": "1", "outcome": "'delivered'", "settled_at": _AT.format("p.first_at")}
)
_ATTEMPT = same(
    "transaction_id", "position", "subscription_id", "at", "status", "duration_ms", "error", "response", of="a"
) | {
    "kind": "'delivery'",
    "number": "a.number",
    "outcome": "a.what",
    "destination": "a.address",
    "replay": "nullif(a.replay, 0)",
}

# The postponements that are counted in one row have these values in common.
_POSTPONEMENT = same(*_MESSAGE, "number", "cause", of="a") | {"outcome": "a.what"}
_KEY, _ITS_VALUES = listed(_POSTPONEMENT), ", ".join(_POSTPONEMENT.values())

# `held` locks the lease rows against a new claim until the commit, in order of name, so two workers never deadlock. It
# has only streams whose epoch is current and whose shard still exists. All other parts read it, so a stale holder
# writes nothing.
_HELD = f"""with held as materialized (
  select s.* from {STREAMS.unnest("s", ordinality="n")}
  join lease l on l.name = s.name and l.owner = $1 and l.epoch = s.epoch
  join checkpoint c on c.subscription_id = s.subscription_id and c.shards = s.shards and c.shard = s.shard
  order by s.name for share of l
)"""  # noqa: S608 -- constants

_FIRST_TRIES_RECEIVED = f"""select {", ".join(_FIRST_TRY_RECEIPT[column] for column in _RECEIPT)}
  from held h join {FIRST_TRIES.unnest("p")} on p.n = h.n
  where exists (
    select from day d where d.low <= p.transaction_id and d.high > p.transaction_id and d.state = 'open'
  )"""  # noqa: S608 -- constants

# The checkpoint of a stream stays where it is once the subscription has other topics or filters: by the former ones the
# stream may have passed a message that was committed after the change. It read that message before this statement
# began, so this snapshot has the change. The next stream reads on from the checkpoint and leaves out what is settled.
_SAME_ROUTE = """exists (
      select from subscription u where u.subscription_id = h.subscription_id and u.matches_since = h.matches_since
      offset 0
    )"""
_MOVED = f"""moved as (
  update checkpoint c set "offset" = h.target, moved_at = $2 from held h
  where c.subscription_id = h.subscription_id and c.shards = h.shards and c.shard = h.shard and h.replay = 0
    and c."offset" < h.target and {_SAME_ROUTE}
), replayed as (
  update replay p set "offset" = h.target, moved_at = $2 from held h
  where p.replay_id = h.replay and p."offset" < h.target and {_SAME_ROUTE}
)
select n::int from held
"""  # noqa: S608 -- constants

# A message from delivery_retry is settled only if its row still has the epoch of its claim (`claim`). A settle that is
# repeated after a lost answer finds its rows and changes nothing more. Rows of a day that is not open any more are left
# out, except rows with a copy of their message: they continue without their day, but get no receipt.
# Postponements use up no attempt (the destination asked for a pause, or the breaker was open), so there can be many.
# `counted` counts them in one row for each attempt and cause; only the first one gets a row in `attempt`, whose rows
# never change. The same settle again counts nothing twice: `last_at` must differ. It may be earlier,
# because a clock can step back.
# Every part is served by primary keys.
SETTLE = f"""
{_HELD}, asked as materialized (
  select a.*, h.subscription_id, h.replay, h.address, h.since, exists (
    select from day d where d.low <= a.transaction_id and d.high > a.transaction_id and d.state = 'open'
  ) as open
  from held h join {OUTCOMES.unnest("a")} on a.n = h.n
), finished as (
  delete from delivery_retry r using asked a
  where r.subscription_id = a.subscription_id and r.replay = a.replay and r.transaction_id = a.transaction_id
    and r.position = a.position and r.lease_epoch = a.claim and a.result in ('delivered', 'dead')
    and (a.open or r.body is not null)
  returning a.*, {selected(same(*_COPY, of="r"))}
), postponed as (
  update delivery_retry r set attempts = a.attempts, first_at = a.first_at, due_at = a.due_at, leased_until = null,
    last_error = coalesce(a.error, r.last_error)
  from asked a
  where r.subscription_id = a.subscription_id and r.replay = a.replay and r.transaction_id = a.transaction_id
    and r.position = a.position and r.lease_epoch = a.claim and r.leased_until is not null and a.result = 'retry'
    and (a.open or r.body is not null)
  returning a.n, r.transaction_id, r.position
), added as (
  {insert("delivery_retry", _RETRY, "from asked where claim is null and result = 'retry' and open")}
  on conflict do nothing
  returning subscription_id, replay, transaction_id, position
), settled as (
  select * from finished
  union all
  select *, {", ".join(["null"] * len(_COPY))} from asked
  where claim is null and result in ('delivered', 'dead') and open
), received as (
  {insert("receipt", _RECEIPT, "from settled where result = 'delivered' and open")}
  union all
  {_FIRST_TRIES_RECEIVED}
  on conflict do nothing
), died as (
  {insert("dead_letter", _DEAD_LETTER, "from settled where result = 'dead'")} on conflict do nothing
  returning subscription_id, replay, transaction_id, position
), noted as (
  select a.*, a.attempts + (a.what in ('postponed', 'gone', 'probe'))::int as number,
    a.what in ('postponed', 'probe') as postpones,
    -- The error may be longer than an index row.
    concat_ws(' ', a.status, left(a.error, 200)) as cause
  from asked a
  -- Postgres hashes the result of `in`. With `exists` it searched all messages for each one.
  where a.what is not null and a.open and (
    a.result = 'note' or (a.n, a.transaction_id, a.position) in (select n, transaction_id, position from postponed)
    or (a.subscription_id, a.replay, a.transaction_id, a.position) in (select * from added union all select * from died)
  )
), counted as (
  insert into postponement as p ({_KEY}, first_at, last_at, times)
  select {_ITS_VALUES}, min(a.at), max(a.at), count(*) from noted a where a.postpones
  group by {_ITS_VALUES} order by {_ITS_VALUES}
  on conflict ({_KEY}) do update set last_at = excluded.last_at, times = p.times + excluded.times
  where p.last_at <> excluded.last_at
  returning {_KEY}, first_at
), listed as (
  {insert("attempt", _ATTEMPT, "from noted a")}
  where not a.postpones or ({_ITS_VALUES}, a.at) in (select {_KEY}, first_at from counted)
), {_MOVED}
"""  # noqa: S608 -- constants


# The first tries alone, which most turns settle. Each part of a statement costs time to start, and SETTLE has many. A
# message has a receipt already if another worker delivered it too, or if an earlier settle was committed and its answer
# was lost. Without `on_receipt` the statement fails then. To look for each receipt before it is written takes longer
# (decision 0066).
def _settle_first_tries(on_receipt: str = "") -> str:
    return f"""
{_HELD}, received as (
  insert into receipt ({listed(_RECEIPT)})
  {_FIRST_TRIES_RECEIVED}
  {on_receipt}
), {_MOVED}
"""


SETTLE_FIRST_TRIES = _settle_first_tries("on conflict do nothing")
SETTLE_NEW_FIRST_TRIES = _settle_first_tries()


def _is_first_try(settlement: Settlement) -> bool:
    """Return whether a message of the log was delivered at its first try, so that only its receipt is written."""
    return (
        settlement.result is DELIVERED
        and settlement.attempts == 1
        and settlement.message.claim is None
        and settlement.what is None
    )


async def settle(connection: Connection, owner: str, batches: Sequence[Batch], now: datetime) -> list[bool]:
    """Record outcomes and move checkpoints forward; return for each batch whether the owner still has its lease.

    Nothing of a batch is written if the owner lost its lease. After a change of topics or filters outcomes are recorded
    and the checkpoint stays.
    """
    outcomes: list[Settlement] = []
    first_tries: list[Settlement] = []
    streams_of_outcomes: list[int] = []
    streams_of_first_tries: list[int] = []
    for n, batch in enumerate(batches, 1):
        for settlement in batch.settlements:
            if _is_first_try(settlement):
                first_tries.append(settlement)
                streams_of_first_tries.append(n)
            else:
                outcomes.append(settlement)
                streams_of_outcomes.append(n)
    arguments = [
        owner,
        now,
        *STREAMS.arrays(batches),
        *FIRST_TRIES.arrays(first_tries, n=streams_of_first_tries),
    ]
    if outcomes:
        held = await connection.fetch(SETTLE, *arguments, *OUTCOMES.arrays(outcomes, n=streams_of_outcomes))
    elif not connection.is_closed() and connection.is_in_transaction():
        # A statement that fails would end the database transaction.
        held = await connection.fetch(SETTLE_FIRST_TRIES, *arguments)
    else:
        try:
            held = await connection.fetch(SETTLE_NEW_FIRST_TRIES, *arguments)
        except asyncpg.UniqueViolationError:
            held = await connection.fetch(SETTLE_FIRST_TRIES, *arguments)
    found = {row[0] for row in held}
    return [n in found for n in range(1, len(batches) + 1)]
