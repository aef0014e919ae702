"""SQL that reads what decides whether each subscription has got a message, and what keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from app.database.connection import Connection
from app.database.pauses import IS_LIMITED
from app.store.relay.leases import LeaseKind
from app.store.relay.log import HASH
from app.store.subscriptions.subscriptions import PULL
from app.topic_patterns import match_sql
from app.verdicts import DeliveryState, OnDead, Ordered, SubscriptionState

# How many log entries before a message are searched for an earlier one of its key.
BLOCKER_SPAN = 2000

# The filters of WINDOW for a message `m` and a subscription `s`, each on its own.
_TAKES_TAG = "(coalesce(s.filters -> 'tags', '[]') in ('[]', 'null') or coalesce(s.filters -> 'tags' ? m.tag, false))"
_TAKES_HEADERS = """(coalesce(s.filters -> 'headers', 'null') = 'null'
    or coalesce(m.headers @> (s.filters -> 'headers'), false))"""

# The messages by primary key, one partition each. Topics are compared once for each topic and subscription. A
# subscription concerns a message if it takes its topic or has a row of it; of the others only the first $5 by name are
# returned, with their number. What is not needed to choose is read for the chosen ones alone. A deleted subscription is
# shown if it has got the message.
FACTS = f"""
with message as materialized (
  select h.transaction_id, h.position, h.topic, h.key, h.tag, h.headers, o."offset", o.due_at, o.committed_at
  from half h left join outbox o on o.transaction_id = $1 and o.position = h.position
  where h.transaction_id = $1 and h.position between $2 and $6
), taken as materialized (
  select t.topic, s.subscription_id from (select distinct topic from message) t
  join subscription s on {match_sql("t.topic", "s.topics")}
  where $4::text is null or s.name = $4
), pair as materialized (
  select m.position, s.subscription_id, s.name, k.subscription_id is not null as takes_topic,
    k.subscription_id is not null or num_nonnulls(r.outcome, d.due_at, x.died_at) > 0 as concerned,
    r.outcome as received, r.settled_at, r.status as received_status,
    d.due_at as retry_at, d.first_at as tried_at, d.last_error, d.leased_until,
    x.reason as died_because, x.died_at, coalesce(x.error, x.reason) as died_of, x.status as died_status,
    coalesce(r.attempts, d.attempts, x.attempts, 0) as attempts
  from message m cross join subscription s
  left join taken k on k.topic = m.topic and k.subscription_id = s.subscription_id
  left join receipt r on r.transaction_id = $1 and r.position = m.position and r.subscription_id = s.subscription_id
    and r.replay = 0
  left join delivery_retry d on d.subscription_id = s.subscription_id and d.replay = 0 and d.transaction_id = $1
    and d.position = m.position
  left join dead_letter x on x.subscription_id = s.subscription_id and x.replay = 0 and x.transaction_id = $1
    and x.position = m.position
  where ($4::text is null or s.name = $4) and (s.deleted_at is null or r.outcome is not null)
), placed as materialized (
  select p.*, row_number() over (partition by p.position, p.concerned order by p.name, p.subscription_id) as place,
    count(*) filter (where not p.concerned) over (partition by p.position) as unconcerned
  from pair p
)
select p.position, s.subscription_id, s.name as subscription, s.topics, s.filters, s.ordered, s.on_dead, s.state,
  s.state_reason, s.started_after, s.created_at, s.matches_since, m.topic, m.key, m.tag, m."offset", m.due_at,
  m.committed_at, p.takes_topic, {_TAKES_TAG} as takes_tag, {_TAKES_HEADERS} as takes_headers,
  c."offset" as checkpoint, c.opened_at, c.opened_because, l.owner as holder,
  case when {IS_LIMITED.format("c", "now()")} then c.paused_until end as paused_until,
  s.destination ->> 'type' = '{PULL}' as pulled, (
    select max(q.held_until) from pull_claim q
    cross join lateral unnest(q.transaction_ids, q.positions) with ordinality t(id, position, place)
    where q.subscription_id = s.subscription_id and q.lowest <= m."offset" and t.id = $1 and t.position = m.position
      and t.place <> all(q.settled)
  ) as claimed_until, p.received, p.settled_at,
  p.received_status, p.retry_at, p.tried_at, p.last_error, p.leased_until, p.died_because, p.died_at, p.died_of,
  p.died_status, p.attempts, p.unconcerned
