"""API keys: how they are created, stored, replaced and revoked; what is shown of them, and what never is."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from app.config import LOOPBACK, BadAdminKeyFile, Settings
from app.database.connection import Connection
from app.loops.live_settings import LiveSettingsReader
from app.permissions import KEY_CHARACTERS, KeyScope, Role, is_key, new_key
from app.retention.loop import clear_audit
from app.runtime.live_settings import follow
from app.runtime.state import Runtime
from tests.admission.test_request_guard import raw_call
from tests.conftest import assembled, client_of, register_group, shares
from tests.support.api_keys import bearer, make
from tests.support.processes import ROOT, Service, free_port

ORDER = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}
SENDING = ("/half", "/messages")
CONFIGURED = "hn_" + "a1B2c3D4" * 8


def settings_of(dsn: str, **fields: Any) -> Settings:
    known = {
        "database_url": dsn,
        "pool_size": 4,
        "linger_s": 0,
        "auth": "keys",
        "admin_key": CONFIGURED,
        "allow_networks": LOOPBACK,
    }
    return Settings(_env_file=None, **{**known, **fields})


@pytest.fixture
async def start(dsn: str) -> AsyncIterator[Callable[..., Any]]:
    """Start a process over the test's database, with settings of its own."""
    async with AsyncExitStack() as stack:

        async def started(**fields: Any) -> tuple[Runtime, httpx.AsyncClient]:
            runtime = await stack.enter_async_context(assembled(settings_of(dsn, **fields), dsn))
            client = await stack.enter_async_context(client_of(runtime))
            client.headers.update(bearer(CONFIGURED))
            return runtime, client

        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_admin(shared_dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the configured admin's key over the module's database, for requests that are refused."""
    async with assembled(settings_of(shared_dsn), shared_dsn) as runtime, client_of(runtime) as client:
        client.headers.update(bearer(CONFIGURED))
        yield client


async def made(client: httpx.AsyncClient, role: str = "metrics", **fields: Any) -> dict[str, Any]:
    answer = await client.post("/api-keys", json={"name": "grafana", "role": role, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return dict(answer.json())


async def status(client: httpx.AsyncClient, key: str, path: str = "/metrics") -> int:
    return (await client.get(path, headers=bearer(key))).status_code


def test_a_key_has_256_bits_in_43_characters() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {3 + KEY_CHARACTERS}
    assert all(map(is_key, keys))
    assert 62**KEY_CHARACTERS > 2**256
    for no_key in ("", "hn_", "hn_short", "hx_" + "a" * 43, "hn_" + "a" * 42 + "-", "hn_" + "a" * 43 + "\n"):
        assert not is_key(no_key)


PATTERNS = st.lists(st.sampled_from(["order", "order.*", "or*", "*", "halfnote.*", "halfnote.finding", "half*"]))
TOPICS = st.sampled_from(["order", "order.paid", "orders", "pay", "halfnote.finding", "halfnote.x", "half", "halfnote"])
SUBSCRIBED = st.sampled_from(["order", "order.*", "order.p*", "*", "halfnote.*", "halfnote.finding", "half*", "h*"])


def takes(pattern: str, topic: str) -> bool:
    """As a subscription's topic takes messages."""
    if not pattern.endswith("*"):
        return pattern == topic
    return topic.startswith(pattern[:-1]) and (pattern.startswith("halfnote.") or not topic.startswith("halfnote."))


@given(PATTERNS, TOPICS)
def test_a_scope_takes_topics_as_subscriptions_do(patterns: list[str], topic: str) -> None:
    assert KeyScope(patterns).takes_topic(topic) == any(takes(one, topic) for one in patterns)


@given(PATTERNS, SUBSCRIBED, TOPICS)
def test_a_covered_pattern_matches_nothing_outside_the_scope(patterns: list[str], subscribed: str, topic: str) -> None:
    scope = KeyScope(patterns)
    if scope.covers_topics(subscribed) and takes(subscribed, topic):
        assert scope.takes_topic(topic)
    if subscribed in patterns:
        assert scope.covers_topics(subscribed)


async def test_only_the_digest_is_stored_and_the_key_is_shown_once(
    start: Callable[..., Any], db: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    _, client = await start()
    key = (await made(client))["key"]
    row = await db.fetchrow("select digest, prefix, api_key::text as whole from api_key")
    assert row is not None
    assert row["digest"] == sha256(key.encode()).digest()
    assert key.startswith(row["prefix"])
    assert len(row["prefix"]) == 9
    listed = (await client.get("/api-keys")).text + (await client.get("/api-keys/1")).text
    audited = (await client.get("/audit")).text
    printed = capfd.readouterr()
    for place in (row["whole"], listed, audited, printed.out, printed.err):
        assert key not in place
        assert key[9:] not in place
    assert '"what":"api_key.create"' in audited


@shares
@pytest.mark.parametrize(
    ("authorization", "detail"),
    [
        (None, "No key came"),
        ("", "not known"),
        ("Bearer", "not known"),
        ("Bearer ", "not known"),
        ("Basic aG46aG4=", "not known"),
        (CONFIGURED, "not known"),
        (f"Bearer hn_{'k3Y' * 15}", "not known"),
        (f"Bearer {CONFIGURED}x", "not known"),
        (f"Bearer {CONFIGURED[:-1]}", "not known"),
        (f"Bearer {CONFIGURED.swapcase()}", "not known"),
        (f"Bearer {CONFIGURED}, Bearer {CONFIGURED}", "not known"),
        ("Bearer \u00ff", "not known"),
    ],
)
async def test_an_invalid_key_is_401(shared_admin: httpx.AsyncClient, authorization: str | None, detail: str) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    for path in ("/half", "/topics", "/nowhere"):
        method = "POST" if path == "/half" else "GET"
        request = shared_admin.build_request(method, path, headers=headers)
        if authorization is None:
            del request.headers["authorization"]
        answer = await shared_admin.send(request)
        assert answer.status_code == 401
        assert detail in answer.json()["detail"]
        assert answer.headers["www-authenticate"].startswith('Bearer realm="halfnote"')
        assert ("invalid_token" in answer.headers["www-authenticate"]) == (authorization is not None)


@shares
async def test_the_scheme_is_in_any_case(shared_admin: httpx.AsyncClient) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = await shared_admin.get("/topics", headers={"authorization": f"{scheme} {CONFIGURED}"})
        assert answer.status_code == 200


async def test_a_body_without_a_key_is_not_read(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    app = client._transport.app

    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was asked for")
        yield b""

    for path in ("/half", "/producer-groups/shop"):
        method = "POST" if path == "/half" else "PUT"
        status, problem = await raw_call(app, method, path, {"content-length": "1000000"}, endless())
        assert (status, problem["type"]) == (401, "/problems/unauthenticated")
    assert runtime.load_limits.in_flight == 0


async def test_a_key_of_another_replica_is_known_and_its_end_as_well(start: Callable[..., Any]) -> None:
    _, one = await start()
    other, two = await start()
    key = await made(one)
    assert await status(one, key["key"]) == 200
    assert await status(two, key["key"]) == 401
    await LiveSettingsReader().step(other, other.clock.now())
    assert await status(two, key["key"]) == 200
    assert (await one.delete(f"/api-keys/{key['key_id']}")).status_code == 204
    refused = await one.get("/metrics", headers=bearer(key["key"]))
    assert refused.status_code == 401
    assert "was revoked" in refused.json()["detail"]
    await LiveSettingsReader().step(other, other.clock.now())
    assert await status(two, key["key"]) == 401
    assert (await one.delete(f"/api-keys/{key['key_id']}")).status_code == 204
    acts = (await one.get("/audit", params={"what": "api_key.revoke"})).json()["items"]
    assert len(acts) == 1


async def test_without_news_no_keys_are_read(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await made(client)
    await LiveSettingsReader().step(runtime, runtime.clock.now())
    # Behind the service's back, so without the news.
    await db.execute("update api_key set revoked_at = now()")
    before = runtime.authenticator.version
    await LiveSettingsReader().step(runtime, runtime.clock.now())
    assert runtime.authenticator.version == before
    assert runtime.authenticator.has_admin


async def test_a_key_expires_by_the_databases_clock(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    now = runtime.clock.now()
    expires = (now + timedelta(hours=1)).isoformat()
    key = (await made(client, expires_at=expires))["key"]
    assert await status(client, key) == 200
    runtime.clock.fixed = now + timedelta(minutes=61)
    refused = await client.get("/metrics", headers=bearer(key))
    assert refused.status_code == 401
    assert "has expired" in refused.json()["detail"]
    over = await client.post("/api-keys", json={"name": "x", "role": "metrics", "expires_at": expires})
    assert (over.status_code, over.json()["field"]) == (422, "expires_at")


async def test_a_rotation_overlaps(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    now = runtime.clock.now()
    scope = {"producer_groups": ["shop"], "topics": ["order"], "rate_per_s": 1030.0}
    former = await made(client, "producer", **scope)
    answer = await client.post(f"/api-keys/{former['key_id']}/rotate", json={"overlap_s": 600})
    assert answer.status_code == 201
    new = answer.json()
    same = ("name", "role", "producer_groups", "topics", "subscriptions", "rate_per_s")
    assert {name: new[name] for name in same} == {name: former[name] for name in same}
    assert new["rotated_from"] == former["key_id"]
    assert new["key"] != former["key"]
    assert [await status(client, one["key"], "/topics") for one in (former, new)] == [200, 200]
    runtime.clock.fixed = now + timedelta(seconds=605)
    assert [await status(client, one["key"], "/topics") for one in (former, new)] == [401, 200]
    again = await client.post(f"/api-keys/{former['key_id']}/rotate", json={})
    assert (again.status_code, again.json()["type"]) == (409, "/problems/api-key-over")
    assert (await client.post("/api-keys/1030/rotate", json={})).json()["type"] == "/problems/api-key-unknown"


async def test_a_rotation_puts_no_end_off(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    expires = runtime.clock.now() + timedelta(minutes=5)
    former = await made(client, expires_at=expires.isoformat())
    new = (await client.post(f"/api-keys/{former['key_id']}/rotate", json={})).json()
    shown = (await client.get(f"/api-keys/{former['key_id']}")).json()
    assert new["expires_at"] == shown["expires_at"] == former["expires_at"]


async def test_last_used_is_noted_once_a_minute(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    key = await made(client)
    now, reader = runtime.clock.now(), LiveSettingsReader()
    noted = "select last_used_at from api_key"
    await reader.step(runtime, now)
    assert await db.fetchval(noted) is None
    for at, expected in ((0, 0), (30, 0), (61, 61)):
        assert await status(client, key["key"]) == 200
        await reader.step(runtime, now + timedelta(seconds=at))
        assert await db.fetchval(noted) == now + timedelta(seconds=expected)


@shares
async def test_the_configured_key_cannot_be_chosen_for_another(shared_admin: httpx.AsyncClient) -> None:
    answer = await shared_admin.post("/api-keys", json={"name": "x", "role": "metrics", "key": CONFIGURED})
    assert (answer.status_code, answer.json()["field"]) == (409, "key")


@shares
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": "producer"}, "producer_groups"),
        ({"role": "producer", "producer_groups": ["shop"]}, "topics"),
        ({"role": "subscriber", "topics": ["order"]}, "subscriptions"),
        ({"role": "admin", "topics": ["order"]}, "topics"),
        ({"role": "king"}, "role"),
        ({"role": "producer", "producer_groups": ["a*b"], "topics": ["*"]}, "producer_groups"),
        ({"role": "producer", "producer_groups": ["shop"], "topics": ["a*b"]}, "topics"),
        ({"role": "metrics", "rate_per_s": 0}, "rate_per_s"),
        ({"role": "metrics", "key": "hn_short"}, "key"),
    ],
)
async def test_an_invalid_key_request_names_its_field(
    shared_admin: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    answer = await shared_admin.post("/api-keys", json={"name": "x", **fields})
    assert answer.status_code == 422
    assert named in answer.json()["field"] + answer.json()["detail"]


async def test_a_missing_scope_is_named(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await register_group(db, "shop")
    key = await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["order", "order.*"])
    for group, topic, missing in (
        ("bank", "order", {"groups": "bank"}),
        ("shop", "orders", {"topics": "orders"}),
        ("shop", "order", None),
        ("shop", "order.paid", None),
    ):
        half = {"producer_group": group, "messages": [{"topic": topic, "body": 1}]}
        answer = await client.post("/half", json=half, headers=bearer(key))
        assert answer.json().get("missing") == missing
        assert answer.status_code == (403 if missing else 201)
    refused = await client.put("/accept", json={"accept": "all"}, headers=bearer(key))
    assert refused.json()["missing"] == {"role": ["admin", "operator"]}


async def test_lists_show_what_is_in_scope(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    for name in ("shop", "shop.eu", "bank"):
        await register_group(db, name)
        put = {"topics": [name], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
        assert (await client.put(f"/subscriptions/{name}", json=put)).status_code == 201
        await client.put(f"/topics/{name}")
    producer = bearer(await make(runtime, Role.PRODUCER, producer_groups=["shop*"], topics=["shop*"]))
    subscriber = bearer(await make(runtime, Role.SUBSCRIBER, subscriptions=["shop.*"], topics=["shop*"]))
    groups = (await client.get("/producer-groups", params={"limit": 1}, headers=producer)).json()
    assert [one["name"] for one in groups["items"]] == ["shop"]
    assert groups["next_cursor"] == "shop"
    groups = (await client.get("/producer-groups", params={"cursor": "shop"}, headers=producer)).json()
    assert ([one["name"] for one in groups["items"]], groups["next_cursor"]) == (["shop.eu"], None)
    found = (await client.get("/subscriptions", headers=subscriber)).json()["items"]
    assert [one["name"] for one in found] == ["shop.eu"]
    topics = (await client.get("/topics", headers=subscriber)).json()["items"]
    assert [(one["topic"], one["subscriptions"]) for one in topics] == [("shop", []), ("shop.eu", ["shop.eu"])]
    await db.execute("insert into topic (name, first_seen_at) values ('halfnote.finding', now())")
    for scope, shown in (("*", False), ("half*", False), ("halfnote.f*", True), ("halfnote.finding", True)):
        reader = bearer(await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=[scope]))
        topics = (await client.get("/topics", headers=reader)).json()["items"]
        assert ("halfnote.finding" in {one["topic"] for one in topics}) == shown, scope
    assert "halfnote.finding" in {one["topic"] for one in (await client.get("/topics")).json()["items"]}
    wide = {"topics": ["*"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
    refused = await client.put("/subscriptions/shop.eu", json=wide, headers=subscriber)
    assert refused.json()["missing"] == {"topics": "*"}


async def test_a_subscriber_sees_no_message_before_its_commit(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await register_group(db, "shop")
    for name in ("mailer", "ledger"):
        put = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
        await client.put(f"/subscriptions/{name}", json=put)
    reader = bearer(await make(runtime, Role.SUBSCRIBER, subscriptions=["mailer"], topics=["order"]))
    transaction_id = (await client.post("/half", json=ORDER)).json()["transaction_id"]
    path = f"/messages/{transaction_id}-0"
    assert (await client.get(path, headers=reader)).json()["type"] == "/problems/transaction-unknown"
    end = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": "commit"}
    assert (await client.post("/end", json=end)).status_code == 200
    shown = (await client.get(path, headers=reader)).json()
    assert shown["body"] == {"order": 1030}
    assert {one["subscription"] for one in shown["deliveries"]} == {"mailer"}
    everything = (await client.get(path)).json()["deliveries"]
    assert {one["subscription"] for one in everything} == {"mailer", "ledger"}


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
    assert seen == [("topic.undeclare", "a"), *(("topic.declare", name) for name in "edcba")]
    for query, count in (
        ({"target": "a"}, 2),
        ({"what": "topic.declare"}, 5),
        ({"actor": "HALFNOTE_ADMIN_KEY"}, 6),
        ({"actor": "dana"}, 0),
        ({"key_id": 1}, 0),
        ({"after": before.isoformat()}, 6),
        ({"before": before.isoformat()}, 0),
    ):
        assert len((await client.get("/audit", params=query)).json()["items"]) == count, query


async def test_the_audit_is_kept_for_a_time(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await client.put("/topics/order")
    now = runtime.clock.now()
    await clear_audit(db, now - timedelta(days=1))
    assert await db.fetchval("select count(*) from audit") == 1
    await clear_audit(db, now + timedelta(seconds=1))
    assert await db.fetchval("select count(*) from audit") == 0


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


async def test_undeclared_topics_are_refused(start: Callable[..., Any], db: Connection) -> None:
    await register_group(db, "shop")
    _, other = await start()
    runtime, client = await start(topics="declared")
    two = {"producer_group": "shop", "messages": [{"topic": "order", "body": 1}, {"topic": "ordr", "body": 1}]}
    for path in ("/half", "/messages"):
        refused = await client.post(path, json=two)
        assert (refused.status_code, refused.json()["type"]) == (422, "/problems/topic-undeclared")
        assert refused.json()["field"] == "messages[0].topic"
    # By another replica: this one reads it on demand, and all of them learn of it by the notification.
    assert (await other.put("/topics/order")).status_code == 204
    assert (await client.post("/half", json=ORDER)).status_code == 201
    assert (await client.post("/half", json=two)).json()["field"] == "messages[1].topic"
    await follow(runtime, runtime.clock.now())
    assert runtime.declared == {"order"}
    stored = (await other.post("/half", json=ORDER)).json()["transaction_id"]
    assert (await other.delete("/topics/order")).status_code == 204
    await follow(runtime, runtime.clock.now())
    assert (await client.post("/half", json=ORDER)).status_code == 422
    # A stored half is answered regardless of later declarations.
    repeated = await client.post("/half", json={**ORDER, "transaction_id": stored})
    assert (repeated.status_code, repeated.json()["replayed"]) == (200, True)
    assert (await other.delete("/topics/order")).status_code == 404
    assert (await other.put("/topics/halfnote.mine")).json()["type"] == "/problems/topic-reserved"


async def test_any_host_is_answered_where_keys_are_asked_for(start: Callable[..., Any]) -> None:
    _, client = await start()
    assert (await client.get("/topics", headers={"host": "halfnote.example"})).status_code == 200
    own = {"host": "halfnote.example", "origin": "https://halfnote.example"}
    assert (await client.put("/topics/order", headers=own)).status_code == 204
    foreign = {"host": "halfnote.example", "origin": "https://evil.example"}
    assert (await client.put("/topics/order", headers=foreign)).json()["type"] == "/problems/foreign-origin"
    _, strict = await start(allowed_hosts=("halfnote.example",))
    assert (await strict.get("/topics", headers={"host": "halfnote.example"})).status_code == 200
    assert (await strict.get("/topics", headers={"host": "other.example"})).status_code == 421


async def test_health_shows_no_details_without_a_key(start: Callable[..., Any]) -> None:
    _, client = await start()
    checks = {one["name"]: one["detail"] for one in (await client.get("/readyz")).json()["checks"]}
    assert "Postgres" in checks["database"]
    for headers in ({"authorization": ""}, bearer(new_key())):
        shown = (await client.get("/readyz", headers=headers)).json()["checks"]
        assert {one["detail"] for one in shown} == {"details are shown to an operator's or admin's key"}


async def test_limits_of_a_key(start: Callable[..., Any]) -> None:
    runtime, client = await start(key_rate_per_s=0.001)
    slow, own = await make(runtime, Role.METRICS), await make(runtime, Role.OPERATOR, rate_per_s=1000.0)
    assert await status(client, slow, "/topics") == 403
    # Health and metrics are answered all the same, and are not counted.
    assert [await status(client, slow) for _ in range(3)] == [200, 200, 200]
    key = await make(runtime, Role.OPERATOR)
    # The configured key, which is not in the database, is counted as well.
    for one in (key, CONFIGURED):
        assert await status(client, one, "/topics") == 200
        refused = await client.get("/topics", headers=bearer(one))
        assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many-requests")
        assert int(refused.headers["retry-after"]) > 900
    assert [await status(client, own, "/topics") for _ in range(3)] == [200, 200, 200]
    assert runtime.load_limits.in_flight == 0


async def test_requests_in_flight_are_limited(start: Callable[..., Any], db: Connection) -> None:
    await register_group(db, "shop")
    runtime, client = await start(in_flight_max=3, key_in_flight_max=1)
    first, second = [await make(runtime, Role.PRODUCER, producer_groups=["shop"], topics=["*"]) for _ in range(2)]
    app = client._transport.app
    gate = asyncio.Event()
    body = json.dumps(ORDER).encode()

    async def held() -> AsyncIterator[bytes]:
        await gate.wait()
        yield body

    async def post(headers: dict[str, str]) -> int:
        status, _ = await raw_call(app, "POST", "/half", {"transfer-encoding": "chunked", **headers}, held())
        return status

    waiting: list[asyncio.Task[int]] = []
    for key in (first, CONFIGURED, second):
        waiting.append(asyncio.create_task(post(bearer(key))))
        await _until(lambda: runtime.load_limits.in_flight == len(waiting))
        if len(waiting) < 3:
            refused = await client.post("/half", json=ORDER, headers=bearer(key))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for method, path in (("POST", "/half"), ("GET", "/topics")):
        answer = await client.request(method, path, json=ORDER if method == "POST" else None)
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/overloaded")
        assert answer.headers["retry-after"] == "1"
    assert [(await client.get(path)).status_code for path in ("/livez", "/metrics")] == [200, 200]
    gate.set()
    assert await asyncio.gather(*waiting) == [201, 201, 201]
    assert runtime.load_limits.in_flight == 0


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.001)


async def test_with_auth_off_only_this_machine_is_answered(start: Callable[..., Any]) -> None:
    _, client = await start(auth="off", admin_key=None)
    for peer, expected in (("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("192.0.2.7", 403)):
        transport = httpx.ASGITransport(app=client._transport.app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as from_there:
            for path in ("/topics", "/livez"):
                answer = await from_there.get(path)
                assert answer.status_code == expected
            half = await from_there.post("/half", json=ORDER)
            assert half.status_code == (422 if expected == 200 else 403)
            if expected == 403:
                assert half.json()["type"] == "/problems/not-this-machine"


def test_the_admins_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{CONFIGURED}\n")
    settings = Settings(_env_file=None, auth="keys", admin_key_file=file)  # type: ignore[call-arg]
    assert settings.given_admin_key() == CONFIGURED
    file.write_text("secret")
    with pytest.raises(BadAdminKeyFile, match="must be `hn_`") as refused:
        settings.given_admin_key()
    assert "secret" not in str(refused.value)
    file.unlink()
    with pytest.raises(BadAdminKeyFile, match="cannot be read"):
        settings.given_admin_key()
    assert CONFIGURED not in repr(Settings(_env_file=None, auth="keys", admin_key=CONFIGURED))  # type: ignore[call-arg,arg-type]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `halfnote` in an environment of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=120)


def test_a_wrong_admin_key_is_not_repeated(tmp_path: Path) -> None:
    refused = run("serve", HALFNOTE_AUTH="keys", HALFNOTE_ADMIN_KEY="s3cret-s3cret")
    assert refused.returncode == 2
    assert "HALFNOTE_ADMIN_KEY: must be `hn_`" in refused.stderr
    assert "s3cret" not in refused.stderr
    none = str(tmp_path / "none")
    refused = run("serve", "--port", str(free_port()), HALFNOTE_AUTH="keys", HALFNOTE_ADMIN_KEY_FILE=none)
    assert refused.returncode == 1
    assert "HALFNOTE_ADMIN_KEY_FILE cannot be read" in refused.stderr


async def test_the_first_key_is_made_beside_the_database(dsn: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_AUTH="keys")
    await service.start()
    try:
        assert "no_admin_key" in service.log.read_text()
        created = run("keys", "create", "--role", "admin", "--name", "dana", "--json", HALFNOTE_DATABASE_URL=dsn)
        assert created.returncode == 0, created.stderr
        key = json.loads(created.stdout)["key"]
        async with httpx.AsyncClient(base_url=service.url, headers=bearer(key)) as client, asyncio.timeout(60):
            while (await client.get("/topics")).status_code != 200:
                await asyncio.sleep(0.05)
            [act] = (await client.get("/audit")).json()["items"]
        assert act["what"] == "api_key.create"
        assert act["actor"].endswith("(command line)")
        asking = {"HALFNOTE_URL": service.url, "HALFNOTE_API_KEY": key}
        made = run("keys", "create", "--role", "producer", "--group", "shop", "--topic", "order", **asking)
        assert made.returncode == 0, made.stderr
        assert "hn_" in made.stdout
        listed = run("keys", "list", **asking)
        assert "groups:" in listed.stdout
        assert "dana" in listed.stdout
        rotated = run("keys", "rotate", "2", "--overlap-s", "60", "--json", **asking)
        assert json.loads(rotated.stdout)["rotated_from"] == 2
        assert run("keys", "revoke", "3", **asking).returncode == 0
        assert run("topics", "declare", "order", **asking).returncode == 0
        assert "order" in run("topics", "list", **asking).stdout
        assert run("topics", "undeclare", "order", **asking).returncode == 0
        assert run("audit", **asking).returncode == 0
        audited = json.loads(run("audit", "--what", "api_key.revoke", "--json", **asking).stdout)
        assert [one["target"] for one in audited["items"]] == ["3"]
        refused = run("topics", "list", HALFNOTE_URL=service.url)
        assert refused.returncode == 1
        assert "HALFNOTE_API_KEY" in refused.stderr
        wrong = run("keys", "create", "--role", "producer", HALFNOTE_DATABASE_URL=dsn)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "producer_groups" in wrong.stderr
        assert run("keys", "revoke", "1030", HALFNOTE_DATABASE_URL=dsn).returncode == 1
        assert len(json.loads(run("keys", "list", "--json", HALFNOTE_DATABASE_URL=dsn).stdout)) == 3
        assert key[9:] not in service.log.read_text()
    finally:
        service.stop()


async def test_the_start_says_that_auth_is_off(dsn: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    service.stop()
    assert "auth_off" in service.log.read_text()
