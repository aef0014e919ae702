"""What a gateway keeps of push consumers that were told of no order when they started."""

from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest

from app.rocketmq.clients import UNORDERED_MAX, ConnectedClient, ConnectedClients
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.protocol.definition_pb2 import FIFO, PUSH_CONSUMER, Resource
from app.rocketmq.protocol.service_pb2 import NotifyClientTerminationRequest, SendMessageRequest
from tests.support.gateway import RocketClient, codes_of, consumer_of, gateway_over, message_of, receive_of

KEYS = ApiKeys(None, None)
SETTINGS = consumer_of("points", "order", client_type=PUSH_CONSUMER)


class SometimesAway(httpx.AsyncBaseTransport):
    """Halfnote, or no answer while `away`."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner, self.away = inner, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("away", request=request)
        return await self._inner.handle_async_request(request)


@pytest.fixture
async def halfnote(client: httpx.AsyncClient) -> SometimesAway:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
    assert (await client.put("/subscriptions/points@order", json=put)).status_code == 201
    return SometimesAway(client._transport)


@pytest.fixture
async def channel(halfnote: SometimesAway) -> AsyncIterator[grpc.aio.Channel]:
    async with gateway_over(halfnote) as (_, channel):
        yield channel


async def received(rocket: RocketClient, group: str, *bodies: bytes) -> list[bytes]:
    """Send messages of a group; return those of the next receive."""
    for body in bodies:
        message = message_of("order", body, message_type=FIFO, message_group=group)
        assert codes_of([await rocket.call("SendMessage", SendMessageRequest(messages=[message]))]) == ["OK"]
    _, messages = await rocket.receive(receive_of("points", "order", auto_renew=True))
    return [one.body for one in messages]


@pytest.mark.parametrize("breaks", [True, False], ids=["it broke", "it is open"])
async def test_a_further_stream_of_a_push_consumer_that_was_told_of_no_order_changes_nothing(
    halfnote: SometimesAway, channel: grpc.aio.Channel, breaks: bool
) -> None:
    rocket = RocketClient(channel)
    halfnote.away = True
    first, settings = await rocket.connect(SETTINGS)
    assert not settings.subscription.fifo
    halfnote.away = False
    if breaks:
        first.cancel()
    second, settings = await rocket.connect(SETTINGS)
    assert settings.subscription.fifo
    assert await received(rocket, "g1", b"1", b"2") == [b"1"]
    # A client that ends says so. The next one with its id starts afresh.
    request = NotifyClientTerminationRequest(group=Resource(name="points"))
    assert codes_of([await rocket.call("NotifyClientTermination", request)]) == ["OK"]
    third, settings = await rocket.connect(SETTINGS)
    assert settings.subscription.fifo
    assert await received(rocket, "g2", b"3", b"4") == [b"3", b"4"]
    for stream in (first, second, third):
        stream.cancel()


async def test_a_further_stream_of_a_push_consumer_that_was_told_changes_nothing(channel: grpc.aio.Channel) -> None:
    rocket = RocketClient(channel)
    for group in ("g1", "g2"):
        stream, settings = await rocket.connect(SETTINGS)
        assert settings.subscription.fifo
        assert await received(rocket, group, b"1", b"2") == [b"1", b"2"]
        stream.cancel()


async def test_a_push_consumer_is_told_of_the_order_that_was_seen_before_halfnote_went_away(
    halfnote: SometimesAway, channel: grpc.aio.Channel
) -> None:
    first, _ = await RocketClient(channel).connect(SETTINGS)
    halfnote.away = True
    second, settings = await RocketClient(channel).connect(SETTINGS)
    assert settings.subscription.fifo
    for stream in (first, second):
        stream.cancel()


def test_the_oldest_is_forgotten() -> None:
    clients = ConnectedClients()
    for number in range(UNORDERED_MAX + 1):
        assert not clients.calls_in_order(ConnectedClient(f"{number}", KEYS), told=False)
    kept = [clients.calls_in_order(ConnectedClient(f"{number}", KEYS), told=True) for number in range(3)]
    assert kept == [True, False, False]
    assert len(clients._unordered) == UNORDERED_MAX
