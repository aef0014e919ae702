"""`GET /transactions/{id}/delivery`: a cause at a time, made by the real relay, and the sentence that explains it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from aiohttp import web

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import in_doubt, turn
from tests.support.consumers import Consumer, put_pulled
from tests.support.explain import scans
from tests.support.relay_stepping import step, subscribe, turn_until

ORDER = {"topic": "order", "key": "order-1030", "tag": "created", "headers": {"region": "eu"}, "body": {"order": 1030}}


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    """The relay of a process; the tests call its step."""
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def sent(client: httpx.AsyncClient, **fields: Any) -> str:
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": [{**ORDER, **fields}]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def message_of(client: httpx.AsyncClient, transaction_id: object, **query: Any) -> dict[str, Any]:
    answer = await client.get(f"/transactions/{transaction_id}/delivery", params=query)
    assert answer.status_code == 200, answer.text
    [message] = answer.json()["messages"]
    return dict(message)


async def why(client: httpx.AsyncClient, transaction_id: object, subscription: str = "mailer") -> dict[str, Any]:
    [found] = (await message_of(client, transaction_id, subscription=subscription))["subscriptions"]
    return dict(found)


async def test_what_no_subscription_takes_says_which_rule_leaves_it_out(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay
) -> None:
    none = await sent(client)
    assert (await message_of(client, none))["sentence"] == (
        "No subscription takes it: no subscription has a topic that matches `order`."
    )
    async with Responder() as receiver:
        await subscribe(client, receiver, "photos", topics=["photo"])
        await subscribe(client, receiver, "refunds", filters={"tags": ["refunded", "voided"]})
        await subscribe(client, receiver, "us-only", filters={"headers": {"region": "us"}})
        one = await sent(client)
        found = await message_of(client, one)
        assert found["reason"] == "no_subscription"
        assert found["sentence"] == (
            "No subscription takes it: `refunds`, `us-only` have its topic, but do not take this message."
        )
        reasons = {shown["subscription"]: (shown["reason"], shown["sentence"]) for shown in found["subscriptions"]}
        assert list(reasons) == ["refunds", "us-only", "photos"]
        assert reasons["refunds"] == (
            "filtered_by_tag",
            "Not sent: its tag is `created`, and the subscription takes only the tags `refunded`, `voided`.",
        )
        assert reasons["us-only"][0] == "filtered_by_header"
        assert "`region: us`" in reasons["us-only"][1]
        assert reasons["photos"][0] == "no_topic_match"
        assert "`order` matches none of the subscription's topics (`photo`)" in reasons["photos"][1]
        await subscribe(client, receiver, "late")
        newer = await why(client, one, "late")
        assert newer["reason"] == "subscription_newer"
        assert "A replay sends it" in newer["sentence"]


async def test_a_transaction_without_a_commit_says_what_is_missing(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    checks = CheckBack()
    async with Responder() as receiver:
        await subscribe(client, receiver)
        half = await client.post("/half", json={"producer_group": "shop", "messages": [ORDER]})
        waiting = half.json()["transaction_id"]
        found = await why(client, waiting)
        assert found["reason"] == "half"
        assert "`shop` has not sent the end" in found["sentence"]
        end = {"transaction_id": waiting, "producer_group": "shop", "verdict": "rollback", "reason": "out of stock"}
        assert (await client.post("/end", json=end)).status_code == 200
        found = await why(client, waiting)
        assert found["reason"] == "rolled_back"
        assert found["sentence"].startswith("Never sent: the transaction was rolled back by producer at ")
        assert found["sentence"].endswith(" (out of stock).")
        doubted = await in_doubt(client, runtime)
        found = await why(client, doubted)
        assert (found["reason"], found["next_at"] is not None) == ("in_doubt", True)
        async with Responder(content={"verdict": "unknown"}) as shop:
            put = {"check_urls": [shop.url], "max_checks": 1, "on_exhausted": "park"}
            assert (await client.put("/producer-groups/shop", json=put)).status_code == 200
            assert await turn(runtime, checks) == 1
        found = await why(client, doubted)
        assert found["reason"] == "parked"
        assert "A person must decide it" in found["sentence"]


async def test_the_way_of_a_message_from_its_commit_to_its_receipt(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay
) -> None:
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver)
        one = await sent(client)
        found = await why(client, one)
        assert (found["reason"], found["sentence"]) == (
            "no_worker",
            "Not sent: no worker holds this subscription at the moment. Is a worker process running?",
        )
        delayed = await sent(client, deliver_after_s=3600)
        found = await why(client, delayed)
        assert found["reason"] == "due_later"
        assert found["next_at"] is not None
        receiver.answer = held = Held()
        await turn_until(relay, runtime, held.reached.is_set)
        assert (await why(client, one))["reason"] in ("not_yet_sent", "in_flight")
        held.go.set()
        await turn_until(relay, runtime, lambda: is_reason(client, one, "delivered"))
        found = await why(client, one)
        assert found["sentence"].endswith(", by attempt 1, answered 204.")
        assert (await message_of(client, one))["sentence"] == "Delivered to every subscription that takes it (1)."


class Held:
    """Answers once it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, call: Call) -> web.StreamResponse:
        self.reached.set()
        await self.go.wait()
        return web.Response(status=204)


