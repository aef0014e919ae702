"""Claiming transactions in doubt: which groups may be asked how much, the leases, and what a check tells of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.database import Connection

# Claims of all replicas take turns, each with a snapshot younger than the claim before it: that is what makes
# `check_window` hold over replicas. A replica that freezes inside its turn is thrown out of it.
TAKE_TURN = "set local idle_in_transaction_session_timeout = '5s'; select pg_advisory_xact_lock(7005)"

# Added to check_timeout_s x URLs: what claiming, signing and settling may take.
LEASE_MARGIN_S = 30
# Nobody is called for a group that is gone, so its window bounds the batch alone.
GONE_GROUP_WINDOW = 100

# 1. `named`: the groups in check_back, one probe of check_back_due each.
# 2. `waiting`: those with something due and not held, and how many of each may be asked now: no more than the window
#    leaves over all replicas (check_back_leased), and in this process an equal part of the room that is left, but in
#    any case up to `reserved`: so groups that hang and hold all the room keep no other group waiting.
# 3. `allotted`: cut to the process's hard limit, the groups with the fewest in flight first.
_ALLOTTED = """
with recursive named as (
  (select producer_group as name from check_back order by producer_group limit 1)
  union all
  select (select c.producer_group from check_back c where c.producer_group > n.name order by c.producer_group limit 1)
  from named n where n.name is not null
), waiting as (
  select n.name, coalesce(m.mine, 0) as mine,
    coalesce(g.check_timeout_s * cardinality(g.check_urls), 0) + $8::int as lease_s,
    case when g.name is null or g.deleted_at is not null then $7::int else g.check_window end - l.leased as open,
    ceil(greatest($4::int, 0)::float8 / count(*) over ()) as part
  from named n
  cross join lateral (
    select from check_back c
    where c.producer_group = n.name and c.next_check_at <= $1 and (c.leased_until is null or c.leased_until <= $1)
    order by c.next_check_at limit 1
  ) due
  cross join lateral (
    select count(*) as leased from check_back c where c.producer_group = n.name and c.leased_until > $1
  ) l
  left join producer_group g on g.name = n.name
  left join unnest($2::text[], $3::int[]) as m(name, mine) on m.name = n.name
  where n.name is not null and (g.held_until is null or g.held_until <= $1)
), ranked as (
  select name, lease_s, least(open, greatest($5::int - mine, part)) as free, mine, random() as lot from waiting
), allotted as (
  select name, lease_s, least(free, $6::int - coalesce(before, 0))::int as free from (
    select name, lease_s, free, sum(free) over (
      order by mine, lot rows between unbounded preceding and 1 preceding
    ) as before
    from ranked where free > 0
  ) r where coalesce(before, 0) < $6::int
)
"""

ANY_DUE = f"{_ALLOTTED} select exists (select from allotted)"  # noqa: S608

# Row locks are skipped, never waited for. What has an op is removed: its verdict stands, whoever gave it.
CLAIM = f"""{_ALLOTTED}, picked as materialized (
  select d.transaction_id, coalesce(o.decided, false) as decided
  from allotted a cross join lateral (
    select c.transaction_id from check_back c
    where c.producer_group = a.name and c.next_check_at <= $1 and (c.leased_until is null or c.leased_until <= $1)
    order by c.next_check_at limit a.free
    for update skip locked
  ) d left join lateral (
    select true as decided from op o where o.transaction_id = d.transaction_id offset 0
  ) o on true
), removed as (
  delete from check_back where transaction_id = any (array(select transaction_id from picked where decided))
), taken as (
  update check_back c
  set asked = c.asked + 1, lease_epoch = c.lease_epoch + 1, leased_until = $1 + make_interval(secs => a.lease_s)
  from allotted a
  where a.name = c.producer_group
    and c.transaction_id = any (array(select transaction_id from picked where not decided))
  returning c.transaction_id, c.producer_group, c.state, c.asked, c.answered, c.unanswered, c.unanswered_since,
    c.lease_epoch
)
select p.transaction_id, t.producer_group, t.state, t.asked, t.answered, t.unanswered, t.unanswered_since,
  t.lease_epoch
