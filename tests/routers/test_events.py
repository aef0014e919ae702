"""`GET /events`: states as server-sent events, one look for all streams, and the end of a stream."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.errors import Overloaded
from app.permissions import Role
from app.routers import events
from app.runtime import state_feed
from app.runtime.live_settings import follow
from app.runtime.state import Runtime
from app.runtime.state_feed import StateEvent, StateFeed
from app.secrets.key_file import new_key
from tests.conftest import client_of
from tests.support.api_keys import bearer, make
from tests.support.console_forms import FORM, sign_in
from tests.support.keyed_services import CONFIGURED, start
from tests.support.processes import Service

__all__ = ["start"]

NOW = {"for_s": 0}


def blocks(text: str) -> list[dict[str, str]]:
    """Return the fields of each event of a stream, without comments."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            found.append(fields)
    return found


async def read(client: httpx.AsyncClient, path: str = "/events", **query: Any) -> list[dict[str, str]]:
    answer = await client.get(path, params={**NOW, **query})
    assert answer.status_code == 200, answer.text
    return blocks(answer.text)


async def half(client: httpx.AsyncClient) -> None:
    message = {"topic": "order", "body": 1}
    answer = await client.post("/half", json={"producer_group": "shop", "messages": [message]})
    assert answer.status_code == 201


async def test_the_present_state_comes_at_once(client: httpx.AsyncClient) -> None:
    answer = await client.get("/events", params=NOW)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-store", "no")
    [event] = blocks(answer.text)
    stats = (await client.get("/stats")).json()
    assert event["event"] == "stats"
    assert json.loads(event["data"]).keys() == stats.keys()


async def test_only_another_state_follows_the_one_that_was_seen(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    [first] = await read(client)
    seen = first["id"]
    assert await read(client, after=seen) == []
    again = await client.get("/events", params=NOW, headers={"last-event-id": seen})
    assert blocks(again.text) == []
    assert ": nothing new" in again.text
    await client.put(
        "/subscriptions/mailer",
        json={"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/in"}},
    )
    [second] = await read(client, after=seen)
    assert second["id"] != seen
    assert json.loads(second["data"])["subscriptions"]["active"] == 1
    # Equal states have equal ids.
    await client.delete("/subscriptions/mailer")
    assert (await read(client))[0]["id"] == seen


