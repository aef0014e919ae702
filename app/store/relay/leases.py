"""SQL of leases: owner, expiry and epoch. The row of a lease stays while it can be claimed, so its epoch only rises.

Times are the database's clock, as the caller measured it. A holder with an expired lease may continue until another
owner claims the lease. Then its epoch is stale, and a settle with a stale epoch changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from app.database.connection import Connection


class LeaseKind(StrEnum):
    """The first part of a lease's name; `:` follows if there are several of the kind.

    SHARD: a shard of a subscription. WORKER: the presence of a relay worker; its epoch is the number of a settle (see
    `settle_numbers.py`). ROUTING: the count of unrouted messages. FIGURES: what stands open, once a minute.
    """

    SHARD = "relay"
    WORKER = "relay-worker"
    ROUTING = "routing"
    FIGURES = "figures"


# A claim by a version that does not write `since` leaves that of an earlier epoch, so it counts only with its epoch.
HELD_SINCE = "case when l.since_epoch = l.epoch then l.since end"

# Served by the primary key. Of two concurrent claims, the second waits for the row and then finds it taken, because the
# WHERE of DO UPDATE is evaluated on the newest row. `free` leaves out held rows, so a claim does not lock them.
CLAIM = """
with free as (
  select n.name from unnest($1::text[]) as n(name) left join lease l on l.name = n.name
  where l.name is null or l.expires_at <= $5
  order by n.name limit $4
)
insert into lease as l (name, owner, epoch, expires_at, since, since_epoch)
select name, $2, 1, $3, $5, 1 from free order by name
on conflict (name) do update set owner = excluded.owner, epoch = l.epoch + 1, expires_at = excluded.expires_at,
  since = excluded.since, since_epoch = l.epoch + 1
where l.expires_at <= $5
returning name, epoch
"""

# Served by the primary key.
UNHELD = """
select n.name from unnest($1::text[]) as n(name) left join lease l on l.name = n.name
where l.name is null or l.expires_at <= $2
"""

# Served by the primary key. A lease with a stale epoch is not extended.
RENEW = """
update lease l set expires_at = $4
from unnest($1::text[], $2::bigint[]) as mine(name, epoch)
where l.name = mine.name and l.epoch = mine.epoch and l.owner = $3
returning l.name
"""

# Register a worker's presence and read the other present workers. The table is small: a row for each shard and worker.
PRESENT = """
with gone as (
  delete from lease where starts_with(name, $1) and expires_at < $4::timestamptz - interval '1 hour'
), me as (
  insert into lease (name, owner, epoch, expires_at) values ($1 || $2, $2, 1, $3)
  on conflict (name) do update set expires_at = excluded.expires_at
)
select owner from lease where starts_with(name, $1) and name <> $1 || $2 and expires_at > $4
"""

# Served by the primary key.
RELEASE = """
update lease l set expires_at = least(l.expires_at, $4)
from unnest($1::text[], $2::bigint[]) as mine(name, epoch)
where l.name = mine.name and l.epoch = mine.epoch and l.owner = $3
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A held lease: its name, its owner, and the epoch that its settles need."""

    name: str
    owner: str
    epoch: int


async def claim(
    connection: Connection, names: Sequence[str], owner: str, until: datetime, at_most: int, now: datetime
) -> list[Lease]:
    """Claim up to `at_most` of the named leases that are free or expired. Each claim starts a new epoch."""
    rows = await connection.fetch(CLAIM, names, owner, until, at_most, now)
    return [Lease(row["name"], owner, row["epoch"]) for row in rows]


async def unheld(connection: Connection, names: Sequence[str], now: datetime) -> set[str]:
    """Return those of the named leases that have no owner."""
    return {row["name"] for row in await connection.fetch(UNHELD, names, now)}


async def renew(connection: Connection, epochs: Mapping[str, int], owner: str, until: datetime) -> set[str]:
    """Extend the leases `name → epoch` that the owner still has; return their names."""
    rows = await connection.fetch(RENEW, list(epochs), list(epochs.values()), owner, until)
    return {row["name"] for row in rows}


async def release(connection: Connection, epochs: Mapping[str, int], owner: str, now: datetime) -> None:
    """Release the leases `name → epoch` that the owner still has: they expire now."""
    await connection.execute(RELEASE, list(epochs), list(epochs.values()), owner, now)


async def workers_present(
    connection: Connection, kind: LeaseKind, owner: str, until: datetime, now: datetime
) -> frozenset[str]:
    """Register `owner` as a present worker of a kind until `until`; return the present ones, this one included."""
    return frozenset([owner, *(row["owner"] for row in await connection.fetch(PRESENT, f"{kind}:", owner, until, now))])


async def leave(connection: Connection, kind: LeaseKind, owner: str) -> None:
    """Withdraw the presence that `workers_present` registered."""
    await connection.execute("delete from lease where name = $1", f"{kind}:{owner}")
