"""One call that asks a producer group about many transactions: its content, its answers, its limits."""

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from aiohttp import web
from halfnote import COMMIT, ROLLBACK, CheckedTransaction, CheckEndpoint, Verdict
from halfnote.hosting import answered_async
from standardwebhooks import Webhook

from app.checkback import check_batches
from app.checkback.loop import CheckBack
from app.config import Settings
from app.database.connection import Connection
from app.field_rules import REASON_MAX
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.support.check_responder import Call, Responder, Silent
from tests.support.check_stepping import SECRET, attempts, in_doubt, many_in_doubt, replica, row, turn, verdict


def said(call: Call, **words: str | None) -> web.StreamResponse:
    """Answer each check by its number in `context`; None leaves it out."""
    answers = []
    for one in call.json()["checks"]:
        word = words[f"n{one['context']['n']}"]
        if word is not None:
            answers.append({"transaction_id": one["transaction_id"], "verdict": word, "reason": "looked"})
    return web.json_response({"answers": answers})


async def test_one_call_brings_a_verdict_for_each_and_what_is_missing_is_unanswered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        return said(call, n0="commit", n1="rollback", n2="unknown", n3=None)

    async with Responder(answer) as shop:
        await register_group(db, "shop", check_urls=[shop.url], batch_checks=True)
        ids = [await in_doubt(client, runtime, context={"n": n}) for n in range(4)]
        assert await turn(runtime, CheckBack()) == 4
    [call] = shop.calls
    Webhook(SECRET).verify(call.body, call.headers)
    asked = call.json()
    assert (asked["type"], asked["producer_group"]) == ("halfnote.checks", "shop")
    assert [UUID(one["transaction_id"]) for one in asked["checks"]] == ids
    assert {one["type"] for one in asked["checks"]} == {"halfnote.check"}
    assert asked["checks"][0]["messages"][0]["key"] == "order-1030"
    assert [await verdict(db, one) for one in ids] == [(1, 1), (2, 1), None, None]
    assert await db.fetchval("select reason from op where transaction_id = $1", ids[1]) == "looked"
    outcomes = ("commit", "rollback", "unknown", "unanswered")
    for one, outcome in zip(ids, outcomes, strict=True):
        [attempt] = await attempts(db, one)
        assert (attempt["outcome"], attempt["destination"], attempt["status"]) == (outcome, shop.url, 200)
    assert attempt["error"] == "the answer has no verdict for this transaction"
    assert ((await row(db, ids[2]))["answered"], (await row(db, ids[3]))["answered"]) == (1, 0)
    # The URL answered.
    shown = (await client.get("/producer-groups/shop")).json()
    assert (shown["batch_checks"], shown["urls"][0]["last_error"]) == (True, None)
    assert shown["urls"][0]["last_ok"] is not None


WRONG: list[tuple[int, Any, str]] = [
    (200, {"verdict": "commit"}, "not {answers"),
    (200, {"answers": "commit"}, "not {answers"),
    (200, {"answers": [], "more": 1}, "no verdict for this"),
    (200, {"more": 1}, "not {answers"),
    (200, {"answers": [{"verdict": "commit"}]}, "no verdict for this"),
    (200, {"answers": [{"transaction_id": str(uuid4()), "verdict": "commit"}]}, "no verdict for this"),
    (200, {"answers": [{"transaction_id": "ID", "verdict": "maybe"}]}, "no verdict for this"),
    (
        200,
        {"answers": [{"transaction_id": "ID", "verdict": word} for word in ("commit", "rollback")]},
        "two verdicts",
    ),
    (200, {"answers": [{"transaction_id": "ID", "verdict": "commit"}], "pad": " " * 20_500}, "more than 20 KiB"),
    (500, {"answers": [{"transaction_id": "ID", "verdict": "commit"}]}, "answered 500"),
]


async def test_other_answers_are_no_answer(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, subtests: pytest.Subtests
) -> None:
    checks, sent = CheckBack(), (0, dict[str, Any]())

    async def answer(call: Call) -> web.StreamResponse:
        status, body = sent
        text = web.json_response(body).text or ""
        return web.Response(status=status, text=text.replace("ID", call.json()["checks"][0]["transaction_id"]))

    async with Responder(answer) as shop:
        for status, body, error in WRONG:
            with subtests.test(status=status, body=str(body)[:60]):
                await db.execute("delete from check_back")
                await db.execute("update producer_group set check_urls = $1, batch_checks = true", [shop.url])
                sent = (status, body)
                transaction_id = await in_doubt(client, runtime)
                assert await turn(runtime, checks) == 1
                [attempt] = await attempts(db, transaction_id)
                assert attempt["outcome"] == "unanswered"
                assert error in attempt["error"]
                assert await verdict(db, transaction_id) is None


