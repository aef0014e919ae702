"""Run Alembic's migrations over one connection, each in a database transaction of its own, under an advisory lock."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from sqlalchemy import Connection, func, insert, pool
from sqlalchemy.ext.asyncio import create_async_engine

from app.database.advisory_locks import AdvisoryLock
from app.database.connection import connect
from app.migrate import LOCK_TIMEOUT_MS, OLDEST_SERVED_RULE, head
from app.models import audit, metadata
from app.operations.audit import audit_entry
from app.permissions import Caller
from app.store.proof.shared_settings import RAISE

# A role's or a database's own limits would end a long revision. Postgres before 17 does not know the last one.
WITHOUT_LIMITS = """
select set_config(name, '0', false) from pg_settings
where name in ('lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')
"""


def _run(connection: Connection) -> None:
    attributes = context.config.attributes
    attributes["backend"] = connection.exec_driver_sql("select pg_backend_pid()").scalar_one()
    connection.exec_driver_sql(WITHOUT_LIMITS)
    # Replicas that start at the same time migrate one at a time; the second one finds the schema up to date. The
    # session has the lock, so it lasts over all database transactions, and ends with the connection.
    connection.exec_driver_sql(f"select pg_advisory_lock({AdvisoryLock.MIGRATION})")
    # While a revision waits for a table lock, every request to the table waits behind it. So it waits for a moment, and
    # `migrate` tries again.
    connection.exec_driver_sql(f"set lock_timeout = {LOCK_TIMEOUT_MS}")
    # Alembic would take an open database transaction for its caller's, and leave all revisions in it.
    connection.commit()
    # A revision that is committed gives its locks back, and stays if a later one cannot have a lock.
    context.configure(
        connection=connection, target_metadata=metadata, transaction_per_migration=True, on_version_apply=_applied
    )
    # A new database has nothing that was changed: one row about the last revision says it all.
    attributes["is_new"] = context.get_context().get_current_revision() is None
    with context.begin_transaction():
        context.run_migrations()


def _applied(ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]) -> None:
    """Write what belongs to a revision, in its database transaction."""
    connection = ctx.connection
    if connection is None or not step.is_upgrade:
        return
    oldest: int | None = context.config.attributes.get("oldest_served")
    if oldest is not None and _has(connection, "shared_rule"):
        # Now, not at the end: a version that this schema no longer serves must not start after a crash.
        connection.exec_driver_sql(RAISE, (OLDEST_SERVED_RULE, float(oldest)))
    _record(connection, str(step.up_revision_id), next(iter(step.down_revision_ids), None))


def _record(connection: Connection, after: str, before: str | None) -> None:
    """Write an audit row about a revision, if a person migrates."""
    attributes = context.config.attributes
    by: Caller | None = attributes.get("by")
    is_new = attributes["is_new"]
    if by is None or not _has(connection, "audit") or (is_new and after != head()):
        return
    done = audit_entry(by, "database.migrate", after, former=None if is_new else before)
    values = {"actor": done.actor, "what": done.what, "target": done.target, "detail": done.detail}
    connection.execute(insert(audit).values(at=func.clock_timestamp(), **values))


def _has(connection: Connection, table: str) -> bool:
    return connection.exec_driver_sql("select to_regclass($1) is not null", (table,)).scalar_one() is True


async def _online() -> None:
    dsn = context.config.attributes["dsn"]
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: connect(dsn), poolclass=pool.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(_run)
        await connection.commit()
    await engine.dispose()


asyncio.run(_online())
