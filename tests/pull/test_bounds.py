"""Bounds of the fields of a consumer's requests: each bound itself is taken, and what is past it is refused."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from tests.conftest import assembled, client_of, settings_of
from tests.support.consumers import Consumer, put_pulled
from tests.support.relay_stepping import order, publish

HELD_S = "select extract(epoch from held_until - claimed_at)::float from pull_claim"
# A whole number that is written so is left to the framework.
BY_THE_FRAMEWORK = {"max": 2.0}


@pytest.fixture
async def open_client(dsn: str, group: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service whose settings allow the most; it has `worker`."""
    async with assembled(settings_of(dsn, claim_max=10_000), dsn) as runtime, client_of(runtime) as client:
        await put_pulled(client)
        yield client


@pytest.mark.parametrize("by", [{}, BY_THE_FRAMEWORK])
@pytest.mark.parametrize(
    "fields",
    [{"max": 1}, {"max": 10_000}, {"invisible_s": 1}, {"invisible_s": 43_200}, {"wait_s": 0}, {"wait_s": 30}],
    ids=str,
)
async def test_a_claim_at_a_bound_is_taken(
    open_client: httpx.AsyncClient, db: Connection, fields: dict[str, Any], by: dict[str, Any]
) -> None:
    # A claim that finds nothing would wait.
    await publish(open_client, order(1))
    sent = {name: float(value) for name, value in fields.items()} if by and "max" in fields else {**by, **fields}
    assert len(await Consumer(open_client).claim(**sent)) == 1
    assert await db.fetchval(HELD_S) == fields.get("invisible_s", 30)


@pytest.mark.parametrize("by", [{}, BY_THE_FRAMEWORK])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max", 0),
        ("max", 10_001),
        ("invisible_s", 0.999),
        ("invisible_s", 43_200.5),
        ("wait_s", -0.5),
        ("wait_s", 30.5),
    ],
)
async def test_a_claim_past_a_bound_is_refused(
    open_client: httpx.AsyncClient, db: Connection, field: str, value: float, by: dict[str, Any]
) -> None:
    await publish(open_client, order(1))
    sent = {field: float(value)} if by and field == "max" else {**by, field: value}
    answer = await open_client.post("/subscriptions/worker/claim", json=sent)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert await db.fetchval("select count(*) from pull_claim") == 0


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("nack", {"retry_after_s": 0}),
        ("nack", {"retry_after_s": 43_200}),
        ("nack", {"error": "x"}),
        ("nack", {"error": "x" * 1000}),
        ("reject", {"reason": "x"}),
        ("reject", {"reason": "x" * 1000}),
        ("extend", {"invisible_s": 1}),
        ("extend", {"invisible_s": 43_200}),
    ],
)
async def test_a_settlement_at_a_bound_is_taken(
    open_client: httpx.AsyncClient, action: str, fields: dict[str, Any]
) -> None:
    await publish(open_client, order(1))
    consumer = Consumer(open_client)
    [message] = await consumer.claim()
    [outcome] = await consumer.settle(action, message["handle"], **fields)
    assert outcome["status"] == 200


@pytest.mark.parametrize(
    ("action", "field", "value"),
    [
        ("nack", "retry_after_s", -0.5),
        ("nack", "retry_after_s", 43_200.5),
        ("nack", "error", ""),
        ("nack", "error", "x" * 1001),
        ("reject", "reason", ""),
        ("reject", "reason", "x" * 1001),
        ("extend", "invisible_s", 0.999),
        ("extend", "invisible_s", 43_200.5),
    ],
)
async def test_a_settlement_past_a_bound_is_refused(
    open_client: httpx.AsyncClient, action: str, field: str, value: Any
) -> None:
    await publish(open_client, order(1))
    consumer = Consumer(open_client)
    [message] = await consumer.claim()
    request = {"handles": [message["handle"]], field: value}
    answer = await open_client.post(f"/subscriptions/worker/{action}", json=request)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert await consumer.ack(message) == [200]


@pytest.mark.parametrize(
    ("action", "more"), [("ack", {}), ("nack", {}), ("reject", {}), ("extend", {"invisible_s": 9})]
)
async def test_a_request_names_1000_handles_of_500_characters_at_most(
    open_client: httpx.AsyncClient, action: str, more: dict[str, Any]
) -> None:
    for handles, status in (
        (["x"] * 1000, 200),
        (["x"] * 1001, 422),
        ([], 422),
        (["x" * 500], 200),
        (["x" * 501], 422),
        ([""], 422),
    ):
        answer = await open_client.post(f"/subscriptions/worker/{action}", json={"handles": handles, **more})
        assert answer.status_code == status, handles[:1]
        if status == 200:
            assert [one["status"] for one in answer.json()["outcomes"]] == [422] * len(handles)
        else:
            assert answer.json()["field"].startswith("handles")
