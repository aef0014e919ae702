"""A subscription that a person makes while a gateway declares it keeps the person's settings."""

from typing import Any

import httpx
import pytest

from app.rocketmq.protocol.definition_pb2 import Code
from tests.support.gateway import RocketClient, consumer_of, gateway_over, receive_of
from tests.support.refusing_service import RefusingService

NAME = "points@order"
OK, MESSAGE_NOT_FOUND = 20000, 40401
PULLED: dict[str, Any] = {"topics": ["order", "billing"], "destination": {"type": "pull"}, "rate_per_s": 20}
PUSHED: dict[str, Any] = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/orders"}}


@pytest.mark.parametrize(
    ("shape", "code"), [(PULLED, MESSAGE_NOT_FOUND), (PUSHED, Code.CONSUMER_GROUP_NOT_FOUND)], ids=["pull", "webhook"]
)
async def test_a_subscription_that_is_made_meanwhile_is_not_overwritten(
    client: httpx.AsyncClient, shape: dict[str, Any], code: int
) -> None:
    transport = client._transport
    assert isinstance(transport, httpx.AsyncBaseTransport)
    service = RefusingService(transport)

    async def make() -> None:
        """Make the subscription after the gateway has seen that there is none, and before the gateway declares it."""
        service.after.clear()
        assert (await client.put(f"/subscriptions/{NAME}", json=shape)).status_code == 201

    service.after[NAME] = make
    async with gateway_over(service) as (_, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order"))
        assert NAME not in service.after
        made = (await client.get(f"/subscriptions/{NAME}")).json()
        assert (made["topics"], made["destination"]["type"]) == (shape["topics"], shape["destination"]["type"])
        assert made["rate_per_s"] == shape.get("rate_per_s")
        assert (await rocket.receive(receive_of("points", "order")))[0] == code
        stream.cancel()
