"""What happened to one transaction, read by its id from each table; every statement is keyed, so it reads one day."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from app.database import Connection
from app.store.relay import HASH

# A transaction that fans out widely for a long time has more attempts than a person reads; the latest are shown.
ATTEMPTS_SHOWN = 1000

# Served by half's primary key in one partition; bodies stay where they are.
STORED_MESSAGES = """
select position, producer_group, topic, key, tag, headers, content_type, deliver_after_s, born_at, first_check_at,
  context, reissued_from
from half where transaction_id = $1 order by position
"""

# One statement, so that op and check_back are of the same moment. Primary keys only, one partition each.
RECORD = """
select o.verdict, o.source, o.actor, o.reason, o.decided_at,
  c.state as check_back, c.next_check_at, c.parked_reason,
  r.reissued_as, r.at as reissued_at, r.actor as reissued_by, r.reason as reissue_reason
from (values ($1::uuid)) as t(transaction_id)
left join op o on o.transaction_id = t.transaction_id
left join check_back c on c.transaction_id = t.transaction_id
left join reissue r on r.transaction_id = t.transaction_id
"""

# Served by outbox's primary key in one partition.
PUBLISHED = """
select position, "offset", due_at, committed_at from outbox where transaction_id = $1 order by position
"""

# Served by attempt's primary key in one partition. What happens once is shown however much came after it.
ATTEMPTS = """
select a.kind, a.at, a.number, a.outcome, a.position, s.name as subscription, a.verdict, a.source, a.destination,
  a.status, a.duration_ms, a.error, a.response, a.replay
from (
  (select * from attempt where transaction_id = $1 and kind in ('swept', 'parked'))
  union all
  (select * from attempt where transaction_id = $1 and kind not in ('swept', 'parked')
    order by attempt_id desc limit $2)
) a left join subscription s on s.subscription_id = a.subscription_id
"""

# receipt and outbox by their primary keys in one partition. The mutable tables lead with the subscription (that is how
# the relay reads them), so they are probed once for each subscription, of which there are few: by offset, which finds
# the rows of every replay (a transaction's offsets are neighbours). What a live subscription asks for and its shard's
# checkpoint has not reached, and what has no row yet, is waiting: matched as the relay's window does.
DELIVERIES = f"""
with place as materialized (
  select min("offset") as low, max("offset") as high from outbox where transaction_id = $1
)
select r.position, s.name as subscription, nullif(r.replay, 0) as replay, r.outcome as state, r.attempts, r.first_at,
  r.settled_at as at, r.status, r.duration_ms, null::timestamptz as due_at, null as error, null as reason
from receipt r join subscription s on s.subscription_id = r.subscription_id
where r.transaction_id = $1
union all
select d.position, s.name, nullif(d.replay, 0), case when d.attempts = 0 then 'waiting' else 'in_retry' end,
  d.attempts, d.first_at, null, null, null, d.due_at, d.last_error, null
from place p cross join subscription s cross join lateral (
  select * from delivery_retry d where d.subscription_id = s.subscription_id
    and d."offset" between p.low and p.high and d.transaction_id = $1 offset 0
) d
union all
select d.position, s.name, nullif(d.replay, 0), 'dead', d.attempts, d.first_at, d.died_at, d.status, null, null,
  d.error, d.reason
from place p cross join subscription s cross join lateral (
  select * from dead_letter d where d.subscription_id = s.subscription_id
    and d."offset" between p.low and p.high and d.transaction_id = $1 offset 0
) d
union all
select o.position, s.name, null, 'waiting', 0, null, null, null, null, o.due_at, null, null
from outbox o
join half h on h.transaction_id = o.transaction_id and h.position = o.position
join subscription s on s.deleted_at is null
  and exists (
    select from unnest(s.topics) t(pattern)
    where o.topic = t.pattern or (right(t.pattern, 1) = '*' and o.topic ^@ left(t.pattern, -1)
      and (t.pattern ^@ 'halfnote.' or not o.topic ^@ 'halfnote.'))
  )
  and (coalesce(s.filters -> 'tags', '[]') in ('[]', 'null') or s.filters -> 'tags' ? o.tag)
  and (coalesce(s.filters -> 'headers', 'null') = 'null' or h.headers @> (s.filters -> 'headers'))
