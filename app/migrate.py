"""Bringing a database to this version's schema, and telling whether it is there."""

import asyncio
from datetime import date, datetime, timedelta
from functools import cache
from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from app.access import Caller
from app.database import Connection, UnusableDatabase, connect
from app.models import DAY_TABLES
from app.policy import LONGEST_BACKOFF_S, LONGEST_HOLD_S, AskingPolicy
from app.sealing import HEADERS_READ_FROM, SECRETS_READ_FROM
from app.store import days
from app.store.sealed import parts
from app.store.shared_rules import raise_rule, read_rule, write_rules

# The oldest revision whose service goes on working on this version's schema: until an upgrade is over its replicas
# serve beside the new ones, and after a rollback they do alone. Raised by a migration that takes away what they use,
# and in a database by sealing what they cannot read.
OLDEST_SERVED = "0007"
_OLDEST_SERVED_RULE = "oldest_served_revision"
# What the nightly proof must know as well; it reads them from the database.
SHARED_RULES = {
    "longest_backoff_s": LONGEST_BACKOFF_S,
    "longest_hold_s": LONGEST_HOLD_S,
    "interval_s": AskingPolicy().interval_s,
    "max_checks": AskingPolicy().max_checks,
    "unanswered_park_s": AskingPolicy().unanswered_park_s,
}

LOCK_RETRIES = 60
LOCK_TIMEOUT_MS = 100
LOCK_REST_S = 0.2


def alembic_config(dsn: str, *, by: Caller | None = None) -> Config:
    """Return Alembic's configuration for a database; there is no alembic.ini, so nothing can point elsewhere.

    `by`: the person who migrates, which is put on record.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent.parent / "migrations"))
    config.attributes["dsn"] = dsn
    config.attributes["by"] = by
    return config


@cache
def revisions() -> tuple[str, ...]:
    """Return every revision this version of the service knows, newest first."""
    script = ScriptDirectory.from_config(alembic_config(""))
    return tuple(revision.revision for revision in script.walk_revisions())


def head() -> str:
    """Return the revision this version of the service needs."""
    return revisions()[0]


async def serves(connection: Connection, revision: str | None) -> bool:
    """Tell whether this version works on a database at `revision`: its own, or a later one that says so."""
    if revision is None or revision in revisions():
        return revision == head()
    oldest = await read_rule(connection, _OLDEST_SERVED_RULE)
    return oldest is not None and oldest <= int(head())


def refuse_newer(revision: str | None) -> None:
    """Raise UnusableDatabase if a later version of Halfnote has migrated the database."""
    if revision is not None and revision not in revisions():
        raise UnusableDatabase(
            f"The database is at revision {revision}, which is newer than this Halfnote (it knows up to {head()}). "
            "Start the version that migrated the database, or a later one."
        )


async def current(connection: Connection) -> str | None:
    """Return the database's revision, or None if it was never migrated."""
    if await connection.fetchval("select to_regclass('alembic_version')") is None:
        return None
    revision: str | None = await connection.fetchval("select version_num from alembic_version")
    return revision


async def migrate(dsn: str, *, days_ahead: int, by: Caller | None = None) -> None:
    """Upgrade the database to `head` and make the partitions from yesterday to `days_ahead` days from now.

    `by`: the person who does it, which is put on record if the schema changes. Tries again while a reader's lock is in
    the way. Raises UnusableDatabase if the database is newer than this version, and asyncpg's errors for anything else.
    """
    for attempt in range(LOCK_RETRIES):
        try:
            await _upgrade(dsn, by)
            break
        except Exception as error:
            if not _lock_timeout(error) or attempt == LOCK_RETRIES - 1:
                raise
            await asyncio.sleep(LOCK_REST_S)
    connection = await connect(dsn)
    try:
        # The database's own clock: partitions are judged by it, and no service is running yet that has measured it.
        now: datetime = await connection.fetchval("select clock_timestamp()")
        await ensure_days(connection, now, days_ahead=days_ahead)
        await write_rules(connection, SHARED_RULES)
        await say_oldest_served(connection)
    finally:
        await connection.close()


async def say_oldest_served(connection: Connection) -> None:
    """Write down which versions may work on the database: none that could not read what is sealed in it."""
    sealed = await parts(connection)
    readers = HEADERS_READ_FROM if sealed.headers else SECRETS_READ_FROM if sealed.secrets else 0
    await raise_rule(connection, _OLDEST_SERVED_RULE, max(int(OLDEST_SERVED), readers))


async def _upgrade(dsn: str, by: Caller | None) -> None:
    connection = await connect(dsn)
    try:
        await connection.execute("set lock_timeout = '2s'")
        refuse_newer(await current(connection))
    finally:
        await connection.close()
    # In a thread: Alembic's environment runs an event loop of its own.
    await asyncio.to_thread(command.upgrade, alembic_config(dsn, by=by), "head")


def _lock_timeout(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, asyncpg.LockNotAvailableError) or getattr(error, "sqlstate", None) == "55P03":
            return True
        error = error.__cause__ or getattr(error, "orig", None)
    return False


async def ensure_days(connection: Connection, now: datetime, *, days_ahead: int) -> list[str]:
    """Make what is missing of the partitions from yesterday to `days_ahead` days after `now`; return the new days.

    Each table is attached in a database transaction of its own with a lock_timeout of 100 ms, and tried again.
    """
    known = {day.day for day in await days.days(connection)}
    wanted = [now.date() + timedelta(days=ahead) for ahead in range(-1, days_ahead + 1)]
    made = []
    for day in wanted:
        if day in known:
            continue
        # half comes last: a half must never find a partition while its op or outbox row would not.
        for table in reversed(DAY_TABLES):
            await attach_patiently(connection, table, day)
        await days.add_day(connection, day, now)
        made.append(day.isoformat())
    return made


async def attach_patiently(connection: Connection, table: str, day: date) -> None:
    """Attach one partition, giving way to whoever holds the table and trying again; raises after the last try."""
    for attempt in range(LOCK_RETRIES):
        try:
            async with connection.transaction():
                await days.lock_days(connection)
                await connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
                await days.attach(connection, table, day)
            return
        except asyncpg.LockNotAvailableError:
            if attempt == LOCK_RETRIES - 1:
                raise
            await asyncio.sleep(LOCK_REST_S)
