"""Checks that get no answer: back-off, parking, replies that are no answer, and groups that ask for a pause."""

import asyncio
from datetime import timedelta

import httpx
import pytest
from aiohttp import web

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.support.check_responder import Call, Responder, Silent
from tests.support.check_stepping import COMMIT, attempts, in_doubt, row, turn, verdict

# A status, a body, and the error of the attempt.
NO_ANSWERS = [
    (200, b"certainly", "not {verdict, reason?}"),
    (200, b"", "not {verdict, reason?}"),
    (200, b'{"verdict": "maybe"}', "not {verdict, reason?}"),
    (200, b'{"more": 1}', "not {verdict, reason?}"),
    (200, b'{"verdict": "commit", "reason": "\\u0000"}', "NUL"),
    (200, b'{"verdict": "commit", "reason": "' + b"a" * 1001 + b'"}', "not {verdict, reason?}"),
    (200, b'{"verdict": "commit"}' + b" " * 10_000_000, "more than 16 KiB"),
    (201, b'{"verdict": "commit"}', "answered 201"),
    (302, b"", "redirects are not followed"),
    (404, b"no such page", "answered 404"),
    (500, b'{"verdict": "commit"}', "answered 500"),
]


async def test_without_an_answer_checks_back_off_and_the_transaction_is_parked_after_three_days(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks, waits = CheckBack(), []
    transaction_id = await in_doubt(client, runtime)
    runtime.clock.fixed = start = runtime.clock.now()
    while (found := await row(db, transaction_id))["state"] == 1:
        waits.append((found["next_check_at"] - runtime.clock.fixed).total_seconds())
        runtime.clock.fixed = max(runtime.clock.fixed, found["next_check_at"])
        if len(waits) == 12:
            assert waits[1:] == [2, 4, 8, 16, 30, 60, 120, 240, 480, 600, 600]
            # The hours in between do not differ.
            runtime.clock.fixed = start + timedelta(seconds=259_200 - 60)
            await db.execute("update check_back set next_check_at = $1", runtime.clock.fixed)
        assert await turn(runtime, checks) == 1
    assert (await row(db, transaction_id))["answered"] == 0
    assert runtime.clock.now() == start + timedelta(seconds=259_200)
    assert "no check was answered since" in found["parked_reason"]
    assert await verdict(db, transaction_id) is None


async def test_a_producer_that_registers_is_asked_at_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Only what was not answered: what waits for its next check after an `unknown`, or is parked, keeps its time."""
    ids = [await in_doubt(client, runtime) for _ in range(5)]
    at = runtime.clock.now() + timedelta(seconds=300)
    await db.execute("update check_back set next_check_at = $1", at)
    refused, parked, leased, other, _ = ids
    await db.execute("update check_back set unanswered = 9 where transaction_id = any($1::uuid[])", ids[:4])
    await db.execute("update check_back set state = 2 where transaction_id = $1", parked)
    await db.execute("update check_back set leased_until = $2 where transaction_id = $1", leased, at)
    await db.execute("update check_back set producer_group = 'other' where transaction_id = $1", other)
    shown = (await client.get("/producer-groups/shop")).json()
    put = {"check_urls": shown["check_urls"]}
    assert (await client.put("/producer-groups/shop?dry_run=true", json=put)).status_code == 200
    assert [(await row(db, one))["next_check_at"] for one in ids] == [at] * 5
    before = runtime.clock.now()
    assert (await client.put("/producer-groups/shop", json=put)).status_code == 200
    due = {one: (await row(db, one))["next_check_at"] for one in ids}
    assert before <= due.pop(refused) <= runtime.clock.now()
    assert set(due.values()) == {at}


async def test_any_other_reply_is_no_answer(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, subtests: pytest.Subtests
) -> None:
    checks = CheckBack()
    sent: tuple[int, bytes] = (0, b"")

    async def answer(call: Call) -> web.StreamResponse:
        status, body = sent
        return web.Response(status=status, body=body, headers={"location": "http://127.0.0.1:9/"})

    async with Responder(answer) as shop:
        for *sent, error in NO_ANSWERS:
            with subtests.test(status=sent[0], body=sent[1][:40]):
                # The previous case left a retry and a smaller window.
                await db.execute("delete from check_back")
                await db.execute("update producer_group set check_urls = $1, check_window = 32", [shop.url])
                shop.calls.clear()
                transaction_id = await in_doubt(client, runtime)
                await turn(runtime, checks)
                assert len(shop.calls) == 1
                found = await row(db, transaction_id)
                assert (found["answered"], found["unanswered"]) == (0, 1)
                [attempt] = await attempts(db, transaction_id)
                assert (attempt["outcome"], attempt["status"]) == ("unanswered", sent[0])
                assert error in attempt["error"]
                assert len(attempt["response"] or "") <= 1000
                assert await verdict(db, transaction_id) is None


async def test_a_url_that_hangs_is_no_answer(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Silent() as hanging:
        await db.execute("update producer_group set check_urls = $1, check_timeout_s = 1", [hanging.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    [attempt] = await attempts(db, transaction_id)
    assert attempt["error"] == "no whole answer within 1 s"
    assert await db.fetchval("select check_window from producer_group") == 16


async def test_retry_after_delays_the_whole_group(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    checks = CheckBack()
    async with Responder(status=429, **{"retry-after": "120"}) as throttled, Responder(content=COMMIT) as working:
        await register_group(db, "shop", check_urls=[throttled.url])
        await register_group(db, "bank", check_urls=[working.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert await db.fetchval("select check_window from producer_group where name = 'shop'") == 16
        two, other = await in_doubt(client, runtime), await in_doubt(client, runtime, "bank")
        runtime.clock.offset_s += 100
        await turn(runtime, checks)
        assert len(throttled.calls) == 1
        assert await verdict(db, other) == (1, 1)
        throttled.status, throttled.content = 200, COMMIT
        runtime.clock.offset_s += 25
        await turn(runtime, checks)
        await turn(runtime, checks)
    assert await verdict(db, transaction_id) == await verdict(db, two) == (1, 1)
    assert await db.fetchval("select check_window from producer_group where name = 'shop'") > 16


@pytest.mark.parametrize("changed", [True, False])
async def test_a_late_answer_of_a_former_url_holds_no_changed_group(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, changed: bool
) -> None:
    """The former URL asks for an hour's pause after the group has got another URL."""
    released = asyncio.Event()

    async def late(_: Call) -> web.Response:
        await released.wait()
        return web.Response(status=503, headers={"retry-after": "3600"})

    checks = CheckBack()
    async with Responder(late) as former, Responder(content=COMMIT) as working:
        await register_group(db, "shop", check_urls=[former.url])
        await in_doubt(client, runtime)
        await checks.step(runtime, runtime.clock.now())
        try:
            async with asyncio.timeout(20):
                while not former.calls:
                    await asyncio.sleep(0.01)
            if changed:
                put = await client.put("/producer-groups/shop", json={"check_urls": [working.url]})
                assert put.status_code == 200
        finally:
            released.set()
        await checks.settle_all()
        group = await db.fetchrow("select check_window, held_until from producer_group")
        assert group is not None
        assert (group["check_window"], group["held_until"] is None) == ((32, True) if changed else (16, False))
        second = await in_doubt(client, runtime)
        await turn(runtime, checks)
    assert await verdict(db, second) == ((1, 1) if changed else None)
