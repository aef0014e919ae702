"""Check-back over real sockets: which URL gets which check, and the effect of each answer. Steps take the time."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from aiohttp import web
from standardwebhooks import Webhook
from structlog.testing import capture_logs

from app.checkback.loop import CheckBack
from app.checkback.sweep import Sweeps
from app.config import Settings
from app.database.connection import Connection
from app.ids import uuid7
from app.lifecycle.startup import assemble, running
from app.runtime.loop_runner import wait
from app.runtime.state import Runtime
from app.store.checkback import claims, results
from app.store.checkback.requests import ask_now
from app.store.checkback.results import SettledCheck
from tests.checkback.test_sweep import run_passes
from tests.conftest import client_of, register_group
from tests.support.check_responder import Call, Responder, Silent
from tests.support.explain import scans

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000"
COMMIT, ROLLBACK, UNKNOWN = ({"verdict": word} for word in ("commit", "rollback", "unknown"))


async def in_doubt(client: httpx.AsyncClient, runtime: Runtime, group: str = "shop", **fields: Any) -> UUID:
    """Post a half and have it checked at once."""
    message = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}
    answer = await client.post("/half", json={"producer_group": group, "messages": [message], **fields})
    transaction_id = UUID(answer.json()["transaction_id"])
    async with runtime.database.connection() as connection:
        assert await ask_now(connection, transaction_id, runtime.clock.now())
    return transaction_id


async def turn(runtime: Runtime, checks: CheckBack) -> int:
    """Take one step, wait for its checks, and return how many it claimed."""
    async with asyncio.timeout(60):
        result = await checks.step(runtime, runtime.clock.now())
        await checks.settle_all()
    return result.done


async def row(db: Connection, transaction_id: UUID) -> Any:
    return await db.fetchrow("select * from check_back where transaction_id = $1", transaction_id)


async def verdict(db: Connection, transaction_id: UUID) -> tuple[int, int] | None:
    found = await db.fetchrow("select verdict, source from op where transaction_id = $1", transaction_id)
    return tuple(found) if found else None


async def attempts(db: Connection, transaction_id: UUID) -> list[Any]:
    return await db.fetch(
        "select * from attempt where transaction_id = $1 and kind = 'check' order by attempt_id", transaction_id
    )


async def test_a_check_is_signed_and_its_verdict_recorded(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    checks = CheckBack()
    async with Responder(content={"verdict": "commit", "reason": "order 1030 is there"}) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        one = await in_doubt(client, runtime, context={"order": 1030})
        assert await turn(runtime, checks) == 1
    [call] = shop.calls
    Webhook(SECRET).verify(call.body, call.headers)
    assert call.headers["webhook-id"] == f"chk_{one}-1"
    assert call.headers["content-type"] == "application/json"
    asked = call.json()
    born_at = asked.pop("born_at")
    assert born_at.endswith("Z")
    assert asked == {
        "type": "halfnote.check",
        "transaction_id": str(one),
        "producer_group": "shop",
        "check": 1,
        "max_checks": 15,
        "context": {"order": 1030},
        "messages": [
            {"message_id": f"{one}-0", "topic": "order", "key": "order-1030", "tag": "created", "headers": {}}
        ],
    }
    assert await verdict(db, one) == (1, 1)
    assert await db.fetchval("select reason from op") == "order 1030 is there"
    assert await row(db, one) is None
    [attempt] = await attempts(db, one)
    assert (attempt["number"], attempt["outcome"], attempt["destination"]) == (1, "commit", shop.url)
    assert attempt["status"] == 200
    urls = (await client.get("/producer-groups/shop")).json()["urls"]
    assert urls[0]["last_ok"]
    assert runtime.metrics.registry.get_sample_value("halfnote_checks_total", {"outcome": "commit"}) == 1
    assert runtime.metrics.registry.get_sample_value("halfnote_check_seconds_count") == 1


async def test_the_whole_service_decides_what_a_dead_producer_left(settings: Settings, db: Connection) -> None:
    async with Responder(content=COMMIT) as shop, running(settings) as runtime, client_of(runtime) as client:
        await client.put("/producer-groups/shop", json={"check_urls": [shop.url], "immunity_s": 1})
        message = {"topic": "order", "body": {"order": 1030}}
        await client.post("/half", json={"producer_group": "shop", "messages": [message]})
        async with asyncio.timeout(60):
            while not await db.fetchval("select exists (select from outbox)"):
                await asyncio.sleep(0.05)
        types = {call.json()["type"] for call in shop.calls}
    assert "halfnote.check" in types
    assert await db.fetchval("select source from op") == 1


async def test_urls_are_used_in_turn(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as a, Responder(content=UNKNOWN) as b, Responder(content=UNKNOWN) as c:
        await register_group(db, "shop", check_urls=[a.url, b.url, c.url])
        for _ in range(6):
            await in_doubt(client, runtime)
        assert await turn(runtime, checks) == 6
        assert [len(url.calls) for url in (a, b, c)] == [2, 2, 2]


async def test_the_next_url_is_asked_at_once_with_the_same_id(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    checks = CheckBack()
    async with Responder(status=500) as failing, Responder(content=COMMIT) as working:
        await register_group(db, "shop", check_urls=["http://127.0.0.1:9/check", failing.url, working.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert failing.calls[0].headers["webhook-id"] == working.calls[0].headers["webhook-id"]
        assert failing.calls[0].body == working.calls[0].body
    assert await verdict(db, one) == (1, 1)
    [attempt] = await attempts(db, one)
    assert attempt["destination"] == working.url
    assert "127.0.0.1:9" in attempt["error"]
    assert "answered 500" in attempt["error"]
    urls = (await client.get("/producer-groups/shop")).json()["urls"]
    assert [bool(url["last_ok"]) for url in urls] == [False, False, True]


async def test_a_token_in_a_query_is_not_recorded(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    checks = CheckBack()
    async with Responder(status=500) as failing, Responder(content=COMMIT) as working:
        await register_group(db, "shop", check_urls=[f"{failing.url}?token=first", f"{working.url}?token=second"])
        with capture_logs() as lines:
            one = await in_doubt(client, runtime)
            await turn(runtime, checks)
            working.status = 500
            other = await in_doubt(client, runtime)
            await turn(runtime, checks)
    texts = [(await client.get(f"/transactions/{id_}")).text for id_ in (one, other)]
    texts += [str(line) for line in lines if line["event"] == "check"]
    assert len(texts) == 4
    assert all(working.url in text and "token=" not in text for text in texts)


async def test_bodies_are_sent_where_the_policy_includes_them(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder(content=COMMIT) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        messages = [
            {"topic": "order", "body": {"order": 1030}, "headers": {"a": "b"}},
            {"topic": "picture", "body_base64": "AP8=", "content_type": "image/png"},
            {"topic": "truncated", "body_base64": "ew==", "content_type": "application/json"},
        ]
        await in_doubt(client, runtime, messages=messages, check={"include_body": True})
        await turn(runtime, CheckBack())
    sent = shop.calls[0].json()["messages"]
    assert (sent[0]["body"], sent[0]["headers"]) == ({"order": 1030}, {"a": "b"})
    assert [message.get("body_base64") for message in sent] == [None, "AP8=", "ew=="]


async def test_202_and_204_are_answers_and_a_later_end_closes_the_check(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, subtests: pytest.Subtests
) -> None:
    for status in (202, 204):
        with subtests.test(status=status):
            await answer_and_end(client, runtime, db, status)


async def answer_and_end(client: httpx.AsyncClient, runtime: Runtime, db: Connection, status: int) -> None:
    """Answer a check with a status and no body, and send the end later."""
    async with Responder(status=status) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    found = await row(db, one)
    assert (found["asked"], found["answered"], found["unanswered"]) == (1, 1, 0)
    assert found["next_check_at"] > runtime.clock.now() + timedelta(seconds=25)
    end = {"transaction_id": str(one), "producer_group": "shop", "from_check": True}
    # The check was answered, so another `unknown` is not counted.
    assert (await client.post("/end", json={**end, "verdict": "unknown"})).status_code == 202
    assert (await row(db, one))["answered"] == 1
    answer = await client.post("/end", json={**end, "verdict": "commit"})
    assert answer.json()["source"] == "check"


async def test_an_unknown_by_end_is_the_answer_to_a_check_that_had_none(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    one: UUID | None = None

    async def answer_by_end(call: Call) -> web.StreamResponse:
        end = {"transaction_id": str(one), "producer_group": "shop", "verdict": "unknown", "from_check": True}
        assert (await client.post("/end", json=end)).status_code == 202
        return web.Response(status=500)

    async with Responder(answer_by_end) as shop:
        await db.execute("update producer_group set check_urls = $1, unanswered_park_s = 0", [shop.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    found = await row(db, one)
    assert (found["state"], found["asked"], found["answered"], found["unanswered"]) == (1, 1, 1, 0)
    assert found["unanswered_since"] is None


async def test_a_verdict_of_a_check_that_loses_is_recorded_without_effect(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    one: UUID | None = None

    async def end_first(call: Call) -> web.StreamResponse:
        end = {"transaction_id": str(one), "producer_group": "shop", "verdict": "rollback"}
        assert (await client.post("/end", json=end)).status_code == 200
        return web.json_response(COMMIT)

    async with Responder(end_first) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    assert await verdict(db, one) == (2, 0)
    assert await db.fetchval("select count(*) from outbox") == 0
    [attempt] = await attempts(db, one)
    assert (attempt["outcome"], attempt["verdict"]) == ("lost", 1)
    assert await row(db, one) is None


async def test_exhaustion_rolls_back_or_parks(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, subtests: pytest.Subtests
) -> None:
    for name, on_exhausted, own in (
        ("shop", "rollback", None),
        ("bank", "park", None),
        ("post", "rollback", "park"),
    ):
        with subtests.test(on_exhausted=on_exhausted, own=own):
            await exhaust(client, runtime, db, name, on_exhausted, own)


async def exhaust(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, name: str, on_exhausted: str, own: str | None
) -> None:
    """Answer every check of a new group's transaction `unknown`; its half may have a policy of its own."""
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, name, check_urls=[shop.url], max_checks=3, on_exhausted=on_exhausted)
        one = await in_doubt(client, runtime, name, check={"on_exhausted": own, "max_checks": 2} if own else None)
        for asked in range(1, 6):
            await turn(runtime, checks)
            assert len(shop.calls) == min(asked, 2 if own else 3)
            runtime.clock.offset_s += 31
    if (own or on_exhausted) == "park":
        assert await verdict(db, one) is None
        found = await row(db, one)
        assert (found["state"], found["next_check_at"]) == (2, None)
        assert found["parked_at"]
        assert "2 checks" in found["parked_reason"] if own else "3 checks" in found["parked_reason"]
    else:
        assert await verdict(db, one) == (2, 2)
        assert await row(db, one) is None
    assert {attempt["outcome"] for attempt in await attempts(db, one)} == {"unknown"}


