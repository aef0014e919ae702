"""The circuit breaker in an outage and with a poison message, and the operational messages about it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.database.connection import Connection
from app.policy.circuit_breaker import MESSAGES
from app.relay import outcomes, window
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

OPEN = "select opened_at is not null from checkpoint"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def announced(db: Connection, topic: str) -> list[dict[str, Any]]:
    """Return the bodies of operational messages, oldest first."""
    rows = await db.fetch(
        'select h.body from outbox o join half h using (transaction_id, position) where o.topic = $1 order by "offset"',
        f"halfnote.{topic}",
    )
    return [json.loads(row["body"]) for row in rows]


def poison(*numbers: int) -> Any:
    """Answer 500 to messages with these numbers, 200 to others."""

    async def answer(call: Call) -> web.Response:
        return web.Response(status=500 if call.json()["order"] in numbers else 200)

    return answer


async def test_an_outage_of_six_hours_makes_no_dead_letters(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[10, 30], max_in_flight=4)
        sent = await publish(client, *(order(number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        for _ in range(30):
            before = len(receiver.calls)
            runtime.clock.offset_s += 31
            await turn_until(relay, runtime, lambda at=before: len(receiver.calls) > at)
            # A probe is one message, whatever the number of slots.
            await step(relay, runtime)
            assert len(receiver.calls) == before + 1
        probed = {int(call.headers["halfnote-offset"]) for call in receiver.calls[-20:]}
        assert len(probed) > 10
        runtime.clock.offset_s += 6 * 3600
        before = len(receiver.calls)
        await turn_until(relay, runtime, lambda: len(receiver.calls) > before)
        assert await db.fetchval("select count(*) from receipt") == 0
        assert await db.fetchval('select "offset" from checkpoint') < sent[-1]
        receiver.status = 200
        runtime.clock.offset_s += 40
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 20 from receipt"))
        assert not await db.fetchval(OPEN)
    assert await db.fetchval("select count(*) from dead_letter") == 0
    # Messages that failed before the breaker opened used one attempt, the others none.
    assert await db.fetchval("select max(attempts) from receipt") == 2
    assert await db.fetchval("select count(*) filter (where attempts = 2) from receipt") == MESSAGES
    assert await db.fetchval("select sum(times) from postponement where outcome = 'probe'") >= 30
    [opened] = await announced(db, "subscription.breaker_opened")
    assert (opened["subscription"], opened["because"]) == (
        "mailer",
        f"{MESSAGES} different messages failed in a row: answered 500",
    )
    [closed] = await announced(db, "subscription.breaker_closed")
    assert closed["open_s"] > 6 * 3600


async def test_a_first_message_that_always_fails_does_not_block_the_others(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(poison(0)) as receiver:
        await subscribe(client, receiver, retry=[1] * 20)
        await publish(client, order(0))
        for number in range(1, 8):
            await turn_until(relay, runtime, lambda at=number: len(receiver.calls) >= 2 * at - 1)
            await publish(client, order(number))
            runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 7 from receipt"))
        assert not await db.fetchval(OPEN)
    assert await announced(db, "subscription.breaker_opened") == []


@pytest.mark.parametrize("unsettled_bytes", [window.UNSETTLED_BYTES, 1], ids=["small", "large"])
async def test_probes_find_the_message_that_succeeds(
    client: httpx.AsyncClient,
    runtime: Runtime,
    relay: Relay,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
    unsettled_bytes: int,
) -> None:
    monkeypatch.setattr(window, "UNSETTLED_BYTES", unsettled_bytes)
    async with Responder(poison(*range(8))) as receiver:
        await subscribe(client, receiver, retry=[1] * 20, max_in_flight=1)
        await publish(client, *(order(number) for number in range(8)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        [good] = await publish(client, order(100))

        async def closed() -> bool:
            runtime.clock.offset_s += 31
            return not await db.fetchval(OPEN)

        await turn_until(relay, runtime, closed)
        assert await db.fetchval('select array_agg("offset") from receipt') == [good]
        assert offsets(receiver).count(good) == 1


@pytest.mark.parametrize(
    ("destination", "refused"),
    [
        ({"type": "rabbitmq", "url": "amqp://127.0.0.1:{port}/", "routing_key": "{key}"}, {"key": "\u0439" * 200}),
        (
            {"type": "nats", "url": "nats://127.0.0.1:{port}", "subject": "{key}.{tag}"},
            {"key": "\u20ac" * 255, "tag": "\u20ac" * 255},
        ),
        ({"type": "kafka", "bootstrap": ["127.0.0.1:{port}"], "topic": "{key}"}, {"key": "k" * 255}),
    ],
    ids=["rabbitmq", "nats", "kafka"],
)
async def test_a_message_that_is_refused_without_asking_the_broker_closes_no_breaker(
    client: httpx.AsyncClient,
    runtime: Runtime,
    relay: Relay,
    db: Connection,
    unused_tcp_port: int,
    destination: dict[str, Any],
    refused: dict[str, Any],
) -> None:
    filled = json.loads(json.dumps(destination).replace("{port}", str(unused_tcp_port)))
    fields = {"topics": ["order"], "max_in_flight": 1, "retry": [1] * 3, "destination": filled}
    answer = await client.put("/subscriptions/mailer", json=fields)
    assert answer.status_code == 201, answer.text
    probes = "select coalesce(sum(times), 0) from postponement where outcome = 'probe'"
    await publish(client, *(order(number) for number in range(4)))
    await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
    for number in range(3):
        await publish(client, *(order(10 * number + extra, **refused) for extra in range(1, 3)))
        before = await db.fetchval(probes)

        async def probed(least: int, dead: int) -> bool:
            runtime.clock.offset_s += 31
            return bool(await db.fetchval(f"select ({probes}) >= $1 and count(*) = $2 from dead_letter", least, dead))

        await turn_until(relay, runtime, lambda at=before + 4, dead=2 * (number + 1): probed(at, dead))
        assert await db.fetchval(OPEN)
    assert await db.fetchval("select max(attempts) from delivery_retry") == 1
    assert await db.fetchval("select array_agg(distinct reason) from dead_letter") != ["retries_exhausted"]
    assert await announced(db, "subscription.breaker_closed") == []
    assert len(await announced(db, "subscription.breaker_opened")) == 1


async def test_a_person_closes_a_breaker_and_all_goes_out_at_once(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[3600])
        # Without an open breaker nothing changes.
        assert (await client.post("/subscriptions/mailer/reset-breaker")).status_code == 200
        await publish(client, *(order(number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        # After this probe the next one is due in five minutes, so only a reset lets messages go.
        receiver.status, receiver.headers = 503, {"retry-after": "300"}
        runtime.clock.offset_s += 31
        await turn_until(relay, runtime, lambda: db.fetchval("select paused_until is not null from checkpoint"))
        versions = await db.fetchval("select count(*) from subscription_version")
        receiver.status = 200
        reset = await client.post("/subscriptions/mailer/reset-breaker", params={"reason": "the disk is replaced"})
        assert (reset.status_code, reset.json()["state"]) == (200, "active")
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) >= 20 - $1 from receipt", MESSAGES))
    assert not await db.fetchval(OPEN)
    assert (await client.get("/subscriptions/mailer")).json()["breaker"]["state"] == "closed"
    [closed] = await announced(db, "subscription.breaker_closed")
    assert closed["subscription"] == "mailer"
    [act] = (await client.get("/audit", params={"what": "subscription.reset_breaker"})).json()["items"]
    assert (act["target"], act["detail"]) == ("mailer", {"reason": "the disk is replaced"})
    # No setting changed.
    assert await db.fetchval("select count(*) from subscription_version") == versions


async def test_a_breaker_that_was_reset_opens_again_at_a_destination_that_fails(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[3600], max_in_flight=2)
        await publish(client, *(order(number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        assert (await client.post("/subscriptions/mailer/reset-breaker")).status_code == 200
        assert not await db.fetchval(OPEN)
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))


async def test_a_new_holder_continues_with_an_open_breaker(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[3600])
        await publish(client, *(order(number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        await relay.drain(runtime)
        before = len(receiver.calls)
        [stream] = [*relay.streams.values()] or [None]
        assert stream is None
        await turn_until(relay, runtime, lambda: relay.streams)
        [stream] = relay.streams.values()
        assert stream.breaker.open
        await turn_until(relay, runtime, lambda: len(receiver.calls) > before)
        await step(relay, runtime)
        assert len(receiver.calls) == before + 1


async def test_dead_letters_and_a_disabled_subscription_are_announced(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[])
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        receiver.status = 410
        await publish(client, order(2))
        await turn_until(relay, runtime, lambda: db.fetchval("select state = 'disabled' from subscription"))
    [dead] = await announced(db, "delivery.dead")
    assert (dead["subscription"], dead["key"], dead["error"]) == ("mailer", "order-1", "answered 500")
    [disabled] = await announced(db, "subscription.disabled")
    assert "410" in disabled["reason"]


async def test_operational_messages_go_only_to_subscriptions_of_reserved_topics(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver, Responder() as everything, Responder() as operator:
        await subscribe(client, receiver, "failing", retry=[])
        await subscribe(client, everything, "all", topics=["*"])
        await subscribe(client, operator, "operator", topics=["halfnote.*"])
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: operator.calls)
        await turn_until(relay, runtime, lambda: everything.calls)
    assert [call.headers["ce-type"] for call in operator.calls] == ["halfnote.delivery.dead"]
    assert [call.headers["ce-type"] for call in everything.calls] == ["order"]


async def test_what_failed_with_a_message_that_always_fails_is_probed_as_well(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    always = order(MESSAGES)
    is_up = False

    async def answer(call: Call) -> web.Response:
        return web.Response(status=200 if is_up and call.json() != always["body"] else 500)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, retry=[1] * 20, max_in_flight=1)
        sent = await publish(client, *(order(number) for number in range(MESSAGES)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        # The only one in memory.
        await publish(client, always)
        await turn_until(relay, runtime, lambda: len(receiver.calls) > MESSAGES)
        is_up = True
        # The clock goes on as it is: the sender's own timer is the first to know that a probe is due.
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = $1 from receipt", MESSAGES))
    assert sorted(row["offset"] for row in await db.fetch('select "offset" from receipt')) == sorted(sent)


async def test_more_messages_that_fail_than_are_read_do_not_keep_it_open(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = 40
    for module in (window, outcomes):
        monkeypatch.setattr(module, "WINDOW_LEAST", 8)
    async with Responder(poison(*range(failing))) as receiver:
        await subscribe(client, receiver, retry=[1] * 20, max_in_flight=1)
        await publish(client, *(order(number) for number in range(failing)))
        await turn_until(relay, runtime, lambda: db.fetchval(OPEN))
        [good] = await publish(client, order(failing))

        async def closed() -> bool:
            runtime.clock.offset_s += 31
            return not await db.fetchval(OPEN)

        await turn_until(relay, runtime, closed, within_s=30)
        assert await db.fetchval('select array_agg("offset") from receipt') == [good]
    assert await db.fetchval("select count(*) from dead_letter") == 0
