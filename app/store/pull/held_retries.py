"""SQL of the rows of delivery_retry that consumers claim and hold: retries, delayed messages, and those held for long.

A held row is due when its time is over, so that a claim does not read the rows that others hold. The epoch of the row
is in the handle. It is drawn at random, because a database that went back gives the numbers of a sequence again, and
then the handle of a lost claim would settle a message that another consumer holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

from app.database.columns import Column, RowArrays, field_names, insert, same
from app.database.connection import Connection
from app.database.standby_wait import CONFIRMED
from app.store.pull.claims import UNCHANGED, HeldMessage, PulledSubscription
from app.store.relay.log import WINDOW_BYTES, Outgoing
from app.store.relay.retries import MESSAGE, OPEN

# The replays of a subscription ($1) whose rows are claimable; 0 is the live delivery.
REPLAYS = """select 0 as replay union all
    select p.replay_id from replay p where p.subscription_id = $1 and p.state = 'running'"""
# An epoch that no other claim of the message has, also after a redelivery: of 2^48 numbers or more, far below the
# highest that the column takes, because a relay adds to it.
EPOCH = f"(random() * {2**62})::bigint"
# Hold the rows `at` of `sized` until $3, and return their messages: as many as the bytes of bodies allow. It updates by
# ctid, which row locks, or the snapshot of the statement, keep valid.
TAKE = f"""claimed as (
  update delivery_retry r set leased_until = $3, due_at = $3, first_at = coalesce(r.first_at, $4),
    lease_epoch = {EPOCH}
  where r.ctid = any(array(select at from sized where before < {WINDOW_BYTES})) and r.leased_until is null
  returning r.*
)
select {", ".join(MESSAGE[name] for name in field_names(Outgoing))}, c.replay
from claimed c
left join lateral (
  select * from outbox o where o.transaction_id = c.transaction_id and o.position = c.position and c.body is null
  offset 0
) o on true left join lateral (
  select * from half h where h.transaction_id = c.transaction_id and h.position = c.position and c.body is null
  offset 0
) h on true
order by c."offset", c.replay
"""  # noqa: S608 -- constants
# The size of a body that the row `d` has no copy of.
SIZE = """coalesce(d.size, (
      select octet_length(h.body) from half h where h.transaction_id = d.transaction_id and h.position = d.position
    ), 0)"""

# 1. `due` locks the rows that are due, of the live delivery and of each running replay, by delivery_retry_due.
# 2. `sized` adds up the bytes of bodies.
# A row whose time is over is not claimable: a worker counts the attempt first. Nor is any if the subscription was
# changed since it was read, so that none comes after a pause.
CLAIM_STORED = f"""
with due as materialized (
  select d.* from (
    {REPLAYS}
  ) r cross join lateral (
    select d.ctid as at, d.transaction_id, d.position, d.due_at, d."offset", d.replay, octet_length(d.body) as size
    from delivery_retry d
    where d.subscription_id = $1 and d.replay = r.replay and d.due_at <= $4 and d.leased_until is null
      and {OPEN.format("d")} and {UNCHANGED.format("$1", "$5")}
    order by d.due_at, d."offset" limit $2 for update skip locked
  ) d
), sized as materialized (
  select d.at, sum(d.size) over (order by d.due_at, d."offset", d.replay) - d.size as before
  from (select d.at, d.due_at, d."offset", d.replay, {SIZE} as size from due d) d
  order by d.due_at, d."offset", d.replay limit $2
), {TAKE}"""  # noqa: S608 -- constants

# $1 is the subscription, $2 the time.
HELD = RowArrays(
    Column("replay", "int"),
    Column("epoch", "bigint"),
    Column("transaction_id", "uuid"),
    Column("position", "smallint"),
    Column("place", "smallint"),
    Column("at", "timestamptz"),
    first=3,
)

# Whether the row {0} is held by the handle {1}. A row that left its claim has the number of that claim, so the time of
# the claim, which is the row's first, must agree as well. Only handles of claims have a place.
_HELD_BY = "{0}.lease_epoch = {1}.epoch and ({1}.place = 0 or {0}.first_at = {1}.at)"

# The rows that these handles hold. `found` looks each one up as the first of a range in the order of the primary key:
# other indexes begin with the same columns, and a plan from a time when the table was empty may prefer them, and read
# all rows of the subscription for each one. `locked` locks by ctid, in the order of the table, so that two requests
# never deadlock; a row that another request has just changed is left out, and `lock_held` asks again. Upkeep owns the
# rows of a day that is not open, except those with a copy of their message.
LOCK_HELD = f"""
with asked as materialized (
  select * from {HELD.unnest("a", ordinality="n")}
), found as materialized (
  select f.at, a.n from asked a cross join lateral (
    select r.ctid as at, r.subscription_id, r.replay, r.transaction_id, r.position, r.lease_epoch, r.first_at
    from delivery_retry r
    where (r.subscription_id, r.replay, r.transaction_id, r.position)
      >= ($1, a.replay, a.transaction_id, a.position)
    order by r.subscription_id, r.replay, r.transaction_id, r.position limit 1
  ) f
  where f.subscription_id = $1 and f.replay = a.replay and f.transaction_id = a.transaction_id
    and f.position = a.position and {_HELD_BY.format("f", "a")}
), locked as materialized (
  select r.ctid as at, r.replay, r.transaction_id, r.position, r.lease_epoch, r.topic, r.key, r.attempts,
    r.first_at
  from delivery_retry r
  where r.ctid = any(array(select at from found)) and r.leased_until > $2
    and {OPEN.format("r")}
  for update
)
select a.n::int, r.at, r.topic, r.key, r.attempts, r.first_at
from locked r join asked a on a.replay = r.replay and a.transaction_id = r.transaction_id and a.position = r.position
  and {_HELD_BY.format("r", "a")}
