"""Store the audit: one row per action of a person, in the same database transaction as the change, if there is one."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database.connection import Connection

# What the digest of a row covers after its place and the digest before it, as the trigger writes it: a JSON array, of
# which the first bracket is left out. Served by audit_place.
CHAINED = """
select a.place, encode(a.digest, 'hex') as digest, substr(jsonb_build_array(a.audit_id,
  to_char(a.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), a.actor, a.key_id, a.role, a.what, a.target,
  a.detail)::text, 2) as content
from audit a where a.place > $1 order by a.place limit $2
"""

# The number of rows without a place is counted over the whole table, which is small.
ENDS = """
select c.place, encode(c.digest, 'hex') as digest, c.forgotten_place, encode(c.forgotten_digest, 'hex')
  as forgotten_digest, (select count(*) from audit a where a.place is null and a.audit_id > (
    select min(f.audit_id) from audit f where f.place is not null
  )) as unchained
from (select) one left join audit_chain c on true
"""

HIGHEST = (1 << 63) - 1
FORGOTTEN_AT_ONCE = 10_000

# The order of the rows is that of the arrays.
ADD = """
insert into audit (at, actor, key_id, role, what, target, detail)
select $1, a.actor, a.key_id, a.role, a.what, a.target, a.detail::jsonb
from unnest($2::text[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[])
  with ordinality a (actor, key_id, role, what, target, detail, place)
order by a.place
"""

# Newest first: served by the primary key, or by audit_target if a target is given. Other filters read the whole table,
# which is small.
MATCHING = """from audit
where audit_id < $1 and audit_id > $2 and ($3::text is null or target = $3) and ($4::text is null or actor = $4)
  and ($5::int is null or key_id = $5) and ($6::text is null or what = $6)
  and ($7::timestamptz is null or at >= $7) and ($8::timestamptz is null or at < $8)"""
PAGE, OLDEST_PAGE = (
    f"select audit_id, at, actor, key_id, role, what, target, detail {MATCHING} order by audit_id {order} limit $9"
    for order in ("desc", "asc")
)
COUNT = f"select count(*) from (select {MATCHING} limit $9) a"  # noqa: S608

# Rows from before there was a chain, and then the first ones of the chain, up to the first that is kept. The last one
# of them is noted, so that the nightly proof knows where the chain begins. Served by audit_place.
FORGET = f"""
with kept as materialized (
  select min(place) as place from audit where at >= $1
), gone as (
  delete from audit where ctid = any(array(
    select a.ctid from audit a cross join kept k
    where a.at < $1 and (a.place is null or a.place < k.place or k.place is null)
    order by a.place nulls first limit {FORGOTTEN_AT_ONCE}
  ))
  returning place, digest
), noted as (
  update audit_chain set forgotten_place = g.place, forgotten_digest = g.digest
  from (select place, digest from gone where place is not null order by place desc limit 1) g
)
select count(*) from gone
"""  # noqa: S608 -- a number of ours


NOTE_SINCE = """
insert into evidence_since as e (name, at) values ('audit', $1)
on conflict (name) do update set at = excluded.at where e.at < excluded.at
"""


@dataclass(frozen=True, slots=True)
class Act:
    """An action: `what` such as `subscription.pause`, `target` a name or id, `detail` without bodies and secrets."""

    what: str
    target: str | None
    detail: dict[str, Any]
    actor: str | None = None
    key_id: int | None = None
    role: str | None = None


@dataclass(frozen=True, slots=True)
class StoredAct:
    """A stored action; `detail` is JSON text."""

    audit_id: int
    at: datetime
    actor: str | None
    key_id: int | None
    role: str | None
    what: str
    target: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class ChainedAct:
    """A row of the audit in its chain. `content`: the text that its digest covers, without its beginning."""

    place: int
    digest: str
    content: str


@dataclass(frozen=True, slots=True)
class ChainEnds:
    """The last row of the chain, and the last one that was removed because of its age; None: the table has no row.

    `unchained`: how many rows have no place, although they are later than the first that has one.
    """

    place: int | None
    digest: str | None
    forgotten_place: int | None
    forgotten_digest: str | None
    unchained: int


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """A filter of actions; all given fields must match. Ids are between `above` and `below`."""

    below: int = HIGHEST
    above: int = 0
    target: str | None = None
    actor: str | None = None
    key_id: int | None = None
    what: str | None = None
    after: datetime | None = None
    before: datetime | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments $1…$8 of the statements."""
        return astuple(self)


async def record(connection: Connection, act: Act, now: datetime) -> None:
    """Store an action."""
    await record_all(connection, [act], now)


async def record_all(connection: Connection, acts: Sequence[Act], now: datetime) -> None:
    """Store actions, in their order."""
    await connection.execute(
        ADD,
        now,
        [act.actor for act in acts],
        [act.key_id for act in acts],
        [act.role for act in acts],
        [act.what for act in acts],
        [act.target for act in acts],
        [msgspec.json.encode(act.detail).decode() for act in acts],
    )


async def page(
    connection: Connection, wanted: AuditFilter, limit: int, *, oldest_first: bool = False
) -> list[StoredAct]:
    """Return actions, newest first or oldest first."""
    rows = await connection.fetch(OLDEST_PAGE if oldest_first else PAGE, *wanted.arguments, limit)
    return [StoredAct(**row) for row in rows]


async def count_acts(connection: Connection, wanted: AuditFilter, most: int) -> int:
    """Return how many actions match, up to `most`."""
    count: int = await connection.fetchval(COUNT, *wanted.arguments, most)
    return count


async def chained(connection: Connection, after: int, limit: int) -> list[ChainedAct]:
    """Return the rows of the chain after a place, oldest first."""
    return [ChainedAct(**row) for row in await connection.fetch(CHAINED, after, limit)]


async def chain_ends(connection: Connection) -> ChainEnds:
    """Return both ends of the chain."""
    row = await connection.fetchrow(ENDS)
    assert row is not None
    return ChainEnds(**row)


async def note_since(connection: Connection, since: datetime) -> None:
    """Note that actions from before a time may be deleted, for the nightly proof. The time only grows."""
    await connection.execute(NOTE_SINCE, since)


async def forget(connection: Connection, before: datetime) -> int:
    """Delete up to FORGOTTEN_AT_ONCE actions before a time; return how many."""
    count: int = await connection.fetchval(FORGET, before)
    return count
