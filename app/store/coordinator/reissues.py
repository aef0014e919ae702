"""SQL of reissues: the new transaction that sends the messages of a rolled-back one."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.database.connection import Connection
from app.database.standby_wait import CONFIRMED

# Safe under concurrency: a second reissue waits for the first one's database transaction and then conflicts.
ADD_REISSUE = """
insert into reissue (transaction_id, reissued_as, actor, reason, at) values ($1, $2, $3, $4, $5)
on conflict do nothing returning true
"""

# Run it after ADD_REISSUE, as a second statement: the winner of a race is not in the snapshot of the first. Its commit
# waits for what it has read (see CONFIRMED).
REISSUED_AS = f"with {CONFIRMED} select reissued_as from reissue, confirmed where transaction_id = $1"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Reissue:
    """A person's request to send the messages of a rolled-back transaction after all."""

    transaction_id: UUID
    reissued_as: UUID
    actor: str | None
    reason: str


async def add_reissue(connection: Connection, reissue: Reissue, now: datetime) -> bool:
    """Store a reissue; False if the transaction has one already."""
    return bool(
        await connection.fetchval(
            ADD_REISSUE, reissue.transaction_id, reissue.reissued_as, reissue.actor, reissue.reason, now
        )
    )


async def reissued_as(connection: Connection, transaction_id: UUID) -> UUID | None:
    """Return the id of the transaction that reissued a rolled-back one, or None. Not in a database transaction."""
    found: UUID | None = await connection.fetchval(REISSUED_AS, transaction_id)
    return found
