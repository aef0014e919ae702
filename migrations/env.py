"""Run Alembic's migrations over one connection, under an advisory lock, without waiting long for table locks."""

import asyncio

import asyncpg
from alembic import context
from sqlalchemy import Connection, func, insert, pool
from sqlalchemy.ext.asyncio import create_async_engine

from app.database.advisory_locks import AdvisoryLock
from app.database.url_file import url_of
from app.models import audit, metadata
from app.operations.audit import audit_entry
from app.permissions import Caller


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        # Replicas that start at the same time migrate one at a time; the second one finds the schema up to date.
        connection.exec_driver_sql(f"select pg_advisory_xact_lock({AdvisoryLock.MIGRATION})")
        # While a migration waits for a table lock, every request to the table waits behind it. So it waits at most 2 s,
        # and `migrate` tries again.
        connection.exec_driver_sql("set local lock_timeout = '2s'")
        before = context.get_context().get_current_revision()
        context.run_migrations()
        _record(connection, before)


def _record(connection: Connection, before: str | None) -> None:
    """Write an audit row about the migration, if a person started it and the schema changed."""
    by: Caller | None = context.config.attributes.get("by")
    after = context.get_context().get_current_revision()
    if by is None or after == before:
        return
    done = audit_entry(by, "database.migrate", after, former=before)
    values = {"actor": done.actor, "what": done.what, "target": done.target, "detail": done.detail}
    connection.execute(insert(audit).values(at=func.clock_timestamp(), **values))


async def _online() -> None:
    dsn = context.config.attributes["dsn"]
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url_of(dsn)), poolclass=pool.NullPool
    )
    async with engine.connect() as connection:
        await connection.run_sync(_run)
        await connection.commit()
    await engine.dispose()


asyncio.run(_online())
