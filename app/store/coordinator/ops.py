"""SQL of Ops: the recorded verdict of each transaction, and the outbox rows that a commit publishes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct

from app.database.advisory_locks import AdvisoryLock
from app.database.columns import Column, RowArrays, same, selected
from app.database.connection import Connection
from app.database.standby_wait import CONFIRMED
from app.verdicts import SOURCE_OF, VERDICT_OF, CheckOutcome, Source, Verdict

ENDS = RowArrays(
    Column("transaction_id", "uuid"),
    Column("producer_group", "text"),
    Column("verdict", "smallint"),
    Column("source", "smallint"),
    Column("actor", "text"),
    Column("reason", "text"),
    Column("from_check", "bool"),
)
CHECKS = RowArrays(
    Column("transaction_id", "uuid"),
    Column("number", "int"),
    Column("at", "timestamptz"),
    Column("outcome", "text"),
    Column("verdict", "smallint"),
    Column("url", "text"),
    Column("status", "int"),
    Column("duration_ms", "int"),
    Column("error", "text"),
    Column("response", "text"),
    first=ENDS.next + 1,
)
READS = RowArrays(
    Column("transaction_id", "uuid"),
    Column("producer_group", "text"),
    Column("verdict", "smallint"),
    Column("source", "smallint"),
)
_RECORDED_AT, _READ_AT = f"${ENDS.next}::timestamptz", f"${READS.next}::timestamptz"

ON_CONFLICT = "on conflict do nothing"
# The columns of a row of RECORD_ENDS and READ_RECORDED, in the order in which `_fold` unpacks it.
FOUND = (
    *("transaction_id", "owner", "open", "half_traceparent", "verdict", "source", "decided_at"),
    *("position", "topic", "offset", "committed_at"),
)


def _found(values: Mapping[str, str]) -> str:
    return selected({name: values[name] for name in FOUND})


# One autocommit statement. Its parts run in this order:
# 1. `known` looks up each id in half by primary key, each in its own partition (LATERAL … OFFSET 0). It has a row for
#    each message, so that the messages of a commit need no second look-up. A day that is being archived takes no more
#    verdicts: `closed` has such days between the first and the last id, which almost always are none.
# 2. `decided` inserts op rows in id order, so two flushes never deadlock. A conflict means that another verdict is
#    recorded.
# 3. `locked` takes the offset lock, only if anything was committed and only after every op row is in. The count forces
#    that order; otherwise two flushes could wait for each other's op row and lock. The lock lasts until the commit is
#    visible, so offsets appear in order. clock_timestamp() and not now(): a statement that waited for the lock would
#    date its offsets before those of the statement that had it.
# 4. `sent` fills the outbox by batch order and then position, so a transaction's messages have consecutive offsets.
#
# `decided_at` of what it decides is a parameter, so it is not returned: a time takes as long to decode as five numbers.
#
# Without `on_conflict` the statement takes a seventh less time, and a conflict fails it: nothing of it is recorded.
def _record_ends(decided_by: str, checks: str = "", answered: str = "", on_conflict: str = ON_CONFLICT) -> str:
    return f"""
