"""What a worker's assignments follow from is read again after each change, and only then."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.relay import assignments
from app.relay.assignments import DesiredReader
from app.relay.loop import REFRESH_EVERY, Relay
from app.runtime.state import Runtime
from app.store.relay import checkpoints
from tests.support.check_responder import Responder
from tests.support.relay_stepping import order, publish, step, subscribe, turn_until

Act = Callable[[httpx.AsyncClient, Responder], Awaitable[Any]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each time that subscriptions, shards and replays were read."""
    found: list[None] = []
    streamed = assignments.streamed

    async def noted(*arguments: Any) -> Any:
        found.append(None)
        return await streamed(*arguments)

    monkeypatch.setattr(assignments, "streamed", noted)
    return found


async def _put(client: httpx.AsyncClient, receiver: Responder, **fields: Any) -> None:
    body = {"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, **fields}
    answer = await client.put("/subscriptions/mailer", json=body)
    assert answer.status_code == 200, answer.text


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code in (200, 201, 202), answer.text


async def _delete(client: httpx.AsyncClient) -> None:
    answer = await client.delete("/subscriptions/mailer")
    assert answer.status_code == 204, answer.text


REPLAY = {"from": {"offset": 1}, "reason": "the mailer lost its database", "actor": "dana"}
ACTS: dict[str, Act] = {
    "another subscription": lambda client, receiver: subscribe(client, receiver, "biller"),
    "a changed topic": lambda client, receiver: _put(client, receiver, topics=["bill"]),
    "another rate": lambda client, receiver: _put(client, receiver, rate_per_s=5),
    "more shards": lambda client, receiver: _put(client, receiver, shards=2),
    "a pause": lambda client, receiver: _post(client, "/subscriptions/mailer/pause"),
    "a rotated secret": lambda client, receiver: _post(client, "/subscriptions/mailer/rotate-secret"),
    "a replay": lambda client, receiver: _post(client, "/subscriptions/mailer/replay", **REPLAY),
    "a removal": lambda client, receiver: _delete(client),
}


@pytest.mark.parametrize("act", ACTS)
async def test_each_change_is_read(
    act: str, client: httpx.AsyncClient, db: Connection, group: str, reads: list[None]
) -> None:
    async with Responder() as receiver:
        await publish(client, order(1))
        await subscribe(client, receiver)
        desired = DesiredReader()
        before = await desired.read(db)
        assert await desired.read(db) is before
        await ACTS[act](client, receiver)
        after = await desired.read(db)
        assert (after == before, len(reads)) == (False, 2)


async def test_a_change_of_the_shards_that_checkpoints_have_is_read(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder() as receiver:
        found = await subscribe(client, receiver, shards=2)
        assert found["shards"] == 2
        desired = DesiredReader()
        assert len((await desired.read(db)).shards) == 2
        await _put(client, receiver, shards=3)
        [resized] = (await desired.read(db)).to_resize
        async with db.transaction():
            assert await checkpoints.resize(db, resized.subscription_id, 3, runtime.clock.now())
        assert len((await desired.read(db)).shards) == 3


async def test_another_end_of_a_replay_is_read_and_closes_its_stream(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder() as receiver:
        await publish(client, *(order(number) for number in range(1, 4)))
        await subscribe(client, receiver)
        await _post(client, "/subscriptions/mailer/replay", **REPLAY)
        relay, desired = Relay(runtime), DesiredReader()
        await relay.step(runtime, runtime.clock.now())
        [stream] = [stream for shard, stream in relay.streams.items() if shard.replay]
        [before] = (await desired.read(db)).replays.values()
        # Between two refreshes the replay is canceled, and a redelivery of its dead letter runs it again.
        await db.execute("update replay set until = 1")
        [after] = (await desired.read(db)).replays.values()
        assert (before.until, after.until) == (3, 1)
        assert not stream.closing
        await relay.step(runtime, runtime.clock.now() + REFRESH_EVERY)
        assert stream.closing
        await relay.drain(runtime)


async def test_deliveries_change_nothing_that_is_read(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, reads: list[None]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = Relay(runtime)
        await step(relay, runtime)
        version = await checkpoints.desired_version(db)
        reads.clear()
        await publish(client, order(1))
        moved = 'select "offset" from checkpoint'
        await turn_until(relay, runtime, lambda: _is_one(db, moved))
        runtime.clock.offset_s += 2
        await step(relay, runtime)
        assert (await checkpoints.desired_version(db), reads) == (version, [])
        await relay.drain(runtime)


async def _is_one(db: Connection, query: str) -> bool:
    return await db.fetchval(query) == 1
