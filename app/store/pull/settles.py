"""SQL that records the outcomes of messages that consumers held."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.database.columns import Column, RowArrays, insert, same, selected
from app.database.connection import Connection
from app.store.pull.held_retries import Ctid
from app.store.relay.results import SettlementResult
from app.verdicts import DeliveryOutcome

# What attempts have as the address of the destination.
ADDRESS = "pull"

# $1 is the time. `at` is null for what a claim from the log had.
SETTLED = RowArrays(
    Column("at", "tid"),
    Column("subscription_id", "int"),
    Column("replay", "int"),
    Column("transaction_id", "uuid"),
    Column("position", "smallint"),
    Column("offset", "bigint"),
    Column("topic", "text"),
    Column("key", "text"),
    Column("waits_from", "timestamptz"),
    Column("result", "text"),
    Column("attempts", "int"),
    Column("first_at", "timestamptz"),
    Column("due_at", "timestamptz"),
    Column("what", "text"),
    Column("duration_ms", "int"),
    Column("digest", "bytea"),
    Column("error", "text"),
    Column("reason", "text"),
    first=2,
)

_MESSAGE = ("subscription_id", "replay", "transaction_id", "position")
_COPY = ("producer_group", "tag", "headers", "content_type", "body", "body_digest", "committed_at")
_RETRY = same(*_MESSAGE, "offset", "topic", "key", "attempts", "first_at", "due_at", of="a") | {
    "last_error": "a.error",
    "waiting_since": "a.waits_from",
}
_RECEIPT = same(*_MESSAGE, "offset", "attempts", "first_at", "duration_ms", "digest", of="a") | {
    "outcome": "'delivered'",
    "settled_at": "greatest($1::timestamptz, a.first_at)",
}
_DEAD_LETTER = (
    same(*_MESSAGE, "offset", "topic", "key", "attempts", "first_at", "reason", "error", of="a")
    | same(*_COPY, of="f")
    | {"died_at": "greatest($1::timestamptz, a.first_at)"}
)
_ATTEMPT = same("transaction_id", "position", "subscription_id", "duration_ms", "error", of="a") | {
    "kind": "'delivery'",
    "at": "$1",
    "number": "a.attempts",
    "outcome": "a.what",
    "destination": f"'{ADDRESS}'",
    "replay": "nullif(a.replay, 0)",
}

# The caller has locked the rows and the claims in this database transaction, so the ctids are valid: a join by the key
# could be planned as a read of all rows of the subscription for each one. A row with a copy of its message goes on
# without its day, but gets no receipt and no attempt. What was given back before the work leaves no attempt either:
# there can be many, and they use up none. It leaves the error of an earlier attempt. Primary keys otherwise.
# What upkeep has closed the day of since the message was locked is not recorded, and returned: a message that a claim
# had is a dead letter by then, and the row of one that was acknowledged becomes one. `kept` looks a row up only then.
SETTLE = f"""
with days as materialized (
  select a.*, exists (
    select from day d where d.low <= a.transaction_id and d.high > a.transaction_id and d.state = 'open'
  ) as open
  from {SETTLED.unnest("a", ordinality="n")}
), asked as materialized (
  select a.*, case when a.open then true when a.at is null then false when a.result <> 'delivered' then true
    else exists (select from delivery_retry r where r.ctid = a.at and r.body is not null) end as kept
  from days a
), finished as (
  delete from delivery_retry r
  where r.ctid = any(array(select at from asked where at is not null and result in ('delivered', 'dead') and kept))
  returning {selected(same(*_MESSAGE, *_COPY, of="r"))}
), postponed as (
  update delivery_retry r set attempts = a.attempts, first_at = a.first_at, due_at = a.due_at, leased_until = null,
    last_error = case when a.what = 'postponed' then coalesce(r.last_error, a.error) else a.error end
  from asked a where r.ctid = a.at and a.result = 'retry'
), added as (
  {insert("delivery_retry", _RETRY, "from asked a where a.at is null and a.result = 'retry' and a.open")}
  on conflict do nothing
), received as (
  {insert("receipt", _RECEIPT, "from asked a where a.result = 'delivered' and a.open")} on conflict do nothing
), died as (
  {insert("dead_letter", _DEAD_LETTER, "from asked a")}
  left join finished f on f.subscription_id = a.subscription_id and f.replay = a.replay
    and f.transaction_id = a.transaction_id and f.position = a.position
  where a.result = 'dead' and a.kept on conflict do nothing
), attempted as (
  {insert("attempt", _ATTEMPT, "from asked a where a.what <> 'postponed' and a.open")}
)
select n::int from asked where not kept
"""  # noqa: S608 -- constants


@dataclass(slots=True)
class HeldSettlement:
    """What is recorded of a message that a consumer held. `at`: the ctid of its locked row; None: a claim had it.

    `attempts`: tries used up. `first_at`: None if there was none, of a dead letter that waited too long. `what`: the
    outcome in the attempt's record, None if it was acknowledged; POSTPONED has no record. `digest`: of the body that
    was handed out. `waits_from`: when the message began to wait.
    """

    at: Ctid | None
    subscription_id: int
    replay: int
    transaction_id: UUID
    position: int
    offset: int
    topic: str
    key: str | None
    waits_from: datetime
    result: SettlementResult
    attempts: int
    first_at: datetime | None
    due_at: datetime | None = None
    what: DeliveryOutcome | None = None
    duration_ms: int = 0
    digest: bytes | None = None
    error: str | None = None
    reason: str | None = None


async def settle_held(connection: Connection, settled: Sequence[HeldSettlement], now: datetime) -> set[int]:
    """Record settlements; return the indexes of those that were not recorded, because their day was closed meanwhile.

    Needs the database transaction in which the rows were locked, or taken from their claims.
    """
    rows = await connection.fetch(SETTLE, now, *SETTLED.arrays(settled))
    return {row["n"] - 1 for row in rows}
