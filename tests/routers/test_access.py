"""Who is answered with and without keys, and how much of a key's traffic."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from app.database.connection import Connection
from app.permissions import Role, new_key
from app.runtime.live_settings import follow
from tests.admission.test_request_guard import raw_call
from tests.conftest import register_group
from tests.support.api_keys import bearer, make
from tests.support.keyed_services import CONFIGURED, ORDER, start, status

__all__ = ["start"]


async def test_undeclared_topics_are_refused(start: Callable[..., Any], db: Connection) -> None:
    await register_group(db, "shop")
    _, other = await start()
    runtime, client = await start(topics="declared")
    two = {"producer_group": "shop", "messages": [{"topic": "order", "body": 1}, {"topic": "ordr", "body": 1}]}
    for path in ("/half", "/messages"):
        refused = await client.post(path, json=two)
        assert (refused.status_code, refused.json()["type"]) == (422, "/problems/topic-undeclared")
        assert refused.json()["field"] == "messages[0].topic"
    # By another replica: this one reads it on demand, and all of them learn of it by the notification.
    assert (await other.put("/topics/order")).status_code == 204
    assert (await client.post("/half", json=ORDER)).status_code == 201
    assert (await client.post("/half", json=two)).json()["field"] == "messages[1].topic"
    await follow(runtime, runtime.clock.now())
    assert runtime.declared == {"order"}
    stored = (await other.post("/half", json=ORDER)).json()["transaction_id"]
    assert (await other.delete("/topics/order")).status_code == 204
    await follow(runtime, runtime.clock.now())
    assert (await client.post("/half", json=ORDER)).status_code == 422
    # A stored half is answered regardless of later declarations.
    repeated = await client.post("/half", json={**ORDER, "transaction_id": stored})
    assert (repeated.status_code, repeated.json()["replayed"]) == (200, True)
    assert (await other.delete("/topics/order")).status_code == 404
    assert (await other.put("/topics/halfnote.mine")).json()["type"] == "/problems/topic-reserved"


async def test_any_host_is_answered_where_keys_are_asked_for(start: Callable[..., Any]) -> None:
    _, client = await start()
    assert (await client.get("/topics", headers={"host": "halfnote.example"})).status_code == 200
    own = {"host": "halfnote.example", "origin": "https://halfnote.example"}
    assert (await client.put("/topics/order", headers=own)).status_code == 204
    foreign = {"host": "halfnote.example", "origin": "https://evil.example"}
    assert (await client.put("/topics/order", headers=foreign)).json()["type"] == "/problems/foreign-origin"
    _, strict = await start(allowed_hosts=("halfnote.example",))
    assert (await strict.get("/topics", headers={"host": "halfnote.example"})).status_code == 200
    assert (await strict.get("/topics", headers={"host": "other.example"})).status_code == 421


async def test_health_shows_no_details_without_a_key(start: Callable[..., Any]) -> None:
    _, client = await start()
    checks = {one["name"]: one["detail"] for one in (await client.get("/readyz")).json()["checks"]}
    assert "Postgres" in checks["database"]
    for headers in ({"authorization": ""}, bearer(new_key())):
        shown = (await client.get("/readyz", headers=headers)).json()["checks"]
        assert {one["detail"] for one in shown} == {"details are shown to the keys of people"}


async def test_limits_of_a_key(start: Callable[..., Any]) -> None:
    runtime, client = await start(key_rate_per_s=0.001)
    slow, own = await make(runtime, Role.METRICS), await make(runtime, Role.OPERATOR, rate_per_s=1000.0)
    assert await status(client, slow, "/topics") == 403
    # Health and metrics are answered all the same, and are not counted.
    assert [await status(client, slow) for _ in range(3)] == [200, 200, 200]
    key = await make(runtime, Role.OPERATOR)
    # The configured key, which is not in the database, is counted as well.
    for one in (key, CONFIGURED):
        assert await status(client, one, "/topics") == 200
        refused = await client.get("/topics", headers=bearer(one))
        assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many-requests")
        assert int(refused.headers["retry-after"]) > 900
    assert [await status(client, own, "/topics") for _ in range(3)] == [200, 200, 200]
    assert runtime.load_limits.in_flight == 0


async def test_requests_in_flight_are_limited(start: Callable[..., Any], db: Connection) -> None:
    await register_group(db, "shop")
    runtime, client = await start(in_flight_max=3, key_in_flight_max=1)
    first, second = [await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["*"]) for _ in range(2)]
    app = client._transport.app
    gate = asyncio.Event()
    body = json.dumps(ORDER).encode()

    async def held() -> AsyncIterator[bytes]:
        await gate.wait()
        yield body

    async def post(headers: dict[str, str]) -> int:
        status, _ = await raw_call(app, "POST", "/half", {"transfer-encoding": "chunked", **headers}, held())
        return status

    waiting: list[asyncio.Task[int]] = []
    for key in (first, CONFIGURED, second):
        waiting.append(asyncio.create_task(post(bearer(key))))
        await _until(lambda: runtime.load_limits.in_flight == len(waiting))
        if len(waiting) < 3:
            refused = await client.post("/half", json=ORDER, headers=bearer(key))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for method, path in (("POST", "/half"), ("GET", "/topics")):
        answer = await client.request(method, path, json=ORDER if method == "POST" else None)
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/overloaded")
        assert answer.headers["retry-after"] == "1"
    assert [(await client.get(path)).status_code for path in ("/livez", "/metrics")] == [200, 200]
    gate.set()
    assert await asyncio.gather(*waiting) == [201, 201, 201]
    assert runtime.load_limits.in_flight == 0


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.001)


async def test_with_auth_off_only_this_machine_is_answered(start: Callable[..., Any]) -> None:
    _, client = await start(auth="off", admin_key=None)
    for peer, expected in (("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("192.0.2.7", 403)):
        transport = httpx.ASGITransport(app=client._transport.app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as from_there:
            for path in ("/topics", "/livez"):
                answer = await from_there.get(path)
                assert answer.status_code == expected
            half = await from_there.post("/half", json=ORDER)
            assert half.status_code == (422 if expected == 200 else 403)
            if expected == 403:
                assert half.json()["type"] == "/problems/not-this-machine"
