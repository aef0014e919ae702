"""Consumers claim and settle messages over HTTP: what they get, what is recorded, and what comes again."""

import asyncio
import base64
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import httpx
import pytest

from app.database.connection import Connection, connect
from app.pull import sweep
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, settings_of
from tests.coordinator.test_races import WAITING, until_waiting
from tests.support.consumers import Consumer, lapse, put_pulled, sweep_after
from tests.support.relay_stepping import order, publish

MESSAGES = {"producer_group": "shop", "messages": [order(1)]}
STANDING = """select (select count(*) from receipt) as receipts, (select count(*) from delivery_retry) as retries,
  (select count(*) from dead_letter) as dead, (select count(*) from pull_claim) as claims"""


async def standing(db: Connection) -> dict[str, int]:
    row = await db.fetchrow(STANDING)
    assert row is not None
    return dict(row)


def handles(claimed: list[dict[str, Any]]) -> list[str]:
    return [one["handle"] for one in claimed]


@pytest.fixture
async def consumer(client: httpx.AsyncClient, group: str) -> Consumer:
    """A consumer of `worker`, which takes `order`."""
    await put_pulled(client)
    return Consumer(client)


async def test_a_message_arrives_as_it_was_sent_and_has_a_receipt(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    body = (
        b'{"producer_group": "shop", "messages": [{"topic": "order", "key": "1", "tag": "new", "headers": {"A": "b"}, '
    )
    body += b'"body": { "z":1.0,  "a":[ ] }}]}'
    answer = await client.post("/messages", content=body, headers={"content-type": "application/json"})
    [sent] = answer.json()["messages"]
    raw = await client.post("/subscriptions/worker/claim", json={})
    assert b'"body":{ "z":1.0,  "a":[ ] }' in raw.content
    [message] = raw.json()["messages"]
    assert {name: message[name] for name in ("message_id", "offset", "topic", "key", "tag", "attempt", "replay")} == {
        "message_id": sent["message_id"],
        "offset": sent["offset"],
        "topic": "order",
        "key": "1",
        "tag": "new",
        "attempt": 1,
        "replay": None,
    }
    assert message["headers"] == {"A": "b"}
    assert await consumer.ack(message) == [200]
    receipt = await db.fetchrow("select r.*, h.body_digest from receipt r join half h using (transaction_id, position)")
    assert receipt is not None
    assert (receipt["outcome"], receipt["attempts"], receipt["status"]) == ("delivered", 1, None)
    assert receipt["digest"] == receipt["body_digest"] == sha256(b'{ "z":1.0,  "a":[ ] }').digest()
    assert receipt["offset"] == sent["offset"]
    assert receipt["settled_at"] >= receipt["first_at"]
    assert await standing(db) == {"receipts": 1, "retries": 0, "dead": 0, "claims": 0}
    assert await consumer.claim() == []


@pytest.mark.parametrize("action", ["ack", "nack", "reject", "extend"])
async def test_a_handle_of_a_lost_claim_changes_nothing_of_a_claim_with_its_number(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, action: str
) -> None:
    """After a failover to a standby that was behind, a sequence gives numbers again that it gave before."""
    await publish(client, order(1))
    [lost] = await consumer.claim()
    number = await db.fetchval("select claim_id from pull_claim")
    await db.execute("delete from pull_claim")
    await db.execute("delete from outbox")
    await db.execute("select setval('pull_claim_id', $1, false)", number)
    await publish(client, order(2))
    [other] = await consumer.claim()
    assert await db.fetchval("select claim_id from pull_claim") == number
    fields = {"extend": {"invisible_s": 600}}.get(action, {})
    assert [one["status"] for one in await consumer.settle(action, lost["handle"], **fields)] == [409]
    assert await standing(db) == {"receipts": 0, "retries": 0, "dead": 0, "claims": 1}
    assert await consumer.ack(other) == [200]
    assert await db.fetchval("select transaction_id || '-' || position from receipt") == other["message_id"]


@pytest.mark.parametrize("action", ["ack", "nack", "reject", "extend"])
async def test_a_handle_of_a_lost_claim_of_a_retry_changes_nothing_of_its_next_claim(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, action: str
) -> None:
    """After a failover to a standby that was behind, or a restore, the row is as it was, and is claimed again."""
    await publish(client, order(1))
    [first] = await consumer.claim()
    await consumer.settle("nack", first["handle"], retry_after_s=0)
    number = await db.fetchval("select last_value from pull_claim_id")
    await db.execute("create table kept as select * from delivery_retry")
    [lost] = await consumer.claim()
    await db.execute("delete from delivery_retry")
    await db.execute("insert into delivery_retry select * from kept")
    await db.execute("select setval('pull_claim_id', $1)", number)
    [other] = await consumer.claim()
    fields = {"extend": {"invisible_s": 600}}.get(action, {})
    assert [one["status"] for one in await consumer.settle(action, lost["handle"], **fields)] == [409]
    assert await standing(db) == {"receipts": 0, "retries": 1, "dead": 0, "claims": 0}
    assert await consumer.ack(other) == [200]


@pytest.mark.parametrize("action", ["ack", "nack", "reject", "extend"])
async def test_a_handle_of_a_lost_claim_changes_nothing_of_what_left_a_claim_with_its_number(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, action: str
) -> None:
    """The other consumer holds the same message for longer, so that it is a row of delivery_retry."""
    await publish(client, order(1))
    cursor = await db.fetchval('select "offset" from pull_cursor')
    [lost] = await consumer.claim()
    number = await db.fetchval("select claim_id from pull_claim")
    await db.execute("delete from pull_claim")
    await db.execute('update pull_cursor set "offset" = $1', cursor)
    await db.execute("select setval('pull_claim_id', $1, false)", number)
    [other] = await consumer.claim()
    assert [one["status"] for one in await consumer.settle("extend", other["handle"], invisible_s=600)] == [200]
    assert await db.fetchval("select lease_epoch from delivery_retry") == number
    fields = {"extend": {"invisible_s": 600}}.get(action, {})
    assert [one["status"] for one in await consumer.settle(action, lost["handle"], **fields)] == [409]
    assert await standing(db) == {"receipts": 0, "retries": 1, "dead": 0, "claims": 0}
    assert await consumer.ack(other) == [200]


async def test_bytes_that_are_not_json_come_in_base64(client: httpx.AsyncClient, consumer: Consumer) -> None:
    await publish(client, {"topic": "order", "body_base64": base64.b64encode(b"\xff\x00").decode()})
    [message] = await consumer.claim()
    assert (base64.b64decode(message["body_base64"]), "body" in message) == (b"\xff\x00", False)


async def test_a_message_has_the_trace_of_its_producer_at_each_attempt(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.post("/messages", json=MESSAGES, headers={"traceparent": trace})
    await client.post("/messages", json=MESSAGES)
    claimed = await consumer.claim()
    assert [one["traceparent"] for one in claimed] == [trace, None]
    await consumer.settle("nack", *handles(claimed), retry_after_s=0)
    assert [one["traceparent"] for one in await consumer.claim()] == [trace, None]


async def test_consumers_share_the_messages_and_each_is_out_once(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(30)))
    claims = await asyncio.gather(*(consumer.claim(max=4) for _ in range(10)))
    got = [message["offset"] for claim in claims for message in claim]
    assert sorted(got) == sent
    statuses = await asyncio.gather(*(consumer.ack(*claim) for claim in claims if claim))
    assert {status for answer in statuses for status in answer} == {200}
    assert await standing(db) == {"receipts": 30, "retries": 0, "dead": 0, "claims": 0}


async def test_consumers_share_the_retries_and_each_is_out_once(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(30)))
    claimed = await consumer.claim(max=30)
    await consumer.settle("nack", *(one["handle"] for one in claimed), retry_after_s=0)
    got: list[dict[str, Any]] = []
    while claims := [claim for claim in await asyncio.gather(*(consumer.claim(max=6) for _ in range(6))) if claim]:
        got += [message for claim in claims for message in claim]
    assert sorted(one["offset"] for one in got) == sent
    assert {one["attempt"] for one in got} == {2}
    assert set(await consumer.ack(*got)) == {200}
    assert await standing(db) == {"receipts": 30, "retries": 0, "dead": 0, "claims": 0}


