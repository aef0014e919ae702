"""SQL of the checks that producers claim: take them, give them back, answer them, and look for those that are due.

A claimed check is a lease like that of a worker's check. `claimed_epoch` has the epoch of that lease, so every later
lease, also one by an earlier version, ends the claim. Its row is next due when the lease ends, so rows that are out are
not in the way of those that are due.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database.connection import Connection
from app.store.checkback.claims import BY_CHANCE, CHANCE, Claim, claim_of
from app.store.checkback.results import HOLD_S, LOCKED_LEASES

# The time of a group's last claim is written at most this often.
NOTED_EVERY_S = 10

_COLUMNS = (
    "transaction_id, producer_group, state, asked, answered, unanswered, unanswered_since, lease_epoch, claimed_at"
)
_LEASED = ", ".join(f"t.{name}" for name in _COLUMNS.split(", "))


# What CLAIM, LAPSED and LEFT share: a row whose transaction has an Op is removed, the others get a new lease. `by`: how
# far the epoch rises.
def _taken(leased: str, by: str = "1") -> str:
    return f""", judged as materialized (
  select p.*, coalesce(o.decided, false) as decided
  from picked p left join lateral (
    select true as decided from op o where o.transaction_id = p.transaction_id offset 0
  ) o on true
), removed as (
  delete from check_back where transaction_id = any (array(select transaction_id from judged where decided))
), taken as (
  update check_back c set lease_epoch = c.lease_epoch + {by}, {leased}
  where c.transaction_id = any (array(select transaction_id from judged where not decided))
  returning {_COLUMNS}
)
"""  # noqa: S608 -- constants


# Served by check_back_due. Locked rows are skipped: another session takes them.
CLAIM = f"""
with {CHANCE}, picked as materialized (
  select c.transaction_id from check_back c
  where c.producer_group = $1 and c.next_check_at <= $2 and (c.leased_until is null or c.leased_until <= $2)
    and c.claimed_epoch is distinct from c.lease_epoch
  order by c.next_check_at limit $3 for update skip locked
){
    _taken(
        f"asked = c.asked + 1, claimed_epoch = c.lease_epoch + {BY_CHANCE}, claimed_at = $2, asked_at = null, "
        "leased_until = $2 + make_interval(secs => $4), next_check_at = $2 + make_interval(secs => $4)",
        BY_CHANCE,
    )
}
select {_LEASED} from taken t
"""  # noqa: S608 -- constants

# Primary key. The rest of a claim whose messages are too large for one answer, and a claim whose client left before its
# answer. Neither was shown, so neither was asked. A check that was answered or lapsed meanwhile has another epoch.
GIVE_BACK = f"""{LOCKED_LEASES}
update check_back c set asked = c.asked - 1, lease_epoch = c.lease_epoch + 1, leased_until = null, next_check_at = $3
where c.transaction_id = any (array(select transaction_id from locked))
"""  # noqa: S608 -- a constant

# Primary key, in the order of ids, so that two answers never wait for each other. Of two answers of one check, and of
# an answer and its lapse, the first raises the epoch. An epoch of null answers whatever claim is out.
ANSWERED = f"""
with asked as materialized (
  select * from unnest($1::uuid[], $2::bigint[]) as a(transaction_id, epoch) order by transaction_id
), locked as materialized (
  select l.transaction_id from asked a cross join lateral (
    select c.transaction_id from check_back c
    where c.transaction_id = a.transaction_id and c.producer_group = $3 and c.claimed_epoch = c.lease_epoch
      and c.lease_epoch = coalesce(a.epoch, c.lease_epoch)
    for update
  ) l
)
update check_back c
set lease_epoch = c.lease_epoch + 1, leased_until = $4::timestamptz + make_interval(secs => {HOLD_S})
where c.transaction_id = any (array(select transaction_id from locked))
returning {_COLUMNS}
"""  # noqa: S608 -- constants

# Served by check_back_claimed.
ANY_LAPSED = "select exists (select from check_back where claimed_epoch = lease_epoch and leased_until <= $1)"
LAPSED = f"""
with picked as materialized (
  select c.transaction_id, c.leased_until from check_back c
  where c.claimed_epoch = c.lease_epoch and c.leased_until <= $1
  order by c.leased_until limit $2 for update skip locked
){_taken(f"leased_until = $1 + make_interval(secs => {HOLD_S})")}
select {_LEASED}, j.leased_until as lapsed_at from taken t join judged j using (transaction_id)
"""  # noqa: S608 -- constants

# Groups that Halfnote cannot call: producers claim their checks, or none are asked.
_CLAIM_ONLY = "g.checks = 'claim' and g.check_urls = '{}' and g.deleted_at is null"

# Served by check_back_due: the rows that are due, of groups without a URL. Checks that are due and that no producer
# claims are no checks, so the time without an answer began when the first of them was due.
LEFT = f"""
with picked as materialized (
  select d.transaction_id, d.since, d.next_check_at, g.updated_at from producer_group g cross join lateral (
    select c.transaction_id, coalesce(c.unanswered_since, c.next_check_at) as since, c.next_check_at from check_back c
    where c.producer_group = g.name and c.next_check_at <= $1 and c.state = 1
      and (c.leased_until is null or c.leased_until <= $1) and c.claimed_epoch is distinct from c.lease_epoch
      and coalesce(c.unanswered_since, c.next_check_at) <= $1::timestamptz - make_interval(secs => g.unanswered_park_s)
    order by c.next_check_at limit $2 for update skip locked
  ) d
  where {_CLAIM_ONLY}
  limit $2
){_taken(f"leased_until = $1 + make_interval(secs => {HOLD_S})")}
select {_LEASED}, j.since, j.next_check_at, j.updated_at from taken t join judged j using (transaction_id)
"""  # noqa: S608 -- constants

# As LEFT. The nightly proof takes a check that was due for hours for one that Halfnote forgot.
STILL_DUE = f"""
update check_back c set unanswered_since = coalesce(c.unanswered_since, c.next_check_at), next_check_at = $1
where c.transaction_id = any (array(
  select d.transaction_id from producer_group g cross join lateral (
    select c.transaction_id from check_back c
    where c.producer_group = g.name and c.next_check_at <= $1::timestamptz - make_interval(secs => $3) and c.state = 1
      and (c.leased_until is null or c.leased_until <= $1)
    order by c.next_check_at limit $2 for update skip locked
  ) d
  where {_CLAIM_ONLY}
  limit $2
))
"""  # noqa: S608 -- constants

# Served by check_back_due, a group at a time: how many checks are due, up to a limit, and when the next one is.
DUE = """
select w.name, (
  select least(w.most, count(*)) from (
    select from check_back c
    where c.producer_group = w.name and c.next_check_at <= $3 and (c.leased_until is null or c.leased_until <= $3)
      and c.claimed_epoch is distinct from c.lease_epoch
    order by c.next_check_at limit 100
  ) d
) as due, (
  select c.next_check_at from check_back c where c.producer_group = w.name and c.next_check_at > $3
  order by c.next_check_at limit 1
) as next_at
from unnest($1::text[], $2::int[]) as w(name, most)
"""

NOTE_CLAIM = f"""
update producer_group set claimed_at = $2
where name = $1 and (claimed_at is null or claimed_at <= $2::timestamptz - interval '{NOTED_EVERY_S} seconds')
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class TakenClaim:
    """The lease of a check that is or was out to a producer since `claimed_at`.

    `ended_at`: when its time was over, or, for a check that no producer claimed, since when none was answered; then
    `due_at` is since when it is due, and `group_updated_at` tells by which configuration of its group it waited too
    long. `answered_epoch`: of the handle of a claim that was answered; `claim` has the lease by which the answer is
    settled.
    """

    claim: Claim
    claimed_at: datetime | None
    ended_at: datetime | None = None
    due_at: datetime | None = None
    group_updated_at: datetime | None = None
    answered_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class DueChecks:
    """How many checks of a group are due, up to a limit, and when the next one is."""

    name: str
    due: int
    next_at: datetime | None