with asked as materialized (
  select * from {ENDS.unnest("a", ordinality="n")}
), closed as materialized (
  select low, high from day
  where high > ($1::uuid[])[1] and low <= ($1::uuid[])[cardinality($1::uuid[])] and state <> 'open'
), known as materialized (
  select a.*, h.producer_group as owner, h.traceparent as half_traceparent, {decided_by}, h.position, h.topic, h.key,
    h.tag, h.deliver_after_s,
    not exists (select from closed d where d.low <= a.transaction_id and d.high > a.transaction_id) as open
  from asked a left join lateral (
    select producer_group, traceparent, position, topic, key, tag, deliver_after_s from half h
    where h.transaction_id = a.transaction_id offset 0
  ) h on true {checks}
), decided as (
  insert into op (transaction_id, verdict, source, actor, reason, decided_at)
  select transaction_id, verdict, decided_by, actor, reason, {_RECORDED_AT}
  from known where position = 0 and owner = coalesce(producer_group, owner) and open
  order by transaction_id
  {on_conflict}
  returning transaction_id, verdict, source, decided_at
), locked as materialized (
  select pg_advisory_xact_lock({AdvisoryLock.OFFSET}), clock_timestamp() as at
  from (select count(*) filter (where verdict = 1) as commits from decided) c where c.commits > 0
), sent as (
  insert into outbox (transaction_id, position, "offset", topic, key, tag, due_at, committed_at)
  select transaction_id, position, nextval('outbox_offset'), topic, key, tag,
    at + make_interval(secs => deliver_after_s), at
  from (
    select k.transaction_id, k.position, k.topic, k.key, k.tag, k.deliver_after_s, l.at
    from locked l, decided d join known k using (transaction_id)
    where d.verdict = 1 order by k.n, k.position
  ) o
  returning transaction_id, position, topic, "offset", committed_at
){answered}
select {
        _found(
            same("transaction_id", "owner", "open", "half_traceparent", of="k")
            | same("verdict", "source", of="d")
            | {"decided_at": "null::timestamptz"}
            | same("position", "topic", "offset", "committed_at", of="s")
        )
    }
from known k left join decided d using (transaction_id) left join sent s using (transaction_id, position)
where s.position is not null or coalesce(k.position, 0) = 0
"""  # noqa: S608 -- constants


RECORD_ENDS = _record_ends("a.source as decided_by")
RECORD_FIRST_ENDS = _record_ends("a.source as decided_by", on_conflict="")

# RECORD_ENDS for a batch in which any end is of a check. A from_check counts as the check's answer only while a check
# of that transaction is open. The statement also writes the attempts of the checks whose ends decided, so no crash can
# leave a verdict of a check, or of the policy after its last check, without its evidence. An answer by `/end` has no
# URL. Batches of producers' ends, which are almost all, take the statement without this.
RECORD_ENDS_OF_CHECKS = _record_ends(
    "case when a.from_check and a.source = 0 and c.asked > 0 then 1::smallint else a.source end as decided_by, c.asked",
    """left join lateral (
    select asked from check_back c where c.transaction_id = a.transaction_id offset 0
  ) c on true""",
    f""", answered as (
  insert into attempt (transaction_id, kind, at, number, outcome, verdict, source, destination, status, duration_ms,
    error, response)
  select d.transaction_id, 'check', coalesce(c.at, d.decided_at), coalesce(c.number, k.asked),
    coalesce(c.outcome, case d.verdict when 1 then 'commit' else 'rollback' end),
    case when c.transaction_id is null then d.verdict else c.verdict end, 1, c.url, c.status, c.duration_ms, c.error,
    c.response
  from decided d join known k using (transaction_id) left join {CHECKS.unnest("c")} using (transaction_id)
  where k.position = 0 and (c.transaction_id is not null or (k.source = 0 and d.source = 1))
  order by d.transaction_id
)""",  # noqa: S608 -- constants
)


# RECORD_ENDS for one end whose group is given and that is not from a check. It returns a row for each message, or one
# row of nulls, if this end decided; and no row if anything prevented that. It is faster for one caller: it needs no
# arrays, the planner opens only the id's own day because the id is a parameter, and a refusal's details are left out.
# Its parameters are in the order of `_record_end`: generated arguments take several times as long.
def _record_end(on_conflict: str = ON_CONFLICT) -> str:
    return f"""
with stored as materialized (
  select h.position, h.producer_group, h.topic, h.key, h.tag, h.deliver_after_s, h.traceparent
  from half h where h.transaction_id = $1::uuid
), decided as (
  insert into op (transaction_id, verdict, source, actor, reason, decided_at)
  select $1, $3::smallint, $4::smallint, $5::text, $6::text, $7::timestamptz
  from stored s
  where s.position = 0 and s.producer_group = $2::text
    and not exists (select from day d where d.low <= $1 and d.high > $1 and d.state <> 'open')
  {on_conflict}
  returning verdict
), locked as materialized (
  select pg_advisory_xact_lock({AdvisoryLock.OFFSET}), clock_timestamp() as at from decided where verdict = 1
), sent as (
  insert into outbox (transaction_id, position, "offset", topic, key, tag, due_at, committed_at)
  select $1, position, nextval('outbox_offset'), topic, key, tag, at + make_interval(secs => deliver_after_s), at
  from (select s.*, l.at from locked l, stored s order by s.position) o
  returning position, topic, "offset", committed_at
)
select b.position, b.topic, b."offset", b.committed_at,
  (select traceparent from stored where position = 0) as half_traceparent