async def test_a_database_that_cannot_be_read_is_an_event(client: httpx.AsyncClient, db: Connection) -> None:
    [before] = await read(client)
    await db.execute("alter table stats_minute rename to stats_gone")
    [event] = await read(client, after=before["id"])
    assert event["event"] == "unavailable"
    assert json.loads(event["data"])["status"] == 503
    assert await read(client, after=event["id"]) == []
    await db.execute("alter table stats_gone rename to stats_minute")
    [after] = await read(client, after=event["id"])
    assert (after["event"], after["id"]) == ("stats", before["id"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between looks and heartbeats."""
    monkeypatch.setattr(state_feed, "SHORTEST_PAUSE_S", 0.01)
    monkeypatch.setattr(state_feed, "PAUSE_FACTOR", 0)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)


@pytest.fixture
def unpaused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at once for a client that names another state, and else not again."""
    monkeypatch.setattr(state_feed, "SHORTEST_PAUSE_S", 600.0)
    monkeypatch.setattr(state_feed, "LONGEST_PAUSE_S", 600.0)
    monkeypatch.setattr(state_feed, "PAUSE_FACTOR", 0)
    monkeypatch.setattr(state_feed, "SHORTEST_HURRIED_PAUSE_S", 0.0, raising=False)


async def turns() -> None:
    """Let all that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_stream_is_no_request_in_flight(
    runtime: Runtime, client: httpx.AsyncClient, group: str, quick: None
) -> None:
    stream = asyncio.create_task(client.get("/events"))
    await until(lambda: runtime.state_feed.state is not None)
    assert (runtime.state_feed.streams, runtime.load_limits.in_flight) == (1, 0)
    runtime.state_feed.close()
    assert (await stream).status_code == 200
    assert runtime.state_feed.streams == 0


async def test_streams_past_the_limit_are_refused(runtime: Runtime, client: httpx.AsyncClient) -> None:
    runtime.state_feed.streams = runtime.settings.event_streams_max
    refused = await client.get("/events", params=NOW)
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/overloaded")
    assert refused.headers["retry-after"] == "10"


@pytest.mark.parametrize("way", ["key", "session"])
async def test_a_stream_ends_with_its_key(start: Callable[..., Any], quick: None, way: str) -> None:
    runtime, admin = await start()
    key = await make(runtime, Role.OPERATOR)
    async with client_of(runtime) as other:
        if way == "session":
            await sign_in(other, key)
            stream = asyncio.create_task(other.get("/console/events"))
        else:
            stream = asyncio.create_task(other.get("/events", headers=bearer(key)))
        await until(lambda: runtime.state_feed.state is not None)
        assert not stream.done()
        key_id = (await admin.get("/api-keys")).json()["items"][0]["key_id"]
        assert (await admin.delete(f"/api-keys/{key_id}")).status_code == 204
        await follow(runtime, runtime.clock.now())
        async with asyncio.timeout(30):
            answer = await stream
    assert answer.status_code == 200
    assert blocks(answer.text)[0]["event"] == "stats"
    assert runtime.state_feed.streams == 0


async def test_a_stream_ends_with_the_key_that_sealed_its_session(
    start: Callable[..., Any], quick: None, tmp_path: Path
) -> None:
    keys = tmp_path / "secrets.keys"
    keys.write_text(f"{new_key()}\n")
    runtime, _ = await start(secrets_key_file=keys)
    async with client_of(runtime) as other:
        await sign_in(other, CONFIGURED)
        stream = asyncio.create_task(other.get("/console/events"))
        await until(lambda: runtime.state_feed.state is not None)
        assert not stream.done()
        keys.write_text(f"{new_key()}\n")
        async with asyncio.timeout(30):
            answer = await stream
    assert answer.status_code == 200
    assert runtime.state_feed.streams == 0


async def test_the_stream_of_the_console_needs_a_session(start: Callable[..., Any]) -> None:
    _, client = await start()
    del client.headers["authorization"]
    led = await client.get("/console/events", params=NOW)
    assert (led.status_code, led.headers["location"]) == (303, "/console/sign-in")


async def test_a_head_of_the_console_s_stream_ends(client: httpx.AsyncClient) -> None:
    answer = await client.head("/console/events")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_the_overview_is_not_older_than_the_state_that_a_page_was_told_of_by_another_process(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a page and its loads may go to different processes, which look at different times."""
    monkeypatch.setattr(state_feed, "SHORTEST_PAUSE_S", 600.0)
    monkeypatch.setattr(state_feed, "LONGEST_PAUSE_S", 600.0)
    (_, one), (behind, other) = await start(), await start()
    stream = asyncio.create_task(other.get("/events"))
    await until(lambda: behind.state_feed.state is not None)
    await one.put(
        "/subscriptions/mailer",
        json={"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/in"}},
    )
    [event] = await read(one)
    assert event["id"] != behind.state_feed.id
    await sign_in(other, CONFIGURED)

    async def overview(**headers: str) -> str:
        answer = await other.get("/console", headers={**FORM, **headers})
        assert answer.status_code == 200
        return answer.text

    assert "of 1 active subscriptions" in await overview(**{"last-event-id": event["id"]})
    # What this process knows is that state: no other look is needed.
    assert "of 0 active subscriptions" in await overview(**{"last-event-id": behind.state_feed.id})
    # The page names the state that it shows, and its stream answers with a newer one.
    first = await overview()
    assert "of 0 active subscriptions" in first
    assert f'data-seen="{behind.state_feed.id}"' in first
    behind.state_feed.close()
    assert (await stream).status_code == 200


async def test_a_stream_sends_no_state_that_is_older_than_the_one_that_another_process_sent(
    start: Callable[..., Any], unpaused: None
) -> None:
    """A stream that is opened again may go to another process, whose last look is older."""
    (_, one), (behind, other) = await start(), await start()
    stream = asyncio.create_task(other.get("/events"))
    await until(lambda: behind.state_feed.state is not None)
    older = behind.state_feed.id
    await one.put(
        "/subscriptions/mailer",
        json={"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/in"}},
    )
    [event] = await read(one)
    assert event["id"] != older
    assert await read(other, after=event["id"]) == []
    # A client that has the older state gets the newer one.
    [again] = await read(other, after=older)
    assert again["id"] == event["id"]
    behind.state_feed.close()
    assert (await stream).status_code == 200


