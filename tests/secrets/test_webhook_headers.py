"""Configured headers of a webhook: stored as secrets are, sent with each delivery, and never shown."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.secrets.key_file import new_key
from app.secrets.vault import Vault
from tests.support.check_responder import Responder
from tests.support.vaults import credentials

TOKEN = "Bearer a-token-of-the-receiver"
HEADERS = {"Authorization": TOKEN, "X-Shop": "north"}
URL = "http://127.0.0.1:9/orders"


async def put(client: httpx.AsyncClient, **destination: Any) -> httpx.Response:
    subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": URL, **destination}}
    return await client.put("/subscriptions/mailer", json=subscription)


async def stored(db: Connection) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(await db.fetchval("select destination from subscription"))
    return found


async def test_their_values_are_sealed_and_their_names_are_shown(client: httpx.AsyncClient, db: Connection) -> None:
    created = await put(client, headers=HEADERS)
    assert created.status_code == 201
    answers = [created, await client.get("/subscriptions/mailer"), await client.get("/subscriptions")]
    for answer in answers:
        assert "a-token-of" not in answer.text
        assert "north" not in answer.text
    assert created.json()["destination"]["header_names"] == ["Authorization", "X-Shop"]
    assert "a-token-of" not in await db.fetchval("select s::text from subscription s")
    assert await credentials(db) == {"headers": HEADERS}
    assert "headers" not in await stored(db)
    before = await db.fetchrow("select * from subscription")
    for again in ({"headers": HEADERS}, {}):
        assert (await put(client, **again)).status_code == 200
    assert await db.fetchrow("select * from subscription") == before


async def test_a_put_keeps_changes_or_removes_them(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client, headers=HEADERS)
    destination = (await put(client, url=f"{URL}/new")).json()["destination"]
    assert (destination["url"], destination["header_names"]) == (f"{URL}/new", ["Authorization", "X-Shop"])
    assert await credentials(db) == {"headers": HEADERS}
    assert (await put(client, headers={"X-Shop": "south"})).json()["destination"]["header_names"] == ["X-Shop"]
    assert await credentials(db) == {"headers": {"X-Shop": "south"}}
    assert (await put(client, headers={})).json()["destination"]["header_names"] == []
    assert await credentials(db) == {}
    assert "header_names" not in await stored(db)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:10/orders", "https://127.0.0.1:9/orders", "http://localhost:9/orders"]
)
async def test_they_are_not_sent_to_another_host_unless_they_are_given_again(
    client: httpx.AsyncClient, url: str
) -> None:
    await put(client, headers=HEADERS)
    refused = await put(client, url=url)
    assert (refused.status_code, refused.json()["field"]) == (422, "destination.headers")
    assert (await put(client, url=url, headers={})).status_code == 200


async def test_a_missing_key_is_named_and_new_headers_replace_the_old_ones(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, tmp_path: Path
) -> None:
    # Everything except the headers is given, so only they are missing.
    secret = "whsec_" + "S" * 43 + "="
    await put(client, headers=HEADERS, secret=secret)
    path = tmp_path / "keys"
    path.write_text(new_key())
    runtime.vault = Vault(path)
    refused = await put(client, secret=secret)
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/secrets-unreadable")
    assert (await client.get("/subscriptions/mailer")).json()["destination"]["header_names"]
    async with Responder() as receiver:
        assert (await put(client, url=receiver.url, secret=secret, headers={"X-Shop": "south"})).status_code == 200
        assert (await client.post("/subscriptions/mailer/test")).json()["outcome"] == "delivered"
    assert receiver.calls[0].headers["x-shop"] == "south"