from placed p join message m on m.position = p.position join subscription s on s.subscription_id = p.subscription_id
left join checkpoint c on c.subscription_id = s.subscription_id
  and (c.shards = 1 or {HASH.format("m")} % c.shards = c.shard)
left join lease l on l.name = '{LeaseKind.SHARD}:' || s.subscription_id || ':' || c.shards || ':' || c.shard
  and l.expires_at > $3 and l.owner <> ''
where p.concerned or p.place <= $5
order by p.position, s.name, s.subscription_id
"""  # noqa: S608 -- constants

# Each is paired with each message, a deleted one too. The whole table is read, as by FACTS.
SUBSCRIPTIONS = "select count(*) from subscription where $1::text is null or name = $1"

# For each of several subscriptions, the earliest message of the same key that is before this one: a retry that was
# tried or is due (delivery_retry_key), a dead letter if the subscription holds its keys for those (dead_letter_key), or
# a log entry after the checkpoint that is not settled: the last BLOCKER_SPAN ones before the message, which are read
# once, by outbox_by_offset. $1, $4, $6: the subscriptions, their checkpoints, and whether they hold their keys.
BLOCKERS = f"""
with earlier as materialized (
  select * from (
    select o.transaction_id, o.position, o."offset", o.topic, o.tag, o.key from outbox o
    where o."offset" > (select min(c.least) from unnest($4::bigint[]) c(least)) and o."offset" < $3
    order by o."offset" desc limit {BLOCKER_SPAN}
  ) s where s.key = $2
)
select w.subscription_id, b.* from unnest($1::int[], $4::bigint[], $6::bool[]) as w(subscription_id, checkpoint, holds)
cross join lateral (
  select * from (
    (select b.transaction_id, b.position, b."offset",
       case when b.attempts = 0 then 'waiting' else 'in_retry' end as state, b.due_at, b.last_error as error
     from delivery_retry b where b.subscription_id = w.subscription_id and b.replay = 0 and b.key = $2
       and b."offset" < $3 and (b.first_at is not null or b.due_at <= $5) order by b."offset" limit 1)
    union all
    (select b.transaction_id, b.position, b."offset", 'dead', null, coalesce(b.error, b.reason)
     from dead_letter b where w.holds and b.subscription_id = w.subscription_id and b.replay = 0 and b.key = $2
       and b."offset" < $3 order by b."offset" limit 1)
    union all
    (select m.transaction_id, m.position, m."offset", 'waiting', null, null
     from earlier m join subscription s on s.subscription_id = w.subscription_id
     where m."offset" > w.checkpoint and {match_sql("m.topic", "s.topics")} and {_TAKES_TAG}
       and (coalesce(s.filters -> 'headers', 'null') = 'null' or exists (
         select from half h where h.transaction_id = m.transaction_id and h.position = m.position
           and h.headers @> (s.filters -> 'headers') offset 0
       ))
       and not exists (
         select from receipt r where r.transaction_id = m.transaction_id and r.position = m.position
           and r.subscription_id = w.subscription_id and r.replay = 0 offset 0
       )
       and not exists (
         select from delivery_retry r where r.subscription_id = w.subscription_id and r.replay = 0
           and r.transaction_id = m.transaction_id and r.position = m.position offset 0
       )
       and not exists (
         select from dead_letter r where r.subscription_id = w.subscription_id and r.replay = 0
           and r.transaction_id = m.transaction_id and r.position = m.position offset 0
       )
     order by m."offset" limit 1)
  ) found order by "offset" limit 1
) b
"""  # noqa: S608 -- constants

# The whole table is read. It has a row for each change of a subscription.
STATES_SINCE = """
select v.subscription_id, min(v.at) as since from (
  select v.subscription_id, v.version_id, v.at,
    max(v.version_id) filter (where v.state <> s.state) over (partition by v.subscription_id) as other
  from subscription_version v join subscription s on s.subscription_id = v.subscription_id
  where v.subscription_id = any($1::int[])
) v where v.version_id > coalesce(v.other, 0) group by v.subscription_id
"""


@dataclass(frozen=True, slots=True)
class Blocker:
    """An earlier message of the same key that is not settled. `due_at` and `error` are those of its retry."""

    transaction_id: UUID
    position: int
    offset: int
    state: DeliveryState
    due_at: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True)
class DeliveryFacts:
    """What is stored about one message and one subscription. Fields are None where there is no such row.

    `checkpoint`, `opened_at`, `opened_because` and `holder` are of the shard that has the message. `unconcerned`: the
    number of subscriptions that do not take the topic of the message and have no row of it. `pulled`: consumers
    claim the messages of the subscription, and one holds this message until `claimed_until`, or `leased_until` if it
    was held for longer.
    """

    position: int
    subscription_id: int
    subscription: str
    topics: list[str]
    filters: dict[str, Any]
    ordered: Ordered
    on_dead: OnDead
    state: SubscriptionState
    state_reason: str | None
    started_after: int
    created_at: datetime
    matches_since: datetime
    topic: str
    key: str | None
    tag: str | None
    offset: int | None
    due_at: datetime | None
    committed_at: datetime | None
    takes_topic: bool
    takes_tag: bool
    takes_headers: bool
    checkpoint: int | None
    opened_at: datetime | None
    opened_because: str | None
    paused_until: datetime | None
    holder: str | None
    pulled: bool
    claimed_until: datetime | None
    received: DeliveryState | None
    settled_at: datetime | None
    received_status: int | None
    retry_at: datetime | None
    tried_at: datetime | None
    last_error: str | None
    leased_until: datetime | None
    died_because: str | None
    died_at: datetime | None
    died_of: str | None
    died_status: int | None
    attempts: int
    unconcerned: int


async def read_facts(
    connection: Connection,
    transaction_id: UUID,
    positions: tuple[int, int],
    subscription: str | None,
    unconcerned_most: int,
    now: datetime,
) -> list[DeliveryFacts]:
    """Return the facts of each message from one position to another and each subscription, or the one that is named.

    Of the subscriptions that do not take a message's topic and have no row of it, only the first ones are returned.
    """
    first, last = positions
    rows = await connection.fetch(FACTS, transaction_id, first, now, subscription, unconcerned_most, last)
    return [_facts(row) for row in rows]


async def count_subscriptions(connection: Connection, subscription: str | None) -> int:
    """Count the subscriptions that a message is compared with: all, or those of one name."""
    found: int = await connection.fetchval(SUBSCRIPTIONS, subscription)
    return found


async def read_blockers(connection: Connection, waiting: Sequence[DeliveryFacts], now: datetime) -> dict[int, Blocker]:
    """Return by subscription the earliest message of the same key that it delivers before this one.

    `waiting`: what is stored about one message, with a key, and several subscriptions.
    """
    if not waiting:
        return {}
    rows = await connection.fetch(
        BLOCKERS,
        [one.subscription_id for one in waiting],
        waiting[0].key,
        waiting[0].offset,
        [one.checkpoint for one in waiting],
        now,
        [one.on_dead is OnDead.HOLD for one in waiting],
    )
    return {
        subscription_id: Blocker(transaction_id, position, offset, DeliveryState(state), due_at, error)
        for subscription_id, transaction_id, position, offset, state, due_at, error in rows
    }


async def states_since(connection: Connection, subscription_ids: Sequence[int]) -> dict[int, datetime]:
    """Return since when each of these subscriptions is in its state."""
    rows = await connection.fetch(STATES_SINCE, subscription_ids) if subscription_ids else []
    return {row["subscription_id"]: row["since"] for row in rows}


def _facts(row: Any) -> DeliveryFacts:
    return DeliveryFacts(
        **{
            **row,
            "filters": msgspec.json.decode(row["filters"]) or {} if row["filters"] else {},
            "ordered": Ordered(row["ordered"]),
            "on_dead": OnDead(row["on_dead"]),
            "state": SubscriptionState(row["state"]),
            "received": None if row["received"] is None else DeliveryState(row["received"]),
        }
    )
