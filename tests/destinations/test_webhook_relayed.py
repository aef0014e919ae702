"""The relay with webhooks in batches and as structured events: what the destination returns is what is recorded."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from standardwebhooks import Webhook as Verifier

from app.database.connection import Connection
from app.policy.circuit_breaker import MESSAGES
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, publish, subscribe, turn_until

SETTLED = "select (select count(*) from receipt) + (select count(*) from delivery_retry) = $1"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    """The relay of a process; the tests call its step."""
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def test_one_poison_message_of_a_batch_fails_alone_and_opens_no_breaker(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async def answer(call: Call) -> web.Response:
        bad = any(event["data"] == {"order": 17} for event in call.json())
        return web.Response(status=500 if bad else 204)

    sent = await publish(client, *(order(number) for number in range(40)))
    async with Responder(answer) as receiver:
        made = await subscribe(
            client,
            receiver,
            start="earliest",
            max_in_flight=1,
            destination={"type": "webhook", "url": receiver.url, "mode": "batch", "batch_max": 40},
        )
        await turn_until(relay, runtime, lambda: db.fetchval(SETTLED, 40))
    assert len(receiver.calls) < 20
    for call in receiver.calls:
        Verifier(made["secret"]).verify(call.body, call.headers)
    assert await db.fetchval('select count(distinct "offset") from receipt') == 39
    retry = await db.fetchrow('select "offset", attempts, last_error from delivery_retry')
    assert tuple(retry) == (sent[17], 1, "answered 500")
    assert await db.fetchval("select opened_at from checkpoint") is None


async def test_a_message_without_an_answer_kills_no_other_one_of_its_batch(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    released = asyncio.Event()

    async def answer(call: Call) -> web.Response:
        if any(event["data"] == {"order": 2} for event in call.json()):
            await released.wait()
        return web.Response(status=204)

    sent = await publish(client, *(order(number) for number in range(2 * MESSAGES)))
    async with Responder(answer) as receiver:
        await subscribe(
            client,
            receiver,
            start="earliest",
            retry=[],
            timeout_s=1,
            max_in_flight=1,
            destination={"type": "webhook", "url": receiver.url, "mode": "batch", "batch_max": 2 * MESSAGES},
        )

        async def settled() -> bool:
            runtime.clock.offset_s += 0.1
            found = "select (select count(*) from receipt) + (select count(*) from dead_letter) = $1"
            assert await db.fetchval("select opened_at from checkpoint") is None
            return bool(await db.fetchval(found, 2 * MESSAGES))

        try:
            await turn_until(relay, runtime, settled)
        finally:
            released.set()
    assert [row["offset"] for row in await db.fetch('select "offset" from dead_letter')] == [sent[2]]
    assert await db.fetchval("select max(attempts) from receipt") == 1


async def test_structured_events_are_delivered_with_receipts(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        made = await subscribe(
            client, receiver, destination={"type": "webhook", "url": receiver.url, "mode": "structured"}
        )
        [offset] = await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval(SETTLED, 1))
    [call] = receiver.calls
    Verifier(made["secret"]).verify(call.body, call.headers)
    assert call.headers["content-type"] == "application/cloudevents+json"
    assert (call.json()["halfnoteoffset"], call.json()["data"]) == (str(offset), {"order": 1})
    assert await db.fetchval("select outcome from receipt") == "delivered"


async def test_auto_sends_a_lone_message_alone_and_a_backlog_in_batches(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        made = await subscribe(
            client,
            receiver,
            max_in_flight=1,
            destination={"type": "webhook", "url": receiver.url, "mode": "auto", "batch_max": 40},
        )
        assert made["destination"]["mode"] == "auto"
        [first] = await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval(SETTLED, 1))
        # A backlog: the relay gets these messages from the log, in its next turn.
        runtime.publications.relay = None
        offsets = await publish(client, *(order(number) for number in range(2, 42)))
        await turn_until(relay, runtime, lambda: db.fetchval(SETTLED, 41))
    alone, *batches = receiver.calls
    assert (alone.headers["halfnote-offset"], alone.json()) == (str(first), {"order": 1})
    assert len(batches) < 20
    received: list[str] = []
    for call in batches:
        Verifier(made["secret"]).verify(call.body, call.headers)
        if call.headers["content-type"] == "application/cloudevents-batch+json":
            received += [event["halfnoteoffset"] for event in call.json()]
        else:
            received.append(call.headers["halfnote-offset"])
    assert sorted(map(int, received)) == sorted(offsets)
