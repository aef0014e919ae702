"""SQL of producer groups. A deleted group stays as a tombstone, for halves that raced its deletion."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database.columns import field_names
from app.database.connection import Connection
from app.permissions import EVERYTHING, Within
from app.store.checkback.next_checks import HELD_UNTIL
from app.verdicts import Checks, OnExhausted

# The count of undecided transactions stops at this number, because it only explains a refusal.
UNDECIDED_MAX = 100_000

_SHAPE = """check_urls, immunity_s, interval_s, max_checks, check_timeout_s, unanswered_park_s, on_exhausted,
  check_max_in_flight, ping_interval_s, checks, batch_checks"""
_COLUMNS = f"""name, {_SHAPE}, secrets, created_at, updated_at, deleted_at, claimed_at,
  nullif(held_until, 'infinity') as held_until"""

# Primary key.
GROUP = f"""
select {_COLUMNS} from producer_group
where name = $1 and deleted_at is null
"""  # noqa: S608

LOCKED_GROUP = f"""
select {_COLUMNS} from producer_group
where name = $1 for update
"""  # noqa: S608

# Primary key, in order; a page is an index range.
GROUPS = f"""
select {_COLUMNS} from producer_group
where name > $1 and deleted_at is null and ($3::text[] is null or name = any($3) or name ^@ any($4::text[]))
order by name limit $2
"""  # noqa: S608

# Primary key.
NAMED = f"""
select {_COLUMNS} from producer_group
where name = any($1::text[]) and deleted_at is null
"""  # noqa: S608

# A scan of the table, once when a process starts.
OLDEST = "select name from producer_group where deleted_at is null order by created_at, name limit $1"

# A group without a URL is held for ever, so that no worker, also of an earlier version, tries to call it: its checks
# wait until a producer claims them.
_HELD = "case when $2 = '{}'::text[] then 'infinity'::timestamptz end"

# Primary key. Safe under concurrency: of two first PUTs, one inserts the row, and the other finds it.
ADD_GROUP = f"""
insert into producer_group (name, {_SHAPE}, secrets, created_at, updated_at, check_window, next_ping_at, held_until)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $14, $9, $14, {_HELD})
on conflict do nothing returning true
"""  # noqa: S608

# LOCKED_GROUP has locked the row. The window and the hold are reset, because they belong to the old URLs.
CHANGE_GROUP = f"""
update producer_group set ({_SHAPE}, secrets, updated_at) = ($2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14),
  created_at = case when deleted_at is null then created_at else $14 end, deleted_at = null,
  check_window = $9, held_until = {_HELD}, next_ping_at = $14
where name = $1
"""  # noqa: S608

# Primary key. The producer can answer now, so the hold ends, and a round begins (rounds.py). A check whose group was
# read before this cannot begin a new hold (ADJUST). A group without a URL stays held.
NOTE_REGISTRATION = """
update producer_group set registered_at = $2, round_began_at = $2, round_reached = $2,
  held_until = case when held_until = 'infinity' then held_until end