from picked p left join taken t using (transaction_id)
"""  # noqa: S608

# Primary key.
GROUPS = """
select name, check_urls, interval_s, max_checks, on_exhausted, unanswered_park_s, check_timeout_s,
  check_max_in_flight, check_window, secrets, deleted_at
from producer_group where name = any($1)
"""

# Primary key of half, one partition each (LATERAL ... OFFSET 0). Bodies are read only where the policy wants them sent.
MESSAGES = """
select a.transaction_id, f.born_at, f.context, f.policy, f.traceparent, m.position, m.topic, m.key, m.tag, m.headers,
  m.content_type, m.body
from unnest($1::uuid[]) as a(transaction_id)
cross join lateral (
  select born_at, context, policy, traceparent from half h
  where h.transaction_id = a.transaction_id and h.position < 1 offset 0
) f
cross join lateral (
  select position, topic, key, tag, headers, content_type,
    case when (f.policy ->> 'include_body')::boolean then body end as body
  from half h where h.transaction_id = a.transaction_id order by position offset 0
) m
"""


@dataclass(frozen=True, slots=True)
class Room:
    """What one process can take: `mine` in flight by group, `left` of its budget, `reserved` for each group beyond
    it, and `hard`, the most it takes now whatever is reserved."""

    mine: Mapping[str, int]
    left: int
    reserved: int
    hard: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased transaction: ours while `epoch` is what its row says. `number` is this check's, from 1."""

    transaction_id: UUID
    producer_group: str
    state: int
    number: int
    answered: int
    unanswered: int
    unanswered_since: datetime | None
    epoch: int


@dataclass(frozen=True, slots=True)
class AskedGroup:
    """What asking needs of a group; `secrets` is JSON text. `deleted_at` set: nobody is called."""

    name: str
    check_urls: list[str]
    interval_s: int
    max_checks: int
    on_exhausted: str
    unanswered_park_s: int
    check_timeout_s: int
    check_max_in_flight: int
    check_window: int
    secrets: str
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """One message of a claimed transaction, and what stands at its first: `context` and `policy` are JSON text."""

    transaction_id: UUID
    born_at: datetime
    context: str | None
    policy: str | None
    traceparent: str | None
    position: int
    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    body: bytes | None


async def any_due(connection: Connection, room: Room, now: datetime) -> bool:
    """Tell whether a claim would find anything; takes no lock."""
    found: bool = await connection.fetchval(ANY_DUE, *_arguments(room, now))
    return found


async def take_turn(connection: Connection) -> None:
    """Wait for this replica's turn to claim, which lasts as long as the database transaction."""
    await connection.execute(TAKE_TURN)


async def claim(connection: Connection, room: Room, now: datetime) -> tuple[list[Claim], int]:
    """Lease what is due, fairly over groups; return the claims, and how many rows were removed as decided.

    Needs the turn (`take_turn`), or groups may be asked more at once than their window.
    """
    rows = await connection.fetch(CLAIM, *_arguments(room, now))
    claims = [Claim(*row) for row in rows if row["lease_epoch"] is not None]
    return claims, len(rows) - len(claims)


async def asked_groups(connection: Connection, names: Sequence[str]) -> dict[str, AskedGroup]:
    """Return the groups by name, tombstones among them."""
    return {row["name"]: AskedGroup(*row) for row in await connection.fetch(GROUPS, names)}


async def asked_messages(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, list[AskedMessage]]:
    """Return the messages of each transaction by position; an id whose day is gone is not in it."""
    found: dict[UUID, list[AskedMessage]] = {}
    for row in await connection.fetch(MESSAGES, ids):
        found.setdefault(row[0], []).append(AskedMessage(*row))
    return found


def _arguments(room: Room, now: datetime) -> tuple[object, ...]:
    names = list(room.mine)
    counts = [room.mine[name] for name in names]
    return now, names, counts, room.left, room.reserved, room.hard, GONE_GROUP_WINDOW, LEASE_MARGIN_S
