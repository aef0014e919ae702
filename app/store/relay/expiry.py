"""SQL that finds the messages that wait for a subscription: rows of delivery_retry, and how many the log holds."""

from dataclasses import dataclass
from datetime import datetime

from app.database.columns import Column, Parameters
from app.database.connection import Connection
from app.store.relay.checkpoints import Shard
from app.store.relay.leases import Lease
from app.store.relay.log import HASH, OF_READER, Outgoing, Reader, matches
from app.store.relay.retries import FREE, OPEN

# How many log entries one count reads.
SPAN = 20_000

# A row that an older version of Halfnote wrote has no `waiting_since`; its due time moves with each try.
SINCE = "coalesce(d.waiting_since, d.due_at)"
_OF_SHARD = f"""d.subscription_id = $1 and d.replay = $2
    and ($3::int = 1 or {HASH.format("d")} % $3 = $4::int)"""

# Served by delivery_retry_waiting, up to the limit. A delayed message that is not due has a later time.
WAITING = f"""
select min(w.since) as oldest_at, count(*)::int as waiting from (
  select {SINCE} as since from delivery_retry d
  where {_OF_SHARD} and {SINCE} <= $5 order by {SINCE} limit $6
) w
"""  # noqa: S608 -- constants

# Claim the rows that wait since $5 or longer, oldest first, as CLAIM_RETRIES claims those that are due: by the epoch of
# the row, so that no other worker settles it, and under the lease, which `held` locks. Due times and the order of keys
# do not matter, because nothing is sent. Served by delivery_retry_waiting; the message itself is not read.
CLAIM_WAITING = f"""
with held as materialized (
  select 1 from lease where name = $9 and owner = $10 and epoch = $11 for share
), old as materialized (
  select d.ctid as at from held cross join lateral (
    select d.ctid from delivery_retry d
    where {_OF_SHARD} and {SINCE} <= $5 and {FREE.format("d", "$8")} and {OPEN.format("d")}
    order by {SINCE} limit $6 for update skip locked
  ) d
), claimed as (
  update delivery_retry r set leased_until = $7, lease_epoch = r.lease_epoch + 1
  where r.ctid = any(array(select at from old)) and {FREE.format("r", "$8")}
  returning r.*
)
select d."offset", d.transaction_id, d.position, d.topic, d.key, {SINCE} as since, d.attempts, d.first_at,
  d.lease_epoch, d.last_error
from claimed d order by d."offset"
"""  # noqa: S608 -- constants

# The parameters of MATCHING_AHEAD: the reader's, the offset `after` which it counts, and the time, if it matters.
COUNTER = Parameters(Column("after", "bigint", given=True), Column("now", "timestamptz", given=True), *OF_READER)

# How many of the next log entries the reader takes, as WINDOW decides it. With a time, delayed messages that are not
# due then do not wait. Served by outbox_by_offset; half by primary key, only if the route has headers; up to
# `settled_to` the primary keys of receipt, delivery_retry and dead_letter.
MATCHING_AHEAD = f"""
with span as materialized (
  select o."offset", o.transaction_id, o.position, o.topic, o.key, o.tag, o.due_at
  from outbox o where o."offset" > {COUNTER["after"]} order by o."offset" limit {SPAN}
)
select (select count(*) from span s where {matches(COUNTER)} and not coalesce(s.due_at > {COUNTER["now"]}, false))::int
  as taken, max("offset") as reached, count(*) >= {SPAN} as more
from span
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class WaitingRetries:
    """The rows of delivery_retry that wait: how many, up to a limit, and since when the oldest does."""

    oldest_at: datetime | None
    waiting: int


@dataclass(frozen=True, slots=True)
class AheadCount:
    """How many messages of a part of the log wait.

    `reached`: the last offset of the part, None if nothing follows. `more`: whether another part may follow.
    """

    taken: int
    reached: int | None
    more: bool


async def waiting_retries(connection: Connection, shard: Shard, at_most: int, now: datetime) -> WaitingRetries:
    """Count a shard's retries that wait, up to `at_most`; a delayed message waits from its due time."""
    row = await connection.fetchrow(WAITING, *_of(shard), now, at_most)
    assert row is not None
    return WaitingRetries(row["oldest_at"], row["waiting"])


async def claim_waiting(
    connection: Connection, lease: Lease, shard: Shard, before: datetime, at_most: int, until: datetime, now: datetime
) -> list[tuple[Outgoing, str | None]]:
    """Claim up to `at_most` of a shard's retries that have waited since `before` or longer, until `until`.

    Return them without their bodies, in the order of offsets, each with its last error; none if the lease is lost.
    """
    of_lease = lease.name, lease.owner, lease.epoch
    rows = await connection.fetch(CLAIM_WAITING, *_of(shard), before, at_most, until, now, *of_lease)
    return [
        (
            Outgoing(
                offset=row["offset"],
                transaction_id=row["transaction_id"],
                position=row["position"],
                topic=row["topic"],
                key=row["key"],
                tag=None,
                due_at=None,
                committed_at=row["since"],
                producer_group="",
                headers=None,
                content_type="",
                body=b"",
                used=row["attempts"],
                first_at=row["first_at"],
                claim=row["lease_epoch"],
                waiting_since=row["since"],
            ),
            row["last_error"],
        )
        for row in rows
    ]


async def matching_ahead(connection: Connection, reader: Reader, after: int, now: datetime | None) -> AheadCount:
    """Count the reader's messages that wait in the next part of the log after an offset.

    With `now` delayed ones wait only once they are due.
    """
    row = await connection.fetchrow(MATCHING_AHEAD, *COUNTER.arguments(reader, after=after, now=now))
    assert row is not None
    return AheadCount(**row)


def _of(shard: Shard) -> tuple[int, int, int, int]:
    return shard.subscription_id, shard.replay, shard.divided_by, shard.remainder
