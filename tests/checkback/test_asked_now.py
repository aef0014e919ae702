"""Checks of many transactions that a person asks for: as many statements as for one, and no decided one among them."""

import asyncio
import json
from datetime import UTC, datetime
from uuid import UUID

import httpx
import pytest
from aiohttp import web

from app.checkback.claim_loops import Lapses
from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.ids import uuid7
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_all_now
from tests.coordinator.test_half_end import post_end
from tests.routers.test_transactions import half_of
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, UNKNOWN, in_doubt, row, turn, verdict
from tests.support.statements import recorded


async def test_many_are_asked_or_decided_by_as_many_statements_as_one(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Row by row, the rows of the first ones would stay locked for the time of all statements."""
    chosen = {"producer_group": "shop", "dry_run": False}
    calls = ("check", {"state": "half"}), ("check", {"state": "in_doubt"}), ("verdict", {"state": "in_doubt"})
    counts: dict[int, list[int]] = {}
    for size in (1, 30):
        ones = {await half_of(client) for _ in range(size)}
        for what, fields in calls:
            said = {"verdict": "commit", "reason": "all"} if what == "verdict" else {}
            # Ends are flushed by a lane's own connection, which is not of the pool.
            with recorded(runtime.database) as statements:
                answer = await client.post(f"/transactions/{what}", json={**chosen, **fields, **said})
                await asyncio.sleep(0)
            assert answer.json()["changed"] == size
            assert set(answer.json()["transaction_ids"]) == ones
            audited = "select target, at from audit where what = $1 and target = any($2) order by audit_id"
            rows = await db.fetch(audited, f"transaction.{what}", list(ones))
            assert {row["target"] for row in rows} == ones
            counts.setdefault(size, []).append(len(statements))
        swept = await db.fetch("select transaction_id::text from attempt where kind = 'swept'")
        assert {row["transaction_id"] for row in swept} >= ones
    assert counts[30] == counts[1]


async def test_a_decided_one_among_many_is_not_asked(db: Connection, client: httpx.AsyncClient, group: str) -> None:
    ones = sorted([UUID(await half_of(client)) for _ in range(3)])
    await post_end(client, str(ones[1]), "commit")
    now = datetime.now(UTC)
    assert await ask_all_now(db, [*reversed(ones), uuid7(now), ones[0]], now) == [ones[0], ones[2]]
    assert await ask_all_now(db, [], now) == []
    rows = await db.fetch("select transaction_id, next_check_at from check_back order by transaction_id")
    assert [tuple(row) for row in rows] == [(ones[0], now), (ones[2], now)]


@pytest.mark.parametrize(("status", "content"), [(500, None), (200, UNKNOWN)])
@pytest.mark.parametrize("parked", [False, True])
async def test_a_check_that_is_asked_for_while_one_is_in_flight_follows_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, status: int, content: object, parked: bool
) -> None:
    """The answer in flight may be from before what the person knows."""

    async def after_the_request(_: Call) -> web.Response:
        assert (await client.post(f"/transactions/{transaction_id}/check")).status_code == 202
        return web.Response(status=status, text=None if content is None else json.dumps(content))

    checks = CheckBack()
    async with Responder(after_the_request) as shop:
        put = {"check_urls": [shop.url], "max_checks": 1 if parked else 9, "on_exhausted": "park"}
        await client.put("/producer-groups/shop", json=put)
        transaction_id = await in_doubt(client, runtime)
        if parked:
            await db.execute("update check_back set state = 2, parked_at = now(), parked_reason = 'why'")
        else:
            await db.execute("update check_back set unanswered = 9, unanswered_since = now()")
        await turn(runtime, checks)
        found = await row(db, transaction_id)
        assert found["next_check_at"] <= runtime.clock.now()
        assert (found["state"], found["asked_at"]) == (2 if parked else 1, None)
        # One request is one check: the next one has its usual time.
        shop.answer, shop.status, shop.content = None, status, content
        assert await turn(runtime, checks) == 1
        found = await row(db, transaction_id)
        assert found["next_check_at"] is None if parked else found["next_check_at"] > runtime.clock.now()
        assert await turn(runtime, checks) == 0


async def test_a_check_that_is_asked_for_while_the_last_one_is_in_flight_follows_although_that_parks(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async def after_the_request(_: Call) -> web.Response:
        assert (await client.post(f"/transactions/{transaction_id}/check")).status_code == 202
        return web.json_response(UNKNOWN)

    checks = CheckBack()
    async with Responder(after_the_request) as shop:
        put = {"check_urls": [shop.url], "max_checks": 1, "on_exhausted": "park"}
        await client.put("/producer-groups/shop", json=put)
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert (await row(db, transaction_id))["state"] == 2
        shop.answer, shop.content = None, COMMIT
        assert await turn(runtime, checks) == 1
    assert await verdict(db, transaction_id) == (1, 1)


@pytest.mark.parametrize("answered", [False, True])
async def test_a_check_that_is_asked_for_while_a_producer_has_it_follows_its_claim(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, answered: bool
) -> None:
    await client.put("/producer-groups/shop", json={"check_urls": [], "checks": "claim"})
    transaction_id = await in_doubt(client, runtime)
    claim = "/producer-groups/shop/checks/claim"
    [check] = (await client.post(claim, json={})).json()["checks"]
    assert (await client.post(f"/transactions/{transaction_id}/check")).status_code == 202
    # It is out until it is answered or lapses.
    assert (await client.post(claim, json={})).json()["checks"] == []
    if answered:
        answer = {"transaction_id": str(transaction_id), "handle": check["handle"], "verdict": "unknown"}
        assert (
            await client.post("/producer-groups/shop/checks/answers", json={"answers": [answer]})
        ).status_code == 200
    else:
        runtime.clock.offset_s += 60
        await Lapses().step(runtime, runtime.clock.now())
    assert (await row(db, transaction_id))["asked_at"] is None
    [again] = (await client.post(claim, json={})).json()["checks"]
    assert again["transaction_id"] == str(transaction_id)
