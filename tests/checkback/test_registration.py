"""A producer group that is registered again: the pause that it asked for ends, and what it did not answer is due."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.checkback import registrations
from app.checkback.loop import CheckBack
from app.database.connection import Connection, connect
from app.permissions import Role
from app.runtime.state import Runtime
from app.store.checkback import requests
from app.store.checkback.requests import AT_ONCE
from app.store.checkback.results import SettledCheck, settle
from tests.coordinator.test_races import until_waiting
from tests.support.api_keys import bearer, make
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, in_doubt, many_in_doubt, turn, verdict
from tests.support.keyed_services import start

__all__ = ["start"]

SHOP = "/producer-groups/shop"


async def held_until(client: httpx.AsyncClient) -> str | None:
    until: str | None = (await client.get(SHOP)).json()["held_until"]
    return until


@pytest.mark.parametrize("by", ["admin", "producer", "patch"])
async def test_a_registration_ends_the_pause_that_the_group_asked_for(
    start: Callable[..., Any], db: Connection, by: str
) -> None:
    runtime, client = await start()
    headers = (
        bearer(await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["*"])) if by == "producer" else {}
    )
    checks = CheckBack()
    async with Responder(status=503) as shop:
        shop.headers["retry-after"] = "3600"
        put = {"check_urls": [shop.url]}
        assert (await client.put(SHOP, json=put)).json()["held_until"] is None
        transaction_id = await in_doubt(client, runtime)
        await turn(runtime, checks)
        until = await held_until(client)
        assert until is not None
        assert (await client.put(f"{SHOP}?dry_run=true", json=put)).status_code == 200
        asked = (await client.post(f"/transactions/{transaction_id}/check")).json()
        assert (asked["next_check_at"], asked["held_until"]) == (until, until)
        shop.status, shop.content = 200, COMMIT
        assert await turn(runtime, checks) == 0
        call = client.patch(SHOP, json={}) if by == "patch" else client.put(SHOP, json=put, headers=headers)
        answer = await call
        assert (answer.status_code, answer.json()["changed"], answer.json()["held_until"]) == (200, [], None)
        assert await held_until(client) is None
        asked = (await client.post(f"/transactions/{transaction_id}/check")).json()
        assert asked["next_check_at"] <= runtime.clock.now().isoformat()
        assert asked["held_until"] is None
        await turn(runtime, checks)
    assert await verdict(db, transaction_id) == (1, 1)


async def test_a_late_answer_from_before_a_registration_holds_no_group(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """The process that asks for the pause has ended, and its successor has registered."""

    async def after_the_put(_: Call) -> web.Response:
        assert (await client.put(SHOP, json=put)).json()["changed"] == []
        return web.Response(status=503, headers={"retry-after": "3600"})

    checks = CheckBack()
    async with Responder(after_the_put) as shop:
        put = {"check_urls": [shop.url]}
        await client.put(SHOP, json=put)
        await in_doubt(client, runtime)
        await turn(runtime, checks)
        assert await held_until(client) is None
        # It halves the window: the calls were too many.
        assert await db.fetchval("select check_window from producer_group") == 16
        shop.answer, shop.content = None, COMMIT
        second = await in_doubt(client, runtime)
        await turn(runtime, checks)
    assert await verdict(db, second) == (1, 1)


async def test_a_pause_that_is_over_is_not_shown_and_a_group_without_a_url_stays_uncalled(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    put = {"check_urls": [], "checks": "claim"}
    for _ in range(2):
        assert (await client.put(SHOP, json=put)).json()["held_until"] is None
        assert await db.fetchval("select held_until = 'infinity' from producer_group")
    await client.put(SHOP, json={"check_urls": ["http://127.0.0.1:9/"]})
    await db.execute("update producer_group set held_until = $1", runtime.clock.now())
    await asyncio.sleep(0.001)
    assert await held_until(client) is None


@pytest.mark.parametrize("by", ["PUT", "claim"])
async def test_all_that_was_not_answered_is_due_after_a_registration(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 60)
    put = {"check_urls": ["http://127.0.0.1:9/"], "checks": "claim"}
    await client.put(SHOP, json=put)
    ids = await many_in_doubt(db, runtime, "shop", 2 * AT_ONCE + 500)
    at = runtime.clock.now() + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    # Those that are in flight are asked again once they are settled.
    leased = "update check_back set leased_until = $1 where transaction_id = any($2::uuid[])"
    await db.execute(leased, at, ids[:AT_ONCE])
    if by == "PUT":
        assert (await client.put(SHOP, json=put)).status_code == 200
    else:
        assert (await client.post(f"{SHOP}/checks/claim", json={"started": True, "max": 1})).status_code == 200
    waits = "select count(*) from check_back where next_check_at > $1 and asked_at is null and claimed_at is null"
    assert await db.fetchval(waits, runtime.clock.now()) == 0


async def test_a_registration_begins_no_batch_after_its_time(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 0)
    put = {"check_urls": ["http://127.0.0.1:9/"]}
    await client.put(SHOP, json=put)
    await many_in_doubt(db, runtime, "shop", AT_ONCE + 500)
    at = runtime.clock.now() + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    assert (await client.put(SHOP, json=put)).status_code == 200
    assert await db.fetchval("select count(*) from check_back where next_check_at = $1", at) == 500


async def test_a_registration_asks_no_check_again_that_it_made_due(
    runtime: Runtime, db: Connection, dsn: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers claim what its first batch made due before its second one."""
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 60)
    now = runtime.clock.now()
    out, *waiting = await many_in_doubt(db, runtime, group, 1 + 2 * AT_ONCE + 500)
    at = now + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    lease = "update check_back set leased_until = $1, asked_at = null"
    await db.execute(f"{lease} where transaction_id = $2", at, out)
    ask_waiting = requests.ask_waiting

    async def claimed_after(*arguments: Any) -> int:
        found = await ask_waiting(*arguments)
        await db.execute(f"{lease} where next_check_at <= $2 and leased_until is null", at, now)
        return found

    monkeypatch.setattr(requests, "ask_waiting", claimed_after)
    asking = await connect(dsn)
    await registrations.ask_unanswered(asking, group, now)
    await asking.close()
    assert await db.fetchval("select array_agg(transaction_id) from check_back where asked_at is not null") == [out]
    assert await db.fetchval("select count(*) from check_back where next_check_at = $1", now) == len(waiting)


