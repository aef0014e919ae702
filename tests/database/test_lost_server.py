"""A server whose machine is gone, or which is frozen: its connections end, so that no loop waits for ever."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from math import inf
from urllib.parse import urlsplit

import asyncpg
import pytest

from app.database import notifier
from app.database.connection import Connection, Database, connect, timeline_guard
from app.database.keepalive import IDLE_S, PROBE_EVERY_S, PROBES, SILENT_S
from app.database.keyed_share import KeyedShare
from app.database.lent_connections import LENT_FOR_LOOKS
from app.database.timelines import Host, LookTimes, TimelineGuard
from app.loops import overdue_connections
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from tests.conftest import assembled, settings_of
from tests.support.faulty_proxy import FaultyProxy, through
from tests.support.postgres_copies import url_of_both
from tests.support.requirements import absent


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(urlsplit(dsn).port or 5432) as made:
        yield made


@pytest.fixture
def url(dsn: str, proxy: FaultyProxy) -> str:
    """The test's database, through the proxy."""
    return through(proxy, dsn)


def option(connection: Connection, level: int, name: int) -> int:
    """Return the value of an option of a connection's socket."""
    value: int = connection._transport.get_extra_info("socket").getsockopt(level, name)
    return value


@pytest.mark.skipif(sys.platform != "linux", reason="the options of Linux")
async def test_the_kernel_probes_the_server_of_each_connection(dsn: str, url: str) -> None:
    database = Database(url, pool_size=1)
    try:
        dedicated = await database.dedicated()
        async with database.connection() as pooled, database.keyed() as keyed:
            for connection in (dedicated, pooled, keyed):
                assert option(connection, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert option(connection, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == IDLE_S
                assert option(connection, socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == PROBE_EVERY_S
                assert option(connection, socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == PROBES
                assert option(connection, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT_S * 1000
        await dedicated.close()
    finally:
        await database.close()


async def test_a_statement_ends_whose_servers_machine_is_gone(proxy: FaultyProxy, url: str, db: Connection) -> None:
    """The server's kernel has acknowledged one statement, and neither the other nor a connection at rest."""
    if sys.platform != "linux":
        absent("a socket's packets can be dropped on Linux only", "MACHINE")
    awaits, sends, rests = [await connect(url) for _ in range(3)]
    awaited = asyncio.create_task(awaits.fetch("select 'awaited', pg_sleep(600)"))
    async with asyncio.timeout(30):
        while not await db.fetchval(
            "select exists (select from pg_stat_activity where query like '%''awaited''%600%' "
            "and datname = current_database())"
        ):
            await asyncio.sleep(0.05)
    proxy.vanish()
    sent = asyncio.create_task(sends.fetch("select 1"))
    async with asyncio.timeout(3 * SILENT_S):
        for statement in (awaited, sent):
            with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                await statement
        while not rests.is_closed():
            await asyncio.sleep(0.05)
    for connection in (awaits, sends, rests):
        assert connection.is_closed()


@pytest.mark.parametrize("kind", ["pool", "keyed", "claims"])
async def test_a_statement_ends_that_a_frozen_server_never_answers(proxy: FaultyProxy, url: str, kind: str) -> None:
    """The proxy acknowledges all, and forwards nothing. What uses a connection afterwards gets another."""
    database = Database(url, pool_size=1)
    share = KeyedShare(database, 1)
    lender = {"pool": database.connection, "keyed": database.keyed, "claims": share.connection}[kind]

    lent = asyncio.Event()

    async def read() -> int:
        async with lender() as connection:
            lent.set()
            value: int = await connection.fetchval("select 1")
            return value

    try:
        assert await read() == 1
        proxy.hold()
        lent.clear()
        stuck = asyncio.create_task(read())
        await lent.wait()
        for _ in range(LENT_FOR_LOOKS):
            assert await database.close_overdue() == 0
        assert not stuck.done()
        assert await database.close_overdue() == 1
        with pytest.raises(asyncpg.ConnectionDoesNotExistError):
            await stuck
        proxy.release()
        # One that is free is never overdue, nor one that is lent again and again.
        for _ in range(LENT_FOR_LOOKS + 1):
            assert await database.close_overdue() == 0
            assert await read() == 1
    finally:
        await share.close()
        await database.close()


@pytest.mark.parametrize("kind", ["runs", "waits for a lock"])
async def test_the_backend_of_an_overdue_connection_ends_with_it(dsn: str, db: Connection, kind: str) -> None:
    """It would go on until its statement is over, and count toward `max_connections`."""
    statement = {"runs": "select pg_sleep(600)", "waits for a lock": "select pg_advisory_lock(hashtext('lost'))"}[kind]
    await db.execute("select pg_advisory_lock(hashtext('lost'))")
    database = Database(dsn, pool_size=1)
    lent: asyncio.Queue[int] = asyncio.Queue()

    async def run() -> None:
        async with database.connection() as connection:
            lent.put_nowait(connection.get_server_pid())
            await connection.execute(statement)

    async def is_there(pid: int) -> bool:
        return bool(await db.fetchval("select exists (select from pg_stat_activity where pid = $1)", pid))

    try:
        stuck = asyncio.create_task(run())
        pid = await lent.get()
        for _ in range(LENT_FOR_LOOKS):
            assert await database.close_overdue() == 0
        assert await is_there(pid)
        assert await database.close_overdue() == 1
        with pytest.raises((asyncpg.ConnectionDoesNotExistError, asyncpg.AdminShutdownError)):
            await stuck
        async with asyncio.timeout(30):
            while await is_there(pid):
                await asyncio.sleep(0.05)
        # The next one gets another.
        async with database.connection() as connection:
            assert await connection.fetchval("select 1") == 1
    finally:
        await database.close()


async def test_looks_of_the_loop_are_counted_and_not_seconds(runtime: Runtime) -> None:
    """A process that is stopped does not look, and goes on with its connections."""
    looks = [await overdue_connections.step(runtime, runtime.clock.now()) for _ in range(LENT_FOR_LOOKS)]
    async with runtime.database.connection() as connection:
        looks += [await overdue_connections.step(runtime, runtime.clock.now()) for _ in range(LENT_FOR_LOOKS)]
        assert not any(look.done for look in looks)
        assert not connection.is_closed()
        assert (await overdue_connections.step(runtime, runtime.clock.now())).done == 1
        assert connection.is_closed()


@pytest.mark.parametrize(("loop", "answer"), [("upkeep", b"pg_try_advisory_lock"), ("listen", b"LISTEN")])
async def test_a_loop_with_its_own_connection_does_not_wait_for_ever(
    proxy: FaultyProxy, url: str, loop: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server freezes in the midst of a statement."""
    for module in (retention_loop, notifier):
        monkeypatch.setattr(module, "ANSWER_WITHIN_S", 5.0)
    async with assembled(settings_of(url), url) as runtime:

        async def turn() -> None:
            if loop == "listen":
                await runtime.wake_ups.listen()
            else:
                await retention_loop.step(runtime, runtime.clock.now())

        proxy.hold_answer(answer)
        stuck = asyncio.create_task(turn())
        try:
            await proxy.holding_answer.wait()
            proxy.hold()
            await asyncio.wait([stuck], timeout=60)
            assert stuck.done()
            with pytest.raises(TimeoutError):
                await stuck
        finally:
            stuck.cancel()
            proxy.release()
        await turn()


@pytest.mark.parametrize("statement", ["first", "last"])
async def test_a_server_that_stops_answering_after_the_login_is_given_up(
    proxy: FaultyProxy, url: str, statement: str
) -> None:
    """As a pooler in session mode does that has no server to spare."""

    class Stops(TimelineGuard):
        async def admit(self, connection: Connection) -> None:
            if statement == "first":
                proxy.hold()
            await super().admit(connection)
            proxy.hold()

    async def connect_host(host: Host) -> Connection:
        raise AssertionError("a URL of one host")

    guard = Stops(url, connect_host, LookTimes())
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError):
            await connect(url, timeout_s=1.0, guard=guard, keeps_plans=True)


@pytest.mark.parametrize("kind", ["frozen", "gone"])
async def test_a_first_host_that_does_not_answer_is_passed_over(
    dsn: str, proxy: FaultyProxy, url: str, kind: str
) -> None:
    """The last look found it well."""
    if kind == "gone" and sys.platform != "linux":
        absent("a socket's packets can be dropped on Linux only", "MACHINE")
    both = url_of_both(url, dsn)
    guard = timeline_guard(both, LookTimes(every_s=inf, within_s=30))
    before = await connect(both, guard=guard)
    assert proxy.connections == 2
    {"frozen": proxy.hold, "gone": proxy.vanish}[kind]()
    connection = await connect(both, timeout_s=5.0, guard=guard)
    assert await connection.fetchval("select inet_server_port()") == urlsplit(dsn).port
    await connection.close()
    before.terminate()


async def test_a_host_that_did_not_answer_the_last_look_is_tried_last(dsn: str, proxy: FaultyProxy, url: str) -> None:
    both = url_of_both(url, dsn)
    proxy.hold()
    guard = timeline_guard(both, LookTimes(every_s=inf, within_s=5))
    connection = await connect(both, timeout_s=30, guard=guard)
    # Of the look alone.
    assert proxy.connections == 1
    await connection.close()


async def test_of_hosts_that_all_fail_the_most_telling_error_is_raised(dsn: str, proxy: FaultyProxy, url: str) -> None:
    both = urlsplit(url_of_both(url, dsn))._replace(path="/no_such_database").geturl()
    proxy.hold()
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await connect(both, timeout_s=5.0)
