"""Redeliver or drop dead letters at a person's request, and record who did it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.database.connection import Connection
from app.store.subscriptions.dead_letters import (
    ABOVE,
    LIVE,
    MEETS,
    NEWEST_FIRST,
    OWN_PLANS,
    PLACE,
    PROBES,
    RANGE,
    DeadLetterCursor,
    DeadLetterSearch,
    bounds,
)
from app.verdicts import DeadLetterAction, SubscriptionState

# The most dead letters of one database transaction.
AT_ONCE = 1000
# How long the records of people's actions are kept at least.
KEPT_DAYS = 45
FORGOTTEN_AT_ONCE = 10_000

# The dead letters to act on, locked until they are moved, so that only one of two requests for the same row gets it. By
# a filter: served by the indexes of lists; rows that another request has locked are skipped. Named: served by the
# primary key, in its order, so that two requests that name the same rows cannot deadlock.
PICKED = {
    name: f"""
select d.subscription_id, d.replay, d.transaction_id, d."position" from dead_letter d
where {bounded.format(n=17)} and {ABOVE} and {MEETS} and {LIVE}
order by {NEWEST_FIRST} limit $16 for update of d skip locked"""  # noqa: S608 -- constants of these modules
    for name, bounded in RANGE.items()
}
PICKED["named"] = f"""
select d.subscription_id, d.replay, d.transaction_id, d."position"
from unnest($1::int[], $2::int[], $3::uuid[], $4::smallint[]) as n(subscription_id, replay, transaction_id, "position")
join dead_letter d on d.subscription_id = n.subscription_id and d.replay = n.replay
  and d.transaction_id = n.transaction_id and d."position" = n."position"
where {LIVE} and d.died_at < $5
order by 1, 2, 3, 4 for update of d"""  # noqa: S608

# The number of arguments of each PICKED; actor, reason and time follow them.
_PICKED_BY = {"all": 16, "subscription": 17, "named": 5}

_OPEN = "exists (select from day y where y.low <= m.transaction_id and y.high > m.transaction_id and y.state = 'open')"

# Primary keys. The statement deletes by key and not by ctid: if upkeep has given the row its own copy of the message
# meanwhile, the row has a new ctid. The same statement records who did it.
_TAKEN = """
with picked as materialized ({picked}
), moved as (
  delete from dead_letter d using picked p
  where d.subscription_id = p.subscription_id and d.replay = p.replay
    and d.transaction_id = p.transaction_id and d."position" = p."position"
  returning d.*
), recorded as (
  insert into redelivery (subscription_id, replay, transaction_id, "position", "offset", what, actor, reason, at,
    died_at, died_because, attempts)
  select subscription_id, replay, transaction_id, "position", "offset", '{what}', ${actor}::text, ${reason}::text,
    ${at}::timestamptz, died_at, reason, attempts
  from moved order by died_at, "offset"
)"""
_NAMED = f"""
select {PLACE}, s.name as subscription, s.state from moved d join subscription s using (subscription_id)
order by {NEWEST_FIRST}
"""  # noqa: S608

# The message is delivered again as if it were new. If its day is being archived, upkeep no longer looks for retries of
# that day. So the retry takes a copy of the message, from the dead letter or from half and outbox (primary keys, one
# partition each). A replay that has ended runs again until this message is settled; a canceled replay runs no further
# than the offset that it had reached.
_REDELIVER = f"""
{_TAKEN}, copied as (
  insert into delivery_retry (subscription_id, replay, transaction_id, "position", "offset", topic, key, attempts,
    due_at, waiting_since, producer_group, tag, headers, content_type, body, body_digest, committed_at)
  select m.subscription_id, m.replay, m.transaction_id, m."position", m."offset", m.topic, m.key, 0, ${{at}}, ${{at}},
    coalesce(m.producer_group, h.producer_group), coalesce(m.tag, h.tag), coalesce(m.headers, h.headers),
    coalesce(m.content_type, h.content_type), coalesce(m.body, h.body), coalesce(m.body_digest, h.body_digest),
    coalesce(m.committed_at, o.committed_at)
  from moved m
  left join lateral (
    select * from half h where h.transaction_id = m.transaction_id and h."position" = m."position"
      and m.body is null and not {_OPEN} offset 0
  ) h on true
  left join lateral (
    select * from outbox o where o.transaction_id = m.transaction_id and o."position" = m."position"
      and m.body is null and not {_OPEN} offset 0
  ) o on true
  on conflict do nothing
), revived as (
  update replay p set state = 'running', ended_at = null,
    cancelled_at = case when p.state = 'cancelled' then coalesce(p.ended_at, p.moved_at) else p.cancelled_at end,
    until = case when p.state = 'cancelled' then least(p.until, p."offset") else p.until end
  where p.replay_id = any(array(select m.replay from moved m where m.replay > 0))
){_NAMED}"""  # noqa: S608

# A receipt records that the delivery is over, so that the next holder of the subscription's lease does not start it
# again. A day that is being archived accepts no receipt and needs none, because the relay skips it.
_DROP = f"""
{_TAKEN}, settled as (
  insert into receipt (transaction_id, "position", subscription_id, replay, "offset", outcome, attempts, first_at,
    duration_ms, status, settled_at)
  select m.transaction_id, m."position", m.subscription_id, m.replay, m."offset", 'dropped', m.attempts,
    coalesce(m.first_at, m.died_at), 0, m.status, greatest(${{at}}::timestamptz, m.first_at, m.died_at)
  from moved m where {_OPEN} on conflict do nothing
){_NAMED}"""  # noqa: S608


def _statement(text: str, source: str, what: DeadLetterAction) -> str:
    first = _PICKED_BY[source] + 1
    return text.format(picked=PICKED[source], what=what, actor=first, reason=first + 1, at=first + 2)


REDELIVER = {source: _statement(_REDELIVER, source, DeadLetterAction.REDELIVERED) for source in PICKED}
DROP = {source: _statement(_DROP, source, DeadLetterAction.DROPPED) for source in PICKED}

# Served by redelivery_transaction, in its order.
EARLIER = """
select at, actor, reason from redelivery
where transaction_id = $1 and position = $2 and subscription_id = $3 and replay = $4 and what = 'redelivered'
order by redelivery_id desc limit $5
"""

# The proof compares the deliveries of a stored day with them. A person acts after the birth of a message, and an id may
# be ahead of that by the skew: so a record from before the oldest stored day is of no stored day. Served by
# redelivery_at; `day` and `shared_rule` are small.
FORGET = f"""
delete from redelivery where ctid = any(array(
  select ctid from redelivery where at < least(
    $1::timestamptz - interval '{KEPT_DAYS} days',
    (select min(d.day)::timestamp at time zone 'UTC' from day d where d.state <> 'gone')
      - make_interval(secs => coalesce((select max(value) from shared_rule where name = 'longest_id_skew_s'), 0))
  ) limit {FORGOTTEN_AT_ONCE}
))
"""  # noqa: S608 -- a number of ours


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a dead letter."""

    subscription_id: int
    replay: int
    transaction_id: UUID
    position: int