async def test_a_url_that_fails_leaves_all_to_the_next(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        return said(call, n0="commit", n1="commit")

    async with Responder(status=500) as broken, Responder(answer) as working:
        await register_group(db, "shop", check_urls=[broken.url, working.url], batch_checks=True)
        ids = [await in_doubt(client, runtime, context={"n": n}) for n in range(2)]
        await turn(runtime, CheckBack())
    assert (len(broken.calls), len(working.calls)) == (1, 1)
    assert broken.calls[0].headers["webhook-id"] == working.calls[0].headers["webhook-id"]
    assert [await verdict(db, one) for one in ids] == [(1, 1), (1, 1)]


async def test_each_call_begins_with_the_next_url(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        return said(call, n0="commit", n1="commit", n2="commit", n3="commit")

    monkeypatch.setattr(check_batches, "BATCH_CHECKS_MAX", 2)
    checks = CheckBack()
    async with Responder(answer) as one, Responder(answer) as other:
        await register_group(db, "shop", check_urls=[one.url, other.url], batch_checks=True)
        for _ in range(2):
            for n in range(4):
                await in_doubt(client, runtime, context={"n": n})
            assert await turn(runtime, checks) == 4
    assert (len(one.calls), len(other.calls)) == (2, 2)


async def test_calls_have_at_most_a_hundred_and_groups_stay_apart(db: Connection, settings: Settings, dsn: str) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        checks = call.json()["checks"]
        answers = [{"transaction_id": one["transaction_id"], "verdict": "commit"} for one in checks]
        return web.json_response({"answers": answers})

    async with replica(settings, dsn, check_concurrency=1000) as runtime, Responder(answer) as shop:
        window = {"check_max_in_flight": 500, "check_window": 500}
        for name, count in (("a", 250), ("b", 3)):
            await register_group(db, name, check_urls=[shop.url], batch_checks=True, **window)
            await many_in_doubt(db, runtime, name, count)
        assert await turn(runtime, CheckBack()) == 253
    sizes = sorted((len(call.json()["checks"]), call.json()["producer_group"]) for call in shop.calls)
    assert sizes == [(3, "b"), (50, "a"), (100, "a"), (100, "a")]
    assert await db.fetchval("select count(*) from op where verdict = 1 and source = 1") == 253
    assert await db.fetchval("select count(*) from check_back") == 0


async def test_a_hundred_answers_with_the_longest_reasons_are_read(
    db: Connection, settings: Settings, dsn: str
) -> None:
    reason = "\N{TEAPOT}" * REASON_MAX

    async def answer(call: Call) -> web.StreamResponse:
        checks = call.json()["checks"]
        answers = [{"transaction_id": one["transaction_id"], "verdict": "rollback", "reason": reason} for one in checks]
        return web.Response(body=json.dumps({"answers": answers}, ensure_ascii=False).encode())

    async with replica(settings, dsn, check_concurrency=1000) as runtime, Responder(answer) as shop:
        window = {"check_max_in_flight": 100, "check_window": 100}
        await register_group(db, "shop", check_urls=[shop.url], batch_checks=True, **window)
        await many_in_doubt(db, runtime, "shop", 100)
        assert await turn(runtime, CheckBack()) == 100
    [call] = shop.calls
    assert len(call.json()["checks"]) == 100
    assert await db.fetchval("select count(*) from op where verdict = 2 and source = 1 and reason = $1", reason) == 100


async def test_unknown_fields_of_answers_are_ignored(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        body = call.json()
        if body["type"] == "halfnote.check":
            return web.json_response({"verdict": "commit", "order": {"number": 1030}})
        answers = [{"transaction_id": one["transaction_id"], "verdict": "rollback", "n": 1} for one in body["checks"]]
        return web.json_response({"answers": answers, "took_ms": 3})

    async with Responder(answer) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        await register_group(db, "bank", check_urls=[shop.url], batch_checks=True)
        ids = [await in_doubt(client, runtime, name) for name in ("shop", "bank")]
        await turn(runtime, CheckBack())
    assert [await verdict(db, one) for one in ids] == [(1, 1), (2, 1)]


async def test_large_transactions_go_in_calls_of_their_own(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_batches, "BATCH_BYTES", 100)
    async with Responder(status=202) as shop:
        await register_group(db, "shop", check_urls=[shop.url], batch_checks=True)
        for _ in range(3):
            await in_doubt(client, runtime, context="x" * 90)
        await turn(runtime, CheckBack())
    assert [len(call.json()["checks"]) for call in shop.calls] == [1, 1, 1]
    # 202 is `unknown` for all.
    assert await db.fetchval("select sum(answered) from check_back") == 3


async def test_what_is_in_flight_at_a_drain_is_released_for_others(
    client: httpx.AsyncClient, db: Connection, settings: Settings, dsn: str, runtime: Runtime
) -> None:
    checks = CheckBack()
    async with replica(settings, dsn, drain_s=0.1) as other, Silent() as shop:
        await register_group(db, "shop", check_urls=[shop.url], batch_checks=True, check_timeout_s=60)
        for n in range(3):
            await in_doubt(client, runtime, context={"n": n})
        await checks.step(other, other.clock.now())
        async with asyncio.timeout(60):
            while not shop.connections:
                await asyncio.sleep(0.01)
        await checks.drain(other)
        assert shop.connections == 1
    assert await db.fetchval("select count(*) from check_back where leased_until is null") == 3


class Says:
    """A listener of two transactions: it fails for the others."""

    def __init__(self, words: dict[UUID, Verdict]) -> None:
        self._words = words

    def check_local(self, transaction: CheckedTransaction) -> Verdict:
        return self._words[transaction.transaction_id]


async def test_the_clients_endpoint_answers_it(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    endpoints: list[CheckEndpoint] = []

    async def answer(call: Call) -> web.StreamResponse:
        reply = await answered_async(endpoints[0], call.headers, call.body)
        return web.Response(status=reply.status, body=reply.body)

    async with Responder(answer) as shop:
        await register_group(db, "shop", check_urls=[shop.url], batch_checks=True)
        ids = [await in_doubt(client, runtime) for _ in range(3)]
        endpoints.append(CheckEndpoint(Says({ids[0]: COMMIT, ids[1]: ROLLBACK}), group="shop", secrets=SECRET))
        await turn(runtime, CheckBack())
        assert [await verdict(db, one) for one in ids] == [(1, 1), (2, 1), None]
        endpoints[0] = CheckEndpoint(Says({}), group="bank", secrets=SECRET)
        runtime.clock.offset_s += 5
        await turn(runtime, CheckBack())
    assert [one["status"] for one in await attempts(db, ids[2])] == [200, 403]