join checkpoint c on c.subscription_id = s.subscription_id and c."offset" < o."offset"
  and (c.shards = 1 or {HASH.format("o")} % c.shards = c.shard)
where o.transaction_id = $1
  and not exists (
    select from receipt r where r.transaction_id = o.transaction_id and r.position = o.position
      and r.subscription_id = s.subscription_id and r.replay = 0
  )
  and not exists (
    select from delivery_retry d where d.subscription_id = s.subscription_id and d.replay = 0
      and d.transaction_id = o.transaction_id and d.position = o.position
  )
  and not exists (
    select from dead_letter d where d.subscription_id = s.subscription_id and d.replay = 0
      and d.transaction_id = o.transaction_id and d.position = o.position
  )
order by 1, 2, 3 nulls first
"""  # noqa: S608 -- an expression of ours

# Served by redelivery_transaction.
REDELIVERIES = """
select x.position, s.name as subscription, nullif(x.replay, 0) as replay, x.what, x.actor, x.reason, x.at,
  x.died_at, x.died_because, x.attempts
from redelivery x left join subscription s on s.subscription_id = x.subscription_id
where x.transaction_id = $1 order by x.redelivery_id
"""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a half without its body; `headers` and `context` are JSON text, the latter on position 0 only."""

    position: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    deliver_after_s: float | None
    born_at: datetime
    first_check_at: datetime
    context: str | None
    reissued_from: UUID | None


@dataclass(frozen=True, slots=True)
class Record:
    """Where a transaction stands: its op's fields, its check_back row's, its reissue's; None where there is none."""

    verdict: int | None
    source: int | None
    actor: str | None
    reason: str | None
    decided_at: datetime | None
    check_back: int | None
    next_check_at: datetime | None
    parked_reason: str | None
    reissued_as: UUID | None
    reissued_at: datetime | None
    reissued_by: str | None
    reissue_reason: str | None


@dataclass(frozen=True, slots=True)
class Published:
    """A committed message's place in the log; `due_at` only if it was delayed."""

    position: int
    offset: int
    due_at: datetime | None
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class Attempt:
    """A check, a failed delivery, a refused end, a sweep or a parking, as `attempt` has it."""

    kind: str
    at: datetime
    number: int | None
    outcome: str
    position: int | None
    subscription: str | None
    verdict: int | None
    source: int | None
    destination: str | None
    status: int | None
    duration_ms: int | None
    error: str | None
    response: str | None
    replay: int | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message on its way to one subscription, or arrived (`at`), or dropped (`at`), or dead (`at`, `reason`);
    `replay`: not live, but in this replay."""

    position: int
    subscription: str
    replay: int | None
    state: str
    attempts: int
    first_at: datetime | None
    at: datetime | None
    status: int | None
    duration_ms: int | None
    due_at: datetime | None
    error: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Redelivery:
    """What a person did about a dead letter, `redelivered` or `dropped`, and what that had died of after how many
    tries. `subscription` None: its row is gone."""

    position: int
    subscription: str | None
    replay: int | None
    what: Literal["redelivered", "dropped"]
    actor: str | None
    reason: str | None
    at: datetime
    died_at: datetime
    died_because: str
    attempts: int


@dataclass(frozen=True, slots=True)
class History:
    """Everything on record about one transaction."""

    transaction_id: UUID
    messages: list[StoredMessage]
    record: Record
    published: list[Published]
    attempts: list[Attempt]
    deliveries: list[Delivery]
    redeliveries: list[Redelivery]


async def read_history(connection: Connection, transaction_id: UUID) -> History | None:
    """Return what is on record about a transaction, all of one moment; None if there is no such half."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        messages = [StoredMessage(**row) for row in await connection.fetch(STORED_MESSAGES, transaction_id)]
        if not messages:
            return None
        record = await connection.fetchrow(RECORD, transaction_id)
        assert record is not None
        return History(
            transaction_id,
            messages,
            Record(**record),
            [Published(**row) for row in await connection.fetch(PUBLISHED, transaction_id)],
            [Attempt(**row) for row in await connection.fetch(ATTEMPTS, transaction_id, ATTEMPTS_SHOWN)],
            [Delivery(**row) for row in await connection.fetch(DELIVERIES, transaction_id)],
            [Redelivery(**row) for row in await connection.fetch(REDELIVERIES, transaction_id)],
        )
