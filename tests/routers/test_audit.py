"""The audit: what people did, under whose name, and for how long it is kept."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from app.database.connection import Connection
from app.permissions import Role
from app.retention.loop import clear_audit
from app.store.admin import audit
from tests.conftest import register_group
from tests.support.api_keys import bearer, make
from tests.support.check_stepping import in_doubt
from tests.support.consumers import put_pulled
from tests.support.keyed_services import ORDER, start
from tests.support.relay_stepping import order, publish

__all__ = ["start"]

SENDING = ("/half", "/messages")


async def test_a_verdict_is_the_keys(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await register_group(db, "shop")
    operator = bearer(await make(runtime, Role.OPERATOR, name="dana"))
    for actor, recorded in ((None, "dana"), ("dana", "dana"), ("erin", "erin (key dana)")):
        transaction_id = (await client.post("/half", json=ORDER)).json()["transaction_id"]
        wanted = {"verdict": "commit", "reason": "asked", "force": True} | ({"actor": actor} if actor else {})
        answer = await client.post(f"/transactions/{transaction_id}/verdict", json=wanted, headers=operator)
        assert answer.status_code == 200
        assert (await client.get(f"/transactions/{transaction_id}")).json()["verdict"]["actor"] == recorded
        query = {"target": transaction_id, "what": "transaction.verdict"}
        [row] = (await client.get("/audit", params=query)).json()["items"]
        assert (row["actor"], row["role"], row["what"]) == ("dana", "operator", "transaction.verdict")
        assert row["detail"].get("actor") == actor
        assert row["detail"]["reason"] == "asked"


async def test_nothing_is_done_under_anothers_name_alone(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await register_group(db, "shop")
    put = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
    assert (await client.put("/subscriptions/mailer", json=put)).status_code == 201
    one = (await client.post("/messages", json=ORDER)).json()["transaction_id"]
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
        "died_at) select s.subscription_id, o.transaction_id, 0, o.offset, o.topic, 3, 'retries_exhausted', now() "
        "from subscription s, outbox o"
    )
    other = (await client.post("/half", json=ORDER)).json()["transaction_id"]
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
        "values ($1, 'shop', 1, now(), now())",
        other,
    )
    client.headers.update(bearer(await make(runtime, Role.OPERATOR, name="dana")))
    claimed = {"actor": "erin", "reason": "asked"}
    many = {"producer_group": "shop", "state": "in_doubt", "verdict": "rollback", "dry_run": False}
    for path, wanted in (
        ("/transactions/verdict", many),
        (f"/transactions/{other}/reissue", {}),
        ("/dead-letters/redeliver", {"ids": [{"subscription": "mailer", "message_id": f"{one}-0"}]}),
        ("/subscriptions/mailer/replay", {"from": "earliest"}),
    ):
        answer = await client.post(path, json={**wanted, **claimed})
        assert answer.is_success, answer.text
        for table in ("op", "reissue", "redelivery", "replay"):
            assert not await db.fetchval(f"select exists (select from {table} where actor = 'erin')"), (path, table)
    for table, rows in (("op", 2), ("reissue", 1), ("redelivery", 1), ("replay", 1)):
        assert await db.fetchval(f"select count(*) from {table} where actor = 'erin (key dana)'") == rows, table


async def test_messages_of_an_admin_are_audited_and_those_of_a_producer_are_not(
    start: Callable[..., Any], db: Connection
) -> None:
    runtime, client = await start()
    await register_group(db, "shop")
    producer = bearer(await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["order"]))
    sent: dict[str, list[str]] = {}
    for who, headers in (("admin", {}), ("producer", producer)):
        ids = [(await client.post(path, json=ORDER, headers=headers)).json()["transaction_id"] for path in SENDING]
        for verdict in ("unknown", "commit"):
            end = {"transaction_id": ids[0], "producer_group": "shop", "verdict": verdict, "reason": "it was paid"}
            assert (await client.post("/end", json=end, headers=headers)).is_success
        sent[who] = ids
    rows = (await client.get("/audit", params={"actor": "HALFNOTE_ADMIN_KEY"})).json()["items"]
    half, plain = sent["admin"]
    about = {"producer_group": "shop", "topics": ["order"], "messages": 1}
    ended = {"producer_group": "shop", "verdict": "commit", "reason": "it was paid"}
    # An `unknown` outside a check changes nothing.
    assert [(row["what"], row["target"], row["detail"]) for row in reversed(rows)] == [
        ("transaction.half", half, about),
        ("transaction.plain", plain, about),
        ("transaction.end", half, ended),
    ]
    assert {row["role"] for row in rows} == {"admin"}
    assert await db.fetchval("select count(*) from audit where target = any($1)", sent["producer"]) == 0
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
        "values ($1, 'shop', 1, now(), now())",
        (open_id := (await client.post("/half", json=ORDER)).json()["transaction_id"]),
    )
    answer = {"transaction_id": open_id, "producer_group": "shop", "verdict": "unknown", "from_check": True}
    assert (await client.post("/end", json=answer)).status_code == 202
    [row, _] = (await client.get("/audit", params={"target": open_id})).json()["items"]
    assert (row["what"], row["detail"]["verdict"], row["detail"]["from_check"]) == ("transaction.end", "unknown", True)


async def test_nothing_an_admin_sends_is_stored_without_its_act(start: Callable[..., Any], db: Connection) -> None:
    _, client = await start()
    await register_group(db, "shop")
    half = (await client.post("/half", json=ORDER)).json()["transaction_id"]
    await db.execute("alter table audit rename to elsewhere")
    end = {"transaction_id": half, "producer_group": "shop", "verdict": "commit"}
    for path, wanted in (*((path, ORDER) for path in SENDING), ("/end", end)):
        assert (await client.post(path, json=wanted)).status_code >= 500
    assert [await db.fetchval(f"select count(*) from {table}") for table in ("half", "op")] == [1, 0]


@pytest.mark.parametrize("fields", [{}, {"ordered": "key"}, {"rate_per_s": 1000}])
async def test_an_admins_claims_are_audited_and_those_of_a_subscriber_are_not(
    start: Callable[..., Any], db: Connection, fields: dict[str, Any]
) -> None:
    runtime, client = await start()
    await register_group(db, "shop")
    await put_pulled(client, **fields)
    await publish(client, *(order(n) for n in range(12)))
    scope = {"subscriptions": ["worker"], "topics": ["order"]}
    subscriber = bearer(await make(runtime, Role.SUBSCRIBER, **scope))
    settles = [("ack", {}), ("nack", {"error": "no paper"}), ("reject", {"reason": "unknown customer"})]
    for count, headers in ((1, subscriber), (11, {})):
        answer = await client.post("/subscriptions/worker/claim", json={"max": count}, headers=headers)
        messages = answer.json()["messages"]
        assert len(messages) == count
        handles = [one["handle"] for one in messages]
        requests = [("extend", {"invisible_s": 60}), *settles]
        for (action, sent), held in zip(requests, (handles, handles[:1], handles[1:2], handles[2:]), strict=True):
            for taken in [held] if held else []:
                wanted = {"handles": ["none", *taken], **sent}
                path = f"/subscriptions/worker/{action}"
                assert (await client.post(path, json=wanted, headers=headers)).status_code == 200
    # They are about no message.
    assert (await client.post("/subscriptions/worker/ack", json={"handles": ["none"]})).status_code == 200
    await db.execute("update delivery_retry set due_at = now() + interval '1 hour'")
    assert (await client.post("/subscriptions/worker/claim", json={})).json()["messages"] == []
    rows = (await client.get("/audit", params={"target": "worker", "sort": "oldest"})).json()["items"]
    assert [(row["what"].partition(".")[2], row["detail"].get("messages")) for row in rows] == [
        ("put", None),
        ("claim", 11),
        ("extend", 11),
        ("acknowledge", 1),
        ("give_back", 1),
        ("reject", 9),
    ]
    assert {row["role"] for row in rows} == {"admin"}
    claimed = [one["message_id"] for one in messages]
    assert rows[1]["detail"]["message_ids"] == claimed[:10]
    assert rows[3]["detail"]["message_ids"] == claimed[:1]
    assert rows[5]["detail"]["reason"] == "unknown customer"


@pytest.mark.parametrize("fields", [{}, {"ordered": "key"}, {"rate_per_s": 1000}])
async def test_no_claim_of_an_admin_is_without_its_act(
    start: Callable[..., Any], db: Connection, fields: dict[str, Any]
) -> None:
    _, client = await start()
    await register_group(db, "shop")
    await put_pulled(client, **fields)
    await publish(client, *(order(n) for n in range(3)))
    wanted = {"max": 1, "invisible_s": 3600}
    held = (await client.post("/subscriptions/worker/claim", json=wanted)).json()["messages"]
    handles = {"handles": [one["handle"] for one in held]}
    await db.execute("alter table audit rename to elsewhere")
    settles = [("ack", handles), ("nack", handles), ("reject", handles), ("extend", {**handles, "invisible_s": 600})]
    # How messages are settled does not depend on the order or the rate.
    for action, sent in [("claim", {"max": 1}), *([] if fields else settles)]:
        assert (await client.post(f"/subscriptions/worker/{action}", json=sent)).status_code >= 500, action
    tables = {"pull_claim": 1, "receipt": 0, "delivery_retry": 0, "dead_letter": 0, "attempt": 0}
    assert {name: await db.fetchval(f"select count(*) from {name}") for name in tables} == tables
    await db.execute("alter table elsewhere rename to audit")
    assert len((await client.post("/subscriptions/worker/claim", json={})).json()["messages"]) == 2
    answer = await client.post("/subscriptions/worker/ack", json=handles)
    assert [one["status"] for one in answer.json()["outcomes"]] == [200]


async def test_no_claim_of_checks_of_an_admin_is_without_its_act(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    group = {"check_urls": [], "checks": "claim"}
    assert (await client.put("/producer-groups/shop", json=group)).status_code == 201
    doubtful = await in_doubt(client, runtime)
    producer = bearer(await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["order"]))
    path = "/producer-groups/shop/checks/claim"
    await db.execute("alter table audit rename to elsewhere")
    assert (await client.post(path, json={})).status_code >= 500
    await db.execute("alter table elsewhere rename to audit")
    # The check is not out: the next claim gets it.
    assert [one["transaction_id"] for one in (await client.post(path, json={})).json()["checks"]] == [str(doubtful)]
    assert (await client.post(path, json={})).json()["checks"] == []
    await in_doubt(client, runtime)
    assert len((await client.post(path, json={}, headers=producer)).json()["checks"]) == 1
    query = {"what": "producer_group.claim_checks"}
    [row] = (await client.get("/audit", params=query)).json()["items"]
    assert (row["target"], row["detail"]) == ("shop", {"checks": 1})


async def test_the_audit_in_pages_and_by_filters(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    before = runtime.clock.now()
    for name in ("a", "b", "c", "d", "e"):
        await client.put(f"/topics/{name}")
    await client.delete("/topics/a")
    seen, cursor = [], None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = (await client.get("/audit", params=query)).json()
        seen += [(one["what"], one["target"]) for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert page.get("total") is None
    assert seen == [("topic.undeclare", "a"), *(("topic.declare", name) for name in "edcba")]
    oldest, query = [], {"sort": "oldest", "limit": "4", "count": "true"}
    while True:
        page = (await client.get("/audit", params=query)).json()
        oldest += [(one["what"], one["target"]) for one in page["items"]]
        # The total is that of all pages.
        assert page["total"] == {"count": 6, "exact": True}
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert oldest == seen[::-1]
    for query, count in (
        ({"target": "a"}, 2),
        ({"what": "topic.declare"}, 5),
        ({"actor": "HALFNOTE_ADMIN_KEY"}, 6),
        ({"actor": "dana"}, 0),
        ({"key_id": 1}, 0),
        ({"after": before.isoformat()}, 6),
        ({"before": before.isoformat()}, 0),
    ):
        for sort in ("newest", "oldest"):
            page = (await client.get("/audit", params={**query, "sort": sort, "count": "true"})).json()
            assert (len(page["items"]), page["total"]["count"]) == (count, count), query


async def test_the_audit_is_kept_for_a_time(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await client.put("/topics/order")
    now = runtime.clock.now()
    await clear_audit(db, now - timedelta(days=1))
    assert await db.fetchval("select count(*) from audit") == 1
    await clear_audit(db, now + timedelta(seconds=1))
    assert await db.fetchval("select count(*) from audit") == 0


async def test_rows_that_are_removed_while_the_chain_is_read_are_not_missing(
    start: Callable[..., Any], db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, client = await start()
    for name in ("order", "photo", "invoice"):
        assert (await client.put(f"/topics/{name}")).status_code == 204
    read = audit.chain_ends

    async def read_and_forget(connection: Connection) -> audit.ChainEnds:
        ends = await read(connection)
        await clear_audit(db, runtime.clock.now() + timedelta(seconds=1))
        return ends

    monkeypatch.setattr(audit, "chain_ends", read_and_forget)
    chain = (await client.get("/audit/chain")).json()
    assert (chain["begins_after"]["place"], [row["place"] for row in chain["items"]]) == (0, [1, 2, 3])
    assert chain["head"]["place"] == 3


async def test_a_repeated_put_leaves_no_row(start: Callable[..., Any], db: Connection) -> None:
    _, client = await start()
    group = {"check_urls": ["http://127.0.0.1:9/check"], "secret": "whsec_" + "U2VjcmV0LW9mLW9yZGVyLTEwMzAtbm90LXRv"}
    secret = "whsec_" + "b3JkZXIgMTAzMCBpcyB0aGUgZXhhbXBsZSBvZiBoYWxm"
    subscription = {
        "topics": ["order"],
        "destination": {"type": "webhook", "url": "http://127.0.0.1:9/", "secret": secret},
    }
    for _ in range(2):
        assert (await client.put("/producer-groups/shop", json=group)).is_success
        assert (await client.put("/subscriptions/mailer", json=subscription)).is_success
        assert (await client.put("/topics/order")).is_success
    rows = await db.fetch("select what, detail from audit order by audit_id")
    assert [row["what"] for row in rows] == ["producer_group.put", "subscription.put", "topic.declare"]
    assert not any("whsec_" in row["detail"] for row in rows)
