"""A group whose policy changes while one of its checks is out: policy decides by the new configuration."""

import asyncio
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.checkback.loop import CheckBack
from app.database.connection import Connection, connect
from app.runtime.state import Runtime
from tests.coordinator.test_races import until_waiting
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import UNKNOWN, attempts, in_doubt, row, turn, verdict

SHOP = "/producer-groups/shop"
IN_DOUBT, PARKED = 1, 2


async def change(client: httpx.AsyncClient, **fields: Any) -> None:
    answer = await client.put(SHOP, json=fields)
    assert answer.status_code in (200, 201), answer.text


@pytest.mark.parametrize(
    ("changed", "state"), [({"on_exhausted": "park", "max_checks": 1}, PARKED), ({"max_checks": 3}, IN_DOUBT)]
)
@pytest.mark.parametrize("batch_checks", [False, True])
async def test_policy_decides_by_what_a_put_has_answered_while_the_check_is_out(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, changed: dict[str, Any], state: int, batch_checks: bool
) -> None:
    async def change_first(call: Call) -> web.StreamResponse:
        await change(client, check_urls=[shop.url], batch_checks=batch_checks, **changed)
        asked = call.json()
        answers = [{"transaction_id": one["transaction_id"], **UNKNOWN} for one in asked.get("checks", [])]
        return web.json_response({"answers": answers} if answers else UNKNOWN)

    async with Responder(change_first) as shop:
        await change(client, check_urls=[shop.url], batch_checks=batch_checks, max_checks=1, on_exhausted="rollback")
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    assert await verdict(db, transaction_id) is None
    found = await row(db, transaction_id)
    assert (found["state"], found["answered"], found["leased_until"]) == (state, 1, None)
    assert (found["next_check_at"] is None) == (state == PARKED)
    [attempt] = await attempts(db, transaction_id)
    assert attempt["outcome"] == "unknown"


async def test_a_check_that_policy_replaced_is_sent_once_the_policy_allows_more(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = CheckBack()
    async with Responder(content=UNKNOWN) as shop:
        await change(client, check_urls=[shop.url], max_checks=1, on_exhausted="rollback")
        transaction_id = await in_doubt(client, runtime)
        await db.execute("update check_back set answered = 1")
        prepared = CheckBack._prepared

        async def changed_after(self: CheckBack, *arguments: Any) -> Any:
            found = await prepared(self, *arguments)
            await change(client, check_urls=[shop.url], max_checks=5)
            return found

        monkeypatch.setattr(CheckBack, "_prepared", changed_after)
        await turn(runtime, checks)
        assert shop.calls == []
        assert await verdict(db, transaction_id) is None
        assert (await row(db, transaction_id))["answered"] == 1
        monkeypatch.setattr(CheckBack, "_prepared", prepared)
        await turn(runtime, checks)
        assert len(shop.calls) == 1
    assert (await row(db, transaction_id))["answered"] == 2


async def test_policy_waits_for_a_change_that_is_not_committed_yet(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    holder = await connect(dsn)
    async with Responder(content=UNKNOWN) as shop:
        await change(client, check_urls=[shop.url], max_checks=1, on_exhausted="rollback")
        transaction_id = await in_doubt(client, runtime)
        async with holder.transaction():
            await holder.execute("update producer_group set on_exhausted = 'park', updated_at = clock_timestamp()")
            policy = asyncio.create_task(turn(runtime, CheckBack()))
            await until_waiting(db)
        await policy
    await holder.close()
    assert await verdict(db, transaction_id) is None
    assert (await row(db, transaction_id))["state"] == PARKED


async def test_the_answer_to_a_claimed_check_says_what_the_changed_policy_made_of_it(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    await change(client, check_urls=[], checks="claim", max_checks=1, on_exhausted="rollback")
    transaction_id = await in_doubt(client, runtime)
    [check] = (await client.post(f"{SHOP}/checks/claim", json={})).json()["checks"]
    answer = {"transaction_id": check["transaction_id"], "handle": check["handle"], **UNKNOWN}
    holder = await connect(dsn)
    async with holder.transaction():
        await holder.execute("update producer_group set on_exhausted = 'park', updated_at = clock_timestamp()")
        answering = asyncio.create_task(client.post(f"{SHOP}/checks/answers", json={"answers": [answer]}))
        await until_waiting(db)
    answered = await answering
    await holder.close()
    [outcome] = answered.json()["outcomes"]
    assert outcome["state"] == "parked"
    assert await verdict(db, transaction_id) is None
