"""The relay with real receivers: what is sent, what is recorded, and how failures are handled."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import asyncpg
import httpx
import pytest
from aiohttp import web
from standardwebhooks import Webhook as Verifier

from app.database.connection import Connection
from app.delivery import Delivery, Failed, Outcome
from app.destinations.base import Destination
from app.relay import assignments, window
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.subscriptions.subscriptions import Subscription
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

RECEIPTS = "select count(*) from receipt"


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    """The relay of a process; the tests call its step."""
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def settled(relay: Relay, runtime: Runtime, db: Connection, count: int) -> None:
    async def enough() -> bool:
        return bool(await db.fetchval(RECEIPTS) >= count)

    await turn_until(relay, runtime, enough)


async def test_a_message_arrives_as_it_was_sent_and_has_a_receipt(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=204) as receiver:
        made = await subscribe(client, receiver)
        body = (
            b'{"producer_group": "shop", "messages": [{"topic": "order", "key": "caf\xc3\xa9 \\"1\\"", "tag": "new", '
        )
        body += b'"headers": {"Trace": "50% off"}, "body": { "z":1.0,  "a":[ ] }}]}'
        answer = await client.post("/messages", content=body, headers={"content-type": "application/json"})
        await settled(relay, runtime, db, 1)
    [call] = receiver.calls
    [sent] = answer.json()["messages"]
    assert call.body == b'{ "z":1.0,  "a":[ ] }'
    Verifier(made["secret"]).verify(call.body, call.headers)
    committed_at = await db.fetchval("select committed_at from outbox")
    expected = {
        "content-type": "application/json",
        "webhook-id": sent["message_id"],
        "ce-specversion": "1.0",
        "ce-id": sent["message_id"],
        "ce-source": "/producer-groups/shop",
        "ce-type": "order",
        "ce-subject": "caf%C3%A9%20%221%22",
        "ce-time": committed_at.isoformat().replace("+00:00", "Z"),
        "halfnote-transaction": answer.json()["transaction_id"],
        "halfnote-offset": str(sent["offset"]),
        "halfnote-tag": "new",
        "halfnote-attempt": "1",
        "halfnote-subscription": "mailer",
        "halfnote-h-trace": "50%25%20off",
    }
    assert {name: call.headers.get(name) for name in expected} == expected
    receipt = await db.fetchrow("select r.*, h.body_digest from receipt r join half h using (transaction_id, position)")
    assert (receipt["outcome"], receipt["attempts"], receipt["status"]) == ("delivered", 1, 204)
    assert receipt["digest"] == receipt["body_digest"]
    assert receipt["offset"] == sent["offset"]


async def test_a_receipt_has_the_digest_of_what_was_sent(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    """The bodies were changed after they were posted; one is sent at the first attempt, one at a retry."""
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[10])
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        receiver.status = 200
        # The message is read from the log.
        runtime.publications.relay = None
        await publish(client, order(2))
        await db.execute("update half set body = 'changed'")
        runtime.clock.offset_s += 12
        await settled(relay, runtime, db, 2)
    assert [call.body for call in receiver.calls[1:]] == [b"changed"] * 2
    found = await db.fetch("select attempts, digest from receipt order by attempts")
    assert [tuple(row) for row in found] == [(attempts, sha256(b"changed").digest()) for attempts in (1, 2)]
    assert await db.fetchval("select count(*) from half where body_digest = sha256(body)") == 0


async def test_a_group_name_is_a_uri_segment_and_then_a_header_value(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    await db.execute("update producer_group set name = 'my shop'")
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await client.post("/messages", json={"producer_group": "my shop", "messages": [order(1)]})
        await settled(relay, runtime, db, 1)
    assert receiver.calls[0].headers["ce-source"] == "/producer-groups/my%2520shop"


async def test_one_in_flight_keeps_the_order_of_offsets(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, max_in_flight=1)
        sent = await publish(client, *(order(number) for number in range(30)))
        await settled(relay, runtime, db, 30)
    assert offsets(receiver) == sent
    assert receiver.most_open == 1


async def test_the_window_slides_past_a_slow_delivery(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answered = asyncio.Event()

    async def slow_first(call: Call) -> web.Response:
        if len(receiver.calls) == 1:
            await answered.wait()
        return web.Response()

    async with Responder(slow_first) as receiver:
        await subscribe(client, receiver, max_in_flight=4, timeout_s=60)
        sent = await publish(client, *(order(number) for number in range(40)))
        await settled(relay, runtime, db, 39)
        runtime.clock.offset_s += 2
        await step(relay, runtime)
        assert receiver.most_open <= 4
        assert await db.fetchval('select "offset" from checkpoint') == sent[0] - 1
        answered.set()
        await settled(relay, runtime, db, 40)
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval('select "offset" = $1 from checkpoint', sent[-1]))
    assert sorted(offsets(receiver)) == sent


async def test_a_failed_delivery_is_retried_when_it_is_due(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500, content="no") as receiver:
        await subscribe(client, receiver, retry=[10, 30])
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        row = await db.fetchrow("select attempts, due_at - first_at as wait, last_error from delivery_retry")
        assert row["attempts"] == 1
        assert timedelta(seconds=9) <= row["wait"] <= timedelta(seconds=12)
        assert row["last_error"] == "answered 500"
        attempt = await db.fetchrow("select * from attempt")
        assert (attempt["kind"], attempt["number"], attempt["outcome"]) == ("delivery", 1, "failed")
        assert (attempt["status"], attempt["response"]) == (500, '"no"')
        await step(relay, runtime)
        assert len(receiver.calls) == 1
        receiver.status = 200
        runtime.clock.offset_s += 12
        await settled(relay, runtime, db, 1)
    first, second = receiver.calls
    assert second.body == first.body
    assert second.headers["webhook-id"] == first.headers["webhook-id"]
    assert second.headers["halfnote-attempt"] == "2"
    assert await db.fetchval("select attempts from receipt") == 2
    assert await db.fetchval("select count(*) from delivery_retry") == 0


async def test_a_message_without_retries_left_is_a_dead_letter(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500, content="never") as receiver:
        await subscribe(client, receiver, retry=[10, 30])
        await publish(client, order(1))
        for attempts, wait_s in ((1, 12), (2, 34)):
            await turn_until(
                relay,
                runtime,
                lambda n=attempts: db.fetchval("select count(*) = $1 from attempt", n),  # type: ignore[misc]
            )
            runtime.clock.offset_s += wait_s
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
    assert len(receiver.calls) == 3
    dead_letter = await db.fetchrow("select * from dead_letter")
    assert (dead_letter["reason"], dead_letter["attempts"], dead_letter["status"]) == ("retries_exhausted", 3, 500)
    assert (dead_letter["error"], dead_letter["response"]) == ("answered 500", '"never"')
    assert await db.fetchval("select count(*) from delivery_retry") == 0
    subscription = (await client.get("/subscriptions/mailer")).json()
    assert (subscription["dead_letters"], subscription["last_error"]) == (1, "answered 500")


async def test_abort_message_is_a_dead_letter_at_once(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    headers = {"webhook-delivery": "abort-message", "halfnote-reason": "unknown customer"}
    async with Responder(status=422, **headers) as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
    assert await db.fetchval("select reason from dead_letter") == "unknown customer"
    assert await db.fetchval("select outcome from attempt") == "refused"


async def test_a_redirect_is_a_failure(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as elsewhere, Responder(status=307, location=elsewhere.url) as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
    assert elsewhere.calls == []
    assert "redirected (307)" in await db.fetchval("select last_error from delivery_retry")


async def test_410_disables_and_loses_nothing(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=410) as receiver:
        await subscribe(client, receiver, max_in_flight=1)
        sent = await publish(client, *(order(number) for number in range(3)))
        await turn_until(relay, runtime, lambda: not relay.streams and receiver.calls)
        subscription = (await client.get("/subscriptions/mailer")).json()
        assert (subscription["state"], subscription["state_reason"]) == ("disabled", "the destination answered 410")
        assert len(receiver.calls) == 1
        receiver.status = 200
        resumed = await client.post("/subscriptions/mailer/resume")
        assert (resumed.json()["state"], resumed.json()["state_reason"]) == ("active", None)
        runtime.clock.offset_s += 2
        await settled(relay, runtime, db, 3)
    assert sorted(offsets(receiver)) == [sent[0], *sent]
    assert await db.fetchval("select max(attempts) from receipt") == 1


async def test_a_late_410_does_not_disable_a_subscription_that_was_resumed(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answered = asyncio.Event()

    async def gone(call: Call) -> web.Response:
        if len(receiver.calls) == 2:
            await answered.wait()
        return web.Response(status=410 if len(receiver.calls) <= 2 else 200)

    async with Responder(gone) as receiver:
        await subscribe(client, receiver, max_in_flight=2, timeout_s=60)
        sent = await publish(client, order(1), order(2))
        states = "select state from subscription"
        await turn_until(relay, runtime, lambda: db.fetchval(f"select ({states}) = 'disabled'"))
        assert len(receiver.calls) == 2
        assert (await client.post("/subscriptions/mailer/resume")).status_code == 200
        answered.set()
        runtime.clock.offset_s += 2
        await settled(relay, runtime, db, 2)
        assert await db.fetchval(states) == "active"
    assert sorted(offsets(receiver)) == sorted([*sent, *sent])


async def test_retry_after_uses_up_no_attempt(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=503, **{"retry-after": "120"}) as receiver:
        await subscribe(client, receiver, retry=[])
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        row = await db.fetchrow("select attempts, due_at - first_at as wait from delivery_retry")
        assert row["attempts"] == 0
        assert timedelta(seconds=120) <= row["wait"] <= timedelta(seconds=125)
        assert await db.fetchval("select outcome from attempt") == "postponed"
        runtime.clock.offset_s += 126
        receiver.status = 200
        await settled(relay, runtime, db, 1)
    assert [call.headers["halfnote-attempt"] for call in receiver.calls] == ["1", "1"]


async def test_tags_and_headers_filter(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, filters={"tags": ["new", "paid"], "headers": {"region": "eu"}})
        eu, us = {"region": "eu", "x": "y"}, {"region": "us"}
        sent = await publish(
            client,
            order(1, tag="new", headers=eu),
            order(2, tag="new", headers=us),
            order(3, tag="gone", headers=eu),
            order(4, headers=eu),
            order(5, tag="paid"),
            order(6, tag="paid", headers=eu),
        )
        await settled(relay, runtime, db, 2)
        await turn_until(relay, runtime, lambda: next(iter(relay.streams.values())).position >= sent[-1])
    assert offsets(receiver) == [sent[0], sent[5]]


async def test_a_new_topics_first_message_is_not_lost_to_a_prefix(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, topics=["billing.*"])

        async def write(writer: int) -> list[int]:
            found = []
            for number in range(20):
                await publish(client, {"topic": "other", "body": None})
                found += await publish(client, {"topic": f"billing.{writer}.{number // 4}", "body": number})
            return found

        writers = [asyncio.create_task(write(writer)) for writer in range(6)]
        await settled(relay, runtime, db, 120)
        sent = [offset for found in await asyncio.gather(*writers) for offset in found]
    assert sorted(offsets(receiver)) == sorted(sent)


async def test_a_delayed_message_waits_for_its_time(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        late, now = await publish(client, order(1, deliver_after_s=100), order(2))
        await settled(relay, runtime, db, 1)
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        assert offsets(receiver) == [now]
        assert await db.fetchval("select attempts from delivery_retry") == 0
        assert await db.fetchval("select count(*) from attempt") == 0
        runtime.clock.offset_s += 98
        await step(relay, runtime)
        await step(relay, runtime)
        assert offsets(receiver) == [now]
        runtime.clock.offset_s += 3
        await settled(relay, runtime, db, 2)
    assert offsets(receiver) == [now, late]
    assert receiver.calls[1].headers["halfnote-attempt"] == "1"


async def test_a_paused_subscription_keeps_its_checkpoint(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1))
        await settled(relay, runtime, db, 1)
        assert (await client.post("/subscriptions/mailer/pause")).json()["state"] == "paused"
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: not relay.streams)
        await publish(client, order(2), order(3))
        runtime.clock.offset_s += 2
        await step(relay, runtime)
        assert len(receiver.calls) == 1
        subscription = (await client.get("/subscriptions/mailer")).json()
        assert subscription["lag"]["messages"] == 2
        await client.post("/subscriptions/mailer/resume")
        runtime.clock.offset_s += 2
        await settled(relay, runtime, db, 3)
    assert len(receiver.calls) == 3


async def test_a_change_of_destination_loses_nothing_in_flight(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answered = asyncio.Event()

    async def wait(call: Call) -> web.Response:
        await answered.wait()
        return web.Response()

    async with Responder(wait) as before, Responder() as after:
        await subscribe(client, before, max_in_flight=1, timeout_s=60)
        first, second = await publish(client, order(1), order(2))
        await turn_until(relay, runtime, lambda: before.calls)
        changed = {"topics": ["order"], "max_in_flight": 1, "destination": {"type": "webhook", "url": after.url}}
        assert (await client.put("/subscriptions/mailer", json=changed)).status_code == 200
        runtime.clock.offset_s += 2
        await step(relay, runtime)
        answered.set()
        await settled(relay, runtime, db, 2)
    assert (offsets(before), offsets(after)) == ([first], [second])


class _Garbled:
    """A destination whose errors are no text that Postgres stores."""

    address, batch_max = "garbled", 1

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        return [Failed("a\x00b", None, "\ud800", None, 0)]

    async def close(self) -> None:
        pass


async def test_an_error_that_cannot_be_stored_stops_no_other_subscription(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = assignments.destination_of

    def garbled(subscription: Subscription, *rest: Any) -> Destination:
        return _Garbled() if subscription.name == "garbled" else made(subscription, *rest)

    monkeypatch.setattr(assignments, "destination_of", garbled)
    async with Responder() as receiver:
        await subscribe(client, receiver, "garbled", retry=[30])
        await subscribe(client, receiver)
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        await settled(relay, runtime, db, 1)
    assert [tuple(row) for row in await db.fetch("select error, response from attempt")] == [("a\ufffdb", "?")]


async def test_a_day_that_is_being_archived_is_left_to_upkeep(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        [sent] = await publish(client, order(1))
        await db.execute("update day set state = 'archiving' where low <= $1 and high > $1", await _id(db, sent))
        await turn_until(relay, runtime, lambda: any(s.position >= sent for s in relay.streams.values()))
        await step(relay, runtime)
    assert receiver.calls == []


async def test_a_retry_of_a_day_that_is_being_archived_is_left_to_upkeep(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[10, 10])
        [sent] = await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        await db.execute("update day set state = 'archiving' where low <= $1 and high > $1", await _id(db, sent))
        runtime.clock.offset_s += 12
        await step(relay, runtime)
        assert await db.fetchval("select leased_until from delivery_retry") is None
        await db.execute("update day set state = 'open'")
        runtime.clock.offset_s += 1
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)


async def test_a_hanging_destination_shows_as_lag(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    answered = asyncio.Event()

    async def wait(call: Call) -> web.Response:
        await answered.wait()
        return web.Response()

    async with Responder(wait) as receiver:
        await subscribe(client, receiver, timeout_s=60)
        await publish(client, order(1), order(2))
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        runtime.clock.offset_s += 8
        await step(relay, runtime)
        metrics = runtime.metrics.exposition().decode()
        answered.set()
        await settled(relay, runtime, db, 2)
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(lines['halfnote_relay_lag_messages{subscription="mailer"}']) == 2
    assert float(lines['halfnote_relay_lag_seconds{subscription="mailer"}']) >= 8


async def _id(db: Connection, offset: int) -> Any:
    return await db.fetchval('select transaction_id from outbox where "offset" = $1', offset)


async def test_metrics_count_outcomes_and_lag(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1), order(2))
        await settled(relay, runtime, db, 2)
        runtime.clock.offset_s += 2
        await step(relay, runtime)
    metrics = runtime.metrics.exposition().decode()
    assert 'halfnote_deliveries_total{outcome="delivered",subscription="mailer"} 2.0' in metrics
    assert 'halfnote_delivery_seconds_count{subscription="mailer"} 2.0' in metrics
    assert 'halfnote_relay_lag_messages{subscription="mailer"} 0.0' in metrics


async def test_large_bodies_are_read_in_small_windows(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        large = "x" * (3 * 1024 * 1024)
        sent = await publish(client, *({"topic": "order", "body": large + str(number)} for number in range(7)))
        await settled(relay, runtime, db, 7)
    assert sorted(offsets(receiver)) == sent
    assert all(json.loads(call.body)[:-1] == large for call in receiver.calls)
    assert all("transfer-encoding" not in call.headers for call in receiver.calls)


async def test_large_bodies_that_are_not_settled_are_few(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "UNSETTLED_BYTES", 2**20)
    answered = asyncio.Event()

    async def wait(call: Call) -> web.Response:
        await answered.wait()
        return web.Response()

    async with Responder(wait) as receiver:
        await subscribe(client, receiver, timeout_s=60)
        large = "x" * (3 * 1024 * 1024)
        sent = await publish(client, *({"topic": "order", "body": large + str(number)} for number in range(7)))
        await turn_until(relay, runtime, lambda: receiver.calls)
        for _ in range(5):
            await step(relay, runtime)
        # One read.
        assert [stream.window.unsettled for stream in relay.streams.values()] == [3]
        answered.set()
        await settled(relay, runtime, db, 7)
    assert sorted(offsets(receiver)) == sent


async def test_a_database_error_in_a_settle_loses_no_outcome(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1))
        await db.execute("alter table receipt rename to receipt_away")
        with pytest.raises(asyncpg.UndefinedTableError):
            await turn_until(relay, runtime, lambda: False)
        await db.execute("alter table receipt_away rename to receipt")
        await settled(relay, runtime, db, 1)
    assert len(receiver.calls) == 1
