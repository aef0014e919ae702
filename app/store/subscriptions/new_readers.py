"""The lock that keeps subscriptions and replays from beginning in a day while it is closed."""

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection

# Requests do not wait for each other. While a day is closed they wait for the end of one short database transaction.
SHARE = f"select pg_advisory_xact_lock_shared({AdvisoryLock.NEW_READERS})"
# It does not wait, because requests would wait behind it.
TAKE = f"select pg_try_advisory_xact_lock({AdvisoryLock.NEW_READERS})"


async def share_new_readers(connection: Connection) -> None:
    """Keep days from being closed until this database transaction ends.

    Call it before the first look at where the log begins, in the database transaction that writes the subscription or
    the replay.
    """
    await connection.execute(SHARE)


async def take_new_readers(connection: Connection) -> bool:
    """Keep subscriptions and replays from beginning until this database transaction ends; False: one begins now."""
    return bool(await connection.fetchval(TAKE))
