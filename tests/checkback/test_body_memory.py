"""Bodies in checks: read just before a call, and within a limit of bytes."""

import asyncio
import tracemalloc

import httpx
from aiohttp import web

from app.checkback.body_memory import BodyMemory
from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, in_doubt, row, turn, verdict

MEBIBYTE = 1024 * 1024
LARGE = "x" * MEBIBYTE
BODIES = {"include_body": True}


def large() -> dict[str, object]:
    return {"messages": [{"topic": "order", "body": LARGE}], "check": BODIES}


async def test_only_so_many_bytes_of_bodies_are_in_calls(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    """Twelve checks of 1 MiB each are claimed at once, and three are sent at a time."""
    checks = CheckBack(BodyMemory(3 * MEBIBYTE + 1000))

    async def slow(_: Call) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response(COMMIT)

    async with Responder(slow) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        ids = [await in_doubt(client, runtime, **large()) for _ in range(12)]
        assert await turn(runtime, checks) == 12
    assert shop.most_open == 3
    assert [call.json()["messages"][0]["body"] for call in shop.calls] == [LARGE] * 12
    assert {await verdict(db, one) for one in ids} == {(1, 1)}


async def test_claimed_checks_wait_without_their_bodies(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    released = asyncio.Event()

    async def hangs(_: Call) -> web.Response:
        await released.wait()
        return web.json_response(COMMIT)

    checks = CheckBack(BodyMemory(MEBIBYTE + 1000))
    async with Responder(hangs) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        for _ in range(12):
            await in_doubt(client, runtime, **large())
        tracemalloc.start()
        try:
            await checks.step(runtime, runtime.clock.now())
            async with asyncio.timeout(20):
                while not shop.calls:
                    await asyncio.sleep(0.01)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            released.set()
        in_flight = checks.in_flight
        await checks.settle_all()
    assert in_flight == 12
    # One body: as read, in the request, in the buffers of both ends, and as the responder keeps it.
    assert most < 8 * MEBIBYTE


async def test_a_group_that_hangs_keeps_no_other_from_sending_bodies(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    released = asyncio.Event()

    async def hangs(_: Call) -> web.Response:
        await released.wait()
        return web.json_response(COMMIT)

    checks = CheckBack(BodyMemory(MEBIBYTE + 1000))
    async with Responder(hangs) as slow, Responder(content=COMMIT) as shop:
        await register_group(db, "slow", check_urls=[slow.url])
        await register_group(db, "shop", check_urls=[shop.url])
        for _ in range(3):
            await in_doubt(client, runtime, "slow", **large())
        await checks.step(runtime, runtime.clock.now())
        transaction_id = await in_doubt(client, runtime, **large())
        await checks.step(runtime, runtime.clock.now())
        try:
            async with asyncio.timeout(20):
                while await verdict(db, transaction_id) is None:
                    await asyncio.sleep(0.01)
            called = len(slow.calls)
        finally:
            released.set()
        await checks.settle_all()
    assert (called, len(slow.calls)) == (1, 3)


async def test_a_check_that_waits_too_long_for_memory_is_due_again(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    memory = BodyMemory(MEBIBYTE + 1000, waits_s=0.05)
    checks = CheckBack(memory)
    async with Responder(content=COMMIT) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        transaction_id = await in_doubt(client, runtime, **large())
        async with memory.held("shop", MEBIBYTE):
            assert await turn(runtime, checks) == 1
            found = await row(db, transaction_id)
            assert (found["asked"], found["leased_until"]) == (0, None)
            assert checks.in_flight == 0
        assert await turn(runtime, checks) == 1
    assert len(shop.calls) == 1
    assert await verdict(db, transaction_id) == (1, 1)


async def test_memory_is_given_in_turn_and_returned() -> None:
    memory = BodyMemory(10)
    order: list[str] = []

    async def take(name: str, group: str, size: int) -> None:
        async with memory.held(group, size):
            order.append(name)
            await asyncio.sleep(0)

    async with memory.held("a", 6):
        tasks = [asyncio.create_task(take(f"a{size}", "a", size)) for size in (5, 4, 3)]
        other = asyncio.create_task(take("larger than all", "b", 100))
        canceled = asyncio.create_task(take("canceled", "a", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The first does not fit, so none after it goes on, but the first of another group.
        assert order == ["larger than all"]
        canceled.cancel()
        await asyncio.wait([canceled])
    await asyncio.gather(*tasks, other)
    assert order == ["larger than all", "a5", "a4", "a3"]
    async with memory.held("a", 4), memory.held("a", 6):
        pass
