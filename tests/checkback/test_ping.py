"""Pings: every URL at its interval, by one replica, signed, and shown in the group and the metric."""

from datetime import timedelta

import httpx
from standardwebhooks import Webhook

from app.checkback.ping import Pings
from app.config import Settings
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.support.check_responder import Responder
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
