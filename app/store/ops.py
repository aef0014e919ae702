"""Ops: the one recorded verdict of each transaction, and the outbox rows that a commit makes visible."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database import Connection

# One autocommit statement; its parts run in this order:
# 1. `known`: each id looked up in half by primary key, each in its own partition (LATERAL … OFFSET 0), and in the day
#    table, because a day that is being archived takes no more verdicts. `position < 1` and not `= 0`: the latter would
#    let a plan made over an empty day walk through all of half_first_check, which holds position 0 alone.
# 2. `decided`: op rows in id order, so that two flushes never wait for each other; a conflict means somebody else's
#    verdict stands.
# 3. `locked`: the offset lock (7001; 7002 is the migrations', 7003 the days'), only if anything was committed and only
#    after every op row is in (the count forces that; otherwise two flushes could wait for each other's op row and
#    lock). The lock lasts until the commit is visible, so offsets appear in order. clock_timestamp() and not now(): a
#    statement that waited for the lock would date its offsets before those of the one it waited for.
# 4. `sent`: the outbox, by batch order and then position, so a transaction's messages are neighbours.
# A from_check counts as the check's answer only while a check of that transaction is open.
RECORD_ENDS = """
with asked as materialized (
  select * from unnest($1::uuid[], $2::text[], $3::smallint[], $4::smallint[], $5::text[], $6::text[], $7::bool[])
  with ordinality as a(transaction_id, producer_group, verdict, source, actor, reason, from_check, n)
), known as materialized (
  select a.*, h.producer_group as owner,
    case when a.from_check and a.source = 0 and exists (
      select from check_back c where c.transaction_id = a.transaction_id and c.asked > 0
    ) then 1::smallint else a.source end as told_by,
    not exists (
      select from day d where d.low <= a.transaction_id and d.high > a.transaction_id and d.state <> 'open'
    ) as open
  from asked a left join lateral (
    select producer_group from half h where h.transaction_id = a.transaction_id and h.position < 1 offset 0
  ) h on true
), decided as (
  insert into op (transaction_id, verdict, source, actor, reason, decided_at)
  select transaction_id, verdict, told_by, actor, reason, $8
  from known where owner = coalesce(producer_group, owner) and open
  order by transaction_id
  on conflict do nothing
  returning transaction_id, verdict, source, decided_at
), locked as materialized (
  select pg_advisory_xact_lock(7001), clock_timestamp() as at
  from (select count(*) filter (where verdict = 1) as commits from decided) c where c.commits > 0
), sent as (
  insert into outbox (transaction_id, position, "offset", topic, key, tag, due_at, committed_at)
  select transaction_id, position, nextval('outbox_offset'), topic, key, tag,
    at + make_interval(secs => deliver_after_s), at
  from (
    select m.*, l.at
    from locked l, decided d join known k using (transaction_id), lateral (
      select h.transaction_id, h.position, h.topic, h.key, h.tag, h.deliver_after_s
      from half h where h.transaction_id = d.transaction_id offset 0
    ) m
    where d.verdict = 1 order by k.n, m.position
  ) o
  returning transaction_id, position, topic, "offset"
)
select k.transaction_id, k.owner, k.open, d.verdict, d.source, d.decided_at, s.position, s.topic, s."offset"
from known k left join decided d using (transaction_id) left join sent s using (transaction_id)
order by k.n, s.position
"""

# RECORD_ENDS for one end that its owner gives unasked, so that a lone caller does not pay for arrays, for nine
# partitions (with the id as a parameter the plan opens the id's own day alone) and for what only a refusal says: rows
# come back, one for each message or one of nulls, if this end decided, and none if anything was in its way.
RECORD_END = """
with stored as materialized (
  select h.position, h.producer_group, h.topic, h.key, h.tag, h.deliver_after_s
  from half h where h.transaction_id = $1::uuid
), decided as (
  insert into op (transaction_id, verdict, source, actor, reason, decided_at)
  select $1, $3::smallint, $4::smallint, $5::text, $6::text, $7::timestamptz
  from stored s
  where s.position = 0 and s.producer_group = $2::text
    and not exists (select from day d where d.low <= $1 and d.high > $1 and d.state <> 'open')
  on conflict do nothing
  returning verdict
), locked as materialized (
  select pg_advisory_xact_lock(7001), clock_timestamp() as at from decided where verdict = 1
), sent as (
  insert into outbox (transaction_id, position, "offset", topic, key, tag, due_at, committed_at)
  select $1, position, nextval('outbox_offset'), topic, key, tag, at + make_interval(secs => deliver_after_s), at
  from (select s.*, l.at from locked l, stored s order by s.position) o
  returning position, topic, "offset"
)
select b.position, b.topic, b."offset" from decided left join sent b on true
"""

# For ids that RECORD_ENDS did not decide: the verdict that stands, in a second statement because the winner is not in
# the first one's snapshot. Served by the primary keys of op and outbox, one partition each. A refused end leaves one
# `attempt` row (attempt_refused keeps it one), so that the proof can name who tried to flip a verdict.
READ_RECORDED = """
with asked as materialized (
  select * from unnest($1::uuid[], $2::text[], $3::smallint[], $4::smallint[])
  as a(transaction_id, producer_group, verdict, source)
), recorded as materialized (
  select a.transaction_id, a.producer_group, a.verdict as asked_verdict, a.source as asked_source,
    h.producer_group as owner, o.verdict, o.source, o.decided_at
  from asked a left join lateral (
    select verdict, source, decided_at from op o where o.transaction_id = a.transaction_id offset 0
  ) o on true left join lateral (
    select producer_group from half h where h.transaction_id = a.transaction_id and h.position < 1 offset 0
  ) h on true
), refused as (
  insert into attempt (transaction_id, kind, at, outcome, verdict, source, destination)
  select transaction_id, 'refused', $5, 'refused', asked_verdict, asked_source, producer_group
  from recorded
  where verdict is not null and asked_verdict > 0 and verdict <> asked_verdict
    and owner = coalesce(producer_group, owner)
  order by transaction_id
  on conflict do nothing
)
select r.transaction_id, r.owner, r.verdict, r.source, r.decided_at, b.position, b.topic, b."offset"
from recorded r left join lateral (
  select position, topic, "offset" from outbox b where b.transaction_id = r.transaction_id offset 0
) b on true
order by r.transaction_id, b.position
"""


# Not frozen, as nothing else on the way of a request: a frozen dataclass takes four times as long to make.
@dataclass(slots=True)
class End:
    """A verdict that asks to be recorded. `producer_group` None skips the ownership check (checks, policy, people).

    `traceparent` is the context of the request that asks; it is not stored.
    """

    transaction_id: UUID
    producer_group: str | None
    verdict: int
    source: int = 0
    actor: str | None = None
    reason: str | None = None
    from_check: bool = False
    traceparent: str | None = None


@dataclass(slots=True)
class Recorded:
    """What stands about a transaction after an End.

    `owner` None: no such half. `verdict` None: undecided (another group asked, or the day is closed: `open` False).
    `messages` are (position, topic, offset) of a committed one. `fresh`: this End is the one that decided it.
    """

    owner: str | None
    open: bool
    verdict: int | None
    source: int | None
    decided_at: datetime | None
    messages: tuple[tuple[int, str, int], ...]
    fresh: bool


async def record_ends(connection: Connection, ends: Sequence[End], now: datetime) -> dict[UUID, Recorded]:
    """Record verdicts (ids distinct and sorted) and publish what was committed; return what each id got.

    Where `verdict` is None although the owner asked and the day is open, another End won: see `read_recorded`.
    """
    if len(ends) == 1:
        recorded = await _record_end(connection, ends[0], now)
        if recorded is not None:
            return {ends[0].transaction_id: recorded}
        # Anything but the usual: the statement for batches also tells why.
    rows = await connection.fetch(
        RECORD_ENDS,
        [end.transaction_id for end in ends],
        [end.producer_group for end in ends],
        [end.verdict for end in ends],
        [end.source for end in ends],
        [end.actor for end in ends],
        [end.reason for end in ends],
        [end.from_check for end in ends],
        now,
    )
    return _fold((row[0], row[1], row[2], *row[3:], row[3] is not None) for row in rows)


async def _record_end(connection: Connection, end: End, now: datetime) -> Recorded | None:
    """Record an end that its owner gives unasked; None if it is another kind of end, or did not decide."""
    if end.producer_group is None or end.from_check:
        return None
    rows = await connection.fetch(
        RECORD_END,
        end.transaction_id,
        end.producer_group,
        end.verdict,
        end.source,
        end.actor,
        end.reason,
        now,
    )
    if not rows:
        return None
    messages = () if rows[0][0] is None else tuple(sorted((row[0], row[1], row[2]) for row in rows))
    return Recorded(end.producer_group, True, end.verdict, end.source, now, messages, True)


async def read_recorded(connection: Connection, ends: Sequence[End], now: datetime) -> dict[UUID, Recorded]:
    """Return the verdict that stands for each id, and leave a `refused` attempt for ends that contradict it.

    An End with verdict 0 only reads.
    """
    rows = await connection.fetch(
        READ_RECORDED,
        [end.transaction_id for end in ends],
        [end.producer_group for end in ends],
        [end.verdict for end in ends],
        [end.source for end in ends],
        now,
    )
    return _fold((row[0], row[1], True, *row[2:], False) for row in rows)


def _fold(rows: Iterable[tuple[Any, ...]]) -> dict[UUID, Recorded]:
    """Gather rows (one for each message, ordered) into one Recorded for each id."""
    found: dict[UUID, Recorded] = {}
    for transaction_id, owner, is_open, verdict, source, decided_at, position, topic, offset, fresh in rows:
        messages = () if position is None else ((position, topic, offset),)
        before = found.get(transaction_id)
        if before is not None:
            messages = before.messages + messages
        found[transaction_id] = Recorded(owner, is_open, verdict, source, decided_at, messages, fresh)
    return found
