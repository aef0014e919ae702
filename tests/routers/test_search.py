"""`GET /search`: what an id, a key or a part of a name belongs to."""

from uuid import UUID, uuid4

import httpx
import pytest

from app.database.connection import Connection
from app.ids import message_id, parse_id
from tests.conftest import register_group
from tests.support.dead_letters import committed, subscription

ORDER = {"topic": "order.paid", "key": "order-1030", "body": {"order": 1030}}


async def hits(client: httpx.AsyncClient, q: str, **query: object) -> list[dict]:  # type: ignore[type-arg]
    answer = await client.get("/search", params={"q": q, **query})
    assert answer.status_code == 200, answer.text
    found: list[dict] = answer.json()["hits"]  # type: ignore[type-arg]
    for one in found:
        shown = await client.get(one["path"])
        assert shown.status_code == 200, one
        assert (await client.get(one["page"], headers={"accept": "text/html"})).status_code == 200, one
    return found


async def test_an_id_names_its_transaction_or_message(client: httpx.AsyncClient, group: str) -> None:
    message = await committed(client, ORDER)
    transaction = message[:36]
    for q, kind, name in (
        (transaction, "transaction", transaction),
        (transaction.upper(), "transaction", transaction),
        (message, "message", message),
    ):
        [hit] = await hits(client, q)
        assert (hit["kind"], hit["name"], hit["by"], hit["state"]) == (kind, name, "id", "committed")
        assert hit["transaction_id"] == transaction
        assert hit["producer_group"] == "shop"
    assert hit["page"] == f"/console/transactions/{transaction}#message-0"
    # No such position, and no such transaction.
    assert await hits(client, f"{transaction}-1") == []
    assert await hits(client, str(uuid4())) == []
    assert await hits(client, "f" * 8 + "-ffff-ffff-ffff-" + "f" * 12) == []


async def test_a_key_names_its_transactions_newest_first(client: httpx.AsyncClient, group: str) -> None:
    made = [(await committed(client, ORDER))[:36] for _ in range(3)]
    found = await hits(client, "order-1030")
    assert [one["name"] for one in found] == made[::-1]
    assert {(one["kind"], one["by"], one["topic"]) for one in found} == {("transaction", "key", "order.paid")}
    # A part of a key names none.
    assert await hits(client, "order-103") == []
    answer = (await client.get("/search", params={"q": "order-1030", "limit": 2})).json()
    assert [one["name"] for one in answer["hits"]] == made[:0:-1]
    assert answer["more"] is True


async def test_a_part_of_a_name_names_topics_groups_and_subscriptions(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await committed(client, ORDER)
    for name in ("us-paid-mailer", "Paid", "crm", "gone-paid"):
        await subscription(client, name)
    await client.delete("/subscriptions/gone-paid")
    await register_group(db, "paid-by-card")
    found = [(one["kind"], one["name"], one["by"]) for one in await hits(client, "paid")]
    assert found == [
        ("topic", "order.paid", "name"),
        ("producer_group", "paid-by-card", "name"),
        ("subscription", "Paid", "name"),
        ("subscription", "us-paid-mailer", "name"),
    ]
    # `limit` is of each kind. Only the subscriptions are more than it.
    answer = (await client.get("/search", params={"q": "paid", "limit": 1})).json()
    assert [one["name"] for one in answer["hits"]] == ["order.paid", "paid-by-card", "Paid"]
    assert answer["more"] is True
    assert (await client.get("/search", params={"q": "paid", "limit": 2})).json()["more"] is False


async def test_a_text_may_name_several_kinds(client: httpx.AsyncClient, group: str) -> None:
    await committed(client, {"topic": "shop", "key": "shop", "body": 1})
    await subscription(client, "shop")
    found = [(one["kind"], one["by"]) for one in await hits(client, "shop")]
    assert found == [("transaction", "key"), ("topic", "name"), ("producer_group", "name"), ("subscription", "name")]


@pytest.mark.parametrize("name", ["50 % off/on?&#", "a_b\\c", "é+ü"])
async def test_names_have_no_special_characters(client: httpx.AsyncClient, group: str, name: str) -> None:
    await committed(client, {"topic": name, "body": 1})
    [hit] = await hits(client, name)
    assert (hit["kind"], hit["name"]) == ("topic", name)
    assert await hits(client, name.replace("%", "x").replace("_", "x").replace("+", "x")) == []


@pytest.mark.parametrize("q", ["", "a\x00b", "x" * 256])
async def test_what_no_name_can_be_is_refused(client: httpx.AsyncClient, q: str) -> None:
    answer = await client.get("/search", params={"q": q})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid")


def test_ids_are_read_in_one_form() -> None:
    transaction = UUID("0193a7d6-a5c8-7b1e-8f00-1030a1030a10")
    text = str(transaction)
    assert parse_id(text) == (transaction, None)
    assert parse_id(text.upper()) == (transaction, None)
    assert parse_id(message_id(transaction, 12)) == (transaction, 12)
    for other in (
        "",
        "order-1030",
        text[:-1],
        f"{text}-",
        f"{text}-x",
        f"{text}-1000",
        f"{transaction.hex}----",
    ):
        assert parse_id(other) is None, other
