"""Destinations of a subscription: the five kinds, their secrets, and a webhook's consent."""

import json
import sys
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.destinations.registry import CLIENTS, installed
from app.secrets.signatures import public_key
from app.store.subscriptions.subscriptions import one
from tests.conftest import shares
from tests.support.check_responder import RawServer, plain
from tests.support.vaults import credentials, subscription_secrets

WEBHOOK: dict[str, Any] = {"type": "webhook", "url": "http://127.0.0.1:9/orders"}
RABBITMQ: dict[str, Any] = {"type": "rabbitmq", "url": "amqp://127.0.0.1:5672/shop%2Feu", "exchange": "orders"}
NATS: dict[str, Any] = {"type": "nats", "url": "tls://nats.example:4222", "subject": "shop.{topic}.{key}"}
KAFKA: dict[str, Any] = {"type": "kafka", "bootstrap": ["127.0.0.1:9092", "[::1]:9093", "kafka.example:9092"]}
REDIS: dict[str, Any] = {"type": "redis", "url": "rediss://127.0.0.1/15", "stream": "{group}:{topic}", "maxlen": 10}
USER = {"username": "halfnote", "password": "first-password"}
SASL = {"sasl": "SCRAM-SHA-256", **USER}

# Constant, because the tests are named by it: every worker must collect the same ones.
V1 = "whsec_" + "M" * 43 + "="
V1A = "whsk_znJBcPnZMerVLJuzGQNGXmQjKHjxCIps9k7DVsCL/peOZzbO48bX0TB2s1WgkPx3mseRWii1NncojWdOUtinfQ=="


async def put(client: httpx.AsyncClient, destination: dict[str, Any], **fields: Any) -> httpx.Response:
    return await client.put("/subscriptions/mailer", json={"topics": ["order"], "destination": destination, **fields})


@pytest.mark.parametrize("destination", [RABBITMQ, NATS, KAFKA, REDIS], ids=lambda one: str(one["type"]))
async def test_a_broker_is_taken_and_answered_as_it_was_given(
    client: httpx.AsyncClient, db: Connection, destination: dict[str, Any]
) -> None:
    made = await put(client, destination)
    assert made.status_code == 201, made.text
    assert made.json()["secret"] is None
    shown = (await client.get("/subscriptions/mailer")).json()["destination"]
    assert {name: shown[name] for name in destination} == destination
    before = await db.fetchrow("select * from subscription")
    assert (await put(client, destination)).status_code == 200
    assert (await put(client, shown)).status_code == 200
    assert await db.fetchrow("select * from subscription") == before


@pytest.mark.parametrize(
    "destination",
    [{**RABBITMQ, **USER}, {**NATS, **USER}, {**KAFKA, **SASL}, {**REDIS, **USER}],
    ids=lambda one: str(one["type"]),
)
async def test_a_password_is_never_shown_and_kept_until_another_is_given(
    client: httpx.AsyncClient, db: Connection, destination: dict[str, Any]
) -> None:
    answers = [await put(client, destination), await client.get("/subscriptions/mailer")]
    answers.append(await client.get("/subscriptions"))
    assert "first-password" not in "".join(answer.text for answer in answers)
    assert "first-password" not in await db.fetchval("select s::text from subscription s")
    assert await credentials(db) == {"password": "first-password"}
    without = {name: value for name, value in destination.items() if name != "password"}
    assert (await put(client, without, timeout_s=5)).status_code == 200
    assert await credentials(db) == {"password": "first-password"}
    assert (await put(client, {**destination, "password": "second"})).status_code == 200
    assert await credentials(db) == {"password": "second"}
    # It belongs to another user.
    answer = await put(client, {**without, "username": "other"})
    assert (answer.status_code, answer.json()["field"]) == (422, "destination.password")
    # Nor is it sent to another server after a change of the address.
    answer = await put(client, {**without, **elsewhere(destination)})
    assert (answer.status_code, answer.json()["field"]) == (422, "destination.password")
    assert (await put(client, {**WEBHOOK})).status_code == 200
    assert await credentials(db) == {}


def elsewhere(destination: dict[str, Any]) -> dict[str, Any]:
    """The address of another server than a destination's."""
    if destination["type"] == "kafka":
        return {"bootstrap": [*destination["bootstrap"], "127.0.0.1:9093"]}
    return {"url": destination["url"].replace("127.0.0.1", "127.0.0.2").replace("nats.", "other.")}


async def test_a_token_replaces_a_user(client: httpx.AsyncClient, db: Connection) -> None:
    assert (await put(client, {**NATS, "token": "t0ken"})).status_code == 201
    assert await credentials(db) == {"token": "t0ken"}
    await put(client, NATS)
    assert await credentials(db) == {"token": "t0ken"}
    await put(client, {**NATS, **USER})
    assert await credentials(db) == {"password": "first-password"}


