"""A producer group that is registered again: the pause that it asked for ends, and what it did not answer is due."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.permissions import Role
from app.runtime.state import Runtime
from tests.support.api_keys import bearer, make
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, in_doubt, turn, verdict
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
