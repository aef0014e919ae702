"""What a key's scope takes, shows and refuses."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.database.connection import Connection
from app.permissions import KeyScope, Role
from tests.conftest import register_group
from tests.support.api_keys import bearer, make
from tests.support.keyed_services import ORDER, start

__all__ = ["start"]

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
