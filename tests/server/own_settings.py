"""The service as a process on a test's database, with settings of the test's own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from app.database.connection import Connection
from tests.conftest import register_group
from tests.support.processes import Service

Start = Callable[..., Awaitable[Service]]


@asynccontextmanager
async def started_by_need(dsn: str, db: Connection, tmp_path: Path, **usual: object) -> AsyncIterator[Start]:
    """Yield a function that starts the service with `usual` settings and its own; the group `shop` is registered."""
    await register_group(db, "shop")
    services: list[Service] = []

    async def start(**settings: object) -> Service:
        env = {f"HALFNOTE_{name.upper()}": str(value) for name, value in {**usual, **settings}.items()}
        service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn, **env)
        services.append(service)
        await service.start()
        return service

    try:
        yield start
    finally:
        for service in services:
            service.stop()
