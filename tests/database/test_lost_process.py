"""A process inside a database transaction whose machine is gone, or which is frozen: the server frees its locks."""

import asyncio
import socket
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from app.coordinator.commit_lanes import answer_repeat_half
from app.coordinator.group_commit import GroupCommitLane, LaneLimits
from app.database import connection as connections
from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection, Database, connect
from app.database.keepalive import IDLE_S, PROBE_EVERY_S, PROBES, SILENT_S
from app.errors import OutcomeUnknown
from app.store.coordinator.halves import Half
from tests.coordinator.test_group_commit import new_half
from tests.support.faulty_proxy import receive_nothing
from tests.support.postgres import IN_THIS_DATABASE
from tests.support.requirements import absent

TAKE_OFFSETS = f"select pg_advisory_xact_lock({AdvisoryLock.OFFSET})"
HELD = (
    f"select count(*) from pg_locks where locktype = 'advisory' and objid = {AdvisoryLock.OFFSET} and granted "
    f"and {IN_THIS_DATABASE}"
)
WITHIN_S = 30
ORDER: dict[str, Any] = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}


@pytest.mark.parametrize("kind", ["pool", "keyed", "dedicated"])
async def test_ends_go_on_when_a_process_is_silent_with_the_offset_lock(
    client: httpx.AsyncClient, group: str, dsn: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_IN_TRANSACTION_S", 0.5)
    database = Database(dsn, pool_size=1)

    async def go_silent(connection: Connection) -> None:
        await connection.execute("begin")
        await connection.execute(TAKE_OFFSETS)
        async with asyncio.timeout(WITHIN_S):
            assert (await client.post("/messages", json=ORDER)).status_code == 201
            while not connection.is_closed():
                await asyncio.sleep(0.01)

    try:
        if kind == "dedicated":
            await go_silent(await database.dedicated())
        lend = {"keyed": database.keyed}.get(kind, database.connection)
        if kind != "dedicated":
            async with lend() as connection:
                await go_silent(connection)
        # The next one gets another.
        async with lend() as connection:
            assert await connection.fetchval("select 1") == 1
    finally:
        await database.close()


async def test_a_flush_that_the_server_ended_is_unconfirmed_and_the_next_one_goes_on(
    db: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_IN_TRANSACTION_S", 0.5)
    database = Database(dsn, pool_size=1)
    is_silent = True

    async def flush(connection: Connection, halves: Sequence[Half]) -> list[Any]:
        async with connection.transaction():
            await connection.execute(TAKE_OFFSETS)
            while is_silent and await db.fetchval(HELD):
                await asyncio.sleep(0.01)
            await connection.execute("select 1")
        return list(halves)

    lane: GroupCommitLane[Half, Any] = GroupCommitLane(
        database.dedicated, flush, answer_repeat_half, LaneLimits(flush_timeout_s=600), lambda *figures: None
    )
    try:
        half = new_half()
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(OutcomeUnknown):
                await lane.enqueue(half)
        is_silent = False
        assert await lane.enqueue(half) == half
    finally:
        await lane.close()
        await database.close()


async def test_only_the_services_connections_have_a_limit_and_all_have_probes(dsn: str) -> None:
    command = await connect(dsn)
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as pooled, database.keyed() as keyed:
            limits = [
                await one.fetchval("show idle_in_transaction_session_timeout") for one in (command, pooled, keyed)
            ]
            assert limits == ["0", "10s", "10s"]
            for connection in (command, pooled, keyed):
                assert await connection.fetchval("show tcp_keepalives_idle") == str(IDLE_S)
                assert await connection.fetchval("show tcp_keepalives_interval") == str(PROBE_EVERY_S)
                assert await connection.fetchval("show tcp_keepalives_count") == str(PROBES)
                assert await connection.fetchval("show tcp_user_timeout") == str(SILENT_S * 1000)
    finally:
        await command.close()
        await database.close()


@pytest.mark.slow
async def test_a_command_whose_machine_is_gone_gives_its_locks_back(dsn: str, db: Connection) -> None:
    if sys.platform != "linux":
        absent("a socket's packets can be dropped on Linux only", "MACHINE")
    command = await connect(dsn)
    await command.execute("begin")
    await command.execute(TAKE_OFFSETS)
    its_socket = command._transport.get_extra_info("socket")  # type: ignore[attr-defined]
    # Its own kernel is gone too, and ends no connection.
    its_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    receive_nothing(its_socket)
    async with asyncio.timeout(3 * SILENT_S):
        while await db.fetchval(HELD):
            await asyncio.sleep(0.05)
    command.terminate()
