"""How Alembic reaches the database: one connection, one advisory lock, and no waiting behind long readers."""

import asyncio

import asyncpg
from alembic import context
from sqlalchemy import Connection, func, insert, pool
from sqlalchemy.ext.asyncio import create_async_engine

from app.access import Caller
from app.acts import act
from app.models import audit, metadata

# Replicas that start together migrate one after another; the second finds nothing to do.
MIGRATION_LOCK = 7002


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        connection.exec_driver_sql(f"select pg_advisory_xact_lock({MIGRATION_LOCK})")
        # A migration that queued for a table's lock would hold up every request behind it; `migrate` tries again.
        connection.exec_driver_sql("set local lock_timeout = '2s'")
        before = context.get_context().get_current_revision()
        context.run_migrations()
        _record(connection, before)


def _record(connection: Connection, before: str | None) -> None:
    """Write down who migrated the database, if a person did and anything changed."""
    by: Caller | None = context.config.attributes.get("by")
    after = context.get_context().get_current_revision()
    if by is None or after == before:
        return
    done = act(by, "database.migrate", after, former=before)
    values = {"actor": done.actor, "what": done.what, "target": done.target, "detail": done.detail}
    connection.execute(insert(audit).values(at=func.clock_timestamp(), **values))


async def _online() -> None:
    dsn = context.config.attributes["dsn"]
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(dsn), poolclass=pool.NullPool
    )
    async with engine.connect() as connection:
        await connection.run_sync(_run)
        await connection.commit()
    await engine.dispose()


asyncio.run(_online())