async def is_reason(client: httpx.AsyncClient, transaction_id: str, reason: str) -> bool:
    return bool((await why(client, transaction_id))["reason"] == reason)


async def test_a_pause_a_retry_a_dead_letter_and_its_drop(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay
) -> None:
    async with Responder(status=500, content={"error": "read-only"}) as receiver:
        await subscribe(client, receiver, retry=[600])
        one = await sent(client)
        assert (await client.post("/subscriptions/mailer/pause")).status_code == 200
        found = await why(client, one)
        assert found["reason"] == "paused"
        assert "a person paused the subscription at " in found["sentence"]
        assert (await client.post("/subscriptions/mailer/resume")).status_code == 200
        await turn_until(relay, runtime, lambda: is_reason(client, one, "retrying"))
        found = await why(client, one)
        assert found["sentence"].startswith("Not delivered yet: 1 attempt failed. The next attempt is at ")
        assert "500" in found["sentence"]
        assert (found["attempts"], found["next_at"] is not None) == (1, True)
        runtime.clock.offset_s += 700
        await turn_until(relay, runtime, lambda: is_reason(client, one, "dead"))
        found = await why(client, one)
        assert "given up after 2 attempts" in found["sentence"]
        assert "A person can redeliver it." in found["sentence"]
        named = {"ids": [{"subscription": "mailer", "message_id": f"{one}-0"}], "reason": "sold out"}
        assert (await client.request("DELETE", "/dead-letters", json=named)).status_code == 200
        assert (await why(client, one))["reason"] == "dropped"


async def test_an_earlier_message_of_the_key(client: httpx.AsyncClient, runtime: Runtime, relay: Relay) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[600])
        first = await sent(client)
        second, other = await sent(client), await sent(client, key="order-1031")
        await turn_until(relay, runtime, lambda: is_reason(client, first, "retrying"))
        for _ in range(3):
            await step(relay, runtime)
        found = await why(client, second)
        assert (found["reason"], found["behind"]) == ("behind_key", f"{first}-0")
        assert "of its key `order-1030`, which is tried again at " in found["sentence"]
        assert (await why(client, other))["reason"] == "retrying"
        runtime.clock.offset_s += 700
        await turn_until(relay, runtime, lambda: is_reason(client, first, "dead"))
        found = await why(client, second)
        assert found["reason"] == "behind_key"
        assert "which is dead" in found["sentence"]


async def test_a_pause_that_the_destination_asked_for(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver)
        one = await sent(client)
        await turn_until(relay, runtime, lambda: is_reason(client, one, "retrying"))
        assert "asks for pauses" not in (await why(client, one))["sentence"]
        await db.execute("update checkpoint set limited_since = now(), paused_until = '2100-11-28 12:00Z'")
        found = await why(client, one)
    assert found["reason"] == "retrying"
    assert "The destination asks for pauses; the next message goes out at 2100-11-28 12:00:00 UTC" in found["sentence"]


async def test_an_open_breaker_and_a_disabled_subscription(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver)
        one = await sent(client)
        await turn_until(relay, runtime, lambda: is_reason(client, one, "retrying"))
        await db.execute("update checkpoint set opened_at = now(), opened_because = 'answered 500'")
        found = await why(client, one)
        assert found["reason"] == "breaker_open"
        assert "the circuit breaker is open since " in found["sentence"]
        assert "(answered 500)" in found["sentence"]
        await db.execute("update subscription set state = 'disabled', state_reason = 'answered 410'")
        found = await why(client, one)
        assert found["reason"] == "disabled"
        assert "(answered 410)" in found["sentence"]