from decided left join sent b on true
"""  # noqa: S608 -- constants


RECORD_END = _record_end()
RECORD_FIRST_END = _record_end("")

# For ids that RECORD_ENDS did not decide: the recorded verdict. It is a second statement because the winner of a race
# is not in the snapshot of the first. Served by the primary keys of op and outbox, one partition each. A refused end
# leaves one `attempt` row (attempt_refused keeps it one), so the proof can name the source that contradicted a verdict.
# A day that is not open takes none: upkeep has counted its rows, and compares them with the archive.
READ_RECORDED = f"""
with {CONFIRMED}, asked as materialized (
  select * from {READS.unnest("a")}
), recorded as materialized (
  select a.transaction_id, a.producer_group, a.verdict as asked_verdict, a.source as asked_source,
    h.producer_group as owner, h.traceparent as half_traceparent, o.verdict, o.source, o.decided_at
  from asked a left join lateral (
    select verdict, source, decided_at from op o where o.transaction_id = a.transaction_id offset 0
  ) o on true left join lateral (
    select producer_group, traceparent from half h
    where h.transaction_id = a.transaction_id and h.position < 1 offset 0
  ) h on true
), refused as (
  insert into attempt (transaction_id, kind, at, outcome, verdict, source, destination)
  select transaction_id, 'refused', {_READ_AT}, 'refused', asked_verdict, asked_source, producer_group
  from recorded
  where verdict is not null and asked_verdict > 0 and verdict <> asked_verdict
    and owner = coalesce(producer_group, owner)
    and exists (select from day d where d.low <= transaction_id and d.high > transaction_id and d.state = 'open')
  order by transaction_id
  on conflict do nothing
)
select {
    _found(
        same("transaction_id", "owner", "half_traceparent", "verdict", "source", "decided_at", of="r")
        | {"open": "true"}
        | same("position", "topic", "offset", "committed_at", of="b")
    )
}
from confirmed cross join recorded r left join lateral (
  select position, topic, "offset", committed_at from outbox b where b.transaction_id = r.transaction_id offset 0
) b on true
order by r.transaction_id, b.position
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class AnsweredCheck:
    """An answered check that leads to a verdict; `verdict` None: it was `unknown`, and policy decides."""

    transaction_id: UUID
    number: int
    at: datetime
    outcome: CheckOutcome
    verdict: Verdict | None
    url: str | None
    status: int | None
    duration_ms: int | None
    error: str | None
    response: str | None


# Structs, like all objects of a request: a dataclass takes two to four times as long to create.
class End(Struct, gc=False):
    """A verdict to record. With `verdict` None, `read_recorded` only reads the recorded one.

    `producer_group` None skips the ownership check (checks, policy, people). `traceparent` is the context of the
    request; it is not stored. `check`: the check that leads to it; if this End decides, its attempt is written with it.
    """

    transaction_id: UUID
    producer_group: str | None
    verdict: Verdict | None
    source: Source = Source.PRODUCER
    actor: str | None = None
    reason: str | None = None
    from_check: bool = False
    traceparent: str | None = None
    check: AnsweredCheck | None = None


class RecordedMessage(Struct, order=True, gc=False):
    """A message of a committed transaction, as the outbox has it."""

    position: int
    topic: str
    offset: int
    committed_at: datetime