async def test_a_part_of_a_claim_is_settled_alone(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, *(order(n) for n in range(5)))
    claimed = await consumer.claim(max=5, invisible_s=20)
    assert await consumer.ack(claimed[1], claimed[3]) == [200, 200]
    assert await consumer.ack(claimed[1]) == [200]
    assert (await standing(db))["receipts"] == 2
    await lapse(db, runtime)
    again = await consumer.claim(max=5)
    assert [one["offset"] for one in again] == [claimed[n]["offset"] for n in (0, 2, 4)]
    assert {one["attempt"] for one in again} == {2}
    assert await consumer.ack(*again) == [200] * 3
    assert await standing(db) == {"receipts": 5, "retries": 0, "dead": 0, "claims": 0}
    assert await db.fetchval('select array_agg(attempts order by "offset") from receipt') == [2, 1, 2, 1, 2]


async def test_two_requests_for_parts_of_one_claim_at_the_same_time(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, *(order(n) for n in range(24)))
    claimed = await consumer.claim(max=24)
    statuses = await asyncio.gather(*(consumer.ack(*claimed[n::8], claimed[0]) for n in range(8)))
    assert {status for answer in statuses for status in answer} == {200}
    assert await standing(db) == {"receipts": 24, "retries": 0, "dead": 0, "claims": 0}


@pytest.mark.parametrize("action", ["ack", "nack", "reject", "extend"])
async def test_what_is_settled_while_its_time_is_extended_is_held(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, action: str
) -> None:
    sent = await publish(client, *(order(n) for n in range(3)))
    claimed = await consumer.claim(max=3, invisible_s=20)
    # Extended once, they are rows of their own.
    fields: dict[str, Any] = {"invisible_s": 30}
    assert {one["status"] for one in await consumer.settle("extend", *handles(claimed), **fields)} == {200}
    async with db.transaction():
        later = "leased_until = leased_until + interval '1 minute', due_at = due_at + interval '1 minute'"
        # A consumer extends what it is just settling: here the last two of three.
        await db.execute(f'update delivery_retry set {later} where "offset" <> $1', sent[0])
        settling = asyncio.create_task(
            consumer.settle(action, *handles(claimed), **(fields if action == "extend" else {}))
        )
        async with asyncio.timeout(30):
            while not await db.fetchval(WAITING):
                assert not settling.done()
                await asyncio.sleep(0.02)
    assert [one["status"] for one in await settling] == [200] * 3


