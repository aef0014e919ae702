"""SQL that claims messages in the order of their keys: what one consumer holds of a key keeps the others of it back.

The caller locks the cursor first, in a statement of its own, so the next statement sees all claims before it. A settle
moves a message out of its claim and into delivery_retry in one database transaction, so each snapshot has it once.
"""

from datetime import datetime
from functools import partial

from app.database.columns import Column, Parameters
from app.database.connection import Connection
from app.store.pull.claims import (
    MADE,
    UNCHANGED,
    ClaimStatement,
    NewClaim,
    PulledSubscription,
    asked,
    claimed,
    log_read,
    new_claim,
    reader_of,
)
from app.store.pull.held_retries import REPLAYS, SIZE, TAKE, StoredClaim
from app.store.relay.expiry import SINCE
from app.store.relay.log import Outgoing
from app.store.relay.retries import OPEN
from app.verdicts import OnDead

# While so many rows of a subscription keep others of their keys back, or so many wait in all, its consumers get nothing
# new from the log. A claim of stored messages reads all of them. One read of the log may exceed both by its span.
WAITING_MOST, ROWS_MOST = 10_000, 50_000
# The most stored messages of a key in a claim.
RUN = 32

LOCK = "select from pull_cursor where subscription_id = $1 for update"

# Whether a row {0} of delivery_retry keeps later ones of its key back at the time {1}: all do but those that their
# producer has delayed. `due_at` alone does not tell them, because clocks differ.
BLOCKS = """({0}.first_at is not null or {0}.due_at <= {1} or not exists (
      select from outbox w where w.transaction_id = {0}.transaction_id and w.position = {0}.position
        and w.due_at > {1} offset 0
    ))"""

# The keys of the subscription {0} that claims hold, also those whose time is over until a worker finds them. Claims are
# few, each with up to a thousand messages. A claim from a time when the subscription was not ordered has no keys: they
# are read from the log.
KEYS_OUT = """select coalesce(m.key, o.key) as key
  from pull_claim c
  cross join lateral unnest(c.transaction_ids, c.positions, c.keys) with ordinality
    as m(transaction_id, position, key, n)
  left join lateral (
    select o.key from outbox o
    where c.keys is null and o.transaction_id = m.transaction_id and o.position = m.position offset 0
  ) o on true
  where c.subscription_id = {0} and m.n <> all(c.settled) and coalesce(m.key, o.key) is not null"""

# Whether nothing more of the log is read for the subscription {0} at the time {1}, by WAITING_MOST and ROWS_MOST. For
# the first a delayed message that is not due has a later time, so it is not read, and messages without a key do not
# count; of very many of them only the oldest are looked at. That is close to BLOCKS, and enough for a bound. Served by
# delivery_retry_waiting and delivery_retry_due.
FULL = f"""((
    select count(*) from (
      select d.key from delivery_retry d
      where d.subscription_id = {{0}} and d.replay = 0 and {SINCE} <= {{1}} limit {2 * WAITING_MOST}
    ) f where f.key is not null
  ) >= {WAITING_MOST} or (
    select count(*) from (
      select from delivery_retry d where d.subscription_id = {{0}} and d.replay = 0 limit {ROWS_MOST}
    ) f
  ) >= {ROWS_MOST})"""  # noqa: S608 -- numbers of ours


# `busy` has the keys of which a consumer or delivery_retry has a message, by delivery_retry_key, and with `hold` those
# of dead letters, by dead_letter_key. Their messages wait.
def _judged_in_order(claimer: Parameters) -> str:
    subscription, now = claimer["subscription_id"], claimer["now"]
    return f"""out as materialized (
  {KEYS_OUT.format(subscription)}
), busy as materialized (
  select m.key from (
    select key, max("offset") as "offset" from matched where key is not null group by key
  ) m
  where m.key in (select key from out) or exists (
    select from delivery_retry d where d.subscription_id = {subscription} and d.replay = 0 and d.key = m.key
      and {BLOCKS.format("d", now)} offset 0
  ) or {claimer["hold"]} and exists (
    select from dead_letter x where x.subscription_id = {subscription} and x.replay = 0 and x.key = m.key
      and x."offset" < m."offset" offset 0
  )
), judged as not materialized (
  select m.*, coalesce(m.due_at > {now}, false) or coalesce(m.key in (select key from busy), false) as waits
  from matched m
)"""  # noqa: S608 -- constants


# As CLAIM_NEW. Besides, messages of busy keys go to delivery_retry (`later`). So the cursor passes them, and other keys
# go on. All messages of another key up to `reach` are in this claim, in their order.
def _claim_new_in_order(claimer: Parameters, *, further: bool = False) -> str:
    subscription, now = claimer["subscription_id"], claimer["now"]
    span = f"case when {FULL.format(subscription, now)} then 0 else {claimer['span']} end"
    return f"""
with {log_read(claimer, span, _judged_in_order(claimer), further=further)}, taken as materialized (
  select b.* from bodies b, reach r where b."offset" <= r."offset" and not b.waits
), later as (
  insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, due_at,
    waiting_since)
  select {subscription}, b.transaction_id, b.position, b."offset", b.topic, b.key, 0,
    case when b.due_at > {now} then b.due_at else least(b.committed_at, {now}) end, coalesce(b.due_at, b.committed_at)
  from bodies b, reach r where b."offset" <= r."offset" and b.waits
  on conflict do nothing
  returning 1
), {claimed(claimer, {**MADE, "keys": 'array_agg(key order by "offset")'})}"""  # noqa: S608 -- constants


