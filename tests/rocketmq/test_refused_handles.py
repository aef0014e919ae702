"""Handles that the service refuses, for now or for good: what consumers still hold, and what is renewed for them."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq import renewals
from app.rocketmq.protocol.definition_pb2 import PUSH_CONSUMER, Resource
from app.rocketmq.protocol.service_pb2 import ForwardMessageToDeadLetterQueueRequest
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from tests.rocketmq.test_consuming import acked, changed, handle_of, received
from tests.rocketmq.test_consuming import sent as sent_by_grpc
from tests.rocketmq.test_remoting_consuming import began, joined, locked, pulled, receipts, sent, sent_back
from tests.support.gateway import GatewayInProcess, RocketClient, codes_of, consumer_of, gateway_over, message_of
from tests.support.refusing_service import INVALID, OVERLOADED, RefusingService
from tests.support.remoting import RemotingPeer, remoting_over

COMMIT = {"consumerGroup": "points", "topic": "order", "queueId": 0}


@pytest.fixture
def service(client: httpx.AsyncClient) -> RefusingService:
    transport = client._transport
    assert isinstance(transport, httpx.AsyncBaseTransport)
    return RefusingService(transport)


@pytest.fixture
async def gateway(service: RefusingService) -> AsyncIterator[tuple[RemotingGateway, int]]:
    async with remoting_over(service) as both:
        yield both


@pytest.fixture
async def peer(gateway: tuple[RemotingGateway, int]) -> AsyncIterator[RemotingPeer]:
    peer = await RemotingPeer.connect(gateway[1])
    await joined(peer)
    yield peer
    await peer.close()


@pytest.fixture
async def pushed(service: RefusingService) -> AsyncIterator[tuple[GatewayInProcess, RocketClient]]:
    """A connected push consumer of RocketMQ 5."""
    async with gateway_over(service) as (parts, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        yield parts, rocket
        stream.cancel()


@pytest.mark.parametrize("by", ["commit", "pull"])
async def test_a_handle_that_is_refused_for_now_stays_with_the_client(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService, db: Connection, by: str
) -> None:
    held = gateway[0].renewals
    await sent(peer, b"a", b"b")
    await pulled(peer, 0)
    first, second = held._held
    service.outcomes["ack"] = {first: OVERLOADED}
    if by == "commit":
        answer = await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, {**COMMIT, "commitOffset": peer.origin + 2})
    else:
        answer = await peer.pull(2, commitOffset=2)
    assert answer.code == ResultCode.SYSTEM_BUSY
    assert (await receipts(db), list(held._held)) == (1, [first])
    # The client commits again. What was refused is acknowledged, and nothing else is asked for.
    service.outcomes.clear()
    service.asked.clear()
    await peer.commit(2)
    assert [wanted["handles"] for action, wanted in service.asked if action == "ack"] == [[first]]
    assert (await receipts(db), len(held)) == (2, 0)
    assert second not in held


@pytest.mark.parametrize("whole", [True, False], ids=["request", "handle"])
@pytest.mark.parametrize("action", ["ack", "reject"])
async def test_a_settlement_that_fails_after_the_client_left_keeps_no_message_out(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService, action: str, whole: bool
) -> None:
    parts, _ = gateway
    await sent(peer, b"a")
    [message] = await pulled(peer, 0)
    [handle] = parts.renewals._held
    settling, left = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        settling.set()
        await left.wait()

    service.before[action] = wait
    if whole:
        service.whole.add(action)
    else:
        service.outcomes[action] = {handle: OVERLOADED}
    if action == "ack":
        done = {**COMMIT, "commitOffset": peer.origin + 1}
        answer = asyncio.create_task(peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, done))
    else:
        back = {"offset": message.position, "group": "points", "delayLevel": -1, "originMsgId": message.unique_key}
        answer = asyncio.create_task(peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, back))
    async with asyncio.timeout(30):
        await settling.wait()
        assert (await peer.heartbeat(consumers={"points": "*"}, topic="billing")).code == ResultCode.SUCCESS
        [client] = parts.clients._by_name.values()
        while client.former_queues():
            await asyncio.sleep(0.05)
        left.set()
        assert (await answer).code == ResultCode.SYSTEM_BUSY
    assert len(parts.renewals) == 0


async def test_a_handle_that_is_over_is_forgotten_with_its_offset(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService, db: Connection
) -> None:
    held = gateway[0].renewals
    await sent(peer, b"a", b"b")
    await pulled(peer, 0)
    service.outcomes["ack"] = {next(iter(held._held)): INVALID}
    await peer.commit(2)
    assert (await receipts(db), len(held)) == (1, 0)
    service.asked.clear()
    await peer.commit(2)
    assert service.asked == []


async def test_what_is_given_back_and_refused_for_now_stays_with_the_client(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService, client: httpx.AsyncClient
) -> None:
    await sent(peer, b"a")
    [message] = await pulled(peer, 0)
    [handle] = gateway[0].renewals._held
    service.outcomes["reject"] = {handle: OVERLOADED}
    assert await sent_back(peer, message, delayLevel=-1) == ResultCode.SYSTEM_BUSY
    # Such a client sends it with its properties.
    answer = await peer.send(
        b"a", topic="%RETRY%points", properties={**message.properties, "RETRY_TOPIC": "order"}, j=2, l=1
    )
    assert answer.code == ResultCode.SYSTEM_BUSY
    other = await RemotingPeer.connect(gateway[1])
    answer = await other.send(
        b"a", topic="%RETRY%points", properties={**message.properties, "RETRY_TOPIC": "order"}, j=2, l=1
    )
    assert answer.code == ResultCode.SYSTEM_BUSY
    await other.close()
    # It runs its handler before it tries again, and keeps the message until then.
    later = time.monotonic() + renewals.TRIED_AGAIN_S + 1
    gateway[0].renewals._held[handle].until = later
    await gateway[0].renewals.renew(later)
    assert handle in gateway[0].renewals
    service.outcomes.clear()
    assert await sent_back(peer, message, delayLevel=-1) == ResultCode.SUCCESS
    assert len((await client.get("/dead-letters")).json()["items"]) == 1
    assert len(gateway[0].renewals) == 0


async def test_a_renewal_reads_the_outcome_of_each_handle(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService
) -> None:
    held = gateway[0].renewals
    await sent(peer, b"a", b"b", b"c")
    await pulled(peer, 0)
    over, busy, renewed = held._held
    service.outcomes["extend"] = {over: INVALID, busy: OVERLOADED}
    until = held._held[busy].until
    due_at = until - renewals.AHEAD_S + 1
    await held.renew(due_at)
    # The one that is over is renewed no more. The one that was refused is due at the next look.
    assert {handle: one.until for handle, one in held._held.items()} == {
        busy: until,
        renewed: due_at + renewals.HELD_S,
    }
    service.outcomes.clear()
    service.asked.clear()
    await held.renew(due_at + renewals.LOOK_S)
    assert [wanted["handles"] for action, wanted in service.asked if action == "extend"] == [[busy]]
    assert held._held[busy].until == due_at + renewals.LOOK_S + renewals.HELD_S


async def test_an_orderly_client_begins_again_when_a_message_of_its_queue_is_not_held_any_more(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService, db: Connection
) -> None:
    held = gateway[0].renewals
    assert (await locked(peer))[0] == ResultCode.SUCCESS
    await sent(peer, b"a", b"b", b"c", KEYS="order-1030")
    assert len(await pulled(peer, 0)) == 3
    await peer.commit(1)
    over, renewed = held._held
    assert await pulled(peer, 3) == []
    service.outcomes["extend"] = {over: INVALID}
    await held.renew(held._held[over].until - renewals.AHEAD_S + 1)
    # Each pull says so until the client begins again, which holds the rest until then.
    for _ in range(2):
        answer = await peer.pull(3)
        assert (answer.code, answer.fields["nextBeginOffset"]) == (ResultCode.PULL_OFFSET_MOVED, str(peer.origin + 1))
    # Then the client commits the offset that it was told.
    await peer.commit(1)
    assert (list(held._held), await receipts(db)) == ([renewed], 1)
    peer.origin = await began(peer)
    assert len(held) == 0
    service.outcomes.clear()
    async with asyncio.timeout(30):
        while not (again := await pulled(peer, 0, maxMsgNums=2)):
            await asyncio.sleep(0.05)
    assert [one.body for one in again] == [b"b", b"c"]


async def test_a_client_without_order_goes_on_when_a_message_is_not_held_any_more(
    gateway: tuple[RemotingGateway, int], peer: RemotingPeer, service: RefusingService
) -> None:
    held = gateway[0].renewals
    await sent(peer, b"a")
    assert len(await pulled(peer, 0)) == 1
    [over] = held._held
    service.outcomes["extend"] = {over: INVALID}
    await held.renew(held._held[over].until - renewals.AHEAD_S + 1)
    await sent(peer, b"b")
    assert [one.body for one in await pulled(peer, 1)] == [b"b"]


SETTLEMENTS = ("ack", "nack", "reject")


async def settled(rocket: RocketClient, action: str, handle: str) -> str:
    """Settle a message; return the status."""
    if action == "ack":
        return (await acked(rocket, handle))[0]
    if action == "nack":
        return codes_of([await changed(rocket, handle, 10)])[0]
    request = ForwardMessageToDeadLetterQueueRequest(
        group=Resource(name="points"), topic=Resource(name="order"), receipt_handle=handle, delivery_attempt=1
    )
    return codes_of([await rocket.call("ForwardMessageToDeadLetterQueue", request)])[0]


async def only_message(rocket: RocketClient) -> str:
    await sent_by_grpc(rocket, message_of("order", b"x"))
    [message] = await received(rocket, auto_renew=True)
    return handle_of(message)


@pytest.mark.parametrize("action", SETTLEMENTS)
async def test_a_message_is_renewed_until_its_settlement_has_its_outcome(
    pushed: tuple[GatewayInProcess, RocketClient], service: RefusingService, action: str
) -> None:
    parts, rocket = pushed
    handle = await only_message(rocket)
    held_during: list[bool] = []

    async def look() -> None:
        held_during.append(handle in parts.renewals)

    service.before[action] = look
    assert await settled(rocket, action, handle) == "OK"
    assert held_during == [True]
    assert handle not in parts.renewals


@pytest.mark.parametrize("whole", [True, False], ids=["request", "handle"])
@pytest.mark.parametrize("action", SETTLEMENTS)
async def test_a_message_is_renewed_while_its_consumer_tries_again(
    pushed: tuple[GatewayInProcess, RocketClient], service: RefusingService, action: str, whole: bool
) -> None:
    parts, rocket = pushed
    handle = await only_message(rocket)
    if whole:
        service.whole.add(action)
    else:
        service.outcomes[action] = {handle: OVERLOADED}
    assert await settled(rocket, action, handle) == "TOO_MANY_REQUESTS"
    tried_at = time.monotonic()
    held = parts.renewals._held[handle]
    # It is renewed for a while. A consumer that does not try again gets it once more.
    held.until = tried_at + renewals.TRIED_AGAIN_S
    await parts.renewals.renew(tried_at + renewals.TRIED_AGAIN_S - 1)
    assert held.until == tried_at + renewals.TRIED_AGAIN_S - 1 + renewals.HELD_S
    await parts.renewals.renew(tried_at + renewals.TRIED_AGAIN_S + 1)
    assert handle not in parts.renewals


@pytest.mark.parametrize("action", SETTLEMENTS)
async def test_a_settlement_that_is_tried_again_is_done(
    pushed: tuple[GatewayInProcess, RocketClient], service: RefusingService, action: str
) -> None:
    parts, rocket = pushed
    handle = await only_message(rocket)
    service.outcomes[action] = {handle: OVERLOADED}
    assert await settled(rocket, action, handle) == "TOO_MANY_REQUESTS"
    service.outcomes.clear()
    assert await settled(rocket, action, handle) == "OK"
    assert handle not in parts.renewals


@pytest.mark.parametrize("action", SETTLEMENTS)
async def test_a_message_that_is_not_held_any_more_is_not_renewed(
    pushed: tuple[GatewayInProcess, RocketClient], service: RefusingService, action: str
) -> None:
    parts, rocket = pushed
    handle = await only_message(rocket)
    service.outcomes[action] = {handle: INVALID}
    assert await settled(rocket, action, handle) == "INVALID_RECEIPT_HANDLE"
    assert handle not in parts.renewals