"""  # noqa: S608 -- constants

# The caller has locked the rows, so their ctids are valid.
EXTEND_HELD = """
update delivery_retry set leased_until = $2, due_at = $2 where ctid = any($1::tid[])
"""

TO_HOLD = RowArrays(
    Column("transaction_id", "uuid"),
    Column("position", "smallint"),
    Column("offset", "bigint"),
    Column("topic", "text"),
    Column("key", "text"),
    Column("first_at", "timestamptz"),
    Column("held_until", "timestamptz"),
    Column("epoch", "bigint"),
    Column("waiting_since", "timestamptz"),
    first=2,
)
_HELD_ROW = same("transaction_id", "position", "offset", "topic", "key", "first_at", "waiting_since", of="a") | {
    "subscription_id": "$1",
    "attempts": "0",
    "due_at": "a.held_until",
    "leased_until": "a.held_until",
    "lease_epoch": "a.epoch",
}
# The epoch is the number of the former claim and the first time is its time, so the handles stay valid.
HOLD = insert("delivery_retry", _HELD_ROW, f"from {TO_HOLD.unnest('a')} on conflict do nothing")

# Receipts by these handles: their digest and number of attempts. Looked up in the order of the primary key, as above.
REPEATED = f"""
with {CONFIRMED}
select a.n::int
from confirmed cross join {HELD.unnest("a", ordinality="n")}
join unnest($9::int[], $10::bytea[]) with ordinality as b(attempt, digest, n) on b.n = a.n
cross join lateral (
  select r.* from receipt r where r.transaction_id = a.transaction_id
    and (r.position, r.subscription_id, r.replay) >= (a.position, $1, a.replay)
  order by r.position, r.subscription_id, r.replay limit 1
) r
where r.position = a.position and r.subscription_id = $1 and r.replay = a.replay and r.outcome = 'delivered'
  and r.attempts = b.attempt and r.digest = b.digest and $2::timestamptz is not null
"""  # noqa: S608 -- constants


# A place in a table: page and number.
Ctid: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredClaim:
    """A claimed row of delivery_retry, with its message; `message.claim` is its epoch."""

    message: Outgoing
    replay: int


@dataclass(frozen=True, slots=True)
class HeldRetry:
    """What a held row says beside its handle. `at`: its ctid, while it is locked."""

    at: Ctid
    topic: str
    key: str | None
    attempts: int
    first_at: datetime


@dataclass(frozen=True, slots=True)
class ToHold:
    """A message that leaves its claim, and that its consumer holds until a time."""

    transaction_id: UUID
    position: int
    offset: int
    topic: str
    key: str | None
    first_at: datetime
    held_until: datetime
    epoch: int
    waiting_since: datetime


async def claim_stored(
    connection: Connection, pulled: PulledSubscription, room: int, until: datetime, now: datetime
) -> list[StoredClaim]:
    """Claim up to `room` rows that are due until a time; none if the subscription changed."""
    subscription_id = pulled.subscription.subscription_id
    rows = await connection.fetch(CLAIM_STORED, subscription_id, room, until, now, pulled.version)
    return [StoredClaim(Outgoing(*message), replay) for *message, replay in rows]


async def lock_held(
    connection: Connection, subscription_id: int, messages: Sequence[HeldMessage], now: datetime
) -> dict[int, HeldRetry]:
    """Lock the rows that these handles hold; return them by index. Needs a database transaction."""
    found = await _locked(connection, subscription_id, messages, now)
    missing = [n for n in range(len(messages)) if n not in found]
    if missing:
        # A row that was extended while the first statement waited for its lock has another ctid, and is still held.
        again = await _locked(connection, subscription_id, [messages[n] for n in missing], now)
        found |= {missing[n]: row for n, row in again.items()}
    return found


async def _locked(
    connection: Connection, subscription_id: int, messages: Sequence[HeldMessage], now: datetime
) -> dict[int, HeldRetry]:
    rows = await connection.fetch(LOCK_HELD, subscription_id, now, *HELD.arrays(messages))
    return {row["n"] - 1: HeldRetry(*row[1:]) for row in rows}


async def extend_held(connection: Connection, places: Sequence[Ctid], until: datetime) -> None:
    """Hold locked rows until another time."""
    await connection.execute(EXTEND_HELD, places, until)


async def hold(connection: Connection, subscription_id: int, messages: Sequence[ToHold]) -> None:
    """Store messages that left their claims as held rows."""
    await connection.execute(HOLD, subscription_id, *TO_HOLD.arrays(messages))


async def acknowledged(connection: Connection, subscription_id: int, messages: Sequence[HeldMessage]) -> set[int]:
    """Return the indexes of the messages that were acknowledged by these very handles."""
    rows = await connection.fetch(
        REPEATED,
        subscription_id,
        messages[0].at,
        *HELD.arrays(messages),
        [one.attempt for one in messages],
        [one.digest for one in messages],
    )
    return {row["n"] - 1 for row in rows}
