"""A PUT's answer says what it changed and what it reset, and a dry run changes nothing."""

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from app.database.connection import Connection
from app.field_rules import RATE_LEAST_PER_S
from tests.conftest import shares

URL = "http://127.0.0.1:9/check"
WEBHOOK: dict[str, Any] = {"type": "webhook", "url": "http://127.0.0.1:9/orders"}
SECRET = "whsec_" + "M" * 43 + "="
AUDITED = "select count(*) from audit"


async def put_group(client: httpx.AsyncClient, dry_run: bool = False, **fields: Any) -> Any:
    query = {"dry_run": "true"} if dry_run else {}
    answer = await client.put("/producer-groups/shop", json={"check_urls": [URL], **fields}, params=query)
    assert answer.is_success, answer.text
    return answer.json()


async def put(client: httpx.AsyncClient, dry_run: bool = False, **fields: Any) -> Any:
    query = {"dry_run": "true"} if dry_run else {}
    content = {"topics": ["order"], "destination": WEBHOOK, **fields}
    answer = await client.put("/subscriptions/mailer", json=content, params=query)
    assert answer.is_success, answer.text
    return answer.json()


def said(answer: Any) -> tuple[list[str], list[str]]:
    return answer["changed"], answer["reset"]


async def test_a_group_says_which_fields_a_put_reset(client: httpx.AsyncClient) -> None:
    assert said(await put_group(client, interval_s=60, max_checks=3)) == ([], [])
    assert said(await put_group(client, interval_s=60, max_checks=3)) == ([], [])
    assert said(await put_group(client, interval_s=45)) == (["interval_s", "max_checks"], ["max_checks"])
    # A field that had its default was not reset.
    assert said(await put_group(client)) == (["interval_s"], ["interval_s"])
    assert said(await put_group(client, secret=SECRET)) == (["secret"], [])
    assert said(await put_group(client)) == ([], [])


async def test_a_subscription_says_which_fields_a_put_reset(client: httpx.AsyncClient) -> None:
    filters = {"tags": ["created"], "headers": {"region": "eu"}}
    await put(client, filters=filters, rate_per_s=500.0, destination={**WEBHOOK, "mode": "structured"})
    assert said(await put(client, filters={"tags": ["created"]}, timeout_s=3.0)) == (
        ["filters.headers", "destination.mode", "rate_per_s", "timeout_s"],
        ["filters.headers", "destination.mode", "rate_per_s"],
    )
    assert said(await put(client)) == (["filters", "timeout_s"], ["filters", "timeout_s"])
    # Secrets and custom headers that are left out are kept; other ones are named.
    private = {**WEBHOOK, "secret": SECRET, "headers": {"x-tenant": "a"}}
    assert said(await put(client, destination=private)) == (["destination.secret", "destination.headers"], [])
    assert said(await put(client)) == ([], [])
    assert said(await put(client, destination={**WEBHOOK, "headers": {"x-tenant": "b"}})) == (
        ["destination.headers"],
        [],
    )
    assert said(await put(client, destination={"type": "nats", "url": "nats://127.0.0.1:4222"}))[0][0] == "destination"


async def test_a_dry_run_answers_the_change_and_makes_none(client: httpx.AsyncClient, db: Connection) -> None:
    assert (await put_group(client, dry_run=True))["secret"] is None
    assert (await put(client, dry_run=True))["secret"] is None
    assert await db.fetchval("select count(*) from producer_group") == 0
    assert await db.fetchval("select (select count(*) from subscription) + (select count(*) from checkpoint)") == 0
    await put_group(client)
    await put(client, rate_per_s=5.0)
    before = [await db.fetch(f"select * from {table}") for table in ("producer_group", "subscription", "audit")]
    tried = await put_group(client, dry_run=True, interval_s=60, secret=SECRET)
    assert (tried["interval_s"], said(tried)) == (60, (["interval_s", "secret"], []))
    tried = await put(client, dry_run=True, destination={**WEBHOOK, "signing": "v1a"})
    assert said(tried)[1] == ["rate_per_s"]
    assert "secret" not in tried
    assert [await db.fetch(f"select * from {table}") for table in ("producer_group", "subscription", "audit")] == before


