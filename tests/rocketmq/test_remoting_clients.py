"""Apache's own remoting clients, unchanged, against the gateway and the service as processes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from tests.support.certificates import Authority
from tests.support.gateway import GatewayProcess
from tests.support.ports import free_port
from tests.support.processes import Service
from tests.support.rocketmq_clients import REMOTING_VERSIONS, DriverCommand, ran, remoting_driver, running

ADMIN = "hn_" + "a1B2c3D4" * 8
COMMITTED = {
    *("commit", "unknown-commit", "unknown-twice", "plain", "delay", "large", "batch-1", "batch-2"),
    *(f"order-{number}" for number in range(5)),
}
WITHIN_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(params=REMOTING_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def admin(tmp_path: Path, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """The service with keys, and a group whose checks come after a second."""
    made = Service(tmp_path / "data", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_AUTH="keys", HALFNOTE_ADMIN_KEY=ADMIN)
    await made.start()
    try:
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with httpx.AsyncClient(base_url=made.url, headers=headers, timeout=60) as admin:
            group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
            assert (await admin.put("/producer-groups/shop", json=group)).status_code == 201
            pulled = {"topics": ["order"], "destination": {"type": "pull"}, "retry": [1, 1, 1]}
            assert (await admin.put("/subscriptions/points@order", json=pulled)).status_code == 201
            yield admin
    finally:
        made.stop()


async def credentials_file(admin: httpx.AsyncClient, place: Path) -> Path:
    """Write a file that gives the access key `shop` the rights of a producer and of a consumer."""
    keys = {}
    for role, scopes in (
        ("producer", {"producer_groups": ["shop"], "topics": ["order"]}),
        ("subscriber", {"subscriptions": ["points*"], "topics": ["order"]}),
    ):
        answer = await admin.post("/api-keys", json={"name": f"remoting {role}", "role": role, **scopes})
        keys[role] = answer.json()["key"]
    file = place / "credentials.yaml"
    file.write_text(
        "credentials:\n  - access_key: shop\n    secret_key: shop-secret\n"
        f"    producer_key: {keys['producer']}\n    subscriber_key: {keys['subscriber']}\n"
    )
    return file


@asynccontextmanager
async def gateway_of(admin: httpx.AsyncClient, place: Path, *arguments: str) -> AsyncIterator[GatewayProcess]:
    file = await credentials_file(admin, place)
    gateway = GatewayProcess(place, str(admin.base_url), "--credentials", str(file), *arguments)
    await gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()


def arguments_of(*ports: int) -> list[str]:
    servers = ";".join(f"127.0.0.1:{port}" for port in ports)
    return [servers, "order", "shop", "points", "shop", "shop-secret"]


def driver(version: str, place: Path, what: str, *options: str) -> DriverCommand:
    (place / "driver").mkdir(exist_ok=True)
    return remoting_driver(version, place / "driver", what, *options)


def bodies(said: Sequence[dict[str, Any]], what: str) -> list[str]:
    return [one["body"] for one in said if one["what"] == what]


async def test_a_client_sends_is_asked_and_consumes(
    version: str, admin: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    command = driver(version, tmp_path, "scenario")
    async with gateway_of(admin, tmp_path, "--remoting-port", "0") as gateway:
        said = await ran(command, *arguments_of(gateway.remoting_port))
        async with asyncio.timeout(WITHIN_S):
            # What the client did last is acknowledged as it leaves, but for the dead letters.
            while await db.fetchval("select count(*) from receipt") < 2 * (len(COMMITTED) + 2) - 2:
                await asyncio.sleep(0.1)
    sent = {one["body"]: one["message_id"] for one in said if one["what"] == "sent"}
    assert {one["status"] for one in said if one["what"] == "sent"} == {"SEND_OK"}
    for what in ("consumed", "ordered"):
        got = {one["body"]: one for one in said if one["what"] == what}
        assert got.keys() == COMMITTED | {"poison", "oneway"}
        assert all(got[body]["message_id"] == sent[body] for body in COMMITTED & sent.keys())
        plain = got["plain"]
        assert (plain["tag"], plain["keys"], plain["shop"], plain["topic"]) == ("created", "k1 k2", "s1", "order")
        assert got["commit"]["transaction_id"] == sent["commit"]
    # A transaction is asked about with what was sent, and again if its listener did not know.
    checked = [one for one in said if one["what"] == "checked"]
    assert set(bodies(said, "checked")) == {"unknown-commit", "unknown-rollback", "unknown-twice"}
    assert bodies(said, "checked").count("unknown-twice") >= 2
    assert all((one["transaction_id"], one["shop"]) == (sent[one["body"]], "s1") for one in checked)
    # Retries of the concurrent consumer, its dead letter, and the order of the orderly one.
    attempts = [(one["body"], one["attempt"]) for one in said if one["what"] == "consumed"]
    assert {("plain", 1), ("plain", 2), ("poison", 1), ("poison", 2)} <= set(attempts)
    dead = (await admin.get("/dead-letters")).json()["items"]
    assert sorted((one["subscription"], one["attempts"]) for one in dead) == [
        # The client makes the attempts at a message in order itself.
        ("points-orderly@order", 1),
        ("points@order", 2),
    ]
    assert bodies(said, "ordered").count("poison") == 2
    in_order = [body for body in bodies(said, "ordered") if body.startswith("order-")]
    assert in_order == ["order-0", "order-1", "order-2", "order-2", "order-3", "order-4"]
    verdicts = await db.fetch(
        "select verdict, source, count(*) from op where verdict is not null group by 1, 2 order by 1, 2"
    )
    assert sum(row[2] for row in verdicts if row[0] == 2) == 2
    assert sum(row[2] for row in verdicts if row[1] == 1) == 3
    assert "Traceback" not in gateway.log.read_text()


async def test_a_producer_that_died_is_asked_when_it_is_back(
    version: str, admin: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    async with gateway_of(admin, tmp_path, "--remoting-port", "0") as gateway:
        dies = driver(version, tmp_path, "orphan")
        process = await asyncio.create_subprocess_exec(*dies.arguments, *arguments_of(gateway.remoting_port))
        async with asyncio.timeout(WITHIN_S):
            await process.wait()
        assert await db.fetchval("select count(*) from op") == 0
        said = await ran(driver(version, tmp_path, "answer"), *arguments_of(gateway.remoting_port))
    assert set(bodies(said, "checked")) == {"unknown-commit"}
    # Its check was answered, and the message that it sent then is there.
    assert sorted(tuple(row) for row in await db.fetch("select verdict, source from op")) == [(1, 0), (1, 1)]


async def test_a_consumer_goes_on_by_another_gateway(
    version: str, admin: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    ports = [free_port(), free_port()]
    named = [part for port in ports for part in ("--remoting-address", f"127.0.0.1:{port}")]
    async with (
        gateway_of(admin, tmp_path, "--remoting-port", str(ports[0]), *named) as first,
        gateway_of(admin, tmp_path, "--remoting-port", str(ports[1]), *named),
    ):
        sender = driver(version, tmp_path, "send")
        async with running(driver(version, tmp_path, "consume"), *arguments_of(*ports)) as consumer:
            await consumer.next("started")
            await ran(sender, *arguments_of(*ports), "a", "b", "c", "d")
            await consumer.until("consumed", "a", "b", "c", "d")
            first.kill()
            await ran(sender, *arguments_of(ports[1]), "e", "f", "g", "h")
            await consumer.until("consumed", "e", "f", "g", "h")


async def test_a_consumer_knows_one_gateway_by_two_addresses(
    version: str, admin: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    port, sent = free_port(), [f"key{number % 3}:{number}" for number in range(24)]
    named = [part for host in ("127.0.0.1", "localhost") for part in ("--remoting-address", f"{host}:{port}")]
    async with (
        gateway_of(admin, tmp_path, "--remoting-port", str(port), *named),
        running(driver(version, tmp_path, "consume"), *arguments_of(port)) as consumer,
    ):
        await consumer.next("started")
        await ran(driver(version, tmp_path, "send"), *arguments_of(port), *sent)
        await consumer.until("consumed", *sent)
        async with asyncio.timeout(WITHIN_S):
            while await db.fetchval("select count(*) from receipt") < len(sent):
                await asyncio.sleep(0.1)
    # Each once.
    assert sorted(bodies(consumer.said, "consumed")) == sorted(sent)


async def test_a_namespace_is_the_beginning_of_each_name(
    version: str, admin: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    gateway = GatewayProcess(tmp_path, str(admin.base_url), "--remoting-port", "0", HALFNOTE_API_KEY=ADMIN)
    await gateway.start()
    arguments = [f"127.0.0.1:{gateway.remoting_port}", "order", "shop", "points", "", ""]
    try:
        namespace = "-Dnamespace=eu"
        async with running(driver(version, tmp_path, "consume", namespace), *arguments) as consumer:
            await consumer.next("started")
            await ran(driver(version, tmp_path, "send", namespace), *arguments, "a")
            # A client of another namespace sends to a topic of its own.
            await ran(driver(version, tmp_path, "send"), *arguments, "b")
            consumed = await consumer.next("consumed")
    finally:
        gateway.stop()
    assert (consumed["body"], consumed["topic"]) == ("a", "order")
    assert {row[0] for row in await db.fetch("select topic from outbox")} == {"eu.order", "order"}
    names = [one["name"] for one in (await admin.get("/subscriptions")).json()["items"]]
    assert "eu.points@eu.order" in names


async def test_a_client_uses_tls(version: str, admin: httpx.AsyncClient, tmp_path: Path, db: Connection) -> None:
    certificate, key = Authority(tmp_path / "authority").issue("127.0.0.1").write(tmp_path / "secret")
    files = ["--tls-cert", str(certificate), "--tls-key", str(key)]
    async with gateway_of(admin, tmp_path, "--remoting-port", "0", *files) as gateway:
        # Without a store of trusted certificates the client trusts any.
        said = await ran(
            driver(version, tmp_path, "send", "-Dtls.enable=true"), *arguments_of(gateway.remoting_port), "a"
        )
    assert bodies(said, "sent") == ["a"]
    assert await db.fetchval("select count(*) from outbox") == 1
