"""SQL that shows the worker processes and the leases that they hold now."""

from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.store.relay.leases import HELD_SINCE, LeaseKind
from app.store.subscriptions.subscriptions import PULL

UNHELD_MOST = 1000

# The table is small: a row for each shard and worker.
HELD = f"""
select l.owner, l.name, l.expires_at, {HELD_SINCE} as since from lease l where l.expires_at > $1 and l.owner <> ''
order by l.owner, l.name
"""  # noqa: S608 -- a constant
NAMES = "select subscription_id, name from subscription where subscription_id = any($1::int[])"

# Shards of active subscriptions that no worker delivers, without those that consumers claim. Served by the primary
# keys; there are few subscriptions.
UNHELD = f"""
select s.name as subscription, c.shard, c.shards from subscription s
join checkpoint c on c.subscription_id = s.subscription_id
where s.state = 'active' and s.deleted_at is null and s.destination ->> 'type' is distinct from '{PULL}'
  and not exists (
  select from lease l
  where l.name = '{LeaseKind.SHARD}:' || s.subscription_id || ':' || c.shards || ':' || c.shard
    and l.expires_at > $1 and l.owner <> ''
)
order by s.name, c.shard limit {UNHELD_MOST}
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard of a subscription under a lease."""

    subscription: str
    shard: int
    shards: int
    held_until: datetime
    held_since: datetime | None


@dataclass(slots=True)
class WorkerLeases:
    """A process and its leases. `present_until`: when its presence ends unless it renews it; None: it sent none.

    `tasks`: other work under a lease, such as the count of unrouted messages.
    """

    worker: str
    present_until: datetime | None
    shards: list[HeldShard]
    tasks: list[str]


@dataclass(frozen=True, slots=True)
class UnheldShard:
    """A shard of an active subscription that no worker holds."""

    subscription: str
    shard: int
    shards: int


async def read_workers(connection: Connection, now: datetime) -> list[WorkerLeases]:
    """Return the workers with a lease, by name."""
    leases = await connection.fetch(HELD, now)
    shard, presence = f"{LeaseKind.SHARD}:", f"{LeaseKind.WORKER}:"
    places = {row["name"]: [int(part) for part in row["name"].split(":")[1:]] for row in leases if _is(row, shard)}
    ids = sorted({place[0] for place in places.values()})
    names = {row["subscription_id"]: row["name"] for row in await connection.fetch(NAMES, ids)}
    found: dict[str, WorkerLeases] = {}
    for row in leases:
        worker = found.setdefault(row["owner"], WorkerLeases(row["owner"], None, [], []))
        if _is(row, shard):
            subscription_id, shards, number = places[row["name"]]
            name = names.get(subscription_id, str(subscription_id))
            worker.shards.append(HeldShard(name, number, shards, row["expires_at"], row["since"]))
        elif _is(row, presence):
            worker.present_until = row["expires_at"]
        else:
            worker.tasks.append(row["name"])
    for worker in found.values():
        worker.shards.sort(key=lambda one: (one.subscription, one.shard))
    return list(found.values())


async def read_unheld(connection: Connection, now: datetime) -> list[UnheldShard]:
    """Return the shards of active subscriptions that no worker holds, at most UNHELD_MOST."""
    return [UnheldShard(**row) for row in await connection.fetch(UNHELD, now)]


def _is(row: object, prefix: str) -> bool:
    return str(row["name"]).startswith(prefix)  # type: ignore[index]