where name = $1
"""

HELD_NOW = f"select held_until from ({HELD_UNTIL.format(name='$1')}) h (held_until) where held_until > $2"  # noqa: S608

CHANGE_SECRETS = "update producer_group set secrets = $2, updated_at = $3 where name = $1"

# Not held any more: a worker parks the halves that raced the deletion.
DELETE_GROUP = """
update producer_group set deleted_at = $2, updated_at = $2, held_until = null where name = $1 and deleted_at is null
"""

# A transaction that is in doubt or parked has a row in check_back (check_back_due). One whose first check is not due
# yet lies after the cursor of the main sweep (half_first_check). Both are compared with op: only an Op makes a
# transaction decided.
UNDECIDED = """
select count(*) from (
  select c.transaction_id from check_back c left join lateral (
    select true as decided from op o where o.transaction_id = c.transaction_id offset 0
  ) o on true
  where c.producer_group = $1 and o.decided is null
  union
  select h.transaction_id from half h left join lateral (
    select true as decided from op o where o.transaction_id = h.transaction_id offset 0
  ) o on true
  where h.position = 0 and h.producer_group = $1 and o.decided is null
    and h.first_check_at > (select coalesce(min(reached), '-infinity') from sweep where name = 'main')
  limit $2
) undecided
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The configuration of a group; durations in seconds. Fields are in the order of the statements."""

    check_urls: list[str]
    immunity_s: int
    interval_s: int
    max_checks: int
    check_timeout_s: int
    unanswered_park_s: int
    on_exhausted: OnExhausted
    check_max_in_flight: int
    ping_interval_s: int
    checks: Checks = Checks.CALL
    batch_checks: bool = False


@dataclass(frozen=True, slots=True)
class ProducerGroup:
    """A stored group. `secrets` is JSON as stored (`app.secrets.vault` decrypts it). `deleted_at` set: a tombstone.

    `held_until`: until when it asked for no checks, also if that time is over.
    """

    name: str
    shape: GroupShape
    secrets: Any
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None
    claimed_at: datetime | None
    held_until: datetime | None


async def read_group(connection: Connection, name: str) -> ProducerGroup | None:
    """Return a registered group, or None."""
    row = await connection.fetchrow(GROUP, name)
    return _group(row) if row else None


async def lock_group(connection: Connection, name: str) -> ProducerGroup | None:
    """Return a group or its tombstone, locked until the database transaction ends; None if it never existed."""
    row = await connection.fetchrow(LOCKED_GROUP, name)
    return _group(row) if row else None


async def read_groups(
    connection: Connection, after: str, limit: int, within: Within = EVERYTHING
) -> list[ProducerGroup]:
    """Return up to `limit` registered groups within a scope whose names come after `after`, by name."""
    return [_group(row) for row in await connection.fetch(GROUPS, after, limit, *within)]


async def groups_of(connection: Connection, names: Sequence[str]) -> list[ProducerGroup]:
    """Return the registered groups of these names, in this order; those that do not exist are left out."""
    found = {row["name"]: _group(row) for row in await connection.fetch(NAMED, names)}
    return [found[name] for name in names if name in found]


async def oldest(connection: Connection, at_most: int) -> list[str]:
    """Return the names of the groups that were registered first, oldest first."""
    return [row[0] for row in await connection.fetch(OLDEST, at_most)]


async def add_group(connection: Connection, name: str, shape: GroupShape, secrets: Any, now: datetime) -> bool:
    """Register a new group, its secrets as stored; False if the name exists already, also as a tombstone."""
    return bool(await connection.fetchval(ADD_GROUP, name, *astuple(shape), _secrets(secrets), now))


async def change_group(connection: Connection, name: str, shape: GroupShape, secrets: Any, now: datetime) -> None:
    """Change the configuration and secrets of a group; a tombstone becomes a group again."""
    await connection.execute(CHANGE_GROUP, name, *astuple(shape), _secrets(secrets), now)


async def note_registration(connection: Connection, name: str, now: datetime) -> None:
    """Write that a group was registered, also unchanged.

    This ends the time for which it asked for no checks, and begins a round.
    """
    await connection.execute(NOTE_REGISTRATION, name, now)


async def held_until(connection: Connection, name: str, now: datetime) -> datetime | None:
    """Return until when no check of a group is sent because it asked for a pause; None if it is asked now."""
    until: datetime | None = await connection.fetchval(HELD_NOW, name, now)
    return until


async def change_secrets(connection: Connection, name: str, secrets: Any, now: datetime) -> None:
    """Change the secrets of a group."""
    await connection.execute(CHANGE_SECRETS, name, _secrets(secrets), now)


async def delete_group(connection: Connection, name: str, now: datetime) -> None:
    """Make a group a tombstone: no new half can name it."""
    await connection.execute(DELETE_GROUP, name, now)


async def count_undecided(connection: Connection, name: str) -> int:
    """Return how many of a group's transactions have no verdict, counting no further than UNDECIDED_MAX."""
    count: int = await connection.fetchval(UNDECIDED, name, UNDECIDED_MAX)
    return count


def _group(row: Any) -> ProducerGroup:
    shape = {name: row[name] for name in field_names(GroupShape)}
    return ProducerGroup(
        row["name"],
        GroupShape(**{**shape, "on_exhausted": OnExhausted(row["on_exhausted"]), "checks": Checks(row["checks"])}),
        msgspec.json.decode(row["secrets"]),
        row["created_at"],
        row["updated_at"],
        row["deleted_at"],
        row["claimed_at"],
        row["held_until"],
    )


def _secrets(secrets: Any) -> str:
    return msgspec.json.encode(secrets).decode()