async def claim_checks(connection: Connection, group: str, limit: int, seconds: float, now: datetime) -> list[Claim]:
    """Lease a group's due checks to a producer for some seconds, those first that are due longest."""
    return [claim_of(row) for row in await connection.fetch(CLAIM, group, now, limit, seconds)]


async def give_back(connection: Connection, claims: Sequence[Claim], now: datetime) -> None:
    """Make claims due again at once, as if they had not been taken."""
    ids = [one.transaction_id for one in claims]
    await connection.execute(GIVE_BACK, ids, [one.epoch for one in claims], now)


async def take_answered(
    connection: Connection, group: str, epochs: Sequence[tuple[UUID, int | None]], now: datetime
) -> list[TakenClaim]:
    """Take the claims of a group's ids that are out, with these epochs if given; others are left out.

    An id may come with several epochs: at most one of them is out.
    """
    ids, given = [one for one, _ in epochs], [epoch for _, epoch in epochs]
    rows = await connection.fetch(ANSWERED, ids, given, group, now)
    return [TakenClaim(claim_of(row), row["claimed_at"], answered_epoch=row["lease_epoch"] - 1) for row in rows]


async def any_lapsed(connection: Connection, now: datetime) -> bool:
    """Return whether there are claims whose time is over."""
    return bool(await connection.fetchval(ANY_LAPSED, now))


async def take_lapsed(connection: Connection, limit: int, now: datetime) -> list[TakenClaim]:
    """Take claims whose time is over."""
    return [_taken_claim(row, row["lapsed_at"]) for row in await connection.fetch(LAPSED, now, limit)]


async def take_left(connection: Connection, limit: int, now: datetime) -> list[TakenClaim]:
    """Take checks that wait for a producer to claim them, and that were not answered for their `unanswered_park_s`.

    Each has the number of the check that waits, which was not asked.
    """
    return [_left_claim(row) for row in await connection.fetch(LEFT, now, limit)]


async def keep_due(connection: Connection, limit: int, seconds: float, now: datetime) -> None:
    """Make checks due now that waited for some seconds for a producer to claim them."""
    await connection.execute(STILL_DUE, now, limit, seconds)


async def due_checks(connection: Connection, limits: dict[str, int], now: datetime) -> list[DueChecks]:
    """Return how many checks of each group are due, up to its limit; takes no lock."""
    rows = await connection.fetch(DUE, list(limits), list(limits.values()), now)
    return [DueChecks(row["name"], row["due"], row["next_at"]) for row in rows]


async def note_claim(connection: Connection, group: str, now: datetime) -> None:
    """Write that a producer claimed checks of a group, unless that was written a short time ago."""
    await connection.execute(NOTE_CLAIM, group, now)


def _taken_claim(row: Any, ended_at: datetime) -> TakenClaim:
    return TakenClaim(claim_of(row), row["claimed_at"], ended_at)


def _left_claim(row: Any) -> TakenClaim:
    # The others were counted when they were claimed.
    waiting = replace(claim_of(row), number=row["asked"] + 1)
    return TakenClaim(waiting, row["claimed_at"], row["since"], row["next_check_at"], row["updated_at"])
