"""DTM: its server on an embedded Postgres of its own, and its Go client in the driver."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import asyncpg

from app.embedded_postgres import EmbeddedPostgres
from bench.idle import postgres_cpu_s
from bench.payload import half_body, message_of
from bench.peers import parts
from bench.peers.slices import Peer, cpu_of, driving, listening, server
from bench.services import free_port

# By default the server opens up to 500, and the embedded Postgres takes 100.
CONNECTIONS = 80


@asynccontextmanager
async def dtm(name: str, place: Path) -> AsyncIterator[Peer]:
    """Run DTM with its files in the directory `place`."""
    programs = await parts.dtm()
    parts.made(place)
    # If this program runs as root, the server's unprivileged user must be able to enter the directory.
    place.chmod(0o755)
    body = place / "body.json"
    body.write_bytes(message_of(half_body()))
    async with AsyncExitStack() as stack:
        postgres = await stack.enter_async_context(postgres_in(place / "data"))
        await make_tables(postgres.url, (programs / "tables.sql").read_text())
        port, log = free_port(), place / "dtm.log"
        environment = settings(postgres.url, port)
        served = await stack.enter_async_context(
            server(log, str(programs / "dtm"), env=os.environ | environment, cwd=place)
        )
        await listening(port, served, log)
        command = (str(programs / "driver"), f"http://127.0.0.1:{port}", str(body))
        driver = await stack.enter_async_context(driving(name, place / "driver.log", *command))
        yield Peer(
            name,
            driver,
            service_cpu_s=lambda: cpu_of([served]),
            database_cpu_s=lambda: postgres_cpu_s(postgres),
            client_cpu_s=lambda: cpu_of([driver.process]),
            halted=lambda: [served, driver.process],
        )


def settings(url: str, port: int) -> dict[str, str]:
    """Return the server's environment: its defaults but for the store, the ports and the log."""
    store = urlsplit(url)
    return {
        "STORE_DRIVER": "postgres",
        "STORE_HOST": str(store.hostname),
        "STORE_PORT": str(store.port),
        "STORE_USER": str(store.username),
        "STORE_PASSWORD": unquote(store.password or ""),
        "STORE_DB": store.path.removeprefix("/"),
        "STORE_MAX_OPEN_CONNS": str(CONNECTIONS),
        "STORE_MAX_IDLE_CONNS": str(CONNECTIONS),
        "HTTP_PORT": str(port),
        "GRPC_PORT": str(free_port()),
        "JSON_RPC_PORT": str(free_port()),
        "LOG_LEVEL": "error",
        "GIN_MODE": "release",
    }


@asynccontextmanager
async def postgres_in(data: Path) -> AsyncIterator[EmbeddedPostgres]:
    """Run a Postgres with the settings of the embedded one until the block ends."""
    postgres = await asyncio.to_thread(EmbeddedPostgres.start, data)
    try:
        yield postgres
    finally:
        await asyncio.to_thread(postgres.stop)
        shutil.rmtree(postgres.log_dir.parent, ignore_errors=True)


async def make_tables(url: str, tables: str) -> None:
    """Make the server's tables with its own script."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(tables)
    finally:
        await connection.close()
