"""Two processes of the gateway over one service: one is killed while a check is out; the service is killed as well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from app.rocketmq.protocol.definition_pb2 import COMMIT, PUSH_CONSUMER, TRANSACTION, Resource
from app.rocketmq.protocol.service_pb2 import EndTransactionRequest, NotifyClientTerminationRequest, SendMessageRequest
from tests.support.gateway import (
    GatewayProcess,
    RocketClient,
    codes_of,
    consumer_of,
    message_of,
    producer_of,
    receive_of,
)
from tests.support.processes import Service

pytestmark = pytest.mark.timeout(300)
WITHIN_S = 120


class Deployment:
    """A service, and two gateways with a connection to each."""

    def __init__(self, directory: Path, dsn: str) -> None:
        self.service = Service(directory / "data", HALFNOTE_DATABASE_URL=dsn)
        self.gateways = [GatewayProcess(directory, self.service.url) for _ in range(2)]
        self.channels: list[grpc.aio.Channel] = []

    async def start(self, stack: AsyncExitStack) -> None:
        await self.service.start()
        stack.callback(self.service.kill)
        for gateway in self.gateways:
            await gateway.start()
            stack.callback(gateway.kill)
            self.channels.append(await stack.enter_async_context(grpc.aio.insecure_channel(gateway.endpoint)))
        async with httpx.AsyncClient(base_url=self.service.url) as admin:
            group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
            assert (await admin.put("/producer-groups/order", json=group)).status_code == 201


@pytest.fixture
async def deployment(tmp_path: Path, dsn: str) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        made = Deployment(tmp_path, dsn)
        await made.start(stack)
        yield made


async def sent(rocket: RocketClient, body: bytes, **system: Any) -> Any:
    """Send until it is stored, as clients do."""
    message = message_of("order", body, **system)
    async with asyncio.timeout(WITHIN_S):
        while True:
            answer = await rocket.call("SendMessage", SendMessageRequest(messages=[message]))
            if codes_of([answer]) == ["OK"]:
                return answer.entries[0]
            assert codes_of([answer]) == ["PROXY_TIMEOUT"], answer
            await asyncio.sleep(0.2)


async def asked(stream: Any) -> Any:
    """Wait for the next check."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            command = await stream.read()
            if command.HasField("recover_orphaned_transaction_command"):
                return command.recover_orphaned_transaction_command


async def ended(rocket: RocketClient, transaction_id: str) -> str:
    request = EndTransactionRequest(topic=Resource(name="order"), transaction_id=transaction_id, resolution=COMMIT)
    async with asyncio.timeout(WITHIN_S):
        while (code := codes_of([await rocket.call("EndTransaction", request)])[0]) == "PROXY_TIMEOUT":
            await asyncio.sleep(0.2)
        return code


async def test_a_check_that_a_killed_gateway_held_comes_by_the_other(deployment: Deployment) -> None:
    first, second = (RocketClient(channel) for channel in deployment.channels)
    stream, _ = await first.connect(producer_of("order"))
    entry = await sent(first, b"order 1030", message_type=TRANSACTION)
    check = await asked(stream)
    assert (check.transaction_id, check.message.body) == (entry.transaction_id, b"order 1030")
    deployment.gateways[0].kill()
    # The client reconnects by the other address, with nothing answered.
    other, _ = await second.connect(producer_of("order"))
    again = await asked(other)
    assert again.transaction_id == entry.transaction_id
    assert await ended(second, again.transaction_id) == "OK"
    other.cancel()


async def test_a_check_goes_where_a_producer_is_connected(deployment: Deployment) -> None:
    first, second = (RocketClient(channel) for channel in deployment.channels)
    stream, _ = await second.connect(producer_of("order"))
    idle, _ = await first.connect(producer_of("billing"))
    entry = await sent(first, b"order 1030", message_type=TRANSACTION)
    assert (await asked(stream)).transaction_id == entry.transaction_id
    assert await ended(first, entry.transaction_id) == "OK"
    idle.cancel()
    stream.cancel()


async def test_the_service_is_killed_and_comes_back(deployment: Deployment) -> None:
    rocket = RocketClient(deployment.channels[0])
    consumer = RocketClient(deployment.channels[1])
    stream, _ = await rocket.connect(producer_of("order"))
    consuming, _ = await consumer.connect(consumer_of("points", "order"))
    entry = await sent(rocket, b"order 1030", message_type=TRANSACTION)
    waiting = asyncio.create_task(consumer.receive(receive_of("points", "order", wait_s=20)))
    await asked(stream)
    deployment.service.kill()
    # What waited in the service is answered, and not left to the client's own timeout.
    assert await waiting == (50400, [])
    assert codes_of([await rocket.call("SendMessage", SendMessageRequest(messages=[message_of("order", b"x")]))]) == [
        "PROXY_TIMEOUT"
    ]
    restarted = asyncio.create_task(deployment.service.start())
    assert await ended(rocket, entry.transaction_id) == "OK"
    await restarted
    async with asyncio.timeout(WITHIN_S):
        found: list[Any] = []
        while not found:
            _, found = await consumer.receive(receive_of("points", "order", wait_s=5))
    assert [one.body for one in found] == [b"order 1030"]
    # The claims of checks recover as well.
    orphan = await sent(rocket, b"order 1031", message_type=TRANSACTION)
    while (await asked(stream)).transaction_id != orphan.transaction_id:
        continue
    stream.cancel()
    consuming.cancel()


async def test_what_a_consumer_left_as_its_gateway_stops_comes_again_soon_by_the_other(deployment: Deployment) -> None:
    settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
    rocket, other = (RocketClient(channel) for channel in deployment.channels)
    stream, _ = await rocket.connect(settings)
    other_stream, _ = await other.connect(settings)
    await sent(rocket, b"x")
    request = receive_of("points", "order", auto_renew=True, wait_s=10)
    _, [message] = await rocket.receive(request)
    answer = await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())
    assert codes_of([answer]) == ["OK"]
    assert await asyncio.to_thread(deployment.gateways[0].stop) == 0
    # Well before its time of 60 s is over.
    async with asyncio.timeout(20):
        while not (messages := (await other.receive(request))[1]):
            pass
    assert [(one.body, one.system_properties.delivery_attempt) for one in messages] == [(message.body, 2)]
    stream.cancel()
    other_stream.cancel()
