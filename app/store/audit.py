"""What people did: one row for each change, written in the database transaction of the change wherever there is one."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from app.database import Connection

HIGHEST = (1 << 63) - 1
FORGOTTEN_AT_ONCE = 10_000

ADD = """
insert into audit (at, actor, key_id, role, what, target, detail) values ($1, $2, $3, $4, $5, $6, $7::text::jsonb)
"""

# Newest first, by the primary key, or by audit_target if a target is named. What few rows meet is looked for in all of
# them: people leave few.
PAGE = """
select audit_id, at, actor, key_id, role, what, target, detail from audit
where audit_id < $1 and ($2::text is null or target = $2) and ($3::text is null or actor = $3)
  and ($4::int is null or key_id = $4) and ($5::text is null or what = $5)
  and ($6::timestamptz is null or at >= $6) and ($7::timestamptz is null or at < $7)
order by audit_id desc limit $8
"""

# Served by audit_at.
FORGET = f"""
delete from audit where ctid = any(array(select ctid from audit where at < $1 limit {FORGOTTEN_AT_ONCE}))
"""  # noqa: S608 -- a number of ours


@dataclass(frozen=True, slots=True)
class Act:
    """What somebody did: `what` as `subscription.pause`, `target` its name or id, `detail` without bodies, secrets."""

    what: str
    target: str | None
    detail: dict[str, Any]
    actor: str | None = None
    key_id: int | None = None
    role: str | None = None


@dataclass(frozen=True, slots=True)
class StoredAct:
    """An act as it is on record; `detail` is JSON text."""

    audit_id: int
    at: datetime
    actor: str | None
    key_id: int | None
    role: str | None
    what: str
    target: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Which acts; all that is given must be met."""

    below: int = HIGHEST
    target: str | None = None
    actor: str | None = None
    key_id: int | None = None
    what: str | None = None
    after: datetime | None = None
    before: datetime | None = None


async def record(connection: Connection, act: Act, now: datetime) -> None:
    """Write down an act."""
    detail = msgspec.json.encode(act.detail).decode()
    await connection.execute(ADD, now, act.actor, act.key_id, act.role, act.what, act.target, detail)


async def page(connection: Connection, wanted: Filter, limit: int) -> list[StoredAct]:
    """Return acts, the newest first."""
    rows = await connection.fetch(
        PAGE,
        wanted.below,
        wanted.target,
        wanted.actor,
        wanted.key_id,
        wanted.what,
        wanted.after,
        wanted.before,
        limit,
    )
    return [StoredAct(**row) for row in rows]


async def forget(connection: Connection, before: datetime) -> int:
    """Delete up to FORGOTTEN_AT_ONCE acts that are older; return how many."""
    return int((await connection.execute(FORGET, before)).rpartition(" ")[2])
