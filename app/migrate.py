"""Migrate a database to this version's schema, and check whether this version works on a database's schema."""

import asyncio
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from functools import cache
from pathlib import Path
from time import monotonic

import asyncpg
import structlog
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from app.database.blockers import blockers_of
from app.database.connection import Connection, UnusableDatabase, connect
from app.models import DAY_TABLES
from app.permissions import Caller
from app.policy.check_schedule import LONGEST_BACKOFF_S, LONGEST_HOLD_S, AskingPolicy
from app.store.proof.shared_settings import raise_rule, read_rule, write_rules
from app.store.retention import days

log = structlog.get_logger(__name__)

# The oldest revision whose service works on this version's schema: its replicas serve beside the new ones during an
# upgrade, and alone after a rollback. A migration that takes away what they use raises it. Services before 0012 need
# the table `sealing` to store a secret.
OLDEST_SERVED = "0012"
OLDEST_SERVED_RULE = "oldest_served_revision"
# Settings that the nightly proof reads from the database.
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
# For how long a revision is tried while another session holds a lock that it needs.
PATIENCE_S = 120.0
# How often a migration that waits is looked at, to name who blocks it.
LOOK_EVERY_S = 0.05
# How often a migration that waits for another one says so. It waits without a limit, because a revision may take long.
SAY_EVERY_S = 30.0
# lock_not_available, deadlock_detected
LOCK_STATES = ("55P03", "40P01")


def alembic_config(dsn: str, *, key_file: Path | None = None, by: Caller | None = None) -> Config:
    """Return Alembic's configuration for a database. There is no alembic.ini that could name another one.

    `key_file`: the keys by which migrations seal secrets. `by`: the person who migrates, for the audit.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent.parent / "migrations"))
    config.attributes["dsn"] = dsn
    config.attributes["key_file"] = key_file
    config.attributes["by"] = by
    return config


@cache
def revisions() -> tuple[str, ...]:
    """Return the revisions of this version's migrations, newest first."""
    script = ScriptDirectory.from_config(alembic_config(""))
    return tuple(revision.revision for revision in script.walk_revisions())


def head() -> str:
    """Return the revision that this version needs."""
    return revisions()[0]


async def serves(connection: Connection, revision: str | None) -> bool:
    """Return whether this version works on a database at `revision`: its own, or a later one that still serves it."""
    if revision is None or revision in revisions():
        return revision == head()
    oldest = await read_rule(connection, OLDEST_SERVED_RULE)
    return oldest is not None and oldest <= int(head())


def _is_newer(revision: str | None) -> bool:
    """Return whether a later version of Halfnote has migrated the database."""
    return revision is not None and revision not in revisions()


def refuse_newer(revision: str | None) -> None:
    """Raise UnusableDatabase if a later version of Halfnote has migrated the database."""
    if _is_newer(revision):
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


async def migrate(
    dsn: str,
    *,
    days_ahead: int,
    key_file: Path | None = None,
    by: Caller | None = None,
    patience_s: float = PATIENCE_S,
) -> str:
    """Upgrade the database to `head` and make the partitions from yesterday to `days_ahead` days from now.

    Returns the database's revision: `head`, or a later one that serves this version, whose schema and rules stay.

    `key_file`: the keys that seal secrets which an older version stored in plain text; needed only if there are any.
    `by`: the person who migrates, recorded in the audit if the schema changes. Each revision is committed by itself,
    and tried again while another session holds a lock. Raises UnusableDatabase if the database is newer than this
    version and does not serve it, if the key file is needed and unusable, or if a lock was not free for `patience_s`,
    and asyncpg's errors and SQLAlchemy's for anything else. After any of them the next call goes on where this one
    ended.
    """
    await _upgrade(dsn, alembic_config(dsn, key_file=key_file, by=by), patience_s)
    connection = await connect(dsn)
    try:
        # The database's own clock decides about partitions, and this process has not measured its offset.
        now: datetime = await connection.fetchval("select clock_timestamp()")
        await ensure_days(connection, now, days_ahead=days_ahead)
        revision = await current(connection)
        if not _is_newer(revision):
            await write_rules(connection, SHARED_RULES)
            await raise_rule(connection, OLDEST_SERVED_RULE, int(OLDEST_SERVED))
    finally:
        await connection.close()
    assert revision is not None
    return revision


