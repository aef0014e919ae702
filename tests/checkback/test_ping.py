"""Pings: every URL at its interval, by one replica, signed, and shown in the group and the metric."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from aiohttp import web
from standardwebhooks import Webhook

from app.checkback.ping import Pings
from app.config import Settings
from app.database.connection import Connection, connect
from app.runtime.state import Runtime
from app.store.checkback.check_urls import CheckUrl, note_urls
from tests.conftest import register_group
from tests.coordinator.test_races import until_waiting
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import SECRET, replica


def up(runtime: Runtime) -> dict[str, float]:
    """Return the metric by URL."""
    return {
        sample.labels["url"]: sample.value
        for family in runtime.metrics.registry.collect()
        if family.name == "halfnote_check_url_up"
        for sample in family.samples
    }


async def test_each_url_is_pinged_at_its_interval(client: httpx.AsyncClient, db: Connection, runtime: Runtime) -> None:
    pings = Pings()
    async with Responder(status=204) as working, Responder(status=500) as failing:
        await register_group(db, "shop", check_urls=[working.url, failing.url], ping_interval_s=60)
        runtime.clock.fixed = start = runtime.clock.now()
        for later_s in (0, 30, 61):
            runtime.clock.fixed = start + timedelta(seconds=later_s)
            await pings.step(runtime, runtime.clock.now())
        assert (len(working.calls), len(failing.calls)) == (2, 2)
        call = working.calls[0]
        Webhook(SECRET).verify(call.body, call.headers)
        assert call.headers["webhook-id"].startswith("ping_")
        assert set(call.json()) == {"type", "producer_group", "at"}
        assert up(runtime) == {working.url: 1, failing.url: 0}
        urls = (await client.get("/producer-groups/shop")).json()["urls"]
        assert urls[0]["last_ok"]
        assert urls[0]["last_error"] is None
        assert (urls[1]["last_ok"], "500" in urls[1]["last_error"]) == (None, True)
        failing.status = 204
        runtime.clock.fixed += timedelta(seconds=61)
        await pings.step(runtime, runtime.clock.now())
        assert up(runtime)[failing.url] == 1
        await client.put("/producer-groups/shop", json={"check_urls": [working.url]})
        await pings.step(runtime, runtime.clock.now())
        assert up(runtime) == {working.url: 1}


async def test_a_token_in_a_query_is_in_no_metric_and_in_no_warning(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    async with Responder(status=204) as working, Responder(status=500) as failing:
        urls = [f"{working.url}?token=first", f"{failing.url}?token=second", f"{failing.url}?token=third"]
        await client.put("/producer-groups/shop", json={"check_urls": urls})
        await Pings().step(runtime, runtime.clock.now() + timedelta(seconds=1))
    assert len(working.calls) == 1
    assert up(runtime) == {working.url: 1, failing.url: 0}
    assert failing.url in (await client.get("/readyz")).text
    for text in ((await client.get("/readyz")).text, (await client.get("/audit")).text):
        assert "token=" not in text
    # A key that may read the group sees the full URLs.
    assert (await client.get("/producer-groups/shop")).json()["check_urls"] == urls


async def test_one_replica_pings_and_all_show_it(
    db: Connection, runtime: Runtime, settings: Settings, dsn: str
) -> None:
    async with replica(settings, dsn) as other, Responder(status=200) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        now = runtime.clock.now() + timedelta(seconds=1)
        for process, pings in ((runtime, Pings()), (other, Pings())):
            await pings.step(process, now)
            assert up(process) == {shop.url: 1}
        assert len(shop.calls) == 1


async def test_a_deleted_group_is_not_pinged(db: Connection, runtime: Runtime) -> None:
    async with Responder() as shop:
        await register_group(db, "shop", check_urls=[shop.url], deleted_at=runtime.clock.now())
        await Pings().step(runtime, runtime.clock.now() + timedelta(seconds=1))
        assert shop.calls == []


@pytest.mark.parametrize("gone", ["group", "url"])
async def test_a_ping_that_was_out_leaves_nothing_of_a_url_that_is_gone(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, gone: str
) -> None:
    async def remove_first(call: Call) -> web.StreamResponse:
        if gone == "group":
            assert (await client.delete("/producer-groups/shop")).status_code == 204
        else:
            answer = await client.put("/producer-groups/shop", json={"check_urls": ["http://127.0.0.1:1/other"]})
            assert answer.status_code == 200
        return web.Response(status=503)

    pings = Pings()
    async with Responder(remove_first) as shop:
        await register_group(db, "shop", check_urls=[shop.url])
        await pings.step(runtime, runtime.clock.now())
        assert len(shop.calls) == 1
    assert await db.fetch("select from check_url where url = $1", shop.url) == []
    assert up(runtime) == {}


@pytest.mark.parametrize("change", ["deleted_at = now()", "check_urls = '{http://127.0.0.1:1/other}'"])
async def test_a_result_waits_for_a_change_of_its_group_that_is_not_committed_yet(
    db: Connection, runtime: Runtime, dsn: str, change: str
) -> None:
    urls = [f"http://127.0.0.1:1/{name}" for name in ("one", "two")]
    await register_group(db, "bank", check_urls=urls)
    await register_group(db, "shop", check_urls=urls)
    results = [CheckUrl.of(name, url, "down", runtime.clock.now()) for name in ("shop", "bank") for url in urls]
    holder, noting = await connect(dsn), await connect(dsn)
    async with holder.transaction():
        # As the router does.
        await holder.execute("select from producer_group where name = 'shop' for update")
        await holder.execute(f"update producer_group set {change} where name = 'shop'")
        await holder.execute("delete from check_url where producer_group = 'shop'")
        noted = asyncio.create_task(note_urls(noting, results))
        await until_waiting(db)
    await noted
    for one in (holder, noting):
        await one.close()
    assert [tuple(row) for row in await db.fetch("select producer_group, url from check_url order by 2")] == [
        ("bank", url) for url in urls
    ]


async def test_results_of_urls_that_are_gone_are_not_shown(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    url, former = "http://127.0.0.1:1/check", "http://127.0.0.1:1/former"
    for name in ("shop", "bank"):
        await register_group(db, name, check_urls=[url])
    rows: list[Any] = [("shop", url), ("shop", former), ("bank", url)]
    await db.executemany(
        "insert into check_url (producer_group, url, last_error_at, last_error) values ($1, $2, now(), 'down')", rows
    )
    await db.execute("update producer_group set deleted_at = now() where name = 'bank'")
    await db.execute("update producer_group set next_ping_at = 'infinity'")
    await Pings().step(runtime, runtime.clock.now())
    assert up(runtime) == {url: 0}
    warning = (await client.get("/readyz")).text
    assert f"shop {url}" in warning
    assert "bank" not in warning
    assert former not in warning
