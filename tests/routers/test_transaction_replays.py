"""`POST /transactions/{id}/replay`: the messages of one transaction, to one subscription, once more."""

from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.subscriptions.replays import running
from tests.support.check_responder import Responder
from tests.support.dead_letters import relay, subscription
from tests.support.relay_stepping import offsets, subscribe, turn_until

__all__ = ["relay"]

MESSAGES = [
    {"topic": "order", "key": "order-1030", "body": 0},
    {"topic": "photo", "key": "photo-1", "body": 1},
    {"topic": "order", "key": "order-1030", "tag": "paid", "body": 2},
]


async def committed(client: httpx.AsyncClient) -> tuple[str, list[int]]:
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": MESSAGES})
    assert answer.status_code == 201, answer.text
    return answer.json()["transaction_id"], [one["offset"] for one in answer.json()["messages"]]


async def ask(client: httpx.AsyncClient, transaction_id: str, **content: Any) -> httpx.Response:
    wanted = {"subscription": "mailer", "reason": "the mailer lost it", **content}
    return await client.post(f"/transactions/{transaction_id}/replay", json=wanted)


async def test_a_subscription_gets_the_messages_that_it_takes_again(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, relay: Relay, group: str
) -> None:
    async with Responder(status=204) as receiver, Responder(status=204) as other:
        await subscribe(client, receiver)
        await subscribe(client, other, "crm")
        transaction_id, made = await committed(client)
        await committed(client)
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 4 and len(other.calls) == 4)
        answer = await ask(client, transaction_id, actor="dana")
        assert answer.status_code == 202
        replay = answer.json()
        assert (replay["subscription"], replay["state"], replay["reason"]) == (
            "mailer",
            "running",
            "the mailer lost it",
        )
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 6)
        assert offsets(receiver)[4:] == [made[0], made[2]]
        assert {call.headers["halfnote-replay"] for call in receiver.calls[4:]} == {str(replay["replay_id"])}
        only = await ask(client, transaction_id, position=2)
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 7)
        assert offsets(receiver)[6:] == [made[2]]
        assert only.status_code == 202
        # The other subscription gets nothing again.
        assert len(other.calls) == 4
    acts = "select actor, target, detail ->> 'subscription' as name from audit where what = 'transaction.replay'"
    audited = await db.fetch(acts)
    assert [(row["actor"], row["target"], row["name"]) for row in audited] == [
        ("dana", transaction_id, "mailer"),
        (None, transaction_id, "mailer"),
    ]


async def test_a_subscription_that_begins_later_gets_it(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, group: str
) -> None:
    transaction_id, made = await committed(client)
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver)
        assert (await ask(client, transaction_id)).status_code == 202
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        assert offsets(receiver) == [made[0], made[2]]


async def test_what_cannot_be_sent_is_refused(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    await subscription(client, "photos", topics=["photo"], filters={"tags": ["raw"]})
    transaction_id, _ = await committed(client)
    half = await client.post("/half", json={"producer_group": "shop", "messages": [MESSAGES[0]]})
    rolled_back = (await client.post("/half", json={"producer_group": "shop", "messages": [MESSAGES[0]]})).json()
    end = {"transaction_id": rolled_back["transaction_id"], "producer_group": "shop", "verdict": "rollback"}
    await client.post("/end", json=end)
    unknown = "0193a7d6-a5c8-7b1e-8f00-1030a1030a10"
    for asked, content, status, problem in (
        (unknown, {}, 404, "transaction-unknown"),
        (half.json()["transaction_id"], {}, 409, "not-committed"),
        (rolled_back["transaction_id"], {}, 409, "not-committed"),
        (transaction_id, {"subscription": "nothing"}, 404, "subscription-unknown"),
        (transaction_id, {"subscription": "photos"}, 422, "invalid"),
        (transaction_id, {"position": 1}, 422, "invalid"),
        (transaction_id, {"position": 3}, 422, "invalid"),
        (transaction_id, {"reason": ""}, 422, "invalid"),
    ):
        answer = await ask(client, asked, **content)
        assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{problem}"), answer.text
    assert await running(db) == []
    assert await db.fetchval("select count(*) from audit where what = 'transaction.replay'") == 0


async def test_a_transaction_of_a_closed_day_is_not_replayed_while_an_older_day_is_open(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver)
    today = runtime.clock.offset_s
    runtime.clock.offset_s = today - 86_400
    _, [oldest, *_] = await committed(client)
    runtime.clock.offset_s = today
    transaction_id, _ = await committed(client)
    closed = "update day set state = 'archiving' where low <= $1::uuid and high > $1"
    assert await db.execute(closed, transaction_id) == "UPDATE 1"
    answer = await ask(client, transaction_id)
    assert (answer.status_code, answer.json()["type"], answer.json()["oldest"]) == (410, "/problems/log-gone", oldest)
    assert await db.fetchval("select count(*) from audit where what = 'transaction.replay'") == 0


async def test_a_subscription_has_a_limit_of_replays(client: httpx.AsyncClient, group: str) -> None:
    await subscription(client, "mailer")
    ids = [(await committed(client))[0] for _ in range(11)]
    answers = [await ask(client, transaction_id) for transaction_id in ids]
    assert [one.status_code for one in answers] == [202] * 10 + [409]
    assert answers[-1].json()["type"] == "/problems/too-many-replays"


async def test_the_same_one_does_not_run_twice(client: httpx.AsyncClient, group: str) -> None:
    await subscription(client, "mailer")
    transaction_id, _ = await committed(client)
    made = (await ask(client, transaction_id)).json()
    refused = (await ask(client, transaction_id)).json()
    assert (refused["type"], refused["replay_id"]) == ("/problems/replay-running", made["replay_id"])
    assert (await ask(client, transaction_id, position=2)).status_code == 202


@pytest.mark.parametrize("missing", ["subscription", "reason"])
async def test_a_request_names_the_subscription_and_the_reason(client: httpx.AsyncClient, missing: str) -> None:
    content = {"subscription": "mailer", "reason": "lost"}
    del content[missing]
    path = "/transactions/0193a7d6-a5c8-7b1e-8f00-1030a1030a10/replay"
    answer = await client.post(path, json=content)
    assert (answer.status_code, answer.json()["field"]) == (422, missing)
