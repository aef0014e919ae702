"""Apache's own clients, unchanged, against the gateway and the service as processes."""

import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq.protocol.service_pb2 import SendMessageRequest
from tests.support.gateway import GatewayProcess, RocketClient, codes_of, message_of
from tests.support.processes import Service
from tests.support.rocketmq_clients import driver, ran

TOPIC, GROUP = "order", "points"
IN_ORDER = ["fifo-0", "fifo-1", "fifo-2"]
DONE = {"commit", "orphan-commit", "orphan-unknown", "plain", "delay", *IN_ORDER}
COMMITTED = DONE | {"poison"}
ADMIN = "hn_" + "a1B2c3D4" * 8

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
async def service(tmp_path: Path, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """The service with keys, and a group whose checks come after a second."""
    made = Service(tmp_path / "data", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_AUTH="keys", HALFNOTE_ADMIN_KEY=ADMIN)
    await made.start()
    try:
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with httpx.AsyncClient(base_url=made.url, headers=headers, timeout=60) as admin:
            group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
            assert (await admin.put(f"/producer-groups/{TOPIC}", json=group)).status_code == 201
            pulled = {"topics": [TOPIC], "destination": {"type": "pull"}, "retry": [1]}
            for name, ordered in ((f"{GROUP}-push", "none"), (f"{GROUP}-fifo", "key")):
                shape = {**pulled, "ordered": ordered}
                assert (await admin.put(f"/subscriptions/{name}@{TOPIC}", json=shape)).status_code == 201
            yield admin
    finally:
        made.stop()


async def key(admin: httpx.AsyncClient, role: str, **scopes: list[str]) -> str:
    answer = await admin.post("/api-keys", json={"name": f"rocketmq {role}", "role": role, **scopes})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


async def credentials_file(admin: httpx.AsyncClient, place: Path) -> Path:
    """Write a file that gives the access key `shop` the rights of a producer and of a consumer."""
    producer = await key(admin, "producer", producer_groups=[TOPIC], topics=[TOPIC])
    subscriber = await key(admin, "subscriber", subscriptions=[f"{GROUP}*"], topics=[TOPIC])
    file = place / "credentials.yaml"
    file.write_text(
        "credentials:\n  - access_key: shop\n    secret_key: shop-secret\n"
        f"    producer_key: {producer}\n    subscriber_key: {subscriber}\n"
    )
    return file


def bodies(said: list[dict[str, Any]], what: str) -> list[str]:
    return [one["body"] for one in said if one["what"] == what]


@pytest.mark.parametrize(
    "language",
    ["python", *(pytest.param(name, marks=pytest.mark.slow) for name in ("java", "go", "node"))],
)
async def test_a_client_sends_is_asked_and_receives(
    language: str, service: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    place = tmp_path / "driver"
    place.mkdir()
    command = driver(language, place)
    gateway = GatewayProcess(
        tmp_path, str(service.base_url), "--credentials", str(await credentials_file(service, tmp_path))
    )
    await gateway.start()
    try:
        said = await ran(command, gateway.endpoint, TOPIC, GROUP, "shop", "shop-secret", "0")
    finally:
        assert gateway.stop() == 0
    received = {one["body"]: one for one in said if one["what"] == "received"}
    sent = {one["body"]: one["message_id"] for one in said if one["what"] == "sent"}
    assert received.keys() == COMMITTED
    assert {body: one["message_id"] for body, one in received.items()} == {body: sent[body] for body in COMMITTED}
    assert not any(one.get("corrupted") for one in received.values())
    plain = received["plain"]
    assert (plain["tag"], sorted(plain["keys"]), plain["properties"]) == ("created", ["k1", "k2"], {"shop": "s1"})
    assert (received["fifo-0"]["group"], plain["attempt"]) == ("g1", 1)
    # The one that was unknown was asked again; each check has the message as it was sent.
    checked = [one for one in said if one["what"] == "checked"]
    assert set(bodies(said, "checked")) == {"orphan-commit", "orphan-rollback", "orphan-unknown"}
    assert bodies(said, "checked").count("orphan-unknown") >= 2
    assert all((one["message_id"], one["properties"]) == (sent[one["body"]], {"shop": "s1"}) for one in checked)
    pushed = [(one["body"], one["attempt"]) for one in said if one["what"] == "pushed"]
    assert {body for body, _ in pushed} == COMMITTED
    assert {("plain", 1), ("plain", 2), ("poison", 1), ("poison", 2)} <= set(pushed)
    # One message of a group after the other, the failed one again before the next. Node's client does not try it again.
    in_order = [body for body in bodies(said, "ordered") if body in IN_ORDER]
    assert in_order == ["fifo-0", "fifo-1", *(["fifo-1"] if language != "node" else []), "fifo-2"]
    # Without the operational messages about the dead letters.
    verdicts = await db.fetch(
        "select verdict, count(*) from op join half using (transaction_id) where topic = $1 group by 1 order by 1",
        TOPIC,
    )
    assert [tuple(row) for row in verdicts] == [(1, len(COMMITTED)), (2, 2)]
    # The answers of checks are recorded as such, also for Go, which does not say what they are.
    assert await db.fetchval("select count(*) from op where source = 1") == 3
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.slow
async def test_a_namespace_is_the_beginning_of_each_name(
    service: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    """Java's client, whose settings have a namespace."""
    group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
    assert (await service.put("/producer-groups/eu.order", json=group)).status_code == 201
    for name, ordered in (("eu.points-push", "none"), ("eu.points-fifo", "key")):
        shape = {"topics": ["eu.order"], "destination": {"type": "pull"}, "retry": [1], "ordered": ordered}
        assert (await service.put(f"/subscriptions/{name}@eu.order", json=shape)).status_code == 201
    (tmp_path / "driver").mkdir()
    command = driver("java", tmp_path / "driver")
    gateway = GatewayProcess(tmp_path, str(service.base_url), HALFNOTE_API_KEY=ADMIN)
    await gateway.start()
    try:
        said = await ran(command, gateway.endpoint, TOPIC, GROUP, "", "", "0", "eu")
    finally:
        assert gateway.stop() == 0
    assert set(bodies(said, "received")) == set(bodies(said, "pushed")) == COMMITTED
    topics = await db.fetch("select distinct topic from outbox where topic not like 'halfnote.%'")
    assert [row[0] for row in topics] == ["eu.order"]


async def test_a_wrong_secret_is_refused(service: httpx.AsyncClient, tmp_path: Path) -> None:
    gateway = GatewayProcess(
        tmp_path, str(service.base_url), "--credentials", str(await credentials_file(service, tmp_path))
    )
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
            for secret, code in (("shop-secret", "OK"), ("another", "UNAUTHORIZED")):
                signature = hmac.new(secret.encode(), b"now", "sha1").hexdigest()
                said = f"MQv2-HMAC-SHA1 Credential=shop, SignedHeaders=x-mq-date-time, Signature={signature}"
                rocket = RocketClient(channel, **{"authorization": said, "x-mq-date-time": "now"})
                request = SendMessageRequest(messages=[message_of(TOPIC, b"x")])
                assert codes_of([await rocket.call("SendMessage", request)]) == [code]
            # Without a word on the stream: gRPC's client calls a refusal during a write an internal error.
            assert await rocket.telemetry().code() == grpc.StatusCode.UNAUTHENTICATED
    finally:
        gateway.stop()
