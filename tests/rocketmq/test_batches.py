"""Batches of producers of either protocol: messages of a key are stored in their order."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq.protocol.service_pb2 import SendMessageRequest
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.store_format import properties_text
from tests.support.gateway import RocketClient, codes_of, gateway_over, message_of
from tests.support.refusing_service import RefusingService
from tests.support.remoting import RemotingPeer, remoting_over

# Pairs of a key, or none, and a body.
Batch = Sequence[tuple[str, str]]


class Sender(Protocol):
    async def __call__(self, batch: Batch) -> list[bool]:
        """Send a batch; return which of its messages are stored, as far as the client learns it."""


@pytest.fixture
def service(client: httpx.AsyncClient) -> RefusingService:
    transport = client._transport
    assert isinstance(transport, httpx.AsyncBaseTransport)
    return RefusingService(transport)


@pytest.fixture(params=["remoting", "grpc"])
async def send(request: pytest.FixtureRequest, service: RefusingService) -> AsyncIterator[Sender]:
    if request.param == "grpc":
        async with gateway_over(service) as (_, channel):
            rocket = RocketClient(channel)

            async def by_grpc(batch: Batch) -> list[bool]:
                messages = [message_of("order", body.encode(), keys=[key] if key else []) for key, body in batch]
                answer = await rocket.call("SendMessage", SendMessageRequest(messages=messages))
                return [code == "OK" for code in codes_of(answer.entries)]

            yield by_grpc
        return
    async with remoting_over(service) as (_, port):
        peer = await RemotingPeer.connect(port)

        async def by_remoting(batch: Batch) -> list[bool]:
            parts = []
            for number, (key, body) in enumerate(batch):
                named = {"UNIQ_KEY": f"id-{number}", **({"KEYS": key} if key else {})}
                properties = properties_text(named).encode()
                part = len(body).to_bytes(4, "big") + body.encode() + len(properties).to_bytes(2, "big") + properties
                parts.append(bytes(16) + part)
            answer = await peer.send(b"".join(parts), code=RequestCode.SEND_BATCH_MESSAGE, m="true")
            return [answer.code == ResultCode.SUCCESS] * len(batch)

        yield by_remoting
        await peer.close()


async def stored(db: Connection) -> list[str]:
    """Return the bodies in the order of their offsets."""
    rows = await db.fetch(
        "select convert_from(h.body, 'UTF8') from outbox o join half h using (transaction_id, position) "
        'order by o."offset"'
    )
    return [row[0] for row in rows]


@pytest.fixture
async def group(client: httpx.AsyncClient) -> None:
    for name in ("shop", "order"):
        assert (await client.put(f"/producer-groups/{name}", json={"checks": "claim"})).status_code == 201


@pytest.mark.usefixtures("group")
async def test_messages_of_a_key_are_stored_in_their_order(
    send: Sender, service: RefusingService, db: Connection
) -> None:
    batch = [("k1", "a1"), ("k2", "b1"), ("k1", "a2"), ("k2", "b2"), ("k1", "a3")]
    passed = 0

    async def pass_later_ones_first() -> None:
        nonlocal passed
        passed += 1
        await asyncio.sleep(0.1 * (len(batch) - passed))

    service.before["messages"] = pass_later_ones_first
    assert await send(batch) == [True] * 5
    found = await stored(db)
    assert [body for body in found if body[0] == "a"] == ["a1", "a2", "a3"]
    assert [body for body in found if body[0] == "b"] == ["b1", "b2"]


@pytest.mark.usefixtures("group")
async def test_after_a_refusal_no_later_message_of_its_key_is_stored(
    send: Sender, service: RefusingService, db: Connection
) -> None:
    batch = [("k1", "a1"), ("k2", "b1"), ("k1", "a2"), ("k2", "b2")]

    async def refuse_the_first() -> None:
        # The latest request is that of the hook.
        if service.asked[-1][1]["messages"][0]["key"] == "k1":
            service.whole.add("messages")
        else:
            service.whole.discard("messages")

    service.before["messages"] = refuse_the_first
    stored_ones = await send(batch)
    assert stored_ones in ([False] * 4, [False, True, False, True])
    assert await stored(db) == ["b1", "b2"]
    assert [wanted["messages"][0]["key"] for action, wanted in service.asked if action == "messages"].count("k1") == 1
    # The client sends it again, and each message is stored once.
    service.before.clear()
    service.whole.clear()
    assert await send([batch[0], batch[2]]) == [True] * 2
    assert await stored(db) == ["b1", "b2", "a1", "a2"]
