"""A client that sends a request and closes its connection before the answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from uvicorn.server import ServerState

from app.database.connection import Connection, connect
from app.server.http_protocol import HttpProtocol
from tests.conftest import app_of

WITHIN_S = 30.0
WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


@asynccontextmanager
async def serving(client: httpx.AsyncClient) -> AsyncIterator[tuple[int, ServerState]]:
    """Serve the app of a client by HttpProtocol; yield the port and what uvicorn knows about connections and tasks."""
    config = uvicorn.Config(
        app_of(client), lifespan="off", ws="none", log_config=None, access_log=False, proxy_headers=False
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], state


async def leave_while_locked(
    client: httpx.AsyncClient, db: Connection, dsn: str, lock: str, path: str, **content: Any
) -> None:
    """Post a request that waits for a lock of the database; close the connection, then end the lock and the request."""
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    other = await connect(dsn)
    try:
        async with asyncio.timeout(WITHIN_S), serving(client) as (port, state):
            async with other.transaction():
                await other.execute(lock)
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
                while not await db.fetchval(WAITING):
                    await asyncio.sleep(0.005)
                writer.close()
                while state.connections:
                    await asyncio.sleep(0.005)
                assert state.tasks
            while state.tasks:
                await asyncio.sleep(0.005)
    finally:
        await other.close()
