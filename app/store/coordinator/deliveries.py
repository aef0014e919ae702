"""SQL that reads the deliveries of a transaction in pages: one for each message, subscription and replay."""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from app.database.connection import Connection
from app.permissions import EVERYTHING, Within
from app.store.relay.log import HASH
from app.store.relay.unsettled import unsettled_sql
from app.topic_patterns import match_sql
from app.verdicts import DeliveryState

# The most deliveries in one answer. Thousands of subscriptions can take a message, and replays send it again.
DELIVERIES_MAX = 1000
# No message has a higher position (app/coordinator/wire.py).
LAST_POSITION = 99

# receipt and outbox: by their primary keys in one partition. The indexes of the mutable tables begin with the
# subscription, because the relay reads them so. They are probed once for each subscription, of which there are few, by
# offset: a transaction's offsets are consecutive, and the range finds the rows of every replay. A message is waiting if
# a live subscription matches it (as in WINDOW), its shard's checkpoint is before it, and it has no row in any of these
# tables.
DELIVERIES = f"""
with place as materialized (
  select min("offset") as low, max("offset") as high from outbox where transaction_id = $1
), found as (
select r.position, s.subscription_id, s.name as subscription, nullif(r.replay, 0) as replay, r.outcome as state,
  r.attempts, r.first_at, r.settled_at as at, r.status, r.duration_ms, null::timestamptz as due_at, null as error,
  null as reason
from receipt r join subscription s on s.subscription_id = r.subscription_id
where r.transaction_id = $1
union all
select d.position, s.subscription_id, s.name, nullif(d.replay, 0),
  case when d.attempts = 0 then 'waiting' else 'in_retry' end, d.attempts, d.first_at, null, null, null, d.due_at,
  d.last_error, null
from place p cross join subscription s cross join lateral (
  select * from delivery_retry d where d.subscription_id = s.subscription_id
    and d."offset" between p.low and p.high and d.transaction_id = $1 offset 0
) d
union all
select d.position, s.subscription_id, s.name, nullif(d.replay, 0), 'dead', d.attempts, d.first_at, d.died_at,
  d.status, null, null, d.error, d.reason
from place p cross join subscription s cross join lateral (
  select * from dead_letter d where d.subscription_id = s.subscription_id
    and d."offset" between p.low and p.high and d.transaction_id = $1 offset 0
) d
union all
select o.position, s.subscription_id, s.name, null, 'waiting', 0, null, null, null, null, o.due_at, null, null
from outbox o
join half h on h.transaction_id = o.transaction_id and h.position = o.position
join subscription s on s.deleted_at is null
  and {match_sql("o.topic", "s.topics")}
  and (coalesce(s.filters -> 'tags', '[]') in ('[]', 'null') or s.filters -> 'tags' ? o.tag)
  and (coalesce(s.filters -> 'headers', 'null') = 'null' or h.headers @> (s.filters -> 'headers'))
join checkpoint c on c.subscription_id = s.subscription_id and c."offset" < o."offset"
  and (c.shards = 1 or {HASH.format("o")} % c.shards = c.shard)
where o.transaction_id = $1
  and {unsettled_sql("o")}
)
select * from found
where (position, subscription, subscription_id, coalesce(replay, 0)) > ($2, $3::text, $4, $5) and position <= $6
  and ($7::text[] is null or subscription = any($7) or subscription ^@ any($8::text[]))
order by position, subscription, subscription_id, coalesce(replay, 0)
limit $9
"""  # noqa: S608 -- an expression of ours


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """The delivery of a message to one subscription, live or in the replay `replay`.

    `at`: when it was delivered or dropped, or died. `reason`: why it died.
    """

    position: int
    subscription_id: int
    subscription: str
    replay: int | None
    state: DeliveryState
    attempts: int
    first_at: datetime | None
    at: datetime | None
    status: int | None
    duration_ms: int | None
    due_at: datetime | None
    error: str | None
    reason: str | None


class DeliveryPlace(NamedTuple):
    """The place of a delivery in the order of a transaction's deliveries. `replay` 0: live delivery.

    The name of a deleted subscription can be that of another one, too.
    """

    position: int
    subscription: str
    subscription_id: int
    replay: int


FIRST = DeliveryPlace(-1, "", 0, 0)


@dataclass(frozen=True, slots=True)
class DeliverySelection:
    """Which deliveries to read: those after a place, of messages up to a position, of subscriptions within a scope."""

    after: DeliveryPlace = FIRST
    last_position: int = LAST_POSITION
    within: Within = EVERYTHING
    limit: int = DELIVERIES_MAX


ALL = DeliverySelection()


async def read_deliveries(
    connection: Connection, transaction_id: UUID, selection: DeliverySelection
) -> tuple[list[DeliveryRecord], DeliveryPlace | None]:
    """Return deliveries by message, name of the subscription and replay, and the place after which there are more.

    The place is None if there are no more.
    """
    names, prefixes = selection.within
    limit = selection.limit
    rows = await connection.fetch(
        DELIVERIES, transaction_id, *selection.after, selection.last_position, names, prefixes, limit + 1
    )
    found = [DeliveryRecord(**{**row, "state": DeliveryState(row["state"])}) for row in rows[:limit]]
    if len(rows) <= limit:
        return found, None
    last = found[-1]
    return found, DeliveryPlace(last.position, last.subscription, last.subscription_id, last.replay or 0)
