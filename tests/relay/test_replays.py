"""Replays: a part of the log once more to one subscription, beside its live delivery."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, publish, subscribe, turn_until

DONE = "select state = 'done' from replay order by replay_id desc limit 1"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def replay(db: Connection, after: int, until: int, filters: str | None = None) -> int:
    made: int = await db.fetchval(
        """insert into replay (subscription_id, after, until, filters, "offset", state, created_at, moved_at)
           select subscription_id, $1, $2, $3, $1, 'running', now(), now() from subscription returning replay_id""",
        after,
        until,
        filters,
    )
    return made


def replayed(receiver: Responder) -> list[tuple[int, str]]:
    return [
        (int(call.headers["halfnote-offset"]), call.headers["halfnote-replay"])
        for call in receiver.calls
        if "halfnote-replay" in call.headers
    ]


async def until_done(relay: Relay, runtime: Runtime, db: Connection) -> None:
    async def done() -> bool:
        runtime.clock.offset_s += 1
        return bool(await db.fetchval(DONE))

    await turn_until(relay, runtime, done)


async def test_a_part_of_the_log_is_sent_again_with_its_ids(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        sent = await publish(client, *(order(number) for number in range(12)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 12 from receipt"))
        number = await replay(db, sent[2], sent[8])
        await until_done(relay, runtime, db)
    assert sorted(replayed(receiver)) == [(offset, str(number)) for offset in sent[3:9]]
    ids: dict[str, set[str]] = {}
    for call in receiver.calls:
        ids.setdefault(call.headers["halfnote-offset"], set()).add(call.headers["webhook-id"])
    assert all(len(found) == 1 for found in ids.values())
    assert await db.fetchval("select count(*) from receipt where replay = $1", number) == 6
    assert await db.fetchval("select count(*) from receipt where replay = 0") == 12


async def test_filters_choose_what_is_sent_again(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        sent = await publish(
            client,
            order(1, tag="new", headers={"region": "eu"}),
            order(2, tag="new", headers={"region": "us"}),
            order(3, tag="paid", headers={"region": "eu"}),
            order(4),
        )
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from receipt"))
        for filters, expected in (
            ('{"tags": ["new"]}', sent[:2]),
            ('{"headers": {"region": "eu"}}', [sent[0], sent[2]]),
            ('{"keys": ["order-2", "order-4"]}', [sent[1], sent[3]]),
            ('{"topics": ["other"]}', []),
        ):
            number = await replay(db, 0, sent[-1], filters)
            await until_done(relay, runtime, db)
            assert [offset for offset, by in sorted(replayed(receiver)) if by == str(number)] == expected


async def test_live_delivery_continues_beside_a_replay_that_fails(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    down = True

    async def answer(call: Call) -> web.Response:
        return web.Response(status=500 if down and "halfnote-replay" in call.headers else 200)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, retry=[5, 5], ordered="key")
        sent = await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
        number = await replay(db, 0, sent[-1])

        async def failing() -> bool:
            runtime.clock.offset_s += 1
            return bool(await db.fetchval("select count(*) = 3 from delivery_retry where replay = $1", number))

        await turn_until(relay, runtime, failing)
        # The same keys: live messages do not wait for those of the replay.
        await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 6 from receipt where replay = 0"))
        assert not await db.fetchval(DONE)
        down = False
        await until_done(relay, runtime, db)
    assert await db.fetchval("select count(*) from receipt where replay = $1", number) == 3
    assert await db.fetchval("select max(attempts) from receipt where replay = 0") == 1


async def test_a_new_holder_continues_a_replay_and_a_cancelled_one_ends(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_in_flight=2)
        sent = await publish(client, *(order(number) for number in range(30)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 30 from receipt"))
        number = await replay(db, 0, sent[-1])
        count = "select count(*) from receipt where replay = $1"
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval(count.replace("count(*)", "count(*) >= 5"), number))
        await relay.drain(runtime)
        assert relay.streams == {}
        await until_done(relay, runtime, db)
        assert await db.fetchval(count, number) == 30
        assert len(replayed(receiver)) == 30
        receiver.calls.clear()
        other = await replay(db, 0, sent[-1])
        await db.execute("update replay set state = 'cancelled' where replay_id = $1", other)
        runtime.clock.offset_s += 2
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: receiver.calls)
        assert all(not shard.replay for shard in relay.streams)
    assert replayed(receiver) == []


async def test_a_paused_subscription_pauses_its_replays(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        sent = await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
        await client.post("/subscriptions/mailer/pause")
        await replay(db, 0, sent[-1])
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: not relay.streams)
        fields: dict[str, Any] = (await client.post("/subscriptions/mailer/resume")).json()
        assert fields["state"] == "active"
        assert replayed(receiver) == []
        await until_done(relay, runtime, db)
    assert len(replayed(receiver)) == 3
