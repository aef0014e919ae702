"""Checks by several groups, workers and leases: none delays or repeats another's."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

import httpx
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from app.checkback import loop as checkback_loop
from app.checkback.body_memory import BodyMemory
from app.checkback.check import Check, FinishedCheck
from app.checkback.check_batches import ask_batch
from app.checkback.loop import CheckBack
from app.checkback.settle import settle_batch
from app.checkback.verdicts import RecordedBatch
from app.config import Settings
from app.database.connection import Connection, connect
from app.runtime.loop_runner import wait
from app.runtime.state import Runtime
from tests.announcements.test_messages import bodies
from tests.conftest import register_group
from tests.coordinator.test_races import until_waiting
from tests.support.check_responder import Call, Responder, Silent
from tests.support.check_stepping import (
    COMMIT,
    UNKNOWN,
    attempts,
    in_doubt,
    many_in_doubt,
    replica,
    row,
    turn,
    verdict,
)


async def until(condition: Callable[[], Awaitable[bool]], runtime: Runtime, checks: CheckBack) -> None:
    """Take steps, as the runner does, until a condition is true."""
    async with asyncio.timeout(60):
        while not await condition():
            checks.wake.clear()
            await checks.step(runtime, runtime.clock.now())
            await wait(0.05, asyncio.Event(), checks.wake)


@pytest.mark.parametrize("hanging_groups", [1, 5])
async def test_groups_that_hang_delay_no_other(
    db: Connection, settings: Settings, dsn: str, hanging_groups: int
) -> None:
    checks = CheckBack()
    # No hanging check times out during the test, so each of them stays in flight throughout.
    async with replica(settings, dsn, drain_s=0.1) as runtime, Silent() as hanging, Responder(content=COMMIT) as bank:
        for n in range(hanging_groups):
            await register_group(db, f"stuck-{n}", check_urls=[hanging.url], check_timeout_s=60)
            await many_in_doubt(db, runtime, f"stuck-{n}", 1000 // hanging_groups)

        async def all_hang() -> bool:
            return hanging.connections >= min(64, 32 * hanging_groups)

        await until(all_hang, runtime, checks)
        hanging_checks = hanging.connections
        await register_group(db, "bank", check_urls=[bank.url])
        await many_in_doubt(db, runtime, "bank", 20)

        async def bank_is_settled() -> bool:
            return bool(await db.fetchval("select count(*) = 20 from op"))

        await until(bank_is_settled, runtime, checks)
        assert len(bank.calls) == 20
        assert checks.in_flight >= hanging_checks
        assert await db.fetchval("select count(*) from attempt where destination = $1", hanging.url) == 0
        await checks.drain(runtime)


async def test_a_group_gets_no_more_checks_at_once_than_its_window(
    db: Connection, settings: Settings, dsn: str, runtime: Runtime
) -> None:
    first, second = CheckBack(), CheckBack()
    async with replica(settings, dsn) as other, Responder(slowly) as shop:
        await register_group(db, "shop", check_urls=[shop.url], check_max_in_flight=6, check_window=6)
        ids = await many_in_doubt(db, runtime, "shop", 60)

        async def settled() -> bool:
            async with other.database.connection() as connection:
                return bool(await connection.fetchval("select count(*) = 60 from op"))

        await asyncio.gather(until(settled, runtime, first), until(settled, other, second))
        await asyncio.gather(first.settle_all(), second.settle_all())
    assert shop.most_open == 6
    # Both replicas sent checks, and no transaction was checked twice.
    assert sorted(UUID(call.json()["transaction_id"]) for call in shop.calls) == ids
    assert await db.fetchval("select count(*) from check_back") == 0


async def slowly(call: Call) -> web.StreamResponse:
    await asyncio.sleep(0.01)
    return web.json_response(COMMIT)


async def test_replicas_share_the_work(db: Connection, settings: Settings, dsn: str, runtime: Runtime) -> None:
    checks, few = (CheckBack(), CheckBack()), {"check_concurrency": 8}
    async with (
        replica(settings, dsn, **few) as one,
        replica(settings, dsn, **few) as other,
        Responder(content=COMMIT) as shop,
    ):
        await register_group(db, "shop", check_urls=[shop.url])
        await many_in_doubt(db, runtime, "shop", 120)
        done = [0, 0]

        async def run_until_idle(index: int, process: Runtime) -> None:
            while claimed := await turn(process, checks[index]):
                done[index] += claimed

        async with asyncio.timeout(60):
            await asyncio.gather(run_until_idle(0, one), run_until_idle(1, other))
    assert sum(done) == len(shop.calls) == 120
    assert min(done) > 0
    assert await db.fetchval("select count(*) from op where verdict = 1 and source = 1") == 120


async def test_after_a_lease_expires_its_new_holder_settles_the_check(
    db: Connection, settings: Settings, dsn: str, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    first, second = CheckBack(), CheckBack()
    released = asyncio.Event()

    async def first_waits(call: Call) -> web.StreamResponse:
        if call.json()["check"] == 1:
            await released.wait()
        return web.json_response(UNKNOWN)

    async with replica(settings, dsn) as other, Responder(first_waits) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=1, check_timeout_s=60, on_exhausted="park")
        transaction_id = await in_doubt(client, runtime)
        await first.step(runtime, runtime.clock.now())
        other.clock.offset_s += 91
        await turn(other, second)
        assert (await row(db, transaction_id))["state"] == 2
        await db.execute("update producer_group set on_exhausted = 'rollback'")
        released.set()
        await first.settle_all()
    found = await row(db, transaction_id)
    assert (found["state"], found["answered"], found["asked"]) == (2, 1, 2)
    assert await verdict(db, transaction_id) is None
    # Policy allows one answer, and the second holder's counted.
    assert [one["number"] for one in await attempts(db, transaction_id)] == [2]


@pytest.mark.parametrize(
    ("max_checks", "on_exhausted", "numbers"), [(3, "rollback", [1, 2]), (1, "rollback", [2]), (1, "park", [2])]
)
async def test_two_checks_of_a_transaction_that_wait_for_the_database_settle_one_after_the_other(
    db: Connection,
    runtime: Runtime,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    max_checks: int,
    on_exhausted: str,
    numbers: list[int],
) -> None:
    """The database was away for longer than the lease, and the loop claimed again before it settled again."""
    checks, asked, failed = CheckBack(), 0, asyncio.Event()

    async def counted(runtime: Runtime, some: Sequence[Check], bodies: BodyMemory) -> list[FinishedCheck]:
        nonlocal asked
        finished = await ask_batch(runtime, some, bodies)
        asked += 1
        return finished

    async def away(runtime: Runtime, batch: Sequence[FinishedCheck]) -> RecordedBatch:
        if asked < 2:
            failed.set()
            raise OSError("the database is away")
        return await settle_batch(runtime, batch)

    monkeypatch.setattr(checkback_loop, "ask_batch", counted)
    monkeypatch.setattr(checkback_loop, "settle_batch", away)
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=max_checks, on_exhausted=on_exhausted)
        transaction_id = await in_doubt(client, runtime)
        await checks.step(runtime, runtime.clock.now())
        async with asyncio.timeout(30):
            await failed.wait()
        runtime.clock.offset_s += 100
        await turn(runtime, checks)
    found = await row(db, transaction_id)
    if max_checks > 1:
        assert (found["state"], found["asked"], found["answered"], found["last_answered"]) == (1, 2, 2, 2)
    elif on_exhausted == "park":
        assert (found["state"], found["asked"], found["answered"], found["last_answered"]) == (2, 2, 1, 2)
    else:
        assert await verdict(db, transaction_id) == (2, 2)
    assert [one["number"] for one in await attempts(db, transaction_id)] == numbers
    assert len(await bodies(db)) == (0 if max_checks > 1 else 1)
    assert checks.in_flight == 0


async def test_the_lease_of_a_claim_that_the_database_lost_settles_no_later_one(
    db: Connection, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    """The claim is lost as after a failover to a standby that was behind, and another worker claims the check again."""
    lost, later = CheckBack(), CheckBack()
    asked, answered = asyncio.Queue[None](), [asyncio.Event(), asyncio.Event()]

    async def waits(call: Call) -> web.StreamResponse:
        place = len(shop.calls) - 1
        asked.put_nowait(None)
        await answered[place].wait()
        return web.json_response((UNKNOWN, COMMIT)[place])

    async with Responder(waits) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=1, check_timeout_s=60)
        transaction_id = await in_doubt(client, runtime)
        before = await row(db, transaction_id)
        for checks in (lost, later):
            await db.execute(
                "update check_back set asked = $2, lease_epoch = $3, leased_until = $4 where transaction_id = $1",
                *(before[name] for name in ("transaction_id", "asked", "lease_epoch", "leased_until")),
            )
            await checks.step(runtime, runtime.clock.now())
            async with asyncio.timeout(30):
                await asked.get()
        claimed = await row(db, transaction_id)
        answered[0].set()
        await lost.settle_all()
        early, left = await verdict(db, transaction_id), await row(db, transaction_id)
        answered[1].set()
        await later.settle_all()
    assert early is None
    assert left == claimed
    assert await verdict(db, transaction_id) == (1, 1)
    assert [one["outcome"] for one in await attempts(db, transaction_id)] == ["commit"]


async def test_a_verdict_of_policy_requires_the_lease(
    db: Connection, settings: Settings, dsn: str, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    checks = CheckBack()
    released = asyncio.Event()

    async def waits(call: Call) -> web.StreamResponse:
        await released.wait()
        return web.json_response(UNKNOWN)

    async with Responder(waits) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=1)
        transaction_id = await in_doubt(client, runtime)
        await checks.step(runtime, runtime.clock.now())
        await db.execute("update check_back set state = 2, lease_epoch = lease_epoch + 1, next_check_at = null")
        released.set()
        await checks.settle_all()
    assert await verdict(db, transaction_id) is None
    assert (await row(db, transaction_id))["state"] == 2


async def test_a_settle_waits_for_a_database_that_does_not_answer(db: Connection, settings: Settings, dsn: str) -> None:
    checks = CheckBack()
    async with replica(settings, dsn, flush_timeout_s=0.2) as runtime, Responder(content=COMMIT) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        [transaction_id] = await many_in_doubt(db, runtime, "shop", 1)
        async with db.transaction():
            await db.execute("lock table op in exclusive mode")
            await checks.step(runtime, runtime.clock.now())
            while not shop.calls or not await db.fetchval(
                "select exists (select from pg_stat_activity where wait_event_type = 'Lock' "
                "and datname = current_database())"
            ):
                # A database transaction sees one snapshot of pg_stat_activity until it ends or clears it.
                await db.execute("select pg_stat_clear_snapshot()")
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await checks.settle_all()
    assert await verdict(db, transaction_id) == (1, 1)
    assert len(shop.calls) == 1
    assert await row(db, transaction_id) is None


async def test_a_drain_settles_what_it_can_and_releases_the_rest(db: Connection, settings: Settings, dsn: str) -> None:
    checks = CheckBack()
    async with (
        replica(settings, dsn, drain_s=2) as runtime,
        Silent() as hanging,
        Responder(slowly) as working,
    ):
        await register_group(db, "stuck", check_urls=[hanging.url], check_timeout_s=60)
        await register_group(db, "bank", check_urls=[working.url])
        await many_in_doubt(db, runtime, "stuck", 3)
        await many_in_doubt(db, runtime, "bank", 3)
        await checks.step(runtime, runtime.clock.now())
        await checks.drain(runtime)
    assert await db.fetchval("select count(*) from op") == 3
    left = await db.fetch("select producer_group, leased_until, next_check_at <= now() as due from check_back")
    assert [tuple(one) for one in left] == [("stuck", None, True)] * 3


async def test_a_drain_releases_finished_checks_that_could_not_be_settled(
    db: Connection, settings: Settings, dsn: str
) -> None:
    """Otherwise no other replica asks before their leases are over."""
    await db.execute(
        "create function no() returns trigger language plpgsql as $$ begin "
        "raise exception 'no' using errcode = 'disk_full'; end $$; "
        "create trigger no before insert on attempt for each row execute function no()"
    )
    checks = CheckBack()
    async with replica(settings, dsn, drain_s=0.1) as runtime, Responder(status=500) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        await many_in_doubt(db, runtime, "shop", 3)
        await checks.step(runtime, runtime.clock.now())
        async with asyncio.timeout(60):
            while len(shop.calls) < 3:
                await asyncio.sleep(0.01)
        await checks.drain(runtime)
    left = await db.fetch("select leased_until, unanswered, next_check_at <= now() as due from check_back")
    assert [tuple(one) for one in left] == [(None, 0, True)] * 3


async def test_a_drain_says_what_it_could_not_release(db: Connection, settings: Settings, dsn: str) -> None:
    checks = CheckBack()
    async with replica(settings, dsn, drain_s=0.1) as runtime, Silent() as hanging:
        await register_group(db, "stuck", check_urls=[hanging.url], check_timeout_s=60)
        await many_in_doubt(db, runtime, "stuck", 3)
        await checks.step(runtime, runtime.clock.now())
        await db.execute(
            "create function no() returns trigger language plpgsql as $$ begin raise exception 'no more'; end $$; "
            "create trigger no before update on check_back for each row execute function no()"
        )
        with capture_logs() as lines:
            await checks.drain(runtime)
    [line] = [line for line in lines if line["event"].startswith("checks_")]
    assert (line["event"], line["checks"], "no more" in line["error"]) == ("checks_not_released", 3, True)


async def test_a_drain_releases_finished_checks_that_are_being_settled(
    db: Connection, settings: Settings, dsn: str
) -> None:
    """The database has not taken them when the drain cancels their statement."""
    checks, holder = CheckBack(), await connect(dsn)
    async with replica(settings, dsn, drain_s=0.1) as runtime, Responder(status=500) as shop, holder.transaction():
        await holder.execute("lock table attempt in exclusive mode")
        await register_group(db, "shop", check_urls=[shop.url])
        await many_in_doubt(db, runtime, "shop", 3)
        await checks.step(runtime, runtime.clock.now())
        await until_waiting(db)
        await checks.drain(runtime)
        left = await db.fetch("select leased_until, unanswered, next_check_at <= now() as due from check_back")
    await holder.close()
    assert [tuple(one) for one in left] == [(None, 0, True)] * 3