async def test_exhaustion_by_end_needs_no_further_check(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    async with Responder(status=500) as shop:
        await db.execute("update producer_group set check_urls = $1, max_checks = 1", [shop.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, checks)
        end = {"transaction_id": str(one), "producer_group": "shop", "verdict": "unknown", "from_check": True}
        await client.post("/end", json=end)
        runtime.clock.offset_s += 31
        await turn(runtime, checks)
        assert len(shop.calls) == 1
    assert await verdict(db, one) == (2, 2)


async def test_a_parked_transaction_is_decided_by_its_producer_alone(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await db.execute("update producer_group set check_urls = $1, max_checks = 1, on_exhausted = 'park'", [shop.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert (await row(db, one))["state"] == 2
        await db.execute("update producer_group set on_exhausted = 'rollback'")
        runtime.clock.offset_s += 86_400
        assert await turn(runtime, checks) == 0
        # An operator requests a check: `unknown`, or no answer, is recorded and leaves it parked.
        for status, content in ((200, UNKNOWN), (500, None)):
            shop.status, shop.content = status, content
            assert await ask_now(db, one, runtime.clock.now())
            await turn(runtime, checks)
            found = await row(db, one)
            assert (found["state"], found["next_check_at"], await verdict(db, one)) == (2, None, None)
        shop.status, shop.content = 200, COMMIT
        assert await ask_now(db, one, runtime.clock.now())
        await turn(runtime, checks)
    assert [attempt["outcome"] for attempt in await attempts(db, one)] == [
        "unknown", "unknown", "unanswered", "commit",
    ]  # fmt: skip
    assert await verdict(db, one) == (1, 1)
    assert not await ask_now(db, one, runtime.clock.now())


async def test_sweep_and_parking_stay_in_the_timeline(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()

    async def timeline_entries() -> list[str]:
        transaction = (await client.get(f"/transactions/{one}")).json()
        return [entry["what"] for entry in transaction["timeline"]]

    async with Responder(content=UNKNOWN) as shop:
        await db.execute("update producer_group set check_urls = $1, max_checks = 1, on_exhausted = 'park'", [shop.url])
        one = await in_doubt(client, runtime)
        # Requested twice, it is swept once; checked again while parked, it is parked once.
        assert await ask_now(db, one, runtime.clock.now())
        assert await timeline_entries() == ["born", "swept"]
        await turn(runtime, checks)
        assert await ask_now(db, one, runtime.clock.now())
        await turn(runtime, checks)
    assert await timeline_entries() == ["born", "swept", "check", "parked", "check"]
    reason = await db.fetchval("select parked_reason from check_back")
    verdict = {"verdict": "rollback", "reason": "asked by phone"}
    assert (await client.post(f"/transactions/{one}/verdict", json=verdict)).status_code == 200
    await run_passes(Sweeps(lambda: None), runtime, runtime.clock.now() + timedelta(seconds=70))
    assert await row(db, one) is None
    assert await timeline_entries() == ["born", "swept", "check", "parked", "check", "verdict"]
    timeline = (await client.get(f"/transactions/{one}")).json()["timeline"]
    assert reason
    assert timeline[3]["reason"] == reason


async def test_without_an_answer_checks_back_off_and_the_transaction_is_parked_after_three_days(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks, waits = CheckBack(), []
    one = await in_doubt(client, runtime)
    runtime.clock.fixed = start = runtime.clock.now()
    while (found := await row(db, one))["state"] == 1:
        waits.append((found["next_check_at"] - runtime.clock.fixed).total_seconds())
        runtime.clock.fixed = max(runtime.clock.fixed, found["next_check_at"])
        if len(waits) == 8:
            assert waits[1:] == [30, 60, 120, 240, 480, 600, 600]
            # The hours in between do not differ.
            runtime.clock.fixed = start + timedelta(seconds=259_200 - 60)
            await db.execute("update check_back set next_check_at = $1", runtime.clock.fixed)
        assert await turn(runtime, checks) == 1
    assert (await row(db, one))["answered"] == 0
    assert runtime.clock.now() == start + timedelta(seconds=259_200)
    assert "no check was answered since" in found["parked_reason"]
    assert await verdict(db, one) is None


# A status, a body, and the error of the attempt.
NO_ANSWERS = [
    (200, b"certainly", "not {verdict, reason?}"),
    (200, b"", "not {verdict, reason?}"),
    (200, b'{"verdict": "maybe"}', "not {verdict, reason?}"),
    (200, b'{"verdict": "commit", "more": 1}', "not {verdict, reason?}"),
    (200, b'{"verdict": "commit", "reason": "\\u0000"}', "NUL"),
    (200, b'{"verdict": "commit", "reason": "' + b"a" * 1001 + b'"}', "not {verdict, reason?}"),
    (200, b'{"verdict": "commit"}' + b" " * 10_000_000, "more than 16 KiB"),
    (201, b'{"verdict": "commit"}', "answered 201"),
    (302, b"", "redirects are not followed"),
    (404, b"no such page", "answered 404"),
    (500, b'{"verdict": "commit"}', "answered 500"),
]


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
                one = await in_doubt(client, runtime)
                await turn(runtime, checks)
                assert len(shop.calls) == 1
                found = await row(db, one)
                assert (found["answered"], found["unanswered"]) == (0, 1)
                [attempt] = await attempts(db, one)
                assert (attempt["outcome"], attempt["status"]) == ("unanswered", sent[0])
                assert error in attempt["error"]
                assert len(attempt["response"] or "") <= 1000
                assert await verdict(db, one) is None


async def test_a_url_that_hangs_is_no_answer(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Silent() as hanging:
        await db.execute("update producer_group set check_urls = $1, check_timeout_s = 1", [hanging.url])
        one = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    [attempt] = await attempts(db, one)
    assert attempt["error"] == "no whole answer within 1 s"
    assert await db.fetchval("select check_window from producer_group") == 16


async def test_retry_after_delays_the_whole_group(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    checks = CheckBack()
    async with Responder(status=429, **{"retry-after": "120"}) as throttled, Responder(content=COMMIT) as working:
        await register_group(db, "shop", check_urls=[throttled.url])
        await register_group(db, "bank", check_urls=[working.url])
        one = await in_doubt(client, runtime)
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
    assert await verdict(db, one) == await verdict(db, two) == (1, 1)
    assert await db.fetchval("select check_window from producer_group where name = 'shop'") > 16


async def test_a_transaction_decided_meanwhile_is_removed_and_not_checked(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder(content=ROLLBACK) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        one = await in_doubt(client, runtime)
        await client.post("/end", json={"transaction_id": str(one), "producer_group": "shop", "verdict": "commit"})
        result = await CheckBack().step(runtime, runtime.clock.now())
        assert (result.done, result.more) == (1, True)
        assert shop.calls == []
    assert await row(db, one) is None


async def test_a_deleted_groups_transactions_are_parked_by_policy(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    one = await in_doubt(client, runtime)
    await db.execute("update producer_group set deleted_at = now(), unanswered_park_s = 60")
    await turn(runtime, checks)
    [attempt] = await attempts(db, one)
    assert "not registered any more" in attempt["error"]
    runtime.clock.offset_s += 61
    await turn(runtime, checks)
    assert (await row(db, one))["state"] == 2
    await db.execute("delete from producer_group")
    await db.execute("update check_back set state = 1, next_check_at = now()")
    await turn(runtime, checks)
    assert len(await attempts(db, one)) == 3


async def test_a_row_whose_day_is_gone_is_removed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    one = await in_doubt(client, runtime)
    await db.execute("delete from half")
    await turn(runtime, CheckBack())
    assert await row(db, one) is None
    assert await attempts(db, one) == []


async def many_in_doubt(db: Connection, runtime: Runtime, group: str, count: int) -> list[UUID]:
    """Write `count` transactions that are in doubt and due."""
    now = runtime.clock.now()
    ids = sorted(uuid7(now) for _ in range(count))
    await db.copy_records_to_table(
        "half",
        columns=["transaction_id", "position", "producer_group", "topic", "content_type", "body", "body_digest",
                 "born_at", "first_check_at"],
        records=[(one, 0, group, "order", "application/json", b"1", b"", now, now) for one in ids],
    )  # fmt: skip
    await db.copy_records_to_table(
        "check_back",
        columns=["transaction_id", "producer_group", "state", "swept_at", "next_check_at"],
        records=[(one, group, 1, now, now) for one in ids],
    )
    return ids


@asynccontextmanager
async def replica(settings: Settings, dsn: str, **options: Any) -> AsyncIterator[Runtime]:
    """Another process over the same database, with other options."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings.model_copy(update=options), dsn, stack)


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
        one = await in_doubt(client, runtime)
        await first.step(runtime, runtime.clock.now())
        other.clock.offset_s += 91
        await turn(other, second)
        assert (await row(db, one))["state"] == 2
        await db.execute("update producer_group set on_exhausted = 'rollback'")
        released.set()
        await first.settle_all()
    found = await row(db, one)
    assert (found["state"], found["answered"], found["asked"]) == (2, 1, 2)
    assert await verdict(db, one) is None
    assert len(await attempts(db, one)) == 2


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
        one = await in_doubt(client, runtime)
        await checks.step(runtime, runtime.clock.now())
        await db.execute("update check_back set state = 2, lease_epoch = lease_epoch + 1, next_check_at = null")
        released.set()
        await checks.settle_all()
    assert await verdict(db, one) is None
    assert (await row(db, one))["state"] == 2


async def test_a_settle_waits_for_a_database_that_does_not_answer(db: Connection, settings: Settings, dsn: str) -> None:
    checks = CheckBack()
    async with replica(settings, dsn, flush_timeout_s=0.2) as runtime, Responder(content=COMMIT) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        [one] = await many_in_doubt(db, runtime, "shop", 1)
        async with db.transaction():
            await db.execute("lock table op in exclusive mode")
            await checks.step(runtime, runtime.clock.now())
            while not shop.calls or not await db.fetchval(
                "select exists (select from pg_stat_activity where wait_event_type = 'Lock')"
            ):
                # A database transaction sees one snapshot of pg_stat_activity until it ends or clears it.
                await db.execute("select pg_stat_clear_snapshot()")
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await checks.settle_all()
    assert await verdict(db, one) == (1, 1)
    assert len(shop.calls) == 1
    assert await row(db, one) is None


async def test_a_drain_settles_what_it_can_and_releases_the_rest(db: Connection, settings: Settings, dsn: str) -> None:
    checks = CheckBack()
    async with (
        replica(settings, dsn, drain_s=0.5) as runtime,
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


async def test_plans_of_claim_and_settle(db: Connection, runtime: Runtime, subtests: pytest.Subtests) -> None:
    for n in range(4):
        await register_group(db, f"group-{n}")
        await many_in_doubt(db, runtime, f"group-{n}", 2500)
    await db.execute("analyze check_back, half, op, producer_group")
    for generic in (False, True):
        with subtests.test(generic=generic):
            await assert_plans(db, runtime.clock.now(), generic=generic)


async def assert_plans(db: Connection, now: datetime, *, generic: bool) -> None:
    kinds = ["timestamptz", "text[]", "int[]", "int", "int", "int", "int", "int"]
    arguments = [now, ["group-1"], [3], 64, 4, 320, 100, 30]
    for statement in (claims.ANY_DUE, claims.CLAIM):
        for scan in await scans(db, statement, kinds, arguments, generic=generic):
            if scan.table.startswith(("check_back", "half_", "op_")) and scan.rows > 1:
                assert "Seq" not in scan.node
                assert scan.rows <= 200, scan
    ids = [row["transaction_id"] for row in await db.fetch("select transaction_id from check_back limit 32")]
    for scan in await scans(db, claims.MESSAGES, ["uuid[]"], [ids], generic=generic):
        assert scan.rows <= 1 or "Seq" not in scan.node
        assert scan.rows <= 64
    settled = [
        SettledCheck(one, 0, 1, now, over=n % 2 == 0, next_check_at=now, parked_reason="why" if n % 4 == 1 else None)
        for n, one in enumerate(ids)
    ]
    columns = [list(column) for column in zip(*map(astuple, settled), strict=True)]
    kinds = re.findall(r"\$\d+::(\w+\[\])", results.SETTLE)
    for scan in await scans(db, results.SETTLE, [*kinds, "timestamptz"], [*columns, now], generic=generic):
        if scan.table.startswith("check_back"):
            assert "Seq" not in scan.node
            assert scan.rows <= 32
