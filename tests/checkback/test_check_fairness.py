"""One group's check URLs hang, and another group's checks are still sent in time. Real time, real sockets."""

from asyncio import sleep, timeout
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from statistics import median, quantiles
from uuid import UUID

from aiohttp import web

from app.config import Settings
from app.database.connection import Connection, connect
from app.ids import uuid7
from app.lifecycle.startup import running
from app.runtime.state import Runtime
from tests.conftest import migrated_template, register_group
from tests.support import postgres
from tests.support.check_responder import Call, Responder, Silent
from tests.support.check_stepping import many_in_doubt

IN_DOUBT = 5000
ASKED = 40
DUE_WITHIN_S = 3.0
WITHIN_S = 1.0
MEASUREMENTS = 4


async def test_a_hanging_group_delays_another_groups_checks_by_less_than_a_second(settings: Settings) -> None:
    # Other tests assert no times. This bound is part of the contract, so it is tested. A machine
    # that is busy with something else may exceed it, so the test fails only if every measurement does.
    found = []
    for _ in range(MEASUREMENTS):
        dsn = postgres.create_database(migrated_template())
        try:
            delays = await delays_beside_a_hanging_group(settings.model_copy(update={"database_url": dsn}), dsn)
        finally:
            postgres.drop_database(dsn)
        found.append((median(delays), quantiles(delays, n=10)[-1]))
        if max(found[-1]) <= WITHIN_S:
            return
    raise AssertionError(f"seconds from due to asked, median and 90th percentile of each measurement: {found}")


async def delays_beside_a_hanging_group(settings: Settings, dsn: str) -> list[float]:
    """Return the seconds from due to sent of each check of the group `bank`, while group `stuck` hangs."""
    asked: dict[UUID, datetime] = {}

    async def note(call: Call) -> web.StreamResponse:
        if call.json()["type"] == "halfnote.check":
            asked[UUID(call.json()["transaction_id"])] = runtime.clock.now()
        return web.json_response({"verdict": "commit"})

    async with AsyncExitStack() as stack:
        db = await connect(dsn)
        stack.push_async_callback(db.close)
        hanging = [await stack.enter_async_context(Silent()) for _ in range(2)]
        bank = await stack.enter_async_context(Responder(note))
        await register_group(db, "stuck", check_urls=[url.url for url in hanging])
        await register_group(db, "bank", check_urls=[bank.url])
        runtime = await stack.enter_async_context(running(settings.model_copy(update={"drain_s": 0.1})))
        await many_in_doubt(db, runtime, "stuck", IN_DOUBT)
        async with timeout(60):
            while sum(url.connections for url in hanging) < 32:
                await sleep(0.05)
            due = await due_one_by_one(db, runtime)
            while len(asked) < ASKED:
                await sleep(0.05)
        left = await db.fetchval("select count(*) from check_back where producer_group = 'stuck'")
    assert left == IN_DOUBT
    return [(at - due[one]).total_seconds() for one, at in asked.items()]


async def due_one_by_one(db: Connection, runtime: Runtime) -> dict[UUID, datetime]:
    """Write halves of `bank`, each due a moment after the one before; return the due time of each."""
    now = runtime.clock.now()
    gap = timedelta(seconds=DUE_WITHIN_S / ASKED)
    due = {uuid7(now): now + timedelta(seconds=0.5) + gap * n for n in range(ASKED)}
    await db.copy_records_to_table(
        "half",
        columns=["transaction_id", "position", "producer_group", "topic", "content_type", "body", "body_digest",
                 "born_at", "first_check_at"],
        records=[(one, 0, "bank", "order", "application/json", b"1", b"", now, at) for one, at in due.items()],
    )  # fmt: skip
    return due
