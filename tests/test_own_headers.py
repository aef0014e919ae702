"""A webhook's own headers: kept as secrets are, sent with each delivery, and never shown."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.database import Connection
from app.resealing import rotate
from app.runtime import Runtime
from app.sealing import Vault, new_key
from app.store import sealed
from app.store.shared_rules import read_rule
from tests.responders import Responder
from tests.vaults import credentials, vault

TOKEN = "Bearer a-token-of-the-receiver"
HEADERS = {"Authorization": TOKEN, "X-Shop": "north"}
URL = "http://127.0.0.1:9/orders"


async def put(client: httpx.AsyncClient, **destination: Any) -> httpx.Response:
    shape = {"topics": ["order"], "destination": {"type": "webhook", "url": URL, **destination}}
    return await client.put("/subscriptions/mailer", json=shape)


async def stored(db: Connection) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(await db.fetchval("select destination from subscription"))
    return found


async def test_their_values_are_sealed_and_their_names_are_shown(client: httpx.AsyncClient, db: Connection) -> None:
    made = await put(client, headers=HEADERS)
    assert made.status_code == 201
    shown = [made, await client.get("/subscriptions/mailer"), await client.get("/subscriptions")]
    for answer in shown:
        assert "a-token-of" not in answer.text
        assert "north" not in answer.text
    assert made.json()["destination"]["header_names"] == ["Authorization", "X-Shop"]
    assert "a-token-of" not in await db.fetchval("select s::text from subscription s")
    assert await credentials(db) == {"headers": HEADERS}
    assert "headers" not in await stored(db)
    before = await db.fetchrow("select * from subscription")
    for again in ({"headers": HEADERS}, {}):
        assert (await put(client, **again)).status_code == 200
    assert await db.fetchrow("select * from subscription") == before


async def test_a_put_keeps_changes_and_takes_them_away(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client, headers=HEADERS)
    kept = (await put(client, url=f"{URL}/new")).json()["destination"]
    assert (kept["url"], kept["header_names"]) == (f"{URL}/new", ["Authorization", "X-Shop"])
    assert await credentials(db) == {"headers": HEADERS}
    assert (await put(client, headers={"X-Shop": "south"})).json()["destination"]["header_names"] == ["X-Shop"]
    assert await credentials(db) == {"headers": {"X-Shop": "south"}}
    assert (await put(client, headers={})).json()["destination"]["header_names"] == []
    assert await credentials(db) == {}
    assert "header_names" not in await stored(db)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:10/orders", "https://127.0.0.1:9/orders", "http://localhost:9/orders"]
)
async def test_they_do_not_go_to_another_host_unless_they_are_given_again(client: httpx.AsyncClient, url: str) -> None:
    await put(client, headers=HEADERS)
    refused = await put(client, url=url)
    assert (refused.status_code, refused.json()["field"]) == (422, "destination.headers")
    assert (await put(client, url=url, headers={})).status_code == 200


async def test_a_lost_key_is_named_and_given_headers_take_the_place(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, tmp_path: Path
) -> None:
    # All but the headers is given, so that they alone are missing.
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


async def test_older_versions_read_them_in_plain_text_until_all_is_sealed(
    client: httpx.AsyncClient, db: Connection
) -> None:
    # As the version before left it: it seals secrets, and knows nothing of sealed headers.
    await db.execute("update sealing set headers = false")
    await db.execute("update shared_rule set value = 8 where name = 'oldest_served_revision'")
    async with Responder() as receiver:
        await put(client, url=receiver.url, headers=HEADERS)
        assert (await stored(db))["headers"] == HEADERS
        assert await sealed.plain_rows(db) == 1
        shown = (await client.get("/subscriptions/mailer")).json()["destination"]
        assert (shown["header_names"], "headers" in shown) == (["Authorization", "X-Shop"], False)
        before = await db.fetchrow("select * from subscription")
        for again in ({"headers": HEADERS}, {}):
            assert (await put(client, url=receiver.url, **again)).status_code == 200
        assert await db.fetchrow("select * from subscription") == before
        done = await rotate(db, vault())
        assert (done.changed, done.unreadable) == (1, [])
        assert (await stored(db))["header_names"] == ["Authorization", "X-Shop"]
        assert "a-token-of" not in await db.fetchval("select s::text from subscription s")
        assert await sealed.plain_rows(db) == 0
        assert (await rotate(db, vault())).changed == 0
        assert await read_rule(db, "oldest_served_revision") == 10
        await client.post("/subscriptions/mailer/test")
    assert receiver.calls[0].headers["authorization"] == TOKEN