class Recorded(Struct, gc=False):
    """The state of a transaction after an End.

    `owner`: its producer group; None if there is no such half. `verdict` None: undecided, because the End was another
    group's or the day is not open (`open` False). `messages`: those of a committed transaction, by position. `fresh`:
    this End decided it. `half_traceparent`: the trace context that is stored with its half, None if there is none.
    """

    owner: str | None
    open: bool
    verdict: Verdict | None
    source: Source | None
    decided_at: datetime | None
    messages: tuple[RecordedMessage, ...]
    fresh: bool
    half_traceparent: str | None = None


async def record_ends(
    connection: Connection, ends: Sequence[End], now: datetime, *, are_first: bool = False
) -> list[Recorded]:
    """Record verdicts (ids distinct and sorted) and publish committed messages; return the result of each, in order.

    If `verdict` is None although the End was the owner's and the day is open, another End decided the transaction:
    `read_recorded` returns its verdict. With `are_first` the verdicts are recorded faster, but one of a transaction
    that another End decided raises asyncpg.UniqueViolationError, and none is recorded.
    """
    if len(ends) == 1:
        recorded = await _record_one(connection, ends[0], now, are_first)
        if recorded is not None:
            return [recorded]
        # It did not decide. The statement for batches returns the reason.
    return await record_batch(connection, ends, now, are_first=are_first)


async def record_batch(
    connection: Connection, ends: Sequence[End], now: datetime, *, are_first: bool = False
) -> list[Recorded]:
    """Record verdicts as `record_ends` does, always by a statement for batches."""
    if any(end.from_check or end.check is not None for end in ends):
        checks = [end.check for end in ends if end.check is not None]
        rows = await connection.fetch(RECORD_ENDS_OF_CHECKS, *ENDS.arrays(ends), now, *CHECKS.arrays(checks))
    else:
        statement = RECORD_FIRST_ENDS if are_first else RECORD_ENDS
        rows = await connection.fetch(statement, *ENDS.arrays(ends), now)
    found = _fold(rows, now)
    return [found[end.transaction_id.int] for end in ends]


async def _record_one(connection: Connection, end: End, now: datetime, is_first: bool) -> Recorded | None:
    """Record an end of a given group that is not from a check; None for other ends, and if it did not decide."""
    if end.producer_group is None or end.from_check:
        return None
    rows = await connection.fetch(
        RECORD_FIRST_END if is_first else RECORD_END,
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
    messages = () if rows[0][0] is None else tuple(sorted([RecordedMessage(*row[:4]) for row in rows]))
    return Recorded(end.producer_group, True, end.verdict, end.source, now, messages, True, rows[0][4])


async def read_recorded(connection: Connection, ends: Sequence[End], now: datetime) -> dict[UUID, Recorded]:
    """Return the recorded verdict of each id, and write a `refused` attempt for each End that contradicts it.

    An End without a verdict only reads.
    """
    found = _fold(await connection.fetch(READ_RECORDED, *READS.arrays(ends), now), None)
    return {end.transaction_id: found[end.transaction_id.int] for end in ends if end.transaction_id.int in found}


def _fold(rows: Iterable[Any], decided_at: datetime | None) -> dict[int, Recorded]:
    """Gather FOUND rows (one for each message) into one Recorded for each id, by its number.

    By number, because a UUID is hashed and compared in Python. `decided_at`: when the statement that returned the rows
    recorded their verdicts; None: the verdicts were recorded before.
    """
    found: dict[int, Recorded] = {}
    several: set[int] = set()
    for transaction_id, owner, is_open, half_trace, verdict, source, stored_at, position, topic, offset, at in rows:
        messages = () if position is None else (RecordedMessage(position, topic, offset, at),)
        number = transaction_id.int
        before = found.get(number)
        if before is not None:
            before.messages += messages
            several.add(number)
            continue
        fresh = decided_at is not None and verdict is not None
        when = decided_at if fresh else stored_at
        found[number] = Recorded(
            owner, is_open, VERDICT_OF[verdict], SOURCE_OF[source], when, messages, fresh, half_trace
        )
    for number in several:
        # The statements return them in any order.
        found[number].messages = tuple(sorted(found[number].messages))
    return found