@dataclass(frozen=True, slots=True)
class Deed:
    """An action on dead letters, with its actor and reason."""

    drop: bool
    actor: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Moved:
    """A dead letter that was redelivered or dropped; `state` is the state of its subscription."""

    place: DeadLetterCursor
    subscription: str
    state: SubscriptionState


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier redelivery of the same message."""

    at: datetime
    actor: str | None
    reason: str | None


async def act_on_named(
    connection: Connection, keys: Sequence[Key], died_before: datetime, deed: Deed, now: datetime
) -> list[Moved]:
    """Redeliver or drop these dead letters (AT_ONCE at most); return those that existed, and died before a time."""
    columns = zip(*((k.subscription_id, k.replay, k.transaction_id, k.position) for k in keys), strict=True)
    return await _act(connection, "named", [*columns, died_before], deed, now)


async def act_on_window(
    connection: Connection, wanted: DeadLetterSearch, floor: DeadLetterCursor, deed: Deed, limit: int, now: datetime
) -> list[Moved]:
    """Redeliver or drop the first `limit` dead letters that match a filter, from `wanted.below` down to `floor`."""
    return await _act(connection, wanted.source, bounds(wanted, floor, limit), deed, now)


async def _act(
    connection: Connection, source: str, arguments: Sequence[object], deed: Deed, now: datetime
) -> list[Moved]:
    statement = (DROP if deed.drop else REDELIVER)[source]
    async with connection.transaction():
        await connection.execute(PROBES if source == "named" else OWN_PLANS)
        rows = await connection.fetch(statement, *arguments, deed.actor, deed.reason, now)
    return [Moved(DeadLetterCursor(*row[:5]), row["subscription"], SubscriptionState(row["state"])) for row in rows]


async def earlier_redeliveries(
    connection: Connection, subscription_id: int, replay: int, transaction_id: UUID, position: int, limit: int
) -> list[Earlier]:
    """Return the latest `limit` recorded redeliveries of this message, oldest first."""
    rows = await connection.fetch(EARLIER, transaction_id, position, subscription_id, replay, limit)
    return [Earlier(**row) for row in reversed(rows)]


async def forget(connection: Connection, now: datetime) -> int:
    """Delete up to FORGOTTEN_AT_ONCE records older than KEPT_DAYS and than every stored day; return how many."""
    return int((await connection.execute(FORGET, now)).rpartition(" ")[2])