async def test_all_that_ask_for_the_present_state_together_get_it(client: httpx.AsyncClient, unpaused: None) -> None:
    found = await asyncio.gather(*(read(client, after=f"other-{number}") for number in range(10)))
    assert [len(one) for one in found] == [1] * 10


async def test_a_look_for_one_client_writes_no_comments_to_the_others(
    runtime: Runtime, client: httpx.AsyncClient, unpaused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 600.0)
    streams = [asyncio.create_task(client.get("/events")) for _ in range(5)]
    await until(lambda: runtime.state_feed.streams == 5 and runtime.state_feed.state is not None)
    for number in range(10):
        assert len(await read(client, after=f"other-{number}")) == 1
    runtime.state_feed.close()
    for answer in await asyncio.gather(*streams):
        assert len(blocks(answer.text)) > 0
        assert ": nothing new" not in answer.text


class Looked:
    """A look whose state is set by the test."""

    def __init__(self) -> None:
        self.times, self.now = 0, "first"

    async def __call__(self) -> StateEvent:
        self.times += 1
        return StateEvent("stats", self.now, "{}", self.now)


async def test_one_look_serves_all_streams() -> None:
    feed, look = StateFeed(100), Looked()

    async def first() -> StateEvent | None:
        with feed.stream(look):
            return await feed.newer(None, 30, 30)

    found = await asyncio.gather(*(first() for _ in range(50)))
    assert {one.id for one in found if one is not None} == {"first"}
    assert len(found) == 50
    assert look.times == 1
    await feed.end()


async def test_all_who_wait_get_the_change(quick: None) -> None:
    feed, look = StateFeed(100), Looked()

    async def second() -> StateEvent | None:
        with feed.stream(look):
            return await feed.newer("first", 30, 30)

    waiting = [asyncio.create_task(second()) for _ in range(10)]
    await until(lambda: look.times > 1)
    assert not any(one.done() for one in waiting)
    look.now = "second"
    found = await asyncio.gather(*waiting)
    assert {one.id for one in found if one is not None} == {"second"}
    await feed.end()


async def test_nothing_is_looked_at_without_a_stream(quick: None) -> None:
    feed, look = StateFeed(1), Looked()
    with feed.stream(look):
        assert await feed.newer(None, 30, 30) is not None
        with pytest.raises(Overloaded):
            feed.refuse_past_limit()
    feed.refuse_past_limit()
    await until(lambda: feed.state is None)
    times = look.times
    assert await feed.newer(None, 0, 0.1) is None
    assert look.times == times
    # The next stream looks again.
    look.now = "second"
    with feed.stream(look):
        found = await feed.newer("first", 30, 30)
        assert (found is not None, found and found.id) == (True, "second")
    await feed.end()


async def test_a_closed_feed_ends_those_who_wait() -> None:
    feed, look = StateFeed(1), Looked()
    with feed.stream(look):
        assert await feed.newer(None, 30, 30) is not None
        waiting = asyncio.create_task(feed.newer("first", 3600, 3600))
        await asyncio.sleep(0)
        feed.close()
        async with asyncio.timeout(30):
            assert await waiting is None
    await feed.end()
    assert feed.state is None