async def _upgrade(dsn: str, config: Config, patience_s: float) -> None:
    """Run the revisions that are missing. Raises as `migrate`."""
    config.attributes["oldest_served"] = int(OLDEST_SERVED)
    # A revision may take long by itself, so the patience begins with the first lock that was not free.
    tried: str | None = None
    until: float | None = None
    # It looks at the database, beside the connection that changes it.
    connection = await connect(dsn)
    try:
        await connection.execute(f"set lock_timeout = {LOCK_TIMEOUT_MS}")
        while (blockers := await _upgraded(connection, config)) is not None:
            revision = await current(connection)
            if until is None or revision != tried:
                tried, until = revision, monotonic() + patience_s
            if monotonic() > until:
                raise UnusableDatabase(
                    f"The database stays at revision {revision}. The next one needs a lock that another session has "
                    f"held for {patience_s:.0f} s: {', '.join(blockers) or 'which is unknown'}. "
                    "End that session or wait for its end, then run `halfnote migrate` again; it goes on from there."
                )
            await asyncio.sleep(LOCK_REST_S)
    finally:
        await connection.close()


async def _upgraded(connection: Connection, config: Config) -> tuple[str, ...] | None:
    """Run the revisions that are missing; return None, or who blocked them if a lock was not free in time."""
    blockers: tuple[str, ...] = ()
    try:
        if _is_newer(revision := await current(connection)):
            if not await serves(connection, revision):
                refuse_newer(revision)
            return None
        # In a thread, because Alembic's environment runs its own event loop.
        upgrading = asyncio.create_task(asyncio.to_thread(command.upgrade, config, "head"))
        try:
            blockers = await _blockers_during(upgrading, connection, config)
        finally:
            # Its error says what failed, also if the other connection was lost with it.
            await upgrading
    except UnusableDatabase:
        raise
    except Exception as error:
        # A later version may have migrated the database meanwhile.
        if not _lost_to_a_lock(error) and not _is_newer(await current(connection)):
            raise
        return blockers
    return None


async def _blockers_during(upgrading: asyncio.Task[None], connection: Connection, config: Config) -> tuple[str, ...]:
    """Wait for the end of an upgrade; return who blocked its session when that was last seen."""
    seen: tuple[str, ...] = ()
    free_at = monotonic()
    while not (await asyncio.wait([upgrading], timeout=LOOK_EVERY_S))[0]:
        backend = config.attributes.get("backend")
        now = () if backend is None else await blockers_of(connection, backend)
        seen = now or seen
        if not now:
            free_at = monotonic()
        elif monotonic() - free_at >= SAY_EVERY_S:
            log.warning("migration_waits", blockers=list(now))
            free_at = monotonic()
    return seen


def _lost_to_a_lock(error: BaseException | None) -> bool:
    """Return whether a lock was not free in time, or two sessions waited for each other."""
    while error is not None:
        if getattr(error, "sqlstate", None) in LOCK_STATES:
            return True
        error = error.__cause__ or getattr(error, "orig", None)
    return False


async def ensure_days(connection: Connection, now: datetime, *, days_ahead: int) -> list[str]:
    """Make the missing partitions from yesterday to `days_ahead` days after `now`; return the days that lacked any.

    Each table is attached in its own database transaction with a lock_timeout of 100 ms, and retried.
    """
    known = {day.day for day in await days.days(connection)}
    wanted = [now.date() + timedelta(days=ahead) for ahead in range(-1, days_ahead + 1)]
    made = await _complete(connection, [day for day in wanted if day in known])
    for day in wanted:
        if day in known:
            continue
        # half comes last, so that no half message is stored before its Op and outbox rows have a partition.
        for table in reversed(DAY_TABLES):
            await attach_patiently(connection, table, day)
        await days.add_day(connection, day, now)
        made.append(day.isoformat())
    return sorted(made)


async def _complete(connection: Connection, known: Sequence[date]) -> list[str]:
    """Make the partitions that open days on record lack; return these days. Rows that were lost stay lost."""
    made: dict[str, list[str]] = {}
    for day, table in await days.incomplete(connection, known, DAY_TABLES[::-1]):
        if await attach_patiently(connection, table, day, on_record=True):
            made.setdefault(day.isoformat(), []).append(table)
    for one, tables in made.items():
        log.error("day_was_incomplete", day=one, made=tables)
    return list(made)


async def attach_patiently(connection: Connection, table: str, day: date, *, on_record: bool = False) -> bool:
    """Attach one partition; retry while another session locks the table. Raises LockNotAvailableError at the end.

    `on_record`: the day has its row; if it is not open any more, nothing is attached and False returned.
    """
    left = LOCK_RETRIES
    while True:
        try:
            async with connection.transaction():
                await days.lock_days(connection)
                await connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
                if on_record and not await days.keep_open(connection, day):
                    return False
                await days.attach(connection, table, day)
            return True
        except asyncpg.LockNotAvailableError:
            left -= 1
            if left == 0:
                raise
            await asyncio.sleep(LOCK_REST_S)
