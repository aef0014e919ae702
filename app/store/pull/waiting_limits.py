"""SQL that counts what waits for consumers, and takes out what must not wait any longer."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from app.database.columns import Column, Parameters
from app.database.connection import Connection
from app.store.pull.claims import reader_of
from app.store.pull.held_retries import REPLAYS, Ctid
from app.store.relay.expiry import SINCE
from app.store.relay.log import OF_READER, Reader, matches
from app.store.relay.retries import OPEN
from app.store.subscriptions.subscriptions import Subscription

# How many log entries one statement reads, and how many delayed messages one moves besides those that are due.
SPAN, DELAYED_AT_ONCE = 5_000, 500

# One worker counts a subscription at a time, and no sooner again than after an interval. A time in the future is from
# before a clock step. Primary key.
TAKE_TURN = """
update pull_cursor set counted_at = $2
where subscription_id = $1 and (counted_at is null or counted_at <= $3 or counted_at > $2)
returning "offset", excess, coalesce(limit_used, 0) as used
"""

NOTE = """
update pull_cursor set excess = $2, limit_used = $3, counted_at = case when $4::bool then null else counted_at end
where subscription_id = $1
"""

USED = """
select subscription_id, limit_used from pull_cursor
where subscription_id = any($1::int[]) and limit_used is not null
"""

# Where the cursor is, if the subscription still has these limits and this route. A change that another session makes
# now counts as made: the caller holds the cursor, and waits for nothing. Until its database transaction ends the
# subscription cannot be changed. Primary keys.
AS_COUNTED = """
select (select k."offset" from pull_cursor k where k.subscription_id = $1)
from subscription where subscription_id = $1 and deleted_at is null and matches_since = $2
  and expire_after_s is not distinct from $3 and max_backlog is not distinct from $4
for share skip locked
"""

# What no consumer holds; delayed messages that are not due have a later time. Served by delivery_retry_waiting.
WAITING_ROWS = f"""
select min(w.since) as oldest_at, count(*)::int as waiting from (
  select {SINCE} as since from delivery_retry d
  where d.subscription_id = $1 and d.replay = 0 and {SINCE} <= $2 and d.leased_until is null
  order by {SINCE} limit $3
) w
"""  # noqa: S608 -- constants

PASSER = Parameters(
    Column("room", "int", given=True),
    Column("before", "timestamptz", given=True),
    Column("now", "timestamptz", given=True),
    Column("matches_since", "timestamptz", given=True),
    *OF_READER,
)
_SUBSCRIPTION, _NOW = PASSER["subscription_id"], PASSER["now"]

# Move up to `room` messages of the log that are due to delivery_retry, with delayed ones between them, and the cursor
# over them and what the subscription does not take: no entry that was committed after `before`. Offsets are in the
# order of commits, up to the difference of clocks. Nothing is moved if the topics or filters are not those of the
# reader any more.
PASS_OVER = f"""
with cursor as materialized (
  select k."offset" from pull_cursor k where k.subscription_id = {_SUBSCRIPTION} and exists (
    select from subscription u where u.subscription_id = {_SUBSCRIPTION} and u.matches_since = {PASSER["matches_since"]}
  )
  for update
), span as materialized (
  select n.* from cursor k cross join lateral (
    select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at, o.committed_at
    from outbox o where o."offset" > k."offset" order by o."offset" limit {SPAN}
  ) n
), old as materialized (
  select s.* from span s where s."offset" < coalesce(
    (select min("offset") from span where committed_at > {PASSER["before"]}), {2**63 - 1}
  )
), found as materialized (
  select s.* from old s where {matches(PASSER)} order by s."offset" limit {PASSER["room"]} + {DELAYED_AT_ONCE}
), matched as materialized (
  select * from (
    select f.*, count(*) filter (where f.due_at is null or f.due_at <= {_NOW}) over (order by f."offset") as due
    from found f
  ) f where f.due <= {PASSER["room"]}
), passed as materialized (
  select coalesce(max(due), 0) as due, max("offset") as last,
    coalesce(max(due), 0) >= {PASSER["room"]} or count(*) >= {PASSER["room"]} + {DELAYED_AT_ONCE} as filled
  from matched
), added as (
  insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, due_at,
    waiting_since)
  select {_SUBSCRIPTION}, m.transaction_id, m.position, m."offset", m.topic, m.key, 0,
    case when m.due_at > {_NOW} then m.due_at else least(m.committed_at, {_NOW}) end,
    coalesce(m.due_at, m.committed_at)
  from matched m
  on conflict do nothing
), moved as (
  update pull_cursor k set "offset" = r."offset" from (
    select case when p.filled then p.last else (select max("offset") from old) end as "offset" from passed p
  ) r
  where k.subscription_id = {_SUBSCRIPTION} and k."offset" < r."offset"
)
select p.due::int as passed, p.filled or (select count(*) from old) >= {SPAN} as more from passed p
"""  # noqa: S608 -- constants

# Lock the rows that wait since $2 or longer, oldest first, of the live delivery and, with $4, of each running replay.
# Served by delivery_retry_waiting, one range for each.
LOCK_WAITING = f"""
select d.* from (
  select r.replay from (
    {REPLAYS}
  ) r where r.replay = 0 or $4::bool
) r cross join lateral (
  select d.ctid as at, d.replay, d.transaction_id, d.position, d."offset", d.topic, d.key, d.attempts, d.first_at,
    d.last_error, {SINCE} as since
  from delivery_retry d
  where d.subscription_id = $1 and d.replay = r.replay and {SINCE} <= $2 and d.leased_until is null
    and {OPEN.format("d")}
  order by {SINCE} limit $3 for update skip locked
) d
order by d.since, d."offset" limit $3
"""  # noqa: S608 -- constants

OLDEST = Parameters(Column("after", "bigint", given=True), *OF_READER)
# When the first message after an offset was committed, and since when the one waits that waits longest, if the next
# entries have any: a delayed one may be before others. Served by outbox_by_offset.
OLDEST_AHEAD = f"""
with span as materialized (
  select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at, o.committed_at
  from outbox o where o."offset" > {OLDEST["after"]} order by o."offset" limit {SPAN}
)
select (array_agg(s.committed_at order by s."offset"))[1] as committed_at,
  min(coalesce(s.due_at, s.committed_at)) as since
