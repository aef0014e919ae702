"""SQL that claims transactions in doubt: how many per group, their leases, and the columns that a check needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection
from app.verdicts import CheckBackState, Checks, OnExhausted

# Replicas claim one at a time. The snapshot of each claim shows the previous claims, so that `check_window` holds over
# all replicas. A replica that hangs during its turn loses the turn after 5 s.
TAKE_TURN = f"""
set local idle_in_transaction_session_timeout = '5s'; select pg_advisory_xact_lock({AdvisoryLock.CHECK_CLAIMS})
"""

# A settle, and a producer's handle, name the epoch of their lease. A database that went back, as when a standby that
# was behind is promoted, gives the next number again, and then the holder of a lost lease would settle or answer the
# check that another one has. So the epoch of a claim rises by a number drawn at random.
CHANCE = f"chance as materialized (select 1 + floor(random() * {2**32})::bigint as by)"
BY_CHANCE = "(select by from chance)"

# Added to check_timeout_s x URLs: the time for claiming, signing and settling.
LEASE_MARGIN_S = 30
# No URL is called for a deleted group, so its window only limits the size of the batch.
GONE_GROUP_WINDOW = 100

# Where producers may claim checks, a URL is called only for a check that none of them took for this long, so that the
# producers that wait for checks come first.
CLAIMERS_FIRST_S = 2
# A check that a producer claimed and did not answer is settled before it is asked again (claim_loops.py).
_NOT_CLAIMED = "c.claimed_epoch is distinct from c.lease_epoch"

# 1. `named`: the groups in check_back, with one probe of check_back_due per group.
# 2. `waiting`: the groups that have a due row and are not held, and how many checks each may start now. Over all
#    replicas (check_back_leased), the group's window is the limit; checks that producers claimed do not count. In this
#    process, each group gets an equal share of the remaining capacity, but always up to `reserved`, so that groups
#    whose endpoints hang do not block the others.
# 3. `allotted`: cut to the hard limit of the process; groups with the fewest checks in flight come first.
_ALLOTTED = f"""
with recursive named as (
  (select producer_group as name from check_back order by producer_group limit 1)
  union all
  select (select c.producer_group from check_back c where c.producer_group > n.name order by c.producer_group limit 1)
  from named n where n.name is not null
), waiting as (
  select n.name, coalesce(m.mine, 0) as mine,
    coalesce(g.check_timeout_s * cardinality(g.check_urls), 0) + $8::int as lease_s, due_by,
    case when g.name is null or g.deleted_at is not null then $7::int else g.check_window end - l.leased as open,
    ceil(greatest($4::int, 0)::float8 / count(*) over ()) as share
  from named n
  left join producer_group g on g.name = n.name
  cross join lateral (
    select case when g.checks = 'claim' then $1::timestamptz - interval '{CLAIMERS_FIRST_S} s' else $1 end as due_by
  ) b
  cross join lateral (
    select from check_back c
    where c.producer_group = n.name and c.next_check_at <= due_by and (c.leased_until is null or c.leased_until <= $1)
      and {_NOT_CLAIMED}
    order by c.next_check_at limit 1
  ) due
  cross join lateral (
    select count(*) as leased from check_back c
    where c.producer_group = n.name and c.leased_until > $1 and {_NOT_CLAIMED}
  ) l
  left join unnest($2::text[], $3::int[]) as m(name, mine) on m.name = n.name
  where n.name is not null and (g.held_until is null or g.held_until <= $1)
), ranked as (
  select name, lease_s, due_by, least(open, greatest($5::int - mine, share)) as free, mine, random() as lot
  from waiting
), allotted as (
  select name, lease_s, due_by, least(free, $6::int - coalesce(before, 0))::int as free from (
    select name, lease_s, due_by, free, sum(free) over (
      order by mine, lot rows between unbounded preceding and 1 preceding
    ) as before
    from ranked where free > 0
  ) r where coalesce(before, 0) < $6::int
)
"""  # noqa: S608 -- constants

ANY_DUE = f"""{_ALLOTTED} select exists (select from allotted), (
  select min(f.next_check_at) from named n cross join lateral (
    select c.next_check_at from check_back c where c.producer_group = n.name order by c.next_check_at limit 1
  ) f left join producer_group g on g.name = n.name
  where g.held_until is distinct from 'infinity'
)
"""  # noqa: S608

# Locked rows are skipped. A row whose transaction has an Op is removed, because the transaction is decided.
CLAIM = f"""{_ALLOTTED}, {CHANCE}, picked as materialized (
  select d.transaction_id, coalesce(o.decided, false) as decided
  from allotted a cross join lateral (
    select c.transaction_id from check_back c
    where c.producer_group = a.name and c.next_check_at <= a.due_by
      and (c.leased_until is null or c.leased_until <= $1) and {_NOT_CLAIMED}
    order by c.next_check_at limit a.free
    for update skip locked
  ) d left join lateral (
    select true as decided from op o where o.transaction_id = d.transaction_id offset 0
  ) o on true
), removed as (
  delete from check_back where transaction_id = any (array(select transaction_id from picked where decided))
), taken as (
  update check_back c
  set asked = c.asked + 1, lease_epoch = c.lease_epoch + {BY_CHANCE},
    leased_until = $1 + make_interval(secs => a.lease_s), asked_at = null
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
  check_max_in_flight, check_window, secrets, deleted_at, checks, claimed_at, batch_checks, updated_at, registered_at
from producer_group where name = any($1)
"""

# The changes of these groups wait until the database transaction ends. Locked in the order of the names, as in ADJUST.
LOCKED_GROUPS = f"{GROUPS} order by name for share"

# Primary key of half, one partition per row (LATERAL ... OFFSET 0). Bodies are read only if the policy sends them, and
# sizes need no TOAST read.
MESSAGES = """
select a.transaction_id, f.born_at, f.context, f.policy, f.traceparent, m.position, m.topic, m.key, m.tag, m.headers,
  m.content_type, m.body, m.body_bytes
from unnest($1::uuid[]) as a(transaction_id)
cross join lateral (
  select born_at, context, policy, traceparent from half h
  where h.transaction_id = a.transaction_id and h.position < 1 offset 0
) f
cross join lateral (
  select position, topic, key, tag, headers, content_type,
    case when $2::bool and (f.policy ->> 'include_body')::boolean then body end as body,
    case when (f.policy ->> 'include_body')::boolean then octet_length(body) else 0 end as body_bytes
  from half h where h.transaction_id = a.transaction_id order by position offset 0
) m
"""


@dataclass(frozen=True, slots=True)
class CheckCapacity:
    """The capacity of one process: `mine` checks in flight by group, `left` of its budget, `reserved` for each group.

    Reservations may exceed `left`. `hard` is the most checks that the process claims now, including reservations.
    """

    mine: Mapping[str, int]
    left: int
    reserved: int
    hard: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased transaction; the lease holds while its row has this `epoch`.

    `number` counts its checks from 1; it is that of the check which the lease is for, also if that is not sent.
    """

    transaction_id: UUID
    producer_group: str
    state: CheckBackState
    number: int
    answered: int
    unanswered: int
    unanswered_since: datetime | None
    epoch: int


@dataclass(frozen=True, slots=True)
class AskedGroup:
    """The columns of a group that a check needs; `secrets` is JSON text. If `deleted_at` is set, no URL is called.

    `updated_at` tells its configurations apart, `registered_at` its registrations.
    """

    name: str
    check_urls: list[str]
    interval_s: int
    max_checks: int
    on_exhausted: OnExhausted
    unanswered_park_s: int
    check_timeout_s: int
    check_max_in_flight: int
    check_window: int
    secrets: str
    deleted_at: datetime | None
    checks: Checks
    claimed_at: datetime | None
    batch_checks: bool
    updated_at: datetime
    registered_at: datetime | None


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """One message of a claimed transaction with the columns of position 0; `context` and `policy` are JSON text.

    `body_bytes`: the size of the body if the check sends it, whether it was read or not.
    """

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
    body_bytes: int


async def any_due(connection: Connection, capacity: CheckCapacity, now: datetime) -> tuple[bool, datetime | None]:
    """Return whether a claim would find anything, and the time of the first check that is planned; takes no lock."""
    row = await connection.fetchrow(ANY_DUE, *_arguments(capacity, now))
    assert row is not None
    return row[0], row[1]


async def take_turn(connection: Connection) -> None:
    """Wait for this replica's turn to claim, which lasts as long as the database transaction."""
    await connection.execute(TAKE_TURN)


async def claim(connection: Connection, capacity: CheckCapacity, now: datetime) -> tuple[list[Claim], int]:
    """Lease due transactions, shared fairly between groups. Return the claims and the number of removed decided rows.

    Call `take_turn` first; otherwise a group may get more checks at once than its window allows.
    """
    rows = await connection.fetch(CLAIM, *_arguments(capacity, now))
    claims = [claim_of(row) for row in rows if row["lease_epoch"] is not None]
    return claims, len(rows) - len(claims)


def claim_of(row: Any) -> Claim:
    """Return a leased row as a claim."""
    return Claim(
        transaction_id=row["transaction_id"],
        producer_group=row["producer_group"],
        state=CheckBackState(row["state"]),
        number=row["asked"],
        answered=row["answered"],
        unanswered=row["unanswered"],
        unanswered_since=row["unanswered_since"],
        epoch=row["lease_epoch"],
    )


async def asked_groups(connection: Connection, names: Sequence[str]) -> dict[str, AskedGroup]:
    """Return the groups by name, including tombstones."""
    return {row["name"]: _asked_group(row) for row in await connection.fetch(GROUPS, names)}


async def locked_groups(connection: Connection, names: Sequence[str]) -> dict[str, AskedGroup]:
    """Return the groups by name, including tombstones; none changes until the database transaction ends."""
    return {row["name"]: _asked_group(row) for row in await connection.fetch(LOCKED_GROUPS, names)}


def _asked_group(row: Any) -> AskedGroup:
    enums = {"on_exhausted": OnExhausted(row["on_exhausted"]), "checks": Checks(row["checks"])}
    return AskedGroup(**{**row, **enums})


async def asked_messages(
    connection: Connection, ids: Sequence[UUID], *, bodies: bool = True
) -> dict[UUID, list[AskedMessage]]:
    """Return the messages of each transaction by position; ids whose day was removed are left out.

    `bodies` False: without those that a transaction's policy sends.
    """
    found: dict[UUID, list[AskedMessage]] = {}
    for row in await connection.fetch(MESSAGES, ids, bodies):
        found.setdefault(row[0], []).append(AskedMessage(*row))
    return found


def message_bytes(message: AskedMessage) -> int:
    """Return about how many bytes a check needs for a message."""
    return message.body_bytes + len(message.headers or "") + len(message.context or "") + len(message.topic)


def _arguments(capacity: CheckCapacity, now: datetime) -> tuple[object, ...]:
    names = list(capacity.mine)
    counts = [capacity.mine[name] for name in names]
    return now, names, counts, capacity.left, capacity.reserved, capacity.hard, GONE_GROUP_WINDOW, LEASE_MARGIN_S
