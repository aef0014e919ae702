"""The environment of a benchmark: one embedded Postgres with real durability, its databases, and services on them."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psutil

from app.database.connection import Connection, connect
from app.embedded_postgres import EmbeddedPostgres
from app.migrate import migrate
from bench.machine import describe
from bench.payload import GROUP, TOPIC
from bench.services import Service, cpu_s, serving

TEMPLATE = "bench_template"
# The check immunity is longer than a run, so that no check is part of the measurement of half and end.
IMMUNITY_S = 86_400
SUBSCRIPTION = "bench"
ELSEWHERE = "bench.elsewhere"


@dataclass(frozen=True, slots=True)
class Stage:
    """The server, a temporary directory and the machine; `quick` shortens runs to about a second."""

    server: EmbeddedPostgres
    place: Path
    quick: bool
    machine: dict[str, Any]

    def seconds(self, full: int, quick: int = 1) -> int:
        """Return the duration of a run in seconds."""
        return quick if self.quick else full

    def dsn(self, name: str) -> str:
        """Return the URL of a database."""
        return urlunsplit(urlsplit(self.server.url)._replace(path=f"/{name}"))

    async def empty_database(self, name: str) -> str:
        """Create a database with nothing in it."""
        await self._administer(f"create database {name}")
        return self.dsn(name)

    async def database(self, name: str) -> str:
        """Create a migrated database."""
        await self._administer(f"create database {name} template {TEMPLATE}")
        return self.dsn(name)

    async def drop(self, *names: str) -> None:
        """Drop databases that are no longer needed, to free their disk space."""
        for name in names:
            await self._administer(f"drop database {name} with (force)")

    async def _administer(self, statement: str) -> None:
        async with connected(self.server.url) as connection:
            await connection.execute(statement)


@asynccontextmanager
async def open_stage(*, quick: bool) -> AsyncIterator[Stage]:
    """Start the Postgres of a benchmark in a temporary directory; stop it and delete the directory at the end."""
    place = Path(tempfile.mkdtemp(prefix="halfnote-bench-")).resolve()
    # If this program runs as root, the server's unprivileged user must be able to enter the directory.
    place.chmod(0o755)
    try:
        server = await asyncio.to_thread(EmbeddedPostgres.start, place / "data")
        try:
            stage = Stage(server, place, quick, await describe(server.url, place))
            await migrate(await stage.empty_database(TEMPLATE), days_ahead=2)
            yield stage
        finally:
            await asyncio.to_thread(server.stop)
            shutil.rmtree(server.log_dir.parent, ignore_errors=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    """Open one connection as the service does; close it at the end of the block."""
    connection = await connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def halfnote(
    stage: Stage,
    dsn: str,
    receiver: Service,
    *,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    app: str = "app.main:app",
    key: str | None = None,
) -> AsyncIterator[Service]:
    """Serve Halfnote in role `all`, with the group and one active subscription whose topic does not match.

    `key` is an admin's API key, if the service requires keys.
    """
    over = {"HALFNOTE_DATABASE_URL": dsn, **(env or {})}
    async with serving(app, stage.place, over, workers=workers) as service:
        group = {"check_urls": [f"{receiver.url}/check"], "immunity_s": IMMUNITY_S}
        await put(service, f"/producer-groups/{GROUP}", group, key=key)
        await relay_busy(service, receiver, busy=False, key=key)
        yield service


async def relay_busy(service: Service, receiver: Service, *, busy: bool, key: str | None = None) -> None:
    """Set whether the subscription's topic matches the messages."""
    destination = {"type": "webhook", "url": f"{receiver.url}/hook"}
    topics = [TOPIC if busy else ELSEWHERE]
    await put(service, f"/subscriptions/{SUBSCRIPTION}", {"topics": topics, "destination": destination}, key=key)


async def put(service: Service, path: str, body: Mapping[str, Any], *, key: str | None = None) -> None:
    """PUT to a service; raises RuntimeError with the answer if it is an error."""
    await _send(service, "PUT", path, body, key)


async def post(service: Service, path: str, body: Mapping[str, Any]) -> None:
    """POST to a service; raises RuntimeError with the answer if it is an error."""
    await _send(service, "POST", path, body)


async def _send(service: Service, method: str, path: str, body: Mapping[str, Any], key: str | None = None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, headers=headers) as client:
        response = await client.request(method, path, json=dict(body))
    if response.is_error:
        raise RuntimeError(f"{method} {path}: {response.status_code} {response.text}")


async def count_of(receiver: Service) -> int:
    """Return how many POSTs the receiver has answered so far."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return int((await client.get(f"{receiver.url}/count")).text)


async def backend_cpu_s(connection: Connection, database: str) -> dict[int, float]:
    """Return the CPU seconds so far, by pid, of the Postgres backends of a database, except this connection's."""
    rows = await connection.fetch(
        "select pid from pg_stat_activity where datname = $1 and backend_type = 'client backend' and pid <> $2",
        database,
        connection.get_server_pid(),
    )
    found = {}
    for (pid,) in rows:
        try:
            found[pid] = cpu_s(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found
