"""A former primary that comes back unfenced is refused, with two real servers: one of them promoted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from app.database.connection import Connection, Database, connect, timeline_guard
from app.database.timelines import StaleServer, hosts_of
from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from tests.support import postgres
from tests.support.load import until
from tests.support.postgres_copies import either, execute, is_so, standby


@dataclass(frozen=True)
class SplitBrain:
    """Two servers that take writes: `promoted`, on timeline 2, and the former primary, on timeline 1."""

    former: EmbeddedPostgres
    promoted: str

    @property
    def url(self) -> str:
        """The URL of both, the former primary first."""
        return either(self.former.url, self.promoted)


@asynccontextmanager
async def split_brain(data_dir: Path) -> AsyncIterator[SplitBrain]:
    former = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings={"fsync": "off"})
    try:
        with standby(former, find_paths(data_dir), data_dir.parent / "standby") as promoted:
            await until(lambda: is_so(former.url, "select count(*) = 1 from pg_stat_replication"))
            await execute(promoted, "select pg_promote()")
            yield SplitBrain(former, promoted)
    finally:
        await asyncio.to_thread(former.stop)


async def port_of(connection: Connection) -> int:
    port: int = await connection.fetchval("select inet_server_port()")
    return port


async def test_a_former_primary_is_refused(data_dir: Path) -> None:
    async with split_brain(data_dir) as servers:
        [(_, former_port), (_, promoted_port)] = hosts_of(servers.url)
        # asyncpg takes the first host that takes writes.
        first = await asyncpg.connect(servers.url)
        assert await port_of(first) == former_port
        await first.close()

        # A process that has just started looks at all hosts.
        connection = await connect(servers.url)
        assert await port_of(connection) == promoted_port
        await connection.close()

        # A URL of one host, which leads to one server and then to the other.
        guard = timeline_guard(servers.promoted)
        await (await connect(servers.promoted, guard=guard)).close()
        with pytest.raises(StaleServer, match=r"timeline 1, and timeline 2 was seen.*former primary"):
            await connect(servers.former.url, guard=guard)


async def test_connections_to_a_former_primary_are_closed(data_dir: Path) -> None:
    former = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings={"fsync": "off"})
    try:
        with standby(former, find_paths(data_dir), data_dir.parent / "standby") as promoted:
            database = Database(either(former.url, promoted), pool_size=2)
            try:
                dedicated = await database.dedicated()
                async with database.connection() as pooled:
                    assert await port_of(pooled) == await port_of(dedicated) == hosts_of(former.url)[0][1]
                await until(lambda: is_so(former.url, "select count(*) = 1 from pg_stat_replication"))
                await execute(promoted, "select pg_promote()")
                database.guard.forget_look()
                await database.guard.look()
                assert dedicated.is_closed()
                async with database.connection() as pooled:
                    assert await port_of(pooled) == hosts_of(promoted)[0][1]
            finally:
                await database.close()
    finally:
        await asyncio.to_thread(former.stop)


async def test_another_cluster_is_refused(data_dir: Path) -> None:
    guard = timeline_guard(postgres.server().url)
    await (await connect(postgres.server().url, guard=guard)).close()
    other = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings={"fsync": "off"})
    try:
        with pytest.raises(StaleServer, match="belongs to another cluster"):
            await connect(other.url, guard=guard)
    finally:
        await asyncio.to_thread(other.stop)


async def test_a_role_without_rights_reads_the_timeline(dsn: str) -> None:
    await execute(dsn, "create role plain_role login password 'plain'")
    try:
        connection = await asyncpg.connect(dsn, user="plain_role", password="plain")
        guard = timeline_guard(dsn)
        await guard.admit(connection)
        await connection.close()
        assert guard.unreadable is None
        assert guard.highest is not None
        assert guard.highest.number >= 1
    finally:
        await execute(dsn, "drop role plain_role")


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u:p@db1,db2:6432/halfnote", [("db1", 5432), ("db2", 6432)]),
        ("postgresql://u:p%40@[::1]:5433,[::2]/halfnote", [("::1", 5433), ("::2", 5432)]),
        ("postgresql:///halfnote?host=db1,db2&port=5433,5434", [("db1", 5433), ("db2", 5434)]),
        ("postgresql:///halfnote?host=/var/run/postgresql", []),
        ("postgresql:///halfnote", []),
    ],
)
def test_hosts_of_a_url(url: str, hosts: list[tuple[str, int]]) -> None:
    assert hosts_of(url) == hosts