async def test_a_look_that_began_before_a_stream_does_not_serve_a_state_of_another_process(unpaused: None) -> None:
    feed, look = StateFeed(2), Held()
    with feed.stream(look):
        await look.began.get()
        with feed.stream(look):
            newer = asyncio.create_task(feed.newer("second", 0, 30, feed.look_for("second")))
            await turns()
            look.states.put_nowait("first")
            await look.began.get()
            await turns()
            assert not newer.done()
            look.states.put_nowait("third")
            found = await newer
            assert (found is not None, found and found.id) == (True, "third")
    await feed.end()


async def test_two_that_ask_for_the_present_state_get_it_though_a_look_ran_when_the_second_came(unpaused: None) -> None:
    feed, look = StateFeed(2), Held()

    async def present() -> StateEvent | None:
        with feed.stream(look):
            return await feed.newer("other", 0, 30, feed.look_for("other"))

    one = asyncio.create_task(present())
    await look.began.get()
    two = asyncio.create_task(present())
    await until(lambda: feed.streams == 2)
    look.states.put_nowait("first")
    found = await one
    assert (found is not None, found and found.id) == (True, "first")
    await look.began.get()
    await turns()
    assert not two.done()
    # Also if the state is the same.
    look.states.put_nowait("first")
    found = await two
    assert (found is not None, found and found.id) == (True, "first")
    await feed.end()


@pytest.mark.parametrize(("pause_s", "looks"), [(0.0, 51), (600.0, 1)])
async def test_a_client_that_asks_again_and_again_makes_no_look_in_the_pause_and_wakes_no_stream(
    unpaused: None, monkeypatch: pytest.MonkeyPatch, pause_s: float, looks: int
) -> None:
    monkeypatch.setattr(state_feed, "SHORTEST_HURRIED_PAUSE_S", pause_s, raising=False)
    monkeypatch.setattr(state_feed, "LONGEST_HURRIED_PAUSE_S", pause_s, raising=False)
    feed, look = StateFeed(100), Looked()
    passed = 0

    async def wait() -> StateEvent | None:
        nonlocal passed
        with feed.stream(look):
            found = await feed.newer("first", 3600, 3600)
        passed += 1
        return found

    waiting = [asyncio.create_task(wait()) for _ in range(10)]
    await until(lambda: feed.state is not None)
    for number in range(50):
        seen = f"other-{number}"
        with feed.stream(look):
            found = await feed.newer(seen, 0, 0 if pause_s else 30, feed.look_for(seen))
        assert (found is None) == bool(pause_s)
    await turns()
    assert (look.times, passed) == (looks, 0)
    feed.close()
    assert await asyncio.gather(*waiting) == [None] * 10
    await feed.end()


async def test_a_pause_ends_when_no_stream_is_left(unpaused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_feed, "SHORTEST_HURRIED_PAUSE_S", 600.0, raising=False)
    monkeypatch.setattr(state_feed, "LONGEST_HURRIED_PAUSE_S", 600.0, raising=False)
    feed, look = StateFeed(1), Looked()
    with feed.stream(look):
        assert await feed.newer(None, 30, 30) is not None
        feed.look_for("other")
    await until(lambda: feed.state is None)
    assert look.times == 1
    await feed.end()


class Held:
    """A look that begins when the feed wants it, and ends when the test gives it a state."""

    def __init__(self) -> None:
        self.began: asyncio.Queue[None] = asyncio.Queue()
        self.states: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self) -> StateEvent:
        self.began.put_nowait(None)
        state = await self.states.get()
        return StateEvent("stats", state, "{}", state)


@pytest.mark.slow
def test_a_service_that_stops_ends_its_streams(tmp_path: Path) -> None:
    service = Service(tmp_path / "data", "serve")
    asyncio.run(service.start())
    try:
        with httpx.stream("GET", f"{service.url}/events", timeout=30) as stream:
            lines = stream.iter_lines()
            assert any(line == "event: stats" for line in lines)
            assert service.process is not None
            service.process.terminate()
            # The answer ends whole; a cut would raise.
            for _ in lines:
                pass
    finally:
        assert service.stop() == 0
