"""A former primary that comes back unfenced is refused, with two real servers: one of them promoted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from app.database.connection import Connection, Database, connect, timeline_guard
from app.database.keyed_share import KeyedShare
from app.database.timelines import LookTimes, StaleServer, Timeline, hosts_of
from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.runtime.readiness import readiness
from app.runtime.state import Runtime
from tests.support import postgres
from tests.support.load import until
from tests.support.postgres_copies import execute, is_true, standby, url_of_both


async def port_of(connection: Connection) -> int:
    port: int = await connection.fetchval("select inet_server_port()")
    return port


@asynccontextmanager
async def two_servers(data_dir: Path) -> AsyncIterator[tuple[str, str]]:
    """Yield the URLs of a primary and of its standby."""
    primary = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings={"fsync": "off"})
    try:
        with standby(primary, find_paths(data_dir), data_dir.parent / "standby") as other:
            await until(lambda: is_true(primary.url, "select count(*) = 1 from pg_stat_replication"))
            yield primary.url, other
    finally:
        await asyncio.to_thread(primary.stop)


async def test_a_former_primary_is_refused(data_dir: Path) -> None:
    async with two_servers(data_dir) as (former, promoted):
        url = url_of_both(former, promoted)
        [(_, former_port), (_, promoted_port)] = hosts_of(url)
        database = Database(url, pool_size=2, look_times=LookTimes(every_s=0))
        try:
            dedicated = await database.dedicated()
            async with database.connection() as pooled:
                assert await port_of(pooled) == await port_of(dedicated) == former_port
            await execute(promoted, "select pg_promote()")
            # asyncpg takes the first host that takes writes.
            direct = await asyncpg.connect(url)
            assert await port_of(direct) == former_port
            await direct.close()

            await database.guard.look()
            assert dedicated.is_closed()
            async with database.connection() as pooled:
                assert await port_of(pooled) == promoted_port
        finally:
            await database.close()

        # A process that has just started looks at all hosts.
        connection = await connect(url)
        assert await port_of(connection) == promoted_port
        await connection.close()

        # A URL of one host, which leads to one server and then to another.
        guard = timeline_guard(promoted)
        await (await connect(promoted, guard=guard)).close()
        with pytest.raises(StaleServer, match=r"timeline 1, and timeline 2 was seen.*former primary"):
            await connect(former, guard=guard)
        with pytest.raises(StaleServer, match="belongs to another cluster"):
            await connect(postgres.server().url, guard=guard)


async def test_a_connection_to_a_standby_is_lent_once(data_dir: Path) -> None:
    """The standby may be promoted while it is open, and then only another connection shows that."""
    async with two_servers(data_dir) as (_, other):
        promotions: list[Timeline] = []
        database = Database(other, pool_size=2)
        share = KeyedShare(database, 1)
        database.guard.on_promotion.append(lambda: promotions.append(highest(database)))
        try:
            async with database.keyed() as keyed, database.connection() as pooled, share.connection() as shared:
                for connection in (keyed, pooled, shared):
                    assert await connection.fetchval("select pg_is_in_recovery()")
            assert all(connection.is_closed() for connection in (keyed, pooled, shared))
            await execute(other, "select pg_promote()")
            async with database.keyed() as keyed:
                assert promotions == [highest(database)]
                await keyed.execute("create table t ()")
            assert not keyed.is_closed()
        finally:
            await share.close()
            await database.close()


def highest(database: Database) -> Timeline:
    assert database.guard.highest is not None
    return database.guard.highest


async def test_readyz_names_a_former_primary(runtime: Runtime) -> None:
    highest = runtime.database.guard.highest
    assert highest is not None
    runtime.database.guard.highest = replace(highest, number=highest.number + 1)
    await runtime.database.engine.dispose()
    [check] = [check for check in (await readiness(runtime)).checks if check.name == "database"]
    assert not check.ok
    assert "former primary" in check.detail


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