@shares
@pytest.mark.parametrize(
    ("destination", "field"),
    [
        ({}, "destination"),
        ({"type": "sqs"}, "destination"),
        ({**WEBHOOK, "mode": "bulk"}, "destination.mode"),
        ({**WEBHOOK, "batch_max": 1001}, "destination.batch_max"),
        ({**WEBHOOK, "signing": "v2"}, "destination.signing"),
        ({**WEBHOOK, "secret": V1A}, "destination.secret"),
        ({**WEBHOOK, "secret": V1, "signing": "v1a"}, "destination.secret"),
        ({**WEBHOOK, "secret": V1A[:40], "signing": "v1a"}, "destination.secret"),
        ({**WEBHOOK, "public_key": "whpk_x"}, "destination.public_key"),
        ({**WEBHOOK, "consent": "yes"}, "destination.consent"),
        ({**WEBHOOK, "password": "x"}, "destination.password"),
        ({**RABBITMQ, "url": "http://127.0.0.1/"}, "destination.url"),
        ({**RABBITMQ, "url": "amqp://user:word@127.0.0.1/"}, "destination.url"),
        ({**RABBITMQ, "url": "amqp://127.0.0.1/a/b"}, "destination.url"),
        ({**RABBITMQ, "url": "amqp://127.0.0.1/a?ssl=0"}, "destination.url"),
        ({**RABBITMQ, "url": "amqp://127.0.0.1:0/"}, "destination.url"),
        ({**RABBITMQ, "exchange": "x" * 128}, "destination.exchange"),
        ({**RABBITMQ, "routing_key": ""}, "destination.routing_key"),
        ({**RABBITMQ, "routing_key": "{tipoc}"}, "destination.routing_key"),
        ({**RABBITMQ, "routing_key": "{topic"}, "destination.routing_key"),
        ({**RABBITMQ, "password": "x"}, "destination.password"),
        ({**RABBITMQ, "username": "x"}, "destination.password"),
        ({**NATS, "url": "nats://127.0.0.1:4222/x"}, "destination.url"),
        ({**NATS, "subject": "a b"}, "destination.subject"),
        ({**NATS, "subject": "a.>"}, "destination.subject"),
        ({**NATS, "subject": "a.*"}, "destination.subject"),
        ({**NATS, "subject": "a..b"}, "destination.subject"),
        ({**NATS, "subject": "a."}, "destination.subject"),
        ({**NATS, **USER, "token": "x"}, "destination.token"),
        ({**KAFKA, "bootstrap": []}, "destination.bootstrap"),
        ({**KAFKA, "bootstrap": ["127.0.0.1"]}, "destination.bootstrap[0]"),
        ({**KAFKA, "bootstrap": ["kafka.example:9092", "x:70000"]}, "destination.bootstrap[1]"),
        ({**KAFKA, "topic": "a b"}, "destination.topic"),
        ({**KAFKA, "topic": ".."}, "destination.topic"),
        ({**KAFKA, "topic": "x" * 250}, "destination.topic"),
        ({**KAFKA, **USER}, "destination"),
        ({**KAFKA, "sasl": "PLAIN"}, "destination"),
        ({**KAFKA, "sasl": "PLAIN", "username": "x"}, "destination.password"),
        ({**KAFKA, "tls": "yes"}, "destination.tls"),
        ({**REDIS, "url": "redis://127.0.0.1/zero"}, "destination.url"),
        ({**REDIS, "maxlen": 0}, "destination.maxlen"),
        ({**REDIS, "stream": "a\x00"}, "destination.stream"),
        ({**REDIS, "username": "x" * 256, "password": "x"}, "destination.username"),
        ({**REDIS, "password": "a\nb"}, "destination.password"),
    ],
    ids=json.dumps,
)
async def test_a_refused_field_is_named(
    shared_client: httpx.AsyncClient, shared_db: Connection, destination: dict[str, Any], field: str
) -> None:
    answer = await put(shared_client, destination)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid")
    assert answer.json()["field"] == field
    assert "first-password" not in answer.text
    assert await shared_db.fetchval("select count(*) from subscription") == 0


@shares
@pytest.mark.parametrize(
    ("destination", "field"),
    [
        ({**RABBITMQ, "url": "amqp://10.1.2.3/"}, "destination.url"),
        ({**NATS, "url": "nats://[2001:db8::1]:4222"}, "destination.url"),
        ({**KAFKA, "bootstrap": ["127.0.0.1:9092", "192.0.2.1:9092"]}, "destination.bootstrap[1]"),
        ({**REDIS, "url": "redis://[::ffff:10.1.2.3]/"}, "destination.url"),
    ],
)
async def test_an_address_outside_the_allowed_networks_is_refused(
    shared_client: httpx.AsyncClient, destination: dict[str, Any], field: str
) -> None:
    answer = await put(shared_client, destination)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/address-not-allowed")
    assert answer.json()["field"] == field