from span s where {matches(OLDEST)} having count(*) > 0
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class CountingTurn:
    """The turn to count a subscription: where its cursor is, and what the last count found.

    `excess`: how many messages were too many. `used`: the share of a limit that was used.
    """

    offset: int
    excess: int
    used: float


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A locked row of delivery_retry that no consumer holds. `at`: its ctid."""

    at: Ctid
    replay: int
    transaction_id: UUID
    position: int
    offset: int
    topic: str
    key: str | None
    attempts: int
    first_at: datetime | None
    last_error: str | None
    since: datetime


async def take_turn(
    connection: Connection, subscription_id: int, every: timedelta, now: datetime
) -> CountingTurn | None:
    """Take the turn to count a subscription; None if another worker has counted it within `every`."""
    row = await connection.fetchrow(TAKE_TURN, subscription_id, now, now - every)
    return None if row is None else CountingTurn(*row)


async def offset_as_counted(connection: Connection, subscription: Subscription) -> int | None:
    """Return where the cursor is; None if limits, topics or filters changed since the subscription was read.

    Needs a database transaction, in which the cursor is locked.
    """
    limits = subscription.expire_after_s, subscription.max_backlog
    offset: int | None = await connection.fetchval(
        AS_COUNTED, subscription.subscription_id, subscription.matches_since, *limits
    )
    return offset


async def waiting_rows(
    connection: Connection, subscription_id: int, at_most: int, now: datetime
) -> tuple[datetime | None, int]:
    """Return since when the oldest row waits, and how many do, up to `at_most`."""
    row = await connection.fetchrow(WAITING_ROWS, subscription_id, now, at_most)
    assert row is not None
    return row["oldest_at"], row["waiting"]


async def oldest_ahead(connection: Connection, reader: Reader, after: int) -> tuple[datetime, datetime] | None:
    """Return when the first message of the log after an offset was committed, and since when the oldest one waits.

    None if the next entries have none.
    """
    row = await connection.fetchrow(OLDEST_AHEAD, *OLDEST.arguments(reader, after=after))
    return None if row is None else (row["committed_at"], row["since"])


async def pass_over(
    connection: Connection, subscription: Subscription, room: int, before: datetime, now: datetime
) -> tuple[int, bool]:
    """Move up to `room` messages of the log that were committed until `before` to delivery_retry.

    Delayed ones that are not due are moved too, and not counted. Return how many, and whether more of the log may be as
    old. None once its topics or filters have changed.
    """
    given = {"room": room, "before": before, "now": now, "matches_since": subscription.matches_since}
    row = await connection.fetchrow(PASS_OVER, *PASSER.arguments(reader_of(subscription), **given))
    assert row is not None
    return row["passed"], row["more"]


async def lock_waiting(
    connection: Connection, subscription_id: int, before: datetime, at_most: int, *, replays: bool
) -> list[WaitingRow]:
    """Lock up to `at_most` rows that wait since `before` or longer. Needs a database transaction."""
    rows = await connection.fetch(LOCK_WAITING, subscription_id, before, at_most, replays)
    return [WaitingRow(**row) for row in rows]


async def note(connection: Connection, subscription_id: int, excess: int, used: float, *, again: bool) -> None:
    """Note what a count found; `again`: the next one may follow at once."""
    await connection.execute(NOTE, subscription_id, excess, used, again)


async def limits_used(connection: Connection, subscription_ids: Sequence[int]) -> dict[int, float]:
    """Return the share of a limit that the last count found, of the subscriptions that were counted."""
    return {row[0]: row[1] for row in await connection.fetch(USED, subscription_ids)}
