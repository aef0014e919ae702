"""A consumer that goes on claims in one statement: what changes meanwhile is seen as if each claim looked first."""

import httpx
import pytest

from app.database.connection import Connection
from app.permissions import Role
from app.pull import claiming
from app.runtime.state import Runtime
from app.store.pull import claims
from tests.conftest import assembled, client_of, settings_of
from tests.support.api_keys import bearer, make
from tests.support.consumers import Consumer, lapse, put_pulled
from tests.support.relay_stepping import order, publish


@pytest.fixture
async def consumer(client: httpx.AsyncClient, runtime: Runtime, group: str) -> Consumer:
    """A consumer of `worker` that has claimed one of six messages, so its next claim goes on."""
    await put_pulled(client)
    await publish(client, *(order(n) for n in range(6)))
    going_on = Consumer(client)
    assert len(await going_on.claim(max=1)) == 1
    assert runtime.pulled["worker"].goes_on
    return going_on


async def test_a_claim_that_goes_on_looks_no_more(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(claiming, "look")
    first, second = await consumer.claim(max=1), await consumer.claim(max=4)
    offsets = [one["offset"] for one in first + second]
    assert (len(offsets), sorted(offsets)) == (5, offsets)


async def test_the_end_of_the_log_ends_it(client: httpx.AsyncClient, consumer: Consumer, runtime: Runtime) -> None:
    assert len(await consumer.claim(max=100)) == 5
    assert not runtime.pulled["worker"].goes_on
    assert await consumer.claim(max=100) == []
    await publish(client, order(7))
    assert len(await consumer.claim(max=100)) == 1


async def test_a_pause_is_seen_by_the_next_claim(client: httpx.AsyncClient, consumer: Consumer) -> None:
    assert (await client.post("/subscriptions/worker/pause")).status_code == 200
    assert await consumer.claim(max=1) == []
    assert (await client.post("/subscriptions/worker/resume")).status_code == 200
    assert len(await consumer.claim(max=100)) == 5


async def test_other_topics_are_seen_by_the_next_claim(client: httpx.AsyncClient, consumer: Consumer) -> None:
    body = {"topics": ["other"], "destination": {"type": "pull"}}
    assert (await client.put("/subscriptions/worker", json=body)).status_code == 200
    assert await consumer.claim(max=100) == []


async def test_a_deleted_subscription_is_seen_by_the_next_request(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    [message] = await consumer.claim(max=1)
    assert (await client.delete("/subscriptions/worker")).status_code == 204
    for action, body in (("ack", {"handles": [message["handle"]]}), ("claim", {})):
        answer = await client.post(f"/subscriptions/worker/{action}", json=body)
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/subscription-unknown")
    assert await db.fetchval("select count(*) from receipt") == 0
    # Another subscription of this name has other handles.
    await put_pulled(client)
    assert await consumer.ack(message) == [422]


async def test_what_was_given_back_comes_first(consumer: Consumer) -> None:
    [message] = await consumer.claim(max=1)
    await consumer.settle("nack", message["handle"], retry_after_s=0)
    [again] = await consumer.claim(max=1)
    assert (again["message_id"], again["attempt"]) == (message["message_id"], 2)


async def test_what_another_process_made_due_comes_first(consumer: Consumer, runtime: Runtime, db: Connection) -> None:
    assert len(await consumer.claim(max=1)) == 1
    await lapse(db, runtime)
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    # This process has not read the subscription since then.
    assert runtime.pulled["worker"].goes_on
    assert [one["attempt"] for one in await consumer.claim(max=100)] == [2, 2]
    assert [one["attempt"] for one in await consumer.claim(max=100)] == [1, 1, 1, 1]


async def test_a_change_between_claim_and_acknowledgement_leaves_the_handle_valid(
    client: httpx.AsyncClient, consumer: Consumer, db: Connection
) -> None:
    first, second = await consumer.claim(max=2)
    assert await consumer.ack(first) == [200]
    body = {"topics": ["other"], "destination": {"type": "pull"}}
    assert (await client.put("/subscriptions/worker", json=body)).status_code == 200
    assert await consumer.ack(first, second) == [200, 200]
    assert await db.fetchval("select count(*) from receipt") == 2


async def test_nothing_is_acknowledged_for_a_row_of_another_version(consumer: Consumer, db: Connection) -> None:
    [message] = await consumer.claim(max=1)
    row = await db.fetchrow("select subscription_id, claim_id from pull_claim order by claim_id desc limit 1")
    stored = await db.fetchrow(
        'select transaction_id, position, "offset" from outbox where "offset" = $1', message["offset"]
    )
    now = await db.fetchval("select now()")
    held = claims.HeldMessage(row["subscription_id"], 0, row["claim_id"], 1, 1, *stored, now, b"")
    assert await claims.acknowledge(db, row["subscription_id"], [held], now, "1") == set()
    assert await consumer.ack(message) == [200]


async def test_the_scope_of_each_key_is_seen(dsn: str, group: str) -> None:
    async with assembled(settings_of(dsn, auth="keys"), dsn) as runtime, client_of(runtime) as client:
        keys = {
            name: bearer(await make(runtime, role, **scope))
            for name, role, scope in (
                ("admin", Role.ADMIN, {}),
                ("all", Role.SUBSCRIBER, {"subscriptions": ["worker"], "topics": ["order"]}),
                ("other", Role.SUBSCRIBER, {"subscriptions": ["worker"], "topics": ["other"]}),
            )
        }
        client.headers.update(keys["admin"])
        await put_pulled(client)
        await publish(client, *(order(n) for n in range(3)))
        for name, status, count in (("all", 200, 1), ("other", 403, 0), ("all", 200, 1), ("other", 403, 0)):
            assert name == "all" or runtime.pulled["worker"].goes_on
            answer = await client.post("/subscriptions/worker/claim", json={"max": 1}, headers=keys[name])
            assert (answer.status_code, len(answer.json().get("messages", ()))) == (status, count)


async def test_a_subscription_out_of_scope_is_refused_whatever_its_topics(dsn: str, group: str) -> None:
    async with assembled(settings_of(dsn, auth="keys"), dsn) as runtime, client_of(runtime) as client:
        client.headers.update(bearer(await make(runtime, Role.ADMIN)))
        await put_pulled(client)
        await publish(client, *(order(n) for n in range(3)))
        other = bearer(await make(runtime, Role.SUBSCRIBER, subscriptions=["mailer"], topics=["order"]))
        [message] = await Consumer(client).claim(max=1)
        requests = {name: {"handles": [message["handle"]]} for name in ("ack", "nack", "reject", "extend")}
        requests["extend"] |= {"invisible_s": 60}
        for action, request in {"claim": {"max": 1}, **requests}.items():
            answer = await client.post(f"/subscriptions/worker/{action}", json=request, headers=other)
            assert (answer.status_code, answer.json()["missing"]) == (403, {"subscriptions": "worker"}), action
        # Also after a change, when the subscription is read again.
        runtime.pulled.clear()
        answer = await client.post("/subscriptions/worker/claim", json={}, headers=other)
        assert answer.status_code == 403
        assert await Consumer(client).ack(message) == [200]


@pytest.mark.parametrize("action", ["claim", "ack"])
@pytest.mark.parametrize("body", [b"{}x", b'{"max": 0}', b'{"handles": []}', b'{"more": 1}', b"[]", b"\xff", b""])
async def test_a_request_at_fault_is_refused_as_by_the_framework(
    client: httpx.AsyncClient, consumer: Consumer, action: str, body: bytes
) -> None:
    answer = await client.post(
        f"/subscriptions/worker/{action}", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code // 100, answer.headers["content-type"]) == (4, "application/problem+json")


async def test_a_claim_takes_whole_numbers_as_json_does(consumer: Consumer) -> None:
    assert len(await consumer.claim(max=2.0, invisible_s=5, wait_s=0)) == 2