async def test_what_a_consumer_holds_and_what_it_has_given_back(client: httpx.AsyncClient, group: str) -> None:
    await put_pulled(client)
    ids = [await sent(client, key=f"order-{n}") for n in range(3)]
    consumer = Consumer(client)
    back, longer, held = await consumer.claim(max=3, invisible_s=30)
    await consumer.settle("nack", back["handle"], retry_after_s=600)
    [extended] = await consumer.settle("extend", longer["handle"], invisible_s=600)
    found = [await why(client, one, "worker") for one in ids]
    assert [one["reason"] for one in found] == ["retrying", "in_flight", "in_flight"]
    assert "A consumer has claimed it, for attempt 1, and holds it" in found[1]["sentence"]
    assert extended["held_until"][:19].replace("T", " ") in found[1]["sentence"].replace("T", " ")
    assert await consumer.ack(held) == [200]
    assert (await why(client, ids[2], "worker"))["reason"] == "delivered"


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_pause_or_a_change_takes_nothing_from_a_consumer(
    client: httpx.AsyncClient, group: str, db: Connection, state: str
) -> None:
    await put_pulled(client)
    ids = [await sent(client, key=f"order-{n}") for n in range(3)]
    longer, _ = await Consumer(client).claim(max=2, invisible_s=30)
    await Consumer(client).settle("extend", longer["handle"], invisible_s=600)
    await db.execute("update subscription set state = $1", state)
    found = [await why(client, one, "worker") for one in ids]
    assert [one["reason"] for one in found] == ["in_flight", "in_flight", state]
    await db.execute("update subscription set topics = '{photo}', matches_since = now()")
    found = [await why(client, one, "worker") for one in ids]
    assert [one["reason"] for one in found] == ["in_flight", "in_flight", "no_topic_match"]


async def test_an_expired_message(client: httpx.AsyncClient, runtime: Runtime, relay: Relay) -> None:
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver, expire_after_s=60)
        one = await sent(client)
        runtime.clock.fixed = runtime.clock.now() + timedelta(seconds=120)
        await turn_until(relay, runtime, lambda: is_reason(client, one, "expired"))
        assert "(`expire_after_s`)" in (await why(client, one))["sentence"]


async def test_scope_and_unknown_ids(client: httpx.AsyncClient, group: str, db: Connection) -> None:
    await register_group(db, "bank")
    unknown = await client.get("/transactions/0193a7d6-a5c8-7b1e-8f00-1030a1030a10/delivery")
    assert (unknown.status_code, unknown.json()["type"]) == (404, "/problems/transaction-unknown")
    one = await sent(client)
    answer = await client.get(f"/transactions/{one}/delivery", params={"position": 1})
    assert answer.json()["messages"] == []


async def test_no_large_table_is_read_as_a_whole(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    from app.store.coordinator.delivery_facts import BLOCKERS, FACTS

    large = ("half", "outbox", "receipt", "delivery_retry", "dead_letter", "attempt", "op")
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver, ordered="key")
        ids = [await sent(client, key=f"order-{number % 7}") for number in range(60)]
        await turn_until(relay, runtime, lambda: is_reason(client, ids[-1], "delivered"))
    await db.execute("set enable_seqscan = off")
    kinds = ["uuid", "smallint", "timestamptz", "text", "bigint", "smallint"]
    now = runtime.clock.now()
    for scan in await scans(db, FACTS, kinds, [ids[0], 0, now, None, 20, 99], generic=True):
        assert not (scan.table.startswith(large) and "Seq" in scan.node), scan
    kinds = ["int[]", "text", "bigint", "bigint[]", "timestamptz", "bool[]"]
    for scan in await scans(db, BLOCKERS, kinds, [[1], "order-3", 50, [10], now, [True]], generic=True):
        assert not (scan.table.startswith(large) and "Seq" in scan.node), scan