async def test_an_acknowledgement_is_repeated(client: httpx.AsyncClient, consumer: Consumer) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    [first] = await consumer.settle("ack", message["handle"])
    [second] = await consumer.settle("ack", message["handle"])
    assert (first["replayed"], second["replayed"]) == (False, True)


async def test_a_handle_whose_time_is_over_changes_nothing(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim(invisible_s=1)
    await db.execute("update pull_claim set held_until = now() - interval '1 s', sweep_at = now() - interval '1 s'")
    # Before a worker has found it, and after.
    for _ in range(2):
        for action, fields in (("ack", {}), ("nack", {}), ("reject", {}), ("extend", {"invisible_s": 60})):
            [outcome] = await consumer.settle(action, message["handle"], **fields)
            assert (outcome["status"], outcome["type"]) == (409, "/problems/not-held")
        await sweep_after(runtime)
    assert await standing(db) == {"receipts": 0, "retries": 1, "dead": 0, "claims": 0}
    [again] = await consumer.claim()
    assert again["attempt"] == 2
    # The handle of the first attempt is not that of the second.
    assert await consumer.ack(message) == [409]
    assert await consumer.ack(again) == [200]
    assert await consumer.ack(message) == [409]


async def test_a_retry_whose_time_is_over_is_not_held(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    await consumer.settle("nack", message["handle"], retry_after_s=0)
    [second] = await consumer.claim()
    over = "now() - interval '1 second'"
    await db.execute(f"update delivery_retry set leased_until = {over}, due_at = {over}")
    # It is not claimed before the attempt was counted.
    assert await consumer.claim() == []
    assert await consumer.ack(second) == [409]
    await sweep_after(runtime)
    assert await consumer.ack(second) == [409]
    [third] = await consumer.claim()
    assert third["attempt"] == 3
    assert await consumer.ack(second, third) == [409, 200]
    assert await db.fetchval("select count(*) from attempt where outcome = 'failed'") == 2


@pytest.mark.parametrize("extended", [False, True])
async def test_at_each_time_a_message_is_its_consumers_or_a_workers(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, extended: bool
) -> None:
    await publish(client, order(1), order(2))
    [early, late] = await consumer.claim(invisible_s=20)
    handles = early["handle"], late["handle"]
    if extended:
        await consumer.settle("extend", *handles, invisible_s=25)
    held = "select max(leased_until) from delivery_retry" if extended else "select held_until from pull_claim"
    until = await db.fetchval(held)
    runtime.clock.fixed = until - timedelta(microseconds=1)
    assert (await sweep.step(runtime, runtime.clock.now())).done == 0
    assert await consumer.ack(early) == [200]
    runtime.clock.fixed = until
    for action, fields in (("ack", {}), ("nack", {}), ("extend", {"invisible_s": 60})):
        [outcome] = await consumer.settle(action, late["handle"], **fields)
        assert outcome["status"] == 409
    assert (await sweep.step(runtime, until)).done == 1
    [again] = await consumer.claim()
    assert (again["message_id"], again["attempt"]) == (late["message_id"], 2)


@pytest.mark.parametrize("held", ["by a claim", "by its row"])
async def test_a_message_that_was_not_begun_keeps_its_tries_for_three_days(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, held: str
) -> None:
    await put_pulled(client, retry=[10.0])
    consumer = Consumer(client)
    runtime.clock.fixed = began = runtime.clock.now() + timedelta(seconds=1)
    await publish(client, order(1))
    for after_s, waited_s in ((None, 1), (0, 1), (0.2, 1), (30, 30)):
        [message] = await consumer.claim(invisible_s=60)
        if held == "by its row":
            await consumer.settle("extend", message["handle"], invisible_s=120)
        fields = {} if after_s is None else {"retry_after_s": after_s}
        [outcome] = await consumer.settle(
            "nack", message["handle"], begun=False, error="the consumer stopped", **fields
        )
        due_at = runtime.clock.fixed + timedelta(seconds=waited_s)
        assert (message["attempt"], outcome["result"]) == (1, "retry")
        assert datetime.fromisoformat(outcome["due_at"]) == due_at
        assert await consumer.claim() == []
        # The same handle gives nothing back a second time.
        [again] = await consumer.settle("nack", message["handle"], begun=False)
        assert again["status"] == 409
        runtime.clock.fixed = due_at
    row = await db.fetchrow("select attempts, last_error, first_at from delivery_retry")
    assert row is not None
    assert tuple(row) == (0, "the consumer stopped", began)
    assert await db.fetchval("select count(*) from attempt") == 0
    [message] = await consumer.claim(invisible_s=60)
    runtime.clock.fixed = began + timedelta(hours=72)
    await db.execute(
        "update delivery_retry set leased_until = $1, due_at = $1", runtime.clock.fixed + timedelta(days=1)
    )
    [outcome] = await consumer.settle("nack", message["handle"], begun=False, retry_after_s=0)
    assert datetime.fromisoformat(outcome["due_at"]) >= runtime.clock.fixed + timedelta(seconds=9)
    runtime.clock.fixed += timedelta(seconds=60)
    [message] = await consumer.claim()
    assert message["attempt"] == 2
    [outcome] = await consumer.settle("nack", message["handle"], begun=False)
    assert outcome["result"] == "dead"
    assert await db.fetchval("select array_agg(number order by number) from attempt") == [1, 2]


async def test_what_is_given_back_unbegun_keeps_the_error_of_its_last_attempt(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """Only what a consumer begins can fail."""
    await put_pulled(client, retry=[10.0] * 4)
    consumer = Consumer(client)
    runtime.clock.fixed = runtime.clock.now() + timedelta(seconds=1)
    await publish(client, order(1))
    for begun, error in ((True, "no paper"), (False, "stopped"), (True, "no ink")):
        [message] = await consumer.claim()
        await consumer.settle("nack", message["handle"], retry_after_s=0, begun=begun, error=error)
        known = error if begun else "no paper"
        assert await db.fetchval("select last_error from delivery_retry") == known
        runtime.clock.fixed += timedelta(seconds=2)
    assert await db.fetchval("select array_agg(error order by number) from attempt") == ["no paper", "no ink"]


async def test_the_first_attempt_is_that_of_the_receipt(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    runtime.clock.fixed = began = runtime.clock.now() + timedelta(seconds=1)
    for _ in range(3):
        [message] = await consumer.claim()
        await consumer.settle("nack", message["handle"], retry_after_s=0)
        runtime.clock.fixed += timedelta(seconds=10)
    [message] = await consumer.claim()
    assert await consumer.ack(message) == [200]
    row = await db.fetchrow("select first_at, settled_at, attempts from receipt")
    assert row is not None
    assert tuple(row) == (began, began + timedelta(seconds=30), 4)


@pytest.mark.parametrize("handle", ["x", "A" * 128, "é" * 10, "", "A" * 400])
async def test_a_malformed_handle_is_refused_alone(client: httpx.AsyncClient, consumer: Consumer, handle: str) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    if not handle:
        answer = await client.post("/subscriptions/worker/ack", json={"handles": [handle]})
        assert answer.status_code == 422
        return
    for action in ("nack", "reject", "ack"):
        [bad, *_] = await consumer.settle(action, handle)
        assert (bad["status"], bad["type"]) == (422, "/problems/handle-invalid")
    assert [one["status"] for one in await consumer.settle("ack", handle, message["handle"])] == [422, 200]


async def test_a_handle_with_any_other_byte_is_refused(client: httpx.AsyncClient, consumer: Consumer) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    whole = base64.urlsafe_b64decode(message["handle"])
    others = [
        base64.urlsafe_b64encode(whole[:n] + bytes([whole[n] ^ bit]) + whole[n + 1 :]).decode()
        for n in range(len(whole))
        for bit in (1, 0x80)
    ]
    # Together they are refused for the first fault of any, so each alone too.
    for handles in (others, *([other] for other in others)):
        outcomes = await consumer.settle("ack", *handles)
        assert {one["status"] for one in outcomes} == {422}
    assert await consumer.ack(message) == [200]


async def test_a_message_that_has_a_receipt_keeps_it(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    """No message that is held has one; if it had, its claim would have to end all the same."""
    await publish(client, order(1), order(2))
    messages = await consumer.claim()
    subscription_id = await db.fetchval("select subscription_id from subscription")
    await db.execute(
        """insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at,
             duration_ms, settled_at)
           select transaction_id, position, $1, "offset", 'delivered', 7, now(), 1, now()
           from outbox order by "offset" limit 1""",
        subscription_id,
    )
    assert await consumer.ack(*messages) == [200, 200]
    assert await standing(db) == {"receipts": 2, "retries": 0, "dead": 0, "claims": 0}
    assert await db.fetchval("select max(attempts) from receipt") == 7


async def test_a_handle_has_one_form(client: httpx.AsyncClient, consumer: Consumer, db: Connection) -> None:
    """Otherwise a message of a claim could be counted as settled twice, and another one be lost with the claim."""
    await publish(client, *(order(n) for n in range(20)))
    handles = [message["handle"] for message in await consumer.claim(max=20)]
    others = [other for handle in handles for other in (handle.replace("-", "+"), handle.replace("_", "/"))]
    others = [other for other in others if other not in handles]
    assert others
    outcomes = await consumer.settle("ack", *handles[:2], *others, *handles[:2])
    assert [one["status"] for one in outcomes] == [200, 200, *[422] * len(others), 200, 200]
    assert await standing(db) == {"receipts": 2, "retries": 0, "dead": 0, "claims": 1}


async def test_a_foreign_handle_is_refused(client: httpx.AsyncClient, consumer: Consumer, db: Connection) -> None:
    await put_pulled(client, "other")
    await publish(client, order(1))
    [mine], [others] = await consumer.claim(), await Consumer(client, "other").claim()
    assert await consumer.ack(others) == [422]
    assert await Consumer(client, "other").ack(mine) == [422]
    assert await standing(db) == {"receipts": 0, "retries": 0, "dead": 0, "claims": 2}


async def test_a_message_that_is_given_back_follows_the_schedule(
    client: httpx.AsyncClient, group: str, runtime: Runtime, db: Connection
) -> None:
    await put_pulled(client, retry=[100.0, 200.0])
    consumer = Consumer(client)
    await publish(client, order(1))
    [message] = await consumer.claim()
    [outcome] = await consumer.settle("nack", message["handle"], error="no paper")
    assert outcome["result"] == "retry"
    row = await db.fetchrow("select * from delivery_retry")
    assert row is not None
    assert (row["attempts"], row["last_error"], row["leased_until"]) == (1, "no paper", None)
    assert timedelta(seconds=85) < row["due_at"] - runtime.clock.now() < timedelta(seconds=111)
    assert await consumer.claim() == []
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    [second] = await consumer.claim()
    [outcome] = await consumer.settle("nack", second["handle"], retry_after_s=0)
    [third] = await consumer.claim()
    assert third["attempt"] == 3
    [outcome] = await consumer.settle("nack", third["handle"], error="still no paper")
    assert (outcome["result"], outcome["due_at"]) == ("dead", None)
    dead = await db.fetchrow("select * from dead_letter")
    assert dead is not None
    assert (dead["attempts"], dead["reason"], dead["error"]) == (3, "retries_exhausted", "still no paper")
    assert await standing(db) == {"receipts": 0, "retries": 0, "dead": 1, "claims": 0}
    announced = await db.fetchval("select count(*) from half where topic = 'halfnote.delivery.dead'")
    assert announced == 1


async def test_a_message_that_is_given_back_twice_counts_once(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    handle = message["handle"]
    assert [one["status"] for one in await consumer.settle("nack", handle, handle, retry_after_s=60)] == [200, 200]
    assert [one["status"] for one in await consumer.settle("nack", handle)] == [409]
    assert await consumer.ack(message) == [409]
    assert await db.fetchval("select attempts from delivery_retry") == 1


async def test_what_is_settled_of_an_open_claim_is_not_settled_again(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, *(order(n) for n in range(3)))
    done, back, _ = await consumer.claim(max=3)
    assert await consumer.ack(done) == [200]
    await consumer.settle("nack", back["handle"], retry_after_s=60)
    assert [one["status"] for one in await consumer.settle("nack", done["handle"], back["handle"])] == [409, 409]
    assert await consumer.ack(back) == [409]
    [repeated] = await consumer.settle("ack", done["handle"])
    assert repeated["replayed"] is True
    assert await standing(db) == {"receipts": 1, "retries": 1, "dead": 0, "claims": 1}
    assert await db.fetchval("select attempts from delivery_retry") == 1


async def test_seventeen_tries_and_then_a_dead_letter(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1))
    for attempt in range(1, 18):
        [message] = await consumer.claim(invisible_s=1)
        assert message["attempt"] == attempt
        await lapse(db, runtime)
    assert await standing(db) == {"receipts": 0, "retries": 0, "dead": 1, "claims": 0}
    assert await db.fetchval("select reason from dead_letter") == "retries_exhausted"
    assert await db.fetchval("select count(*) from attempt where outcome = 'failed'") == 17


async def test_a_rejected_message_is_a_dead_letter_until_it_is_redelivered(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    [outcome] = await consumer.settle("reject", message["handle"], reason="no address")
    assert outcome["result"] == "dead"
    dead = (await client.get("/dead-letters", params={"subscription": "worker"})).json()["items"]
    assert [(one["message_id"], one["reason"]) for one in dead] == [(message["message_id"], "no address")]
    ids = [{"subscription": "worker", "message_id": message["message_id"]}]
    answer = await client.post("/dead-letters/redeliver", json={"ids": ids, "reason": "the address is known"})
    assert answer.status_code == 200, answer.text
    [again] = await consumer.claim()
    assert (again["message_id"], again["attempt"]) == (message["message_id"], 1)
    assert await consumer.ack(again) == [200]
    assert await standing(db) == {"receipts": 1, "retries": 0, "dead": 0, "claims": 0}


async def test_a_handle_of_one_redelivery_is_not_that_of_the_next(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim()
    ids = [{"subscription": "worker", "message_id": message["message_id"]}]
    before = []
    for _ in range(3):
        await consumer.settle("reject", message["handle"], reason="no address")
        assert (await client.post("/dead-letters/redeliver", json={"ids": ids})).status_code == 200
        before.append(message)
        [message] = await consumer.claim()
        assert message["attempt"] == 1
        for action, fields in (("ack", {}), ("nack", {}), ("reject", {}), ("extend", {"invisible_s": 60})):
            outcomes = await consumer.settle(action, *(one["handle"] for one in before), **fields)
            assert {one["status"] for one in outcomes} == {409}
    assert await consumer.ack(message) == [200]
    assert await standing(db) == {"receipts": 1, "retries": 0, "dead": 0, "claims": 0}


async def test_a_message_is_held_for_longer_by_the_same_handle(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    await publish(client, order(1), order(2))
    one, two = await consumer.claim(invisible_s=5)
    [outcome] = await consumer.settle("extend", one["handle"], invisible_s=300)
    assert outcome["status"] == 200
    await db.execute("update pull_claim set held_until = now() - interval '1 s', sweep_at = now() - interval '1 s'")
    await sweep_after(runtime)
    [again] = await consumer.claim()
    assert again["message_id"] == two["message_id"]
    [outcome] = await consumer.settle("extend", one["handle"], invisible_s=600)
    await sweep_after(runtime, 500)
    assert await consumer.ack(one) == [200]
    [repeated] = await consumer.settle("ack", one["handle"])
    assert repeated["replayed"] is True
    row = await db.fetchrow("select r.attempts, r.duration_ms from receipt r")
    assert row is not None
    assert row["attempts"] == 1


async def test_the_sweep_rests_while_there_is_nothing_to_claim_from(
    client: httpx.AsyncClient, group: str, runtime: Runtime, db: Connection
) -> None:
    assert (await sweep.step(runtime, runtime.clock.now())).within_s is None
    await put_pulled(client)
    assert (await sweep.step(runtime, runtime.clock.now())).within_s == sweep.EVERY_S
    await publish(client, order(1))
    assert len(await Consumer(client).claim(invisible_s=5)) == 1
    assert (await client.delete("/subscriptions/worker")).status_code == 204
    # A claim of a deleted subscription keeps the sweep awake until its end.
    assert (await sweep.step(runtime, runtime.clock.now())).within_s == sweep.EVERY_S
    await sweep_after(runtime, 6)
    assert await standing(db) == {"receipts": 0, "retries": 0, "dead": 0, "claims": 0}
    assert (await sweep.step(runtime, runtime.clock.now())).within_s is None


async def test_a_message_is_held_until_its_last_extension(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime
) -> None:
    await publish(client, order(1), order(2))
    runtime.clock.fixed = runtime.clock.now()
    longer, shorter = await consumer.claim(invisible_s=5)
    for one, seconds in ((longer, 60), (shorter, 10)):
        for invisible_s in (30, seconds):
            [outcome] = await consumer.settle("extend", one["handle"], invisible_s=invisible_s)
            assert outcome["status"] == 200
    runtime.clock.fixed += timedelta(seconds=11)
    assert await consumer.ack(shorter) == [409]
    runtime.clock.fixed += timedelta(seconds=40)
    assert await consumer.ack(longer) == [200]


async def test_a_long_claim_lets_the_checkpoint_go_on_and_its_handles_stay(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(order(n) for n in range(4)))
    claimed = await consumer.claim(invisible_s=3600)
    await consumer.ack(claimed[2])
    await sweep_after(runtime)
    assert await db.fetchval('select "offset" from checkpoint') == sent[0] - 1
    await sweep_after(runtime, 31)
    assert await db.fetchval('select "offset" from checkpoint') == sent[-1]
    assert await standing(db) == {"receipts": 1, "retries": 3, "dead": 0, "claims": 0}
    assert await consumer.claim() == []
    assert await consumer.ack(*claimed) == [200] * 4
    assert await standing(db) == {"receipts": 4, "retries": 0, "dead": 0, "claims": 0}


async def test_delayed_messages_come_when_they_are_due(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    late = await publish(client, order(1, deliver_after_s=3600))
    now = await publish(client, order(2))
    [message] = await consumer.claim()
    assert [message["offset"]] == now
    assert await consumer.claim() == []
    assert (await standing(db))["retries"] == 1
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    [message] = await consumer.claim()
    assert ([message["offset"]], message["attempt"]) == (late, 1)
    assert await consumer.ack(message) == [200]


@pytest.mark.parametrize("early", [timedelta(0), timedelta(microseconds=1)])
async def test_a_message_that_is_claimed_at_its_due_time_is_not_passed_over(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, early: timedelta
) -> None:
    await publish(client, order(1, deliver_after_s=60))
    due_at = await db.fetchval("select due_at from outbox")
    runtime.clock.fixed = due_at - early
    assert len(await consumer.claim()) == (0 if early else 1)
    runtime.clock.fixed = due_at
    assert len(await consumer.claim()) == (1 if early else 0)


async def test_filters_choose_the_messages(client: httpx.AsyncClient, group: str) -> None:
    await put_pulled(client, topics=["order", "bill*"], filters={"tags": ["new"], "headers": {"region": "eu"}})
    wanted = {"tag": "new", "headers": {"region": "eu", "other": "x"}}
    sent = await publish(
        client,
        order(1, **wanted),
        order(2, **{**wanted, "tag": "old"}),
        order(3, **{**wanted, "headers": {"region": "us"}}),
        order(4, **{**wanted, "topic": "billing"}),
        order(5, **{**wanted, "topic": "other"}),
    )
    assert [one["offset"] for one in await Consumer(client).claim()] == [sent[0], sent[3]]


async def test_a_claim_of_one_message_passes_all_that_are_delayed(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    late = await publish(client, *(order(n, deliver_after_s=3600) for n in range(60)))
    early = await publish(client, order(60), order(61))
    await publish(client, order(62, deliver_after_s=3600))
    assert [one["offset"] for one in await consumer.claim(max=1)] == early[:1]
    assert await db.fetchval("select count(*) from delivery_retry") == len(late)
    assert await db.fetchval('select "offset" from pull_cursor') == early[0]
    assert [one["offset"] for one in await consumer.claim(max=2)] == early[1:]


async def test_a_claim_stores_so_many_that_wait_and_no_more(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.pull.claiming.SPAN_LEAST", 10)
    monkeypatch.setattr("app.pull.claiming.SPAN", 10)
    monkeypatch.setattr("app.pull.claiming.PUT_OFF_AT_ONCE", 25)
    await publish(client, *(order(n, deliver_after_s=3600) for n in range(40)))
    [due] = await publish(client, order(41))
    answer = (await client.post("/subscriptions/worker/claim", json={"max": 5})).json()
    assert (answer["messages"], answer["more"]) == ([], True)
    assert await db.fetchval("select count(*) from delivery_retry") == 25
    assert [one["offset"] for one in await consumer.claim(max=5)] == [due]


async def test_a_message_far_behind_others_is_found(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.pull.claiming.SPAN_LEAST", 2)
    monkeypatch.setattr("app.pull.claiming.SPAN", 3)
    await publish(client, *(order(n, topic="other") for n in range(20)))
    [sent] = await publish(client, order(1))
    assert [one["offset"] for one in await consumer.claim(max=1)] == [sent]


async def test_a_paused_subscription_hands_out_nothing_and_settles(
    client: httpx.AsyncClient, consumer: Consumer
) -> None:
    await publish(client, order(1), order(2))
    [message] = await consumer.claim(max=1)
    await client.post("/subscriptions/worker/pause")
    assert await consumer.claim() == []
    assert await consumer.ack(message) == [200]
    await client.post("/subscriptions/worker/resume")
    assert len(await consumer.claim()) == 1


async def test_a_consumer_that_dies_with_ten_thousand_messages_loses_none(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    messages = [{"topic": "order", "body": n} for n in range(100)]
    body = {"transactions": [{"producer_group": "shop", "messages": messages} for _ in range(100)]}
    answer = await client.post("/messages", json=body)
    assert {one["status"] for one in answer.json()["outcomes"]} == {201}
    held: list[dict[str, Any]] = []
    while claimed := await consumer.claim(max=1000):
        held += claimed
    assert len(held) == 10_000
    await lapse(db, runtime)
    again: list[dict[str, Any]] = []
    while claimed := await consumer.claim(max=1000):
        again += claimed
        assert set(await consumer.ack(*claimed)) == {200}
    assert sorted(one["offset"] for one in again) == sorted(one["offset"] for one in held)
    assert {one["attempt"] for one in again} == {2}
    assert await standing(db) == {"receipts": 10_000, "retries": 0, "dead": 0, "claims": 0}


async def test_large_bodies_are_divided_among_claims(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection
) -> None:
    sent = await publish(client, *(order(n, body="x" * 3_000_000) for n in range(4)))
    sizes, offsets = [], []
    while claimed := await consumer.claim(max=10):
        sizes.append(len(claimed))
        offsets += [one["offset"] for one in claimed]
    assert (sizes, offsets) == ([3, 1], sent)
    await lapse(db, runtime)
    assert len(await consumer.claim(max=10)) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("max", 0), ("max", 1001), ("max", "7"), ("invisible_s", 0), ("invisible_s", 13 * 3600), ("other", 1)],
)
async def test_a_claim_out_of_bounds_is_refused(
    client: httpx.AsyncClient, consumer: Consumer, field: str, value: Any
) -> None:
    answer = await client.post("/subscriptions/worker/claim", json={field: value})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid")
    assert answer.json()["field"] == field


async def test_settings_lower_what_a_claim_may_ask_for(dsn: str, db: Connection, group: str) -> None:
    limited = settings_of(dsn, claim_max=3, claim_held_max_s=60)
    async with assembled(limited, dsn) as runtime, client_of(runtime) as client:
        await put_pulled(client)
        consumer = Consumer(client)
        await publish(client, *(order(n) for n in range(4)))
        claimed = await consumer.claim(max=3, invisible_s=60)
        assert len(claimed) == 3
        until = await db.fetchval("select held_until from pull_claim")
        handles = [one["handle"] for one in claimed]
        for action, fields, field in (
            ("claim", {"max": 4}, "max"),
            ("claim", {"max": 1, "invisible_s": 60.5}, "invisible_s"),
            ("extend", {"handles": handles, "invisible_s": 60.5}, "invisible_s"),
        ):
            answer = await client.post(f"/subscriptions/worker/{action}", json=fields)
            assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert await db.fetch("select held_until, size from pull_claim") == [(until, 3)]
        assert {one["status"] for one in await consumer.settle("extend", *handles, invisible_s=60)} == {200}
        assert len(await consumer.claim(max=3)) == 1


async def test_settings_lower_the_defaults_of_a_claim(dsn: str, db: Connection, group: str) -> None:
    held_s = "select extract(epoch from held_until - claimed_at)::float from pull_claim where size = $1"
    limited = settings_of(dsn, claim_max=3, claim_held_max_s=20)
    async with assembled(limited, dsn) as runtime, client_of(runtime) as client:
        await put_pulled(client)
        consumer = Consumer(client)
        await publish(client, *(order(n) for n in range(6)))
        assert len(await consumer.claim()) == 3
        assert await db.fetchval(held_s, 3) == 20
        # 2.0 is for the framework, and the time is not sent.
        assert len(await consumer.claim(max=2.0)) == 2
        assert await db.fetchval(held_s, 2) == 20
        for fields, field, detail in (
            ({"max": 10}, "max", "`max` must be at most 3 (HALFNOTE_CLAIM_MAX)."),
            ({"invisible_s": 30}, "invisible_s", "`invisible_s` must be at most 20 (HALFNOTE_CLAIM_HELD_MAX_S)."),
            ({"max": 2.0, "invisible_s": 30}, "invisible_s", None),
        ):
            answer = await client.post("/subscriptions/worker/claim", json=fields)
            assert (answer.status_code, answer.json()["field"]) == (422, field)
            assert detail in (None, answer.json()["detail"])
        assert len(await consumer.claim()) == 1


async def test_settings_do_not_raise_the_defaults_of_a_claim(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    await publish(client, *(order(n) for n in range(11)))
    assert len(await consumer.claim()) == 10
    assert await db.fetchval("select extract(epoch from held_until - claimed_at)::float from pull_claim") == 30


async def test_a_pulled_subscription_has_no_shards(client: httpx.AsyncClient) -> None:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "shards": 2}
    answer = await client.put("/subscriptions/worker", json=put)
    assert (answer.status_code, answer.json()["field"]) == (422, "shards")
    assert "Any number of consumers" in answer.json()["detail"]


async def test_a_subscription_is_not_changed_to_or_from_pull(client: httpx.AsyncClient, consumer: Consumer) -> None:
    webhook = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
    answer = await client.put("/subscriptions/worker", json=webhook)
    assert (answer.status_code, answer.json()["field"]) == (422, "destination.type")
    assert (await client.put("/subscriptions/mailer", json=webhook)).status_code == 201
    answer = await client.put("/subscriptions/mailer", json={"topics": ["order"], "destination": {"type": "pull"}})
    assert (answer.status_code, answer.json()["field"]) == (422, "destination.type")
    for action, body in (("claim", {}), ("ack", {"handles": ["x"]})):
        answer = await client.post(f"/subscriptions/mailer/{action}", json=body)
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/not-pulled")
    answer = await client.post("/subscriptions/worker/test")
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/nothing-sent")


@pytest.mark.parametrize("invisible_s", [30, 600])
async def test_a_deleted_subscription_leaves_nothing(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, invisible_s: int
) -> None:
    await publish(client, order(1))
    [message] = await consumer.claim(invisible_s=invisible_s)
    assert (await client.delete("/subscriptions/worker")).status_code == 204
    answer = await client.post("/subscriptions/worker/ack", json={"handles": [message["handle"]]})
    assert answer.status_code == 404
    await put_pulled(client)
    assert await consumer.ack(message) == [422]
    await sweep_after(runtime, 31)
    assert await standing(db) == {"receipts": 0, "retries": 0, "dead": 0, "claims": 0}


async def test_a_sweep_without_such_a_subscription_does_nothing(runtime: Runtime) -> None:
    result = await sweep.step(runtime, runtime.clock.now())
    assert (result.done, result.more) == (0, False)


@pytest.mark.parametrize("held_in", ["a claim", "a row"])
@pytest.mark.parametrize(
    ("act", "given", "answered", "column"),
    [("extend", "invisible_s", "held_until", "leased_until"), ("nack", "retry_after_s", "due_at", "due_at")],
)
async def test_the_time_of_an_extension_or_a_retry_begins_when_it_is_written(
    client: httpx.AsyncClient,
    group: str,
    runtime: Runtime,
    db: Connection,
    act: str,
    given: str,
    answered: str,
    column: str,
    held_in: str,
) -> None:
    await put_pulled(client)
    consumer = Consumer(client)
    await publish(client, order(1))
    [message] = await consumer.claim(invisible_s=60)
    if held_in == "a row":
        await consumer.settle("extend", message["handle"], invisible_s=60)
    runtime.clock.fixed = began = runtime.clock.now()
    async with db.transaction():
        await db.execute("select from pull_claim for update")
        await db.execute("select from delivery_retry for update")
        settling = asyncio.create_task(consumer.settle(act, message["handle"], **{given: 20}))
        await until_waiting(db)
        runtime.clock.fixed = now = began + timedelta(seconds=15)
    [outcome] = await settling
    assert datetime.fromisoformat(outcome[answered]) == now + timedelta(seconds=20)
    assert await db.fetchval(f"select {column} from delivery_retry") == now + timedelta(seconds=20)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_the_time_of_a_claim_begins_when_it_has_the_cursor(
    client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime, db: Connection, dsn: str, goes_on: bool
) -> None:
    await publish(client, *(order(n) for n in range(3)))
    if goes_on:
        await consumer.ack(*await consumer.claim(max=1))
        assert runtime.pulled["worker"].goes_on
    other = await connect(dsn)
    try:
        async with other.transaction():
            await other.execute("select from pull_cursor for update")
            claiming = asyncio.create_task(
                client.post("/subscriptions/worker/claim", json={"max": 1, "invisible_s": 1})
            )
            await until_waiting(db)
            # The wait for the cursor is longer than the claim lasts.
            await asyncio.sleep(1.5)
            released = runtime.clock.now()
    finally:
        await other.close()
    answer = (await claiming).json()
    until = datetime.fromisoformat(answer["held_until"])
    assert until > released + timedelta(seconds=0.9)
    assert await db.fetchval("select (held_until, sweep_at) = ($1, $1) from pull_claim", until)
    await sweep.step(runtime, released)
    assert await consumer.ack(*answer["messages"]) == [200]
    assert await db.fetchval("select count(*) from attempt") == 0
    row = await db.fetchrow('select first_at, attempts from receipt order by "offset" desc limit 1')
    assert row is not None
    assert (row["first_at"], row["attempts"]) == (until - timedelta(seconds=1), 1)
