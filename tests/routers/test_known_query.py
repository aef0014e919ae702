"""Query parameters that a request does not have, or has twice, are refused where something could change."""

from typing import Any

import httpx
import pytest

SHAPE: dict[str, Any] = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/in"}}


@pytest.mark.parametrize(
    ("method", "path", "query", "body", "field"),
    [
        ("DELETE", "/subscriptions/mailer", "dry_run=true", None, "dry_run"),
        ("POST", "/subscriptions/mailer/replay", "dry_run=true", {"from": "2026-11-21T08:00:00Z"}, "dry_run"),
        ("POST", "/subscriptions/mailer/pause", "dry_run=true", {}, "dry_run"),
        ("PUT", "/subscriptions/mailer", "dryrun=true", {**SHAPE, "rate_per_s": 5}, "dryrun"),
        ("PATCH", "/subscriptions/mailer", "dry-run=true", {"rate_per_s": 5}, "dry-run"),
        ("PATCH", "/subscriptions/mailer", "dry_run=true&dry_run=false", {"rate_per_s": 5}, "dry_run"),
        ("PUT", "/producer-groups/shop", "dryrun=1", {"check_urls": [], "interval_s": 45}, "dryrun"),
        ("DELETE", "/producer-groups/shop", "dry_run=true", None, "dry_run"),
        ("PUT", "/topics/order", "dry_run=true", {}, "dry_run"),
    ],
)
async def test_a_request_that_changes_something_refuses_what_it_does_not_have(
    client: httpx.AsyncClient, group: str, method: str, path: str, query: str, body: Any, field: str
) -> None:
    assert (await client.put("/subscriptions/mailer", json=SHAPE)).status_code == 201
    before = (await client.get("/subscriptions/mailer")).json()
    answer = await client.request(method, f"{path}?{query}", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert (await client.get("/subscriptions/mailer")).json() == before
    assert (await client.get("/producer-groups/shop")).status_code == 200
    assert (await client.get("/topics")).json()["items"] == []


async def test_a_request_takes_the_parameters_that_it_has(client: httpx.AsyncClient, group: str) -> None:
    answer = await client.put("/subscriptions/mailer?dry_run=true", json=SHAPE)
    assert answer.status_code == 201, answer.text
    assert (await client.get("/subscriptions/mailer")).status_code == 404
    assert (await client.put("/subscriptions/mailer", json=SHAPE)).status_code == 201
    answer = await client.patch("/subscriptions/mailer?dry_run=true&reason=why", json={"rate_per_s": 5})
    assert (answer.status_code, answer.json()["changed"]) == (200, ["rate_per_s"])


async def test_a_filter_of_a_list_is_given_once(client: httpx.AsyncClient, group: str) -> None:
    answer = await client.get("/transactions?state=committed&state=parked")
    assert (answer.status_code, answer.json()["field"]) == (422, "state")
    assert (await client.get("/transactions?state=committed")).status_code == 200


async def test_a_request_that_only_reads_takes_what_a_proxy_adds(client: httpx.AsyncClient) -> None:
    assert (await client.get("/stats?_=1764460800")).status_code == 200


@pytest.mark.parametrize("path", ["/half", "/end", "/messages", "/halves", "/ends"])
async def test_the_fast_path_has_no_query_parameters(client: httpx.AsyncClient, group: str, path: str) -> None:
    body = {"producer_group": group, "messages": [{"topic": "order", "body": 1}]}
    for query in ("dry_run=true", "dryrun", "a=1&a=2"):
        answer = await client.post(f"{path}?{query}", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, query.partition("=")[0]), answer.text
    assert (await client.get("/transactions")).json()["items"] == []


@pytest.mark.parametrize("act", ["claim", "ack"])
async def test_claims_and_acknowledgements_have_no_query_parameters(
    client: httpx.AsyncClient, group: str, act: str
) -> None:
    assert (
        await client.put("/subscriptions/queue", json={"topics": ["order"], "destination": {"type": "pull"}})
    ).is_success
    body = {"max": 1} if act == "claim" else {"handles": ["x"]}
    answer = await client.post(f"/subscriptions/queue/{act}?peek=true", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, "peek"), answer.text