@pytest.mark.parametrize("destination", [RABBITMQ, NATS, KAFKA, REDIS], ids=lambda one: str(one["type"]))
async def test_a_broker_whose_client_is_missing_is_refused_with_the_command_to_install_it(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, destination: dict[str, Any]
) -> None:
    kind = destination["type"]
    assert (await put(client, destination)).status_code == 201
    # As the interpreter notes a module that is not to be had.
    monkeypatch.setitem(sys.modules, CLIENTS[kind], None)
    assert [installed(other) for other in CLIENTS] == [other != kind for other in CLIENTS]
    for answer in (await put(client, destination), await client.post("/subscriptions/mailer/test")):
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/client-not-installed")
        assert answer.json()["command"] == f"pip install 'halfnote-server[{kind}]'"


async def test_ed25519_is_made_shown_and_exchanged(client: httpx.AsyncClient, db: Connection) -> None:
    made = (await put(client, {**WEBHOOK, "signing": "v1a"})).json()
    assert made["secret"].startswith("whsk_")
    assert made["destination"]["public_key"] == public_key(made["secret"])
    assert (await put(client, {**WEBHOOK, "signing": "v1a"})).json()["destination"]["public_key"] is not None
    rotated = (await client.post("/subscriptions/mailer/rotate-secret")).json()
    shown = (await client.get("/subscriptions/mailer")).json()["destination"]
    assert shown["public_key"] == public_key(rotated["secret"]) != made["destination"]["public_key"]
    # The other kind needs another secret: one is made and shown, and the former ones still sign as well.
    changed = await put(client, WEBHOOK)
    assert (changed.status_code, changed.json()["destination"]["public_key"]) == (200, None)
    assert changed.json()["secret"].startswith("whsec_")
    assert changed.headers["cache-control"] == "no-store"
    assert len(await subscription_secrets(db)) == 3
    assert "secret" not in (await put(client, WEBHOOK)).json()


async def test_a_broker_that_becomes_a_webhook_gets_a_secret(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client, REDIS)
    answer = await client.post("/subscriptions/mailer/rotate-secret")
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/not-signed")
    changed = await put(client, WEBHOOK)
    assert (changed.status_code, changed.json()["secret"][:6]) == (200, "whsec_")
    assert (await put(client, REDIS)).status_code == 200
    assert await db.fetchval("select secrets::text from subscription") == "[]"


async def test_a_webhook_is_asked_once_and_its_rate_is_a_bound(client: httpx.AsyncClient, db: Connection) -> None:
    async with RawServer(plain(200, WebHook_Allowed_Origin="*", WebHook_Allowed_Rate="120")) as server:
        destination = {**WEBHOOK, "url": server.url, "consent": True}
        made = await put(client, destination, rate_per_s=10.0)
        assert made.status_code == 201, made.text
        assert (made.json()["rate_per_s"], made.json()["destination"]["granted_rate_per_s"]) == (10, 2)
        assert [(request.method, request.headers["webhook-request-rate"]) for request in server.requests] == [
            ("OPTIONS", "600")
        ]
        stored = await one(db, "mailer")
        assert stored is not None
        assert stored.rate_per_s == 2
        before = await db.fetchrow("select * from subscription")
        assert (await put(client, destination, rate_per_s=10.0)).status_code == 200
        assert await db.fetchrow("select * from subscription") == before
        await put(client, destination, rate_per_s=1.5)
        stored = await one(db, "mailer")
        assert stored is not None
        assert (stored.rate_per_s, stored.granted_per_s, len(server.requests)) == (1.5, 2, 1)
        # Another URL is another receiver; without consent the granted rate no longer limits.
        await put(client, {**destination, "url": f"{server.url}/other"})
        assert len(server.requests) == 2
        await put(client, {**destination, "consent": False})
    stored = await one(db, "mailer")
    assert stored is not None
    assert (stored.rate_per_s, stored.granted_per_s) == (None, None)


async def test_without_consent_nothing_is_stored(client: httpx.AsyncClient, db: Connection) -> None:
    async with RawServer(plain(200, WebHook_Allowed_Origin="other.example")) as server:
        answer = await put(client, {**WEBHOOK, "url": server.url, "consent": True})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/consent-refused")
    assert answer.json()["field"] == "destination.url"
    assert "`other.example`, not of `halfnote`" in answer.json()["detail"]
    assert await db.fetchval("select count(*) from subscription") == 0
    await put(client, WEBHOOK)
    answer = await put(client, {**WEBHOOK, "consent": True})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/consent-refused")
    assert "no connection to 127.0.0.1:" in answer.json()["detail"]
    assert (await client.get("/subscriptions/mailer")).json()["destination"]["consent"] is False