@pytest.mark.parametrize("leased", [False, True])
async def test_of_two_registrations_at_once_the_second_writes_no_row_again(
    runtime: Runtime, db: Connection, dsn: str, group: str, leased: bool
) -> None:
    now = runtime.clock.now()
    await many_in_doubt(db, runtime, group, 3)
    at = now + timedelta(seconds=600)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9", at)
    if leased:
        await db.execute("update check_back set leased_until = $1", at)
    first, second = [await connect(dsn) for _ in range(2)]
    async with first.transaction():
        await registrations.ask_unanswered(first, group, now)
        written = await first.fetch("select transaction_id, xmin::text from check_back order by 1")
        asked = asyncio.create_task(registrations.ask_unanswered(second, group, now + timedelta(seconds=1)))
        await until_waiting(db)
    await asked
    assert await db.fetch("select transaction_id, xmin::text from check_back order by 1") == written
    for connection in (first, second):
        await connection.close()


async def test_a_row_that_is_settled_now_is_asked_once_it_has_its_back_off(
    runtime: Runtime, db: Connection, dsn: str, group: str
) -> None:
    now = runtime.clock.now()
    first, second = await many_in_doubt(db, runtime, group, 2)
    at = now + timedelta(seconds=600)
    await db.execute("update check_back set unanswered = 1, leased_until = $1", at)
    holder, settling, asking = [await connect(dsn) for _ in range(3)]
    rows = [SettledCheck(one, 0, 1, now, unanswered=True, next_check_at=at) for one in (second, first)]
    async with holder.transaction():
        await holder.execute("select from check_back where transaction_id = $1 for update", second)
        settled = asyncio.create_task(settle(settling, rows, now))
        await until_waiting(db)
        asked = asyncio.create_task(requests.ask_in_flight(asking, group, now))
        await until_waiting(db, 2)
    await settled
    assert await asked == 2
    found = await db.fetch("select next_check_at, unanswered, leased_until from check_back")
    assert [tuple(row) for row in found] == [(now, 2, None)] * 2
    for connection in (holder, settling, asking):
        await connection.close()
