"""How Alembic reaches the database: one connection, one advisory lock, and no waiting behind long readers."""

import asyncio

import asyncpg
from alembic import context
from sqlalchemy import Connection, pool
from sqlalchemy.ext.asyncio import create_async_engine

from app.models import metadata

# Replicas that start together migrate one after another; the second finds nothing to do.
MIGRATION_LOCK = 7002


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        connection.exec_driver_sql(f"select pg_advisory_xact_lock({MIGRATION_LOCK})")
        # A migration that queued for a table's lock would hold up every request behind it; `migrate` tries again.
        connection.exec_driver_sql("set local lock_timeout = '2s'")
        context.run_migrations()


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
