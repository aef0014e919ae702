"""PATCH of subscriptions and producer groups: a change of one field leaves the others, secrets included."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from app.database.connection import Connection
from app.field_rules import RATE_LEAST_PER_S
from app.operations.merge_patch import merged
from app.runtime.state import Runtime
from tests.support.check_responder import Responder

PUT: dict[str, Any] = {
    "topics": ["order", "refund.*"],
    "filters": {"tags": ["created"], "headers": {"region": "eu"}},
    "destination": {"type": "webhook", "url": "http://127.0.0.1:9/in", "headers": {"authorization": "Bearer s3cret"}},
    "ordered": "key",
    "on_dead": "hold",
    "max_in_flight": 8,
    "rate_per_s": 12.5,
    "timeout_s": 3.0,
    "retry": [1, 60],
    "expire_after_s": 3600,
}

BANK: dict[str, Any] = {
    "check_urls": ["http://127.0.0.1:9/check"],
    "interval_s": 45,
    "max_checks": 3,
    "on_exhausted": "park",
}


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"a": "foo"}, "bar", "bar"),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_the_rfc(target: Any, patch: Any, expected: Any) -> None:
    assert merged(target, patch) == expected


async def test_a_change_of_one_field_leaves_the_others(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    assert (await client.put("/subscriptions/mailer", json=PUT)).status_code == 201
    before = (await client.get("/subscriptions/mailer")).json()
    secrets = await db.fetchrow("select secrets, credentials from subscription")
    for patch, changed in (
        ({"rate_per_s": 20}, {"rate_per_s": 20.0}),
        ({"rate_per_s": None}, {"rate_per_s": None}),
        ({"retry": [5]}, {"retry": [5.0]}),
        ({"filters": {"headers": None}}, {"filters": {"tags": ["created"], "headers": None}}),
        ({"filters": None}, {"filters": None}),
        ({"topics": ["order"]}, {"topics": ["order"]}),
        ({"destination": {"url": "http://127.0.0.1:9/other"}}, {}),
    ):
        answer = await client.patch("/subscriptions/mailer", json=patch)
        assert answer.status_code == 200, answer.text
        assert answer.json()["changed"] != []
        assert answer.json()["reset"] == []
        shown = (await client.get("/subscriptions/mailer")).json()
        for name in PUT.keys() - {"destination", *patch}:
            assert shown[name] == before[name], (patch, name)
        for name, value in changed.items():
            assert shown[name] == value, (patch, name)
        before = shown
    assert before["destination"]["url"] == "http://127.0.0.1:9/other"
    assert before["destination"]["header_names"] == ["authorization"]
    assert dict(await db.fetchrow("select secrets, credentials from subscription")) == dict(secrets)
    nothing = await client.patch("/subscriptions/mailer", json={"timeout_s": 3})
    assert nothing.json()["changed"] == []
    assert await db.fetchval("select count(*) from audit where what = 'subscription.put'") == 8


async def test_a_patch_is_refused_as_the_put_would_be(client: httpx.AsyncClient, group: str) -> None:
    assert (await client.put("/subscriptions/mailer", json=PUT)).status_code == 201
    for patch, field in (
        ({"topics": []}, "topics"),
        ({"timeout_s": 61}, "timeout_s"),
        ({"ordered": "none"}, "on_dead"),
        ({"destination": {"url": "ftp://example"}}, "destination.url"),
        ({"destination": {"url": "http://127.0.0.2:9/in"}}, "destination.headers"),
        ({"destination": None}, "destination"),
        ({"surprise": 1}, "surprise"),
    ):
        refused = await client.patch("/subscriptions/mailer", json=patch)
        assert (refused.status_code, refused.json()["type"]) == (422, "/problems/invalid"), patch
        assert refused.json()["field"] == field, (patch, refused.text)
    unknown = await client.patch("/subscriptions/nobody", json={"rate_per_s": 1})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "/problems/subscription-unknown")


async def test_a_stored_rate_below_the_lowest_one_is_read_as_that(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    """An older version stored such rates. They refuse neither a patch of another field nor a PUT of what is shown."""
    assert (await client.put("/subscriptions/mailer", json=PUT)).status_code == 201
    await db.execute("update subscription set rate_per_s = 1e-12")
    assert (await client.get("/subscriptions/mailer")).json()["rate_per_s"] == RATE_LEAST_PER_S
    answer = await client.patch("/subscriptions/mailer", json={"timeout_s": 4})
    assert (answer.status_code, answer.json()["changed"]) == (200, ["timeout_s"]), answer.text
    again = await client.put("/subscriptions/mailer", json={**PUT, "timeout_s": 4, "rate_per_s": RATE_LEAST_PER_S})
    assert (again.status_code, again.json()["changed"]) == (200, []), again.text


async def test_patches_at_once_lose_nothing(client: httpx.AsyncClient, group: str) -> None:
    """Each changes another field; a refused one says that it is to be repeated."""
    assert (await client.put("/subscriptions/mailer", json=PUT)).status_code == 201
    patches = [{"rate_per_s": 1}, {"timeout_s": 4}, {"max_in_flight": 9}, {"expire_after_s": 7200}, {"retry": [7]}]

    async def until_taken(patch: dict[str, Any]) -> None:
        while (answer := await client.patch("/subscriptions/mailer", json=patch)).status_code != 200:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    await asyncio.gather(*map(until_taken, patches))
    shown = (await client.get("/subscriptions/mailer")).json()
    for patch in patches:
        assert {name: shown[name] for name in patch} == patch


async def test_a_group_keeps_what_a_patch_leaves_out(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    async with Responder() as shop:
        put = {"check_urls": [shop.url], "interval_s": 45, "max_checks": 3, "on_exhausted": "park"}
        made = await client.put("/producer-groups/bank", json=put)
        assert made.status_code == 201
        stored = await db.fetchval("select secrets from producer_group where name = 'bank'")
        answer = await client.patch("/producer-groups/bank", json={"interval_s": 60})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["changed"], answer.json()["reset"]) == (["interval_s"], [])
        shown = (await client.get("/producer-groups/bank")).json()
        assert {name: shown[name] for name in put} == {**put, "interval_s": 60}
        assert await db.fetchval("select secrets from producer_group where name = 'bank'") == stored
        default = await client.patch("/producer-groups/bank", json={"max_checks": None})
        assert default.json()["max_checks"] == 15
        rotated = await client.patch("/producer-groups/bank", json={"secret": made.json()["secret"][:-4] + "AAA="})
        assert rotated.json()["changed"] == ["secret"]
        refused = await client.patch("/producer-groups/bank", json={"check_urls": ["ftp://x"]})
        assert refused.json()["field"] == "check_urls[0]"
        assert (await client.patch("/producer-groups/nobody", json={})).status_code == 404


async def test_the_audit_says_what_a_change_reset_and_that_a_secret_was_replaced(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    assert (await client.put("/subscriptions/mailer", json=PUT)).status_code == 201
    assert (await client.put("/producer-groups/bank", json=BANK)).status_code == 201
    secret, header = "whsec_" + "U2VjcmV0LW9mLW9yZGVyLTEwMzAtbm90LXRv", "Bearer an0ther"
    written = []
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", "/subscriptions/mailer", {"rate_per_s": None, "filters": {"headers": None}, "timeout_s": 4}),
        ("PATCH", "/subscriptions/mailer", {"destination": {"secret": secret, "headers": {"authorization": header}}}),
        ("PUT", "/subscriptions/mailer", {**PUT, "expire_after_s": None, "filters": {"tags": ["created"]}}),
        ("PATCH", "/producer-groups/bank", {"max_checks": None, "interval_s": 60}),
        ("PATCH", "/producer-groups/bank", {"secret": secret}),
        ("PUT", "/producer-groups/bank", {"check_urls": BANK["check_urls"], "interval_s": 60}),
    ]
    for method, path, body in changes:
        answer = await client.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        [detail] = await db.fetch("select detail from audit order by audit_id desc limit 1")
        assert secret not in detail["detail"]
        assert "Bearer" not in detail["detail"]
        said = msgspec.json.decode(detail["detail"])
        written.append((said["changed"], said["reset"]))
    assert written == [
        (["filters.headers", "rate_per_s", "timeout_s"], ["filters.headers", "rate_per_s"]),
        (["destination.secret", "destination.headers"], []),
        (["rate_per_s", "timeout_s", "expire_after_s", "destination.headers"], []),
        (["interval_s", "max_checks"], ["max_checks"]),
        (["secret"], []),
        (["on_exhausted"], ["on_exhausted"]),
    ]


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ('{"rate_per_s": 1e400}', "rate_per_s"),
        ('{"rate_per_s": "inf"}', "rate_per_s"),
        ('{"rate_per_s": "5"}', "rate_per_s"),
        ('{"rate_per_s": true}', "rate_per_s"),
        ('{"timeout_s": true}', "timeout_s"),
        ('{"timeout_s": -1e400}', "timeout_s"),
        ('{"expire_after_s": 1e400}', "expire_after_s"),
        ('{"filters": {"headers": {"region": 1e400}}}', "filters"),
        ('{"destination": {"headers": {"authorization": 1e400}}}', "destination"),
    ],
)
async def test_a_number_that_is_none_or_infinite_is_refused_and_removes_no_limit(
    client: httpx.AsyncClient, group: str, sent: str, field: str
) -> None:
    assert (await client.put("/subscriptions/mailer", json=PUT)).status_code == 201
    before = (await client.get("/subscriptions/mailer")).json()
    headers = {"content-type": "application/json"}
    answer = await client.patch("/subscriptions/mailer", content=sent, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert (await client.get("/subscriptions/mailer")).json() == before