async def test_many_deliveries_are_explained_in_pages(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await db.execute(
        "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, "
        "created_at, updated_at, started_after, matches_since) "
        "select 's-' || lpad(n::text, 4, '0'), '{order}', '{}', '[]', '{}', 1, 1, '{}', 'active', now(), now(), 0, "
        "now() from generate_series(0, 1499) n"
    )
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": [ORDER] * 5})
    transaction_id = answer.json()["transaction_id"]
    names, found, pages, query = [f"s-{n:04}" for n in range(1500)], dict[str, list[str]](), [], dict[str, str]()
    while True:
        answer = await client.get(f"/transactions/{transaction_id}/delivery", params=query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        pages.append(sum(len(message["subscriptions"]) for message in page["messages"]))
        for message in page["messages"]:
            assert message["sentence"].startswith("Delivered to 0 of 1500 subscriptions; not to `s-0000`, `s-0001`")
            assert message["sentence"].endswith("`s-0019` and 1480 more.")
            found.setdefault(message["message_id"], []).extend(one["subscription"] for one in message["subscriptions"])
        if page["deliveries_cursor"] is None:
            break
        query = {"cursor": page["deliveries_cursor"]}
    assert pages == [1000] * 7 + [500]
    assert found == {f"{transaction_id}-{position}": names for position in range(5)}
    one = {"position": 2}
    first = (await client.get(f"/transactions/{transaction_id}/delivery", params=one)).json()
    rest = {**one, "cursor": first["deliveries_cursor"]}
    second = (await client.get(f"/transactions/{transaction_id}/delivery", params=rest)).json()
    assert second["deliveries_cursor"] is None
    both = [each["subscription"] for page in (first, second) for each in page["messages"][0]["subscriptions"]]
    assert both == names
    # Few of many subscriptions are listed, but all are compared, so that an answer has three messages.
    photos = [{**ORDER, "topic": "photo"}] * 5
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": photos})
    other = answer.json()["transaction_id"]
    first = (await client.get(f"/transactions/{other}/delivery")).json()
    rest = {"cursor": first["deliveries_cursor"]}
    second = (await client.get(f"/transactions/{other}/delivery", params=rest)).json()
    ids = [[message["message_id"] for message in page["messages"]] for page in (first, second)]
    assert ids == [[f"{other}-{n}" for n in range(3)], [f"{other}-{n}" for n in (3, 4)]]
    assert second["deliveries_cursor"] is None
    unknown = await client.get(f"/transactions/{transaction_id}/delivery", params={"cursor": "0"})
    assert (unknown.status_code, unknown.json()["type"]) == (422, "/problems/invalid")


async def test_subscriptions_of_other_topics_cost_no_row_each(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    from app.operations.delivery_reasons.explain import UNMATCHED_MOST
    from app.store.coordinator.delivery_facts import read_facts

    async with Responder() as receiver:
        for number in range(3):
            await subscribe(client, receiver, f"mailer-{number}")
    await db.execute(
        "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, "
        "created_at, updated_at, started_after, matches_since) "
        "select 'other-' || lpad(n::text, 3, '0'), array['t' || n], '{}', '[]', '{}', 1, 1, '{}', 'active', now(), "
        "now(), 0, now() from generate_series(1, 100) n"
    )
    messages = [ORDER, {**ORDER, "topic": "t7"}]
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
    transaction_id = UUID(answer.json()["transaction_id"])
    facts = await read_facts(db, transaction_id, (0, 99), None, UNMATCHED_MOST, datetime.now(UTC))
    assert len(facts) == 3 + UNMATCHED_MOST + 1 + UNMATCHED_MOST
    shown = (await client.get(f"/transactions/{transaction_id}/delivery")).json()["messages"]
    others = [f"other-{n:03}" for n in range(1, UNMATCHED_MOST + 1)]
    assert [one["subscription"] for one in shown[0]["subscriptions"]] == ["mailer-0", "mailer-1", "mailer-2", *others]
    assert shown[0]["left_out"] == 100 - UNMATCHED_MOST
    second = [one["subscription"] for one in shown[1]["subscriptions"]]
    assert second[0] == "other-007"
    assert second[1:5] == ["mailer-0", "mailer-1", "mailer-2", "other-001"]
    assert shown[1]["left_out"] == 102 - UNMATCHED_MOST
    # One that was redelivered to before its topics changed still concerns it.
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at) select subscription_id, $1, 0, 1, 'order', 3, 'x', now() from subscription where name = 'other-099'",
        transaction_id,
    )
    [first, _] = (await client.get(f"/transactions/{transaction_id}/delivery")).json()["messages"]
    reasons = {one["subscription"]: one["reason"] for one in first["subscriptions"]}
    assert reasons["other-099"] == "dead"
    assert first["left_out"] == 99 - UNMATCHED_MOST
