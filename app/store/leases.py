"""Leases: who may work on what, until when, and in which epoch. A lease row stays, so that its epoch never goes back.

Times are the database's clock, as the caller knows it. A holder whose lease ran out may go on until somebody takes it;
then its epoch is stale, and every settle that names the old epoch changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database import Connection

# Served by the primary key. Two that claim at once: the second waits on the row and then finds it taken (the WHERE of
# DO UPDATE is judged on the newest row). Rows that are held are filtered before, so that asking does not lock them.
CLAIM = """
with free as (
  select n.name from unnest($1::text[]) as n(name) left join lease l on l.name = n.name
  where l.name is null or l.expires_at <= $5
  order by n.name limit $4
)
insert into lease as l (name, owner, epoch, expires_at) select name, $2, 1, $3 from free order by name
on conflict (name) do update set owner = excluded.owner, epoch = l.epoch + 1, expires_at = excluded.expires_at
where l.expires_at <= $5
returning name, epoch
"""

# Served by the primary key; only the epoch that is still the row's is prolonged.
RENEW = """
update lease l set expires_at = $4
from unnest($1::text[], $2::bigint[]) as mine(name, epoch)
where l.name = mine.name and l.epoch = mine.epoch and l.owner = $3
returning l.name
"""

# A worker's sign of life, and how many others show theirs. The table holds one row for each subscription and worker.
PRESENT = """
with gone as (
  delete from lease where starts_with(name, $1) and expires_at < $4::timestamptz - interval '1 hour'
), me as (
  insert into lease (name, owner, epoch, expires_at) values ($1 || $2, $2, 1, $3)
  on conflict (name) do update set expires_at = excluded.expires_at
)
select count(*) + 1 from lease where starts_with(name, $1) and name <> $1 || $2 and expires_at > $4
"""

# Served by the primary key.
RELEASE = """
update lease l set expires_at = least(l.expires_at, $4)
from unnest($1::text[], $2::bigint[]) as mine(name, epoch)
where l.name = mine.name and l.epoch = mine.epoch and l.owner = $3
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that is held: its name, whose it is, and the epoch that settles must name."""

    name: str
    owner: str
    epoch: int


async def claim(
    connection: Connection, names: Sequence[str], owner: str, until: datetime, at_most: int, now: datetime
) -> list[Lease]:
    """Take up to `at_most` of the named leases that are free or ran out; each takeover is a new epoch."""
    rows = await connection.fetch(CLAIM, names, owner, until, at_most, now)
    return [Lease(row["name"], owner, row["epoch"]) for row in rows]


async def renew(connection: Connection, epochs: Mapping[str, int], owner: str, until: datetime) -> set[str]:
    """Prolong the leases `name → epoch` that are still the owner's; return their names."""
    rows = await connection.fetch(RENEW, list(epochs), list(epochs.values()), owner, until)
    return {row["name"] for row in rows}


async def release(connection: Connection, epochs: Mapping[str, int], owner: str, now: datetime) -> None:
    """Let the leases `name → epoch` end now, if they are still the owner's."""
    await connection.execute(RELEASE, list(epochs), list(epochs.values()), owner, now)


async def workers_present(connection: Connection, kind: str, owner: str, until: datetime, now: datetime) -> int:
    """Show that `owner` is at work of this kind until `until`; return how many are, with it."""
    count: int = await connection.fetchval(PRESENT, f"{kind}:", owner, until, now)
    return count


async def leave(connection: Connection, kind: str, owner: str) -> None:
    """Withdraw the sign of life of `workers_present`."""
    await connection.execute("delete from lease where name = $1", f"{kind}:{owner}")
