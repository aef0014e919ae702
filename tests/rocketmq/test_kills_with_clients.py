"""Gateways, the service and consumers that are killed under Apache's own clients."""

import asyncio
import base64
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from tests.support.gateway import GatewayProcess
from tests.support.ports import free_port
from tests.support.processes import Service
from tests.support.rocketmq_clients import (
    REMOTING_VERSIONS,
    RunningDriver,
    java_driver,
    ran,
    remoting_driver,
    running,
)

pytestmark = pytest.mark.timeout(500)
each_version = pytest.mark.parametrize("version", REMOTING_VERSIONS)
# Where the client's version makes no difference, one of them runs.
OLDEST, NEWEST = REMOTING_VERSIONS
KEYS = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Deployment:
    """A service and two gateways for both protocols, of which RocketMQ 4 clients learn both addresses."""

    service: Service
    gateways: list[GatewayProcess]

    @property
    def endpoints(self) -> str:
        """Where RocketMQ 5 clients connect."""
        return ";".join(gateway.endpoint for gateway in self.gateways)

    @property
    def names(self) -> str:
        """Where RocketMQ 4 clients connect."""
        return ";".join(f"127.0.0.1:{gateway.remoting_port}" for gateway in self.gateways)

    def arguments(self) -> list[str]:
        """Return the arguments of the driver for remoting."""
        return [self.names, "order", "shop", "points", "", ""]

    async def that_sent_the_check(self) -> GatewayProcess:
        """Return the gateway that sent the check. It logs that afterward, so the client may have the check before."""
        async with asyncio.timeout(30):
            while not (found := [one for one in self.gateways if "rocketmq_check_sent" in one.log.read_text()]):
                await asyncio.sleep(0.01)
        [sender] = found
        return sender


@pytest.fixture
async def deployment(tmp_path: Path, dsn: str) -> AsyncIterator[Deployment]:
    ports = [free_port(), free_port()]
    named = [part for port in ports for part in ("--remoting-address", f"127.0.0.1:{port}")]
    async with AsyncExitStack() as stack:
        service = Service(tmp_path / "data", HALFNOTE_DATABASE_URL=dsn)
        await service.start()
        stack.callback(service.kill)
        gateways = [GatewayProcess(tmp_path, service.url, "--remoting-port", str(port), *named) for port in ports]
        for gateway in gateways:
            stack.callback(gateway.kill)
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as admin:
            for group in ("order", "shop"):
                shape = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
                assert (await admin.put(f"/producer-groups/{group}", json=shape)).status_code == 201
            pulled = {"topics": ["order"], "destination": {"type": "pull"}, "retry": [1] * 9}
            assert (await admin.put("/subscriptions/points@order", json=pulled)).status_code == 201
        yield Deployment(service, gateways)


async def committed_by_a_check(db: Connection, driver: RunningDriver) -> None:
    """Answer each check until the transaction is committed."""

    async def answer() -> None:
        while True:
            driver.answer()
            await driver.next("checked")

    answering = asyncio.create_task(answer())
    try:
        async with asyncio.timeout(120):
            while not await db.fetchval("select count(*) from op where verdict = 1 and source = 1"):
                await asyncio.sleep(0.1)
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def test_a_client_over_grpc_answers_a_check_of_a_killed_gateway(
    deployment: Deployment, tmp_path: Path, db: Connection
) -> None:
    async with running(java_driver("Orphan", tmp_path), deployment.endpoints, "order", "points") as driver:
        await driver.next("checked")
        (await deployment.that_sent_the_check()).kill()
        await committed_by_a_check(db, driver)
        if not any(one["what"] == "pushed" for one in driver.said):
            await driver.next("pushed")


@each_version
async def test_a_client_over_remoting_answers_a_check_of_a_killed_gateway(
    version: str, deployment: Deployment, tmp_path: Path, db: Connection
) -> None:
    async with running(remoting_driver(version, tmp_path, "hold"), *deployment.arguments()) as driver:
        await driver.next("checked")
        (await deployment.that_sent_the_check()).kill()
        await committed_by_a_check(db, driver)


async def test_a_client_over_remoting_goes_on_after_the_service_was_killed(
    deployment: Deployment, tmp_path: Path, db: Connection
) -> None:
    send = remoting_driver(NEWEST, tmp_path, "send")
    async with running(remoting_driver(NEWEST, tmp_path, "consume"), *deployment.arguments()) as consumer:
        await consumer.next("started")
        await ran(send, *deployment.arguments(), "a", "b")
        await consumer.until("consumed", "a", "b")
        deployment.service.kill()
        # A send that is under way meanwhile is tried again by the client, or by the one who sends.
        sending = asyncio.create_task(ran(send, *deployment.arguments(), "c"))
        await asyncio.sleep(2)
        await deployment.service.start()
        await asyncio.gather(sending, return_exceptions=True)
        await ran(send, *deployment.arguments(), "d", "e")
        await consumer.until("consumed", "d", "e")
    assert all("Traceback" not in gateway.log.read_text() for gateway in deployment.gateways)


class Producer:
    """Sends rounds of messages, one of each key with the number of the round."""

    def __init__(self, api: httpx.AsyncClient) -> None:
        self._api = api
        self.rounds = 0

    async def send(self) -> None:
        """Send a round."""
        bodies = {key: base64.b64encode(f"{key}:{self.rounds}".encode()).decode() for key in KEYS}
        messages = [{"topic": "order", "key": key, "body_base64": body} for key, body in bodies.items()]
        answer = await self._api.post("/messages", json={"producer_group": "shop", "messages": messages})
        assert answer.status_code == 201, answer.text
        self.rounds += 1

    async def send_until_consumed(self, *drivers: RunningDriver) -> None:
        """Send rounds until each driver has begun with a message of one of them."""
        first_round = self.rounds

        async def consumed(driver: RunningDriver) -> None:
            while int((await driver.next("ordered"))["body"].partition(":")[2]) < first_round:
                pass

        waiting = {asyncio.create_task(consumed(driver)) for driver in drivers}
        while waiting:
            await self.send()
            ended, waiting = await asyncio.wait(waiting, timeout=0.5)
            for one in ended:
                one.result()


async def test_two_orderly_clients_of_a_group_keep_the_order_of_each_key_when_one_is_killed(
    deployment: Deployment, tmp_path: Path, db: Connection
) -> None:
    order = remoting_driver(OLDEST, tmp_path, "order")
    async with (
        running(order, *deployment.arguments()) as first,
        running(order, *deployment.arguments()) as second,
        httpx.AsyncClient(base_url=deployment.service.url, timeout=60) as api,
    ):
        producer = Producer(api)
        await producer.send_until_consumed(first, second)
        # A client commits what it has done when it pulls again.
        await producer.send_until_consumed(first)
        await first.kill()
        await producer.send()
        every = {key: [f"{key}:{number}" for number in range(producer.rounds)] for key in KEYS}
        seen = {one["body"] for one in first.said if one["what"] == "ordered"}
        await second.until("ordered", *({body for bodies in every.values() for body in bodies} - seen))
    said = sorted((one["at"], one["body"]) for one in [*first.said, *second.said] if one["what"] == "ordered")
    begun: dict[str, list[str]] = defaultdict(list)
    for _, body in said:
        key = body.partition(":")[0]
        # What the killed client had not committed comes again.
        if body not in begun[key]:
            begun[key].append(body)
    assert begun == every
