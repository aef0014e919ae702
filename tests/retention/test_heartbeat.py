"""The heartbeat of upkeep: a long statement is no hang, and a failing step is no progress."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from app.database.connection import Connection, connect
from app.retention import heartbeat
from app.retention import loop as retention_loop
from app.retention.heartbeat import beating
from app.runtime.loop_lateness import TURN_WITHIN_S
from app.runtime.state import Runtime
from app.store.retention import days

LONG_AGO_S = 10 * TURN_WITHIN_S
HOLD, WAIT, RELEASE = (f"select pg_advisory_{act}(63)" for act in ("lock", "lock", "unlock"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between beats."""
    monkeypatch.setattr(heartbeat, "BEAT_EVERY_S", 0.01)


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[Connection]:
    """A session that is in the way of upkeep's."""
    connection = await connect(dsn)
    yield connection
    await connection.close()


def make_late(runtime: Runtime) -> float:
    """Set the last beat to a time that counts as late; return it."""
    at = runtime.heartbeats[heartbeat.NAME] = monotonic() - LONG_AGO_S
    return at


async def beats(runtime: Runtime, since: float, statement: asyncio.Task[object]) -> bool:
    """Return whether the heartbeat moves before a statement ends."""
    while not statement.done():
        if runtime.heartbeats[heartbeat.NAME] > since:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_statement_that_takes_long_is_not_late(runtime: Runtime, db: Connection, other: Connection) -> None:
    await other.execute(HOLD)
    async with beating(runtime, db, within_s=600):
        statement: asyncio.Task[object] = asyncio.create_task(db.execute(WAIT))
        # More than one beat, each while the statement waits.
        for _ in range(3):
            async with asyncio.timeout(30):
                assert await beats(runtime, make_late(runtime), statement)
        await other.execute(RELEASE)
        await statement


async def test_a_statement_that_exceeds_its_limit_is_late(runtime: Runtime, db: Connection, other: Connection) -> None:
    await other.execute(HOLD)
    since = make_late(runtime)
    async with beating(runtime, db, within_s=0):
        statement: asyncio.Task[object] = asyncio.create_task(db.execute(WAIT))
        await asyncio.sleep(20 * heartbeat.BEAT_EVERY_S)
        assert runtime.heartbeats[heartbeat.NAME] == since
        await other.execute(RELEASE)
        await statement


async def test_each_statement_has_its_own_limit(runtime: Runtime, db: Connection) -> None:
    """As the batches of clear_leftovers, which may take as long together as many statements."""
    within_s = 1.0
    async with beating(runtime, db, within_s):
        began = monotonic()
        while monotonic() - began < 1.5 * within_s:
            await db.execute("select 1")
            await asyncio.sleep(0.01)
        since = make_late(runtime)
        async with asyncio.timeout(30):
            while runtime.heartbeats[heartbeat.NAME] <= since:
                await db.execute("select 1")
                await asyncio.sleep(0.01)


async def test_a_step_beats_while_it_waits_unless_those_before_failed(
    runtime: Runtime, db: Connection, other: Connection
) -> None:
    for failed in range(heartbeat.FAILED_MOST + 2):
        since = make_late(runtime)
        async with other.transaction():
            await other.execute("lock table audit")
            # It waits for its lock_timeout and fails.
            step: asyncio.Task[object] = asyncio.create_task(retention_loop.step(runtime, runtime.clock.now()))
            assert await beats(runtime, since, step) == (failed < heartbeat.FAILED_MOST)
            with pytest.raises(Exception, match="lock timeout"):
                await step
    assert runtime.heartbeats[heartbeat.NAME] == since
    await retention_loop.step(runtime, runtime.clock.now())
    assert runtime.upkeep_failures == 0


async def test_failures_are_forgotten_while_another_worker_does_upkeep(
    runtime: Runtime, db: Connection, other: Connection
) -> None:
    runtime.upkeep_failures = heartbeat.FAILED_MOST
    assert await days.take_upkeep(other)
    await retention_loop.step(runtime, runtime.clock.now())
    since = make_late(runtime)
    heartbeat.beat(runtime)
    assert runtime.heartbeats[heartbeat.NAME] > since