_HOLD = Column("hold", "bool", given=True)
CLAIM_NEW_IN_ORDER = ClaimStatement(_claim_new_in_order, _HOLD)
CLAIM_FURTHER_IN_ORDER = ClaimStatement(partial(_claim_new_in_order, further=True), _HOLD)

# 1. `rows` has what is due, and of its keys all rows but delayed ones that are not due. There can be far more of other
#    keys, so `due` finds the keys first, by delivery_retry_due: to ask the log whether a row is delayed takes longest.
# 2. `placed` puts those of a key in their order. A row is claimable if all before it are, and nothing of its key is
#    held. So a claim takes the first ones of a key together, up to RUN.
# 3. `chosen` takes the keys by the due time and the offset of their first row, and leaves out those that claims hold.
# Nothing is read if the subscription ($1) was changed since its row had the version $6; null: any.
_CHOSEN = f"""
with out as materialized (
  {KEYS_OUT.format("$1")}
), due as materialized (
  select d.key from (
    {REPLAYS}
  ) r join delivery_retry d on d.subscription_id = $1 and d.replay = r.replay and d.due_at <= $4
    and d.leased_until is null and d.key is not null
  where $6::text is null or {UNCHANGED.format("$1", "$6")}
), rows as materialized (
  select d.ctid as at, d.transaction_id, d.position, d.replay, d.key, d."offset", d.due_at,
    octet_length(d.body) as size, d.leased_until is not null as held,
    d.due_at <= $4 and d.leased_until is null and {OPEN.format("d")} as claimable
  from (
    {REPLAYS}
  ) r join delivery_retry d on d.subscription_id = $1 and d.replay = r.replay and (
    d.due_at <= $4 or d.key is not null and d.key in (select key from due) and {BLOCKS.format("d", "$4")}
  )
  where $6::text is null or {UNCHANGED.format("$1", "$6")}
), placed as materialized (
  select r.*, r.due_at as first_due, r."offset" as first, 1 as place, r.claimable as unbroken, false as held_key
  from rows r
  where r.key is null
  union all
  select r.*, first_value(r.due_at) over run, first_value(r."offset") over run, row_number() over run,
    bool_and(r.claimable) over run, bool_or(r.held) over (partition by r.replay, r.key)
  from rows r where r.key is not null
  window run as (partition by r.replay, r.key order by r."offset")
), chosen as materialized (
  select p.* from placed p
  where p.unbroken and not p.held_key and p.place <= {RUN}
    and not (p.replay = 0 and coalesce(p.key in (select key from out), false))
    and (not $5::bool or p.key is null or not exists (
      select from dead_letter x where x.subscription_id = $1 and x.replay = p.replay and x.key = p.key
        and x."offset" < p."offset" offset 0
    ))
  order by p.first_due, p.first, p.replay, p."offset" limit $2
)"""  # noqa: S608 -- constants

CLAIM_STORED_IN_ORDER = f"""{_CHOSEN}, sized as materialized (
  select d.at, sum(d.size) over (order by d.first_due, d.first, d.replay, d."offset") - d.size as before
  from (select d.at, d.first_due, d.first, d.replay, d."offset", {SIZE} as size from chosen d) d
), {TAKE}"""  # noqa: S608 -- constants

# How many rows can be claimed. $3 only gives it the parameters of the claim.
COUNT_IN_ORDER = f"{_CHOSEN} select count(*) from chosen where $3::timestamptz is null"  # noqa: S608 -- constants


async def lock(connection: Connection, subscription_id: int) -> None:
    """Let one claim of the subscription at a time go on, until the database transaction ends."""
    await connection.execute(LOCK, subscription_id)


async def claim_new_in_order(
    connection: Connection,
    pulled: PulledSubscription,
    room: int,
    span: int,
    until: datetime,
    now: datetime,
    *,
    further: bool = False,
) -> NewClaim:
    """Claim messages of the log, as claim_new does. Needs the lock."""
    hold = pulled.subscription.on_dead is OnDead.HOLD
    reader = reader_of(pulled.subscription)
    parameters, sql = (CLAIM_FURTHER_IN_ORDER if further else CLAIM_NEW_IN_ORDER).of(reader)
    arguments = parameters.arguments(reader, **asked(pulled, room, span, until, now), hold=hold)
    return new_claim(await connection.fetch(sql, *arguments))


async def claim_stored_in_order(
    connection: Connection, pulled: PulledSubscription, room: int, until: datetime, now: datetime
) -> list[StoredClaim]:
    """Claim up to `room` rows that are due until a time; none if the subscription changed. Needs the lock."""
    subscription = pulled.subscription
    hold = subscription.on_dead is OnDead.HOLD
    arguments = (subscription.subscription_id, room, until, now, hold, pulled.version)
    rows = await connection.fetch(CLAIM_STORED_IN_ORDER, *arguments)
    return [StoredClaim(Outgoing(*message), replay) for *message, replay in rows]


async def count_in_order(connection: Connection, subscription_id: int, most: int, now: datetime, *, hold: bool) -> int:
    """Return how many rows `claim_stored_in_order` would claim, up to `most`. `hold`: none behind a dead letter."""
    count: int = await connection.fetchval(COUNT_IN_ORDER, subscription_id, most, None, now, hold, None)
    return count