async def test_a_dry_run_asks_no_webhook_for_consent(client: httpx.AsyncClient) -> None:
    # Nothing listens on port 9: a request for consent would fail.
    assert (await put(client, dry_run=True, destination={**WEBHOOK, "consent": True}))["destination"]["consent"]


async def test_a_key_gets_another_scope_and_stays_valid(client: httpx.AsyncClient, db: Connection) -> None:
    asked = {"name": "shop", "role": "producer", "producer_groups": ["shop"], "topics": ["order"], "rate_per_s": 5.0}
    made = (await client.post("/api-keys", json=asked)).json()
    path = f"/api-keys/{made['key_id']}"
    audited = await db.fetchval(AUDITED)
    assert said((await client.put(path, json=asked)).json()) == ([], [])
    assert await db.fetchval(AUDITED) == audited
    del asked["rate_per_s"]
    changed = (await client.put(path, json={**asked, "topics": ["order", "bill"]})).json()
    assert said(changed) == (["topics", "rate_per_s"], ["rate_per_s"])
    assert (changed["prefix"], changed["topics"]) == (made["prefix"], ["order", "bill"])
    await client.delete(path)
    assert (await client.put(path, json=asked)).status_code == 409
    assert (await client.put("/api-keys/1234567", json=asked)).status_code == 404
    past = await client.put(path, json={**asked, "expires_at": "2020-01-01T00:00:00Z"})
    assert past.status_code == 409


async def test_a_stored_rate_of_a_key_below_the_lowest_one_is_read_as_that(
    client: httpx.AsyncClient, db: Connection
) -> None:
    """An older version stored such rates; a PUT of what is shown is not refused."""
    asked = {"name": "shop", "role": "producer", "producer_groups": ["shop"], "topics": ["order"], "rate_per_s": 5.0}
    path = f"/api-keys/{(await client.post('/api-keys', json=asked)).json()['key_id']}"
    await db.execute("update api_key set rate_per_s = 1e-12")
    shown = (await client.get(path)).json()["rate_per_s"]
    assert shown == RATE_LEAST_PER_S
    again = await client.put(path, json={**asked, "rate_per_s": shown})
    assert (again.status_code, said(again.json())) == (200, ([], [])), again.text


@shares
@pytest.mark.parametrize("name", ["../x", "a b", "a/b", "", "..", "*", "a*", "-a", "a\n", "caf\u00e9", "x" * 256])
async def test_a_bad_subscription_name_is_refused(shared_client: httpx.AsyncClient, name: str) -> None:
    answer = await shared_client.put(
        f"/subscriptions/{quote(name, safe='').replace('.', '%2E')}", json={"topics": ["o"], "destination": WEBHOOK}
    )
    assert (answer.status_code, answer.json()["field"]) == (422, "name")
    assert "letters, digits" in answer.json()["detail"]


@shares
@pytest.mark.parametrize("path", ["producer-groups/a%2Fb", "producer-groups/", "topics/a%2Fb", "topics/"])
async def test_a_name_that_is_no_path_segment_is_refused(shared_client: httpx.AsyncClient, path: str) -> None:
    answer = await shared_client.put(f"/{path}", json={"check_urls": [URL]})
    assert (answer.status_code, answer.json()["field"]) == (422, "name")


async def test_a_chosen_key_is_stored_and_not_shown(client: httpx.AsyncClient, db: Connection) -> None:
    key = "hn_" + "a1" * 32
    made = await client.post("/api-keys", json={"name": "prometheus", "role": "metrics", "key": key})
    assert (made.status_code, made.json()["key"], made.json()["prefix"]) == (201, None, key[:9])
    assert await db.fetchval("select digest = sha256($1::bytea) from api_key", key.encode())
    assert key not in str(await db.fetch("select detail::text from audit"))
    taken = await client.post("/api-keys", json={"name": "other", "role": "metrics", "key": key})
    assert (taken.status_code, taken.json()["type"]) == (409, "/problems/api-key-taken")
    short = await client.post("/api-keys", json={"name": "other", "role": "metrics", "key": key[:40]})
    assert (short.status_code, short.json()["field"]) == (422, "key")
    assert key[:40] not in short.text
