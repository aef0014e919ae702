"""Apache's remoting clients, unchanged, behind one address that leads to one gateway and then to another."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from tests.support.faulty_proxy import FaultyProxy
from tests.support.gateway import GatewayProcess
from tests.support.processes import Service
from tests.support.rocketmq_clients import REMOTING_VERSIONS, remoting_driver, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# The first answers of all four queues of a client.
NUMBER = 32


@pytest.fixture
async def service(tmp_path: Path, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    made = Service(tmp_path / "data", HALFNOTE_DATABASE_URL=dsn)
    await made.start()
    try:
        async with httpx.AsyncClient(base_url=made.url, timeout=60) as admin:
            assert (await admin.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
            pulled = {"topics": ["order"], "destination": {"type": "pull"}, "retry": [1] * 9}
            assert (await admin.put("/subscriptions/points@order", json=pulled)).status_code == 201
            yield admin
    finally:
        made.stop()


async def sent(admin: httpx.AsyncClient, name: str) -> set[str]:
    """Send messages, and return their bodies."""
    bodies = {f"{name}-{number}" for number in range(NUMBER)}
    messages = [{"topic": "order", "body_base64": base64.b64encode(body.encode()).decode()} for body in bodies]
    answer = await admin.post("/messages", json={"producer_group": "shop", "messages": messages})
    assert answer.status_code == 201, answer.text
    return bodies


@pytest.mark.parametrize("version", REMOTING_VERSIONS)
async def test_a_client_gets_what_it_did_not_get_before_it_went_to_another_gateway_and_came_back(
    version: str, service: httpx.AsyncClient, tmp_path: Path, db: Connection
) -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultyProxy(0))
        shared = ("--remoting-port", "0", "--remoting-address", f"127.0.0.1:{proxy.port}")
        gateways = [GatewayProcess(tmp_path, str(service.base_url), *shared) for _ in range(2)]
        for gateway in gateways:
            stack.callback(gateway.kill)
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        first, second = (gateway.remoting_port for gateway in gateways)
        proxy.lead_to(first)
        command = remoting_driver(version, tmp_path, "consume", "-Dheartbeat=1000")
        arguments = [f"127.0.0.1:{proxy.port}", "order", "shop", "points", "", ""]
        consumer = await stack.enter_async_context(running(command, *arguments))
        await consumer.next("started")
        before = await sent(service, "before")
        await consumer.until("consumed", *before)
        # No answer arrives from then on.
        proxy.hold_answer(b"lost-")
        lost = await sent(service, "lost")
        async with asyncio.timeout(60):
            await proxy.holding_answer.wait()
        proxy.lead_to(second)
        proxy.cut()
        elsewhere = await sent(service, "elsewhere")
        await consumer.until("consumed", *elsewhere)
        proxy.lead_to(first)
        proxy.cut()
        await consumer.until("consumed", *lost)
        async with asyncio.timeout(120):
            while await db.fetchval("select count(*) from receipt") < 3 * NUMBER:
                await asyncio.sleep(0.1)
    assert all("Traceback" not in gateway.log.read_text() for gateway in gateways)
