"""Check-back over real sockets: which URL gets which check, and the effect of each answer. Steps take the time."""

import asyncio
from datetime import timedelta
from uuid import UUID

import httpx
import pytest
from aiohttp import web
from standardwebhooks import Webhook
from structlog.testing import capture_logs

from app.checkback.loop import SOON_S, CheckBack
from app.checkback.sweep import Sweeps
from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import running
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_now
from tests.checkback.test_sweep import run_passes
from tests.conftest import client_of, register_group
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import (
    COMMIT,
    ROLLBACK,
    SECRET,
    UNKNOWN,
    attempts,
    in_doubt,
    row,
    turn,
    verdict,
)


async def test_a_check_is_signed_and_its_verdict_recorded(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    checks = CheckBack()
    async with Responder(content={"verdict": "commit", "reason": "order 1030 is there"}) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        transaction_id = await in_doubt(client, runtime, context={"order": 1030})
        assert await turn(runtime, checks) == 1
    [call] = shop.calls
    Webhook(SECRET).verify(call.body, call.headers)
    assert call.headers["webhook-id"] == f"chk_{transaction_id}-1"
    assert call.headers["content-type"] == "application/json"
    asked = call.json()
    born_at = asked.pop("born_at")
    assert born_at.endswith("Z")
    assert asked == {
        "type": "halfnote.check",
        "transaction_id": str(transaction_id),
        "producer_group": "shop",
        "check": 1,
        "max_checks": 15,
        "context": {"order": 1030},
        "messages": [
            {
                "message_id": f"{transaction_id}-0",
                "topic": "order",
                "key": "order-1030",
                "tag": "created",
                "headers": {},
            }
        ],
    }
    assert await verdict(db, transaction_id) == (1, 1)
    assert await db.fetchval("select reason from op") == "order 1030 is there"
    assert await row(db, transaction_id) is None
    [attempt] = await attempts(db, transaction_id)
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
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert failing.calls[0].headers["webhook-id"] == working.calls[0].headers["webhook-id"]
        assert failing.calls[0].body == working.calls[0].body
    assert await verdict(db, transaction_id) == (1, 1)
    [attempt] = await attempts(db, transaction_id)
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
            transaction_id = await in_doubt(client, runtime)
            await turn(runtime, checks)
            working.status = 500
            other = await in_doubt(client, runtime)
            await turn(runtime, checks)
    texts = [(await client.get(f"/transactions/{id_}")).text for id_ in (transaction_id, other)]
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
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    found = await row(db, transaction_id)
    assert (found["asked"], found["answered"], found["unanswered"]) == (1, 1, 0)
    assert found["next_check_at"] > runtime.clock.now() + timedelta(seconds=25)
    end = {"transaction_id": str(transaction_id), "producer_group": "shop", "from_check": True}
    # The check was answered, so another `unknown` is not counted.
    assert (await client.post("/end", json={**end, "verdict": "unknown"})).status_code == 202
    assert (await row(db, transaction_id))["answered"] == 1
    answer = await client.post("/end", json={**end, "verdict": "commit"})
    assert answer.json()["source"] == "check"


async def test_an_unknown_by_end_is_the_answer_to_a_check_that_had_none(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    transaction_id: UUID | None = None

    async def answer_by_end(call: Call) -> web.StreamResponse:
        end = {
            "transaction_id": str(transaction_id),
            "producer_group": "shop",
            "verdict": "unknown",
            "from_check": True,
        }
        assert (await client.post("/end", json=end)).status_code == 202
        return web.Response(status=500)

    async with Responder(answer_by_end) as shop:
        await db.execute("update producer_group set check_urls = $1, unanswered_park_s = 0", [shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    found = await row(db, transaction_id)
    assert (found["state"], found["asked"], found["answered"], found["unanswered"]) == (1, 1, 1, 0)
    assert found["unanswered_since"] is None


async def test_a_verdict_of_a_check_that_loses_is_recorded_without_effect(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    transaction_id: UUID | None = None

    async def end_first(call: Call) -> web.StreamResponse:
        end = {"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": "rollback"}
        assert (await client.post("/end", json=end)).status_code == 200
        return web.json_response(COMMIT)

    async with Responder(end_first) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    assert await verdict(db, transaction_id) == (2, 0)
    assert await db.fetchval("select count(*) from outbox") == 0
    [attempt] = await attempts(db, transaction_id)
    assert (attempt["outcome"], attempt["verdict"]) == ("lost", 1)
    assert await row(db, transaction_id) is None


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
        transaction_id = await in_doubt(
            client, runtime, name, check={"on_exhausted": own, "max_checks": 2} if own else None
        )
        for asked in range(1, 6):
            await turn(runtime, checks)
            assert len(shop.calls) == min(asked, 2 if own else 3)
            runtime.clock.offset_s += 31
    if (own or on_exhausted) == "park":
        assert await verdict(db, transaction_id) is None
        found = await row(db, transaction_id)
        assert (found["state"], found["next_check_at"]) == (2, None)
        assert found["parked_at"]
        assert "2 checks" in found["parked_reason"] if own else "3 checks" in found["parked_reason"]
    else:
        assert await verdict(db, transaction_id) == (2, 2)
        assert await row(db, transaction_id) is None
    assert {attempt["outcome"] for attempt in await attempts(db, transaction_id)} == {"unknown"}


async def test_exhaustion_by_end_needs_no_further_check(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    async with Responder(status=500) as shop:
        await db.execute("update producer_group set check_urls = $1, max_checks = 1", [shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        end = {
            "transaction_id": str(transaction_id),
            "producer_group": "shop",
            "verdict": "unknown",
            "from_check": True,
        }
        await client.post("/end", json=end)
        runtime.clock.offset_s += 31
        await turn(runtime, checks)
        assert len(shop.calls) == 1
    assert await verdict(db, transaction_id) == (2, 2)


async def test_a_parked_transaction_is_decided_by_its_producer_alone(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await db.execute("update producer_group set check_urls = $1, max_checks = 1, on_exhausted = 'park'", [shop.url])
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert (await row(db, transaction_id))["state"] == 2
        await db.execute("update producer_group set on_exhausted = 'rollback'")
        runtime.clock.offset_s += 86_400
        assert await turn(runtime, checks) == 0
        # An operator requests a check: `unknown`, or no answer, is recorded and leaves it parked.
        for status, content in ((200, UNKNOWN), (500, None)):
            shop.status, shop.content = status, content
            assert await ask_now(db, transaction_id, runtime.clock.now())
            await turn(runtime, checks)
            found = await row(db, transaction_id)
            assert (found["state"], found["next_check_at"], await verdict(db, transaction_id)) == (2, None, None)
        shop.status, shop.content = 200, COMMIT
        assert await ask_now(db, transaction_id, runtime.clock.now())
        await turn(runtime, checks)
    assert [attempt["outcome"] for attempt in await attempts(db, transaction_id)] == [
        "unknown", "unknown", "unanswered", "commit",
    ]  # fmt: skip
    assert await verdict(db, transaction_id) == (1, 1)
    assert not await ask_now(db, transaction_id, runtime.clock.now())


async def test_sweep_and_parking_stay_in_the_timeline(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()

    async def timeline_entries() -> list[str]:
        transaction = (await client.get(f"/transactions/{transaction_id}")).json()
        return [entry["what"] for entry in transaction["timeline"]]

    async with Responder(content=UNKNOWN) as shop:
        await db.execute("update producer_group set check_urls = $1, max_checks = 1, on_exhausted = 'park'", [shop.url])
        transaction_id = await in_doubt(client, runtime)
        # Requested twice, it is swept once; checked again while parked, it is parked once.
        assert await ask_now(db, transaction_id, runtime.clock.now())
        assert await timeline_entries() == ["born", "swept"]
        await turn(runtime, checks)
        assert await ask_now(db, transaction_id, runtime.clock.now())
        await turn(runtime, checks)
    assert await timeline_entries() == ["born", "swept", "check", "parked", "check"]
    reason = await db.fetchval("select parked_reason from check_back")
    verdict = {"verdict": "rollback", "reason": "asked by phone"}
    assert (await client.post(f"/transactions/{transaction_id}/verdict", json=verdict)).status_code == 200
    await run_passes(Sweeps(lambda: None), runtime, runtime.clock.now() + timedelta(seconds=70))
    assert await row(db, transaction_id) is None
    assert await timeline_entries() == ["born", "swept", "check", "parked", "check", "verdict"]
    timeline = (await client.get(f"/transactions/{transaction_id}")).json()["timeline"]
    assert reason
    assert timeline[3]["reason"] == reason


async def test_a_transaction_decided_meanwhile_is_removed_and_not_checked(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder(content=ROLLBACK) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        transaction_id = await in_doubt(client, runtime)
        await client.post(
            "/end", json={"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": "commit"}
        )
        result = await CheckBack().step(runtime, runtime.clock.now())
        assert (result.done, result.more) == (1, True)
        assert shop.calls == []
    assert await row(db, transaction_id) is None


async def test_a_deleted_groups_transactions_are_parked_by_policy(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    transaction_id = await in_doubt(client, runtime)
    await db.execute("update producer_group set deleted_at = now(), unanswered_park_s = 60")
    await turn(runtime, checks)
    [attempt] = await attempts(db, transaction_id)
    assert "not registered any more" in attempt["error"]
    runtime.clock.offset_s += 61
    await turn(runtime, checks)
    assert (await row(db, transaction_id))["state"] == 2
    await db.execute("delete from producer_group")
    await db.execute("update check_back set state = 1, next_check_at = now()")
    await turn(runtime, checks)
    assert len(await attempts(db, transaction_id)) == 3


async def test_a_row_whose_day_is_gone_is_removed(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    transaction_id = await in_doubt(client, runtime)
    await db.execute("delete from half")
    await turn(runtime, CheckBack())
    assert await row(db, transaction_id) is None
    assert await attempts(db, transaction_id) == []


async def test_a_step_without_due_checks_says_when_the_next_is_planned(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    checks = CheckBack()
    assert (await checks.step(runtime, runtime.clock.now())).within_s is None
    transaction_id = await in_doubt(client, runtime)
    now = runtime.clock.now()
    for after_s, within_s in ((0.3, 0.3), (0.01, SOON_S)):
        at = now + timedelta(seconds=after_s)
        await db.execute("update check_back set next_check_at = $2 where transaction_id = $1", transaction_id, at)
        result = await checks.step(runtime, now)
        assert result.done == 0
        assert result.within_s == pytest.approx(within_s)
    # A leased check is looked at again soon, as its lease may end.
    await db.execute("update check_back set next_check_at = $1, leased_until = $2", now, now + timedelta(seconds=60))
    assert (await checks.step(runtime, now)).within_s == SOON_S
