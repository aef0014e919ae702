"""Producer groups over HTTP: registering, changing, secrets, tests by ping, deleting."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.conftest import shares
from tests.support.check_responder import Responder
from tests.support.vaults import group_secrets

URL = "http://127.0.0.1:9/check"
SECRET = "whsec_" + "A" * 32


async def put(client: httpx.AsyncClient, name: str = "shop", **fields: Any) -> httpx.Response:
    return await client.put(f"/producer-groups/{name}", json={"check_urls": [URL], **fields})


async def test_a_new_group_gets_defaults_and_its_secret_once(client: httpx.AsyncClient) -> None:
    made = await put(client)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    created = made.json()
    assert created.pop("secret").startswith("whsec_")
    assert (created.pop("changed"), created.pop("reset")) == ([], [])
    shown = (await client.get("/producer-groups/shop")).json()
    assert shown.pop("standing") == {"in_doubt": 0, "parked": 0, "exact": True}
    assert shown.pop("answers") == []
    assert shown == created
    assert {key: created[key] for key in ("immunity_s", "interval_s", "max_checks", "on_exhausted")} == {
        "immunity_s": 6,
        "interval_s": 30,
        "max_checks": 15,
        "on_exhausted": "rollback",
    }
    assert created["urls"] == [{"url": URL, "last_ok": None, "last_error": None, "last_error_at": None}]


async def test_a_given_secret_is_not_shown(client: httpx.AsyncClient, db: Connection) -> None:
    made = await put(client, secret=SECRET)
    assert (made.status_code, made.json()["secret"]) == (201, None)
    assert await group_secrets(db) == [SECRET]
    assert SECRET not in await db.fetchval("select secrets::text from producer_group")
    assert SECRET not in (await client.get("/producer-groups/shop")).text


async def test_the_same_put_again_changes_nothing(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client, immunity_s=9)
    before = await db.fetchrow("select * from producer_group")
    again = await put(client, immunity_s=9)
    assert again.status_code == 200
    assert "secret" not in again.json()
    after = await db.fetchrow("select * from producer_group")
    assert before
    assert after
    # But for the time at which its producer started, and the round that begins then.
    started = dict.fromkeys(("registered_at", "round_began_at", "round_reached"))
    assert {**after, **started} == {**before, **started}


async def test_put_replaces_the_shape_and_keeps_the_secret(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client, immunity_s=9, secret=SECRET)
    changed = await put(client, check_max_in_flight=5)
    assert (changed.status_code, changed.json()["immunity_s"]) == (200, 6)
    assert await db.fetchval("select check_window from producer_group") == 5
    assert await group_secrets(db) == [SECRET]
    assert SECRET not in await db.fetchval("select secrets::text from producer_group")


async def test_two_first_puts_at_once_make_one_group(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(put(client) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]


async def test_another_secret_is_a_rotation_with_overlap(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    await put(client, secret=SECRET)
    rotated = await client.post("/producer-groups/shop/rotate-secret")
    assert rotated.status_code == 200
    new = rotated.json()["secret"]
    async with Responder() as producer:
        await put(client, check_urls=[producer.url])
        await client.post("/producer-groups/shop/test")
        call = producer.calls[0]
        for secret in (SECRET, new):
            Webhook(secret).verify(call.body, call.headers)
        runtime.clock.offset_s += timedelta(hours=25).total_seconds()
        await client.post("/producer-groups/shop/test")
        # Twenty-five hours later only the new one signs: one signature, the first of the two before.
        assert len(producer.calls[1].headers["webhook-signature"].split(" ")) == 1
    assert (await put(client, secret=SECRET)).status_code == 200
    assert (await group_secrets(db))[0] == SECRET


async def test_ping_reports_each_url(client: httpx.AsyncClient) -> None:
    async with Responder(status=204) as good, Responder(status=500) as bad:
        await put(client, check_urls=[good.url, bad.url, URL])
        answer = await client.post("/producer-groups/shop/test")
        assert [result["ok"] for result in answer.json()["results"]] == [True, False, False]
        sent = good.calls[0].json()
        assert (sent["type"], sent["producer_group"]) == ("halfnote.ping", "shop")
        assert good.calls[0].headers["webhook-id"].startswith("ping_")
        shown = (await client.get("/producer-groups/shop")).json()["urls"]
    assert shown[0]["last_ok"]
    assert "500" in shown[1]["last_error"]
    assert shown[2]["last_error_at"]


async def test_results_of_dropped_urls_go(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client, check_urls=[URL, URL + "/two"])
    await client.post("/producer-groups/shop/test")
    await put(client)
    assert await db.fetchval("select array_agg(url) from check_url") == [URL]


async def test_list_pages_by_name(client: httpx.AsyncClient) -> None:
    for name in ("c", "a", "b"):
        await put(client, name)
    first = (await client.get("/producer-groups?limit=2")).json()
    assert ([group["name"] for group in first["items"]], first["next_cursor"]) == (["a", "b"], "b")
    second = (await client.get(f"/producer-groups?limit=2&cursor={first['next_cursor']}")).json()
    assert ([group["name"] for group in second["items"]], second["next_cursor"]) == (["c"], None)


async def test_a_group_with_undecided_transactions_stays(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client)
    ids = [
        (
            await client.post("/half", json={"producer_group": "shop", "messages": [{"topic": "order", "body": 1}]})
        ).json()["transaction_id"]
        for _ in range(3)
    ]
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) values ($1, 'shop', 2, now())",
        ids[0],
    )
    refused = await client.delete("/producer-groups/shop")
    assert (refused.status_code, refused.json()["undecided"]) == (409, 3)
    for one in ids:
        await client.post("/end", json={"transaction_id": one, "producer_group": "shop", "verdict": "rollback"})
    assert (await client.delete("/producer-groups/shop")).status_code == 204
    assert (await client.get("/producer-groups/shop")).status_code == 404
    assert (await client.delete("/producer-groups/shop")).status_code == 404
    assert (await client.get("/producer-groups")).json()["items"] == []
    half = await client.post("/half", json={"producer_group": "shop", "messages": [{"topic": "order", "body": 1}]})
    assert half.status_code == 422
    revived = await put(client)
    assert (revived.status_code, bool(revived.json()["secret"])) == (201, True)


@shares
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"check_urls": []}, "check_urls"),
        ({"check_urls": [f"{URL}/{n}" for n in range(17)]}, "check_urls"),
        ({"check_urls": [URL, URL]}, "check_urls"),
        ({"check_urls": [URL, "ftp://127.0.0.1/check"]}, "check_urls[1]"),
        ({"check_urls": ["http://user@127.0.0.1/"]}, "check_urls[0]"),
        ({"check_urls": ["http://127.0.0.1/#part"]}, "check_urls[0]"),
        ({"check_urls": ["http://127.0.0.1:99999/"]}, "check_urls[0]"),
        ({"check_urls": ["/check"]}, "check_urls[0]"),
        ({"check_urls": ["http://127.0.0.1/\x00"]}, "check_urls[0]"),
        ({"immunity_s": 0}, "immunity_s"),
        ({"immunity_s": 86_401}, "immunity_s"),
        ({"max_checks": 0}, "max_checks"),
        ({"on_exhausted": "commit"}, "on_exhausted"),
        ({"secret": "whsec_short"}, "secret"),
        ({"secret": "A" * 40}, "secret"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_bad_shapes_name_their_field(
    shared_client: httpx.AsyncClient, fields: dict[str, Any], field: str
) -> None:
    answer = await put(shared_client, **fields)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert "A" * 40 not in answer.text


@shares
async def test_addresses_outside_the_allowed_networks(shared_client: httpx.AsyncClient) -> None:
    answer = await put(shared_client, check_urls=[URL, "http://169.254.169.254/latest"])
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/address-not-allowed")
    assert answer.json()["field"] == "check_urls[1]"


async def test_the_name_of_halfnotes_own_group_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.put("/producer-groups/halfnote", json={"check_urls": ["http://127.0.0.1:9/check"]})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/group-reserved")
    half = {"producer_group": "halfnote", "messages": [{"topic": "order", "body": 1}]}
    for path in ("/half", "/messages"):
        answer = await client.post(path, json=half)
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/group-unregistered")
    assert (await client.get("/producer-groups")).json()["items"] == []
