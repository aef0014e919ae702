"""Messages that were claimed for a consumer which does not get them come again soon, before their time is over.

Those that it surely did not get use up no attempt.
"""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq import claiming, leaving
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.protocol.definition_pb2 import PUSH_CONSUMER
from app.rocketmq.protocol.service_pb2 import NotifyClientTerminationRequest
from app.rocketmq.remoting import connections
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from tests.conftest import assembled, client_of, settings_of
from tests.rocketmq.test_consuming import acked, handle_of, received
from tests.rocketmq.test_consuming import sent as sent_by_grpc
from tests.rocketmq.test_remoting_consuming import began, joined, pulled, sent
from tests.support.gateway import RocketClient, codes_of, consumer_of, gateway_over, message_of, receive_of
from tests.support.refusing_service import RefusingService
from tests.support.remoting import ReadMessage, RemotingPeer, remoting_over

# Well before the time of a claim is over.
SOON_S = 20.0
PULL = {"consumerGroup": "points", "topic": "order", "queueId": 0, "queueOffset": 0, "maxMsgNums": 32, "sysFlag": 0}


@pytest.fixture
def service(client: httpx.AsyncClient) -> RefusingService:
    transport = client._transport
    assert isinstance(transport, httpx.AsyncBaseTransport)
    return RefusingService(transport)


@pytest.fixture
async def gateway(service: RefusingService) -> AsyncIterator[tuple[RemotingGateway, int]]:
    async with remoting_over(service) as both:
        yield both


async def pulled_soon(peer: RemotingPeer) -> list[ReadMessage]:
    async with asyncio.timeout(SOON_S):
        while not (messages := await pulled(peer, 0)):
            await asyncio.sleep(0.05)
    return messages


async def test_messages_claimed_for_a_connection_that_ended_come_again_soon(
    gateway: tuple[RemotingGateway, int], service: RefusingService
) -> None:
    parts, port = gateway
    peer, other = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
    await joined(peer)
    await joined(other)
    await sent(peer, b"a", b"b")
    left = asyncio.Event()

    async def leave() -> None:
        """End the connection after the service has claimed, and before its answer arrives."""
        service.after.clear()
        left.set()
        await peer.close()
        while parts.clients.get(peer.client_id, ApiKeys(None, None)) is not None:
            await asyncio.sleep(0.01)

    service.after["claim"] = leave
    peer.write(RequestCode.PULL_MESSAGE, PULL)
    async with asyncio.timeout(SOON_S):
        await left.wait()
    assert [(one.body, one.reconsume_times) for one in await pulled_soon(other)] == [(b"a", 0), (b"b", 0)]
    await other.close()


async def test_a_claim_that_waits_ends_as_its_client_leaves(
    gateway: tuple[RemotingGateway, int], service: RefusingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A claim that goes on is not over within the time of this test.
    monkeypatch.setattr(claiming, "ANSWERED_BY_S", 2 * SOON_S)
    peer, other = await RemotingPeer.connect(gateway[1]), await RemotingPeer.connect(gateway[1])
    await joined(peer)
    await joined(other)
    waits, canceled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        waits.set()
        try:
            await asyncio.sleep(2 * SOON_S)
        except asyncio.CancelledError:
            canceled.set()
            raise

    service.before["claim"] = wait
    peer.write(RequestCode.PULL_MESSAGE, {**PULL, "sysFlag": 2, "suspendTimeoutMillis": 20_000})
    async with asyncio.timeout(SOON_S):
        await waits.wait()
        await asyncio.sleep(claiming.AT_ONCE_S + 0.1)
        await peer.close()
        await canceled.wait()
    service.before.clear()
    await sent(other, b"a")
    # It used up no attempt.
    assert [(one.body, one.reconsume_times) for one in await pulled_soon(other)] == [(b"a", 0)]
    await other.close()


async def test_messages_claimed_for_a_client_that_does_not_read_come_again_soon(
    gateway: tuple[RemotingGateway, int], service: RefusingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, port = gateway
    peer, other = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
    await joined(peer)
    await joined(other)
    await sent(peer, b"a")
    claimed = asyncio.Event()

    async def unread() -> None:
        service.after.clear()
        # Nothing may wait for a client any more.
        monkeypatch.setattr(connections, "UNREAD_MAX_BYTES", -1)
        claimed.set()

    service.after["claim"] = unread
    peer.write(RequestCode.PULL_MESSAGE, PULL)
    async with asyncio.timeout(SOON_S):
        await claimed.wait()
        await peer.ended()
    monkeypatch.undo()
    assert [one.body for one in await pulled_soon(other)] == [b"a"]
    assert len(parts.renewals) == 1
    await peer.close()
    await other.close()


@pytest.mark.parametrize("by", ["the group", "the topic", "both and comes back"])
async def test_messages_claimed_for_a_client_that_left_meanwhile_come_again_soon(
    gateway: tuple[RemotingGateway, int], service: RefusingService, by: str
) -> None:
    parts, port = gateway
    peer, other = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
    await joined(peer)
    await joined(other)
    await sent(peer, b"a")

    async def leave() -> None:
        """Leave after the service has claimed, and before its answer arrives. The connection stays."""
        service.after.clear()
        if by == "the group":
            left = {"clientID": peer.client_id, "consumerGroup": "points"}
            assert (await peer.call(RequestCode.UNREGISTER_CLIENT, left)).code == ResultCode.SUCCESS
            return
        assert (await peer.heartbeat(consumers={"points": "*"}, topic="billing")).code == ResultCode.SUCCESS
        if by == "both and comes back":
            await joined(peer)

    service.after["claim"] = leave
    assert (await peer.pull(0)).code == ResultCode.PULL_NOT_FOUND
    assert len(parts.renewals) == 0
    assert [(one.body, one.reconsume_times) for one in await pulled_soon(other)] == [(b"a", 0)]
    await peer.close()
    await other.close()


async def test_what_a_client_holds_of_a_topic_that_it_leaves_comes_again_soon(
    gateway: tuple[RemotingGateway, int],
) -> None:
    parts, port = gateway
    peer, other = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
    await joined(peer)
    await joined(other)
    await sent(peer, b"a")
    assert [one.body for one in await pulled(peer, 0)] == [b"a"]
    assert (await peer.heartbeat(consumers={"points": "*"}, topic="billing")).code == ResultCode.SUCCESS
    assert [(one.body, one.reconsume_times) for one in await pulled_soon(other)] == [(b"a", 1)]
    assert len(parts.renewals) == 1
    await peer.close()
    await other.close()


async def test_what_a_client_holds_of_a_group_that_its_heartbeat_leaves_out_comes_again_soon(
    gateway: tuple[RemotingGateway, int],
) -> None:
    parts, port = gateway
    peer, other = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
    assert (await peer.heartbeat(consumers={"points": "*", "mail": "*"})).code == ResultCode.SUCCESS
    peer.origin = await began(peer)
    await joined(other)
    await sent(peer, b"a")
    assert [one.body for one in await pulled(peer, 0)] == [b"a"]
    # Its word that it left was lost.
    assert (await peer.heartbeat(consumers={"mail": "*"})).code == ResultCode.SUCCESS
    assert (await peer.pull(1)).code == ResultCode.SUBSCRIPTION_NOT_EXIST
    assert [(one.body, one.reconsume_times) for one in await pulled_soon(other)] == [(b"a", 1)]
    assert len(parts.renewals) == 1
    await peer.close()
    await other.close()


async def test_two_connections_of_one_client_id_keep_their_groups(gateway: tuple[RemotingGateway, int]) -> None:
    peer, other = await RemotingPeer.connect(gateway[1]), await RemotingPeer.connect(gateway[1])
    other.client_id = peer.client_id
    await joined(peer)
    await sent(peer, b"a")
    assert len(await pulled(peer, 0)) == 1
    for _ in range(2):
        assert (await other.heartbeat(consumers={"mail": "*"})).code == ResultCode.SUCCESS
        assert (await peer.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
    assert await pulled(peer, 1) == []
    assert (await other.pull(0, group="mail")).code == ResultCode.PULL_NOT_FOUND
    await peer.close()
    await other.close()


async def test_messages_claimed_for_a_call_that_was_canceled_come_again_soon(service: RefusingService) -> None:
    async with gateway_over(service) as (_, channel):
        rocket, other = RocketClient(channel), RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order"))
        await sent_by_grpc(rocket, message_of("order", b"x"))
        claimed = asyncio.Event()

        async def wait() -> None:
            service.after.clear()
            claimed.set()
            # The client goes away meanwhile.
            await asyncio.sleep(0.2)

        service.after["claim"] = wait
        receiving = asyncio.create_task(rocket.receive(receive_of("points", "order")))
        async with asyncio.timeout(SOON_S):
            await claimed.wait()
            receiving.cancel()
            while not (messages := await received(other)):
                await asyncio.sleep(0.05)
        assert [(one.body, one.system_properties.delivery_attempt) for one in messages] == [(b"x", 1)]
        stream.cancel()


@pytest.mark.parametrize("by", ["its word", "its word as the gateway stops"])
async def test_what_a_push_consumer_holds_that_ends_comes_again_soon(
    service: RefusingService, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LEAVE_S", 3.0)
    async with gateway_over(service) as (parts, channel):
        rocket, other = RocketClient(channel), RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        other_stream, _ = await other.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        for body in (b"x", b"y"):
            await sent_by_grpc(rocket, message_of("order", body))
        messages = await received(rocket, auto_renew=True)
        await sent_by_grpc(rocket, message_of("order", b"z"))
        assert [one.body for one in await received(other, auto_renew=True)] == [b"z"]
        assert len(messages) == 2
        assert codes_of([await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())]) == ["OK"]
        if by == "its word":
            # It may send its last acknowledgements after that.
            assert await acked(rocket, handle_of(messages[0])) == ["OK", "OK"]
            async with asyncio.timeout(SOON_S):
                while not (again := await received(other, auto_renew=True)):
                    await asyncio.sleep(0.05)
            [left] = again
            assert (left.body, left.system_properties.delivery_attempt) == (messages[1].body, 2)
            # What the other one holds is renewed on.
            assert len(parts.renewals) == 2
        else:
            await parts.stop()
            [given_back] = [wanted["handles"] for action, wanted in service.asked if action == "nack"]
            assert given_back == [handle_of(one) for one in messages]
        stream.cancel()
        other_stream.cancel()


async def test_what_a_push_consumer_acknowledges_as_it_ends_is_acknowledged(service: RefusingService) -> None:
    async with gateway_over(service) as (parts, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        await sent_by_grpc(rocket, message_of("order", b"x"))
        [message] = await received(rocket, auto_renew=True)
        asked, answers = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            asked.set()
            await answers.wait()

        service.before["ack"] = wait
        acknowledging = asyncio.create_task(acked(rocket, handle_of(message)))
        await asked.wait()
        assert codes_of([await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())]) == ["OK"]
        await parts.leaving.stop()
        await parts.claiming.stop()
        answers.set()
        assert await acknowledging == ["OK", "OK"]
        assert "nack" not in [action for action, _ in service.asked]
        assert len(parts.renewals) == 0
        stream.cancel()


async def test_a_message_for_a_push_consumer_that_ends_while_it_waits_goes_to_another(
    service: RefusingService,
) -> None:
    async with gateway_over(service) as (parts, channel):
        rocket, other = RocketClient(channel), RocketClient(channel)
        settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
        stream, _ = await rocket.connect(settings)
        claimed, ended = asyncio.Event(), asyncio.Event()

        async def hold_the_answer() -> None:
            claimed.set()
            await ended.wait()

        await sent_by_grpc(other, message_of("order", b"x"))
        service.after["claim"] = hold_the_answer
        waiting = asyncio.create_task(received(rocket, auto_renew=True))
        await claimed.wait()
        del service.after["claim"]
        assert codes_of([await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())]) == ["OK"]
        ended.set()
        assert await waiting == []
        assert len(parts.renewals) == 0
        other_stream, _ = await other.connect(settings)
        async with asyncio.timeout(SOON_S):
            while not (messages := await received(other, auto_renew=True)):
                await asyncio.sleep(0.05)
        assert [(one.body, one.system_properties.delivery_attempt) for one in messages] == [(b"x", 1)]
        stream.cancel()
        other_stream.cancel()


@pytest.mark.parametrize("reads_on", [True, False])
async def test_what_is_still_being_sent_to_a_push_consumer_that_ends_comes_again_soon(
    service: RefusingService, reads_on: bool
) -> None:
    # A connection that takes no more than 64 KiB ahead of the client.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        gateway_over(service) as (parts, channel),
        grpc.aio.insecure_channel(f"127.0.0.1:{parts.port}", options=narrow) as narrow_channel,
    ):
        rocket, producer = RocketClient(narrow_channel), RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        for number in range(4):
            await sent_by_grpc(producer, message_of("order", b"%d" % number * 400_000))
        receiving = rocket.begin_receive(receive_of("points", "order", auto_renew=True))
        answers = [await receiving.read() for _ in range(2)]
        [first] = [one.message for one in answers if one.HasField("message")]
        async with asyncio.timeout(SOON_S):
            while sum(one.answer.has_passed(handle) for handle, one in parts.renewals._held.items()) < 2:
                await asyncio.sleep(0.01)
        held = list(parts.renewals._held)
        assert (len(held), held[0]) == (4, handle_of(first))
        assert codes_of([await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())]) == ["OK"]
        # What was not passed on comes again as the same attempt, whether or not the client reads.
        async with asyncio.timeout(SOON_S):
            while not (unsent := _given_back(service, begun=False)):
                await asyncio.sleep(0.01)
        passed = [handle for handle in held if handle not in unsent]
        assert (sorted(parts.renewals._held), len(passed), len(unsent)) == (sorted(passed), 2, 2)
        if reads_on:
            # For what the client gets it has LEAVE_S from the end of the answer.
            while (answer := await receiving.read()) is not grpc.aio.EOF:
                answers.append(answer)
            assert [handle_of(one.message) for one in answers if one.HasField("message")] == passed
            assert answers[-1].HasField("delivery_timestamp")
            assert await acked(rocket, passed[1]) == ["OK", "OK"]
            again = passed[:1]
        else:
            receiving.cancel()
            again = passed
        async with asyncio.timeout(SOON_S):
            while not (given_back := _given_back(service)):
                await asyncio.sleep(0.01)
        assert given_back == again
        assert len(parts.renewals) == 0
        await parts.leaving.stop()
        await parts.claiming.stop()
        assert (_given_back(service), _given_back(service, begun=False)) == (again, unsent)
        stream.cancel()


def _given_back(service: RefusingService, *, begun: bool = True) -> list[str]:
    """Return the handles that were given back, of attempts that clients may have begun or that they have not."""
    wanted = [wanted for action, wanted in service.asked if action == "nack" and wanted.get("begun", True) == begun]
    return [handle for one in wanted for handle in one["handles"]]


async def test_a_push_consumer_that_ends_and_comes_back_at_once_keeps_what_it_holds(
    service: RefusingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LEAVE_S", 3.0)
    async with gateway_over(service) as (parts, channel):
        rocket = RocketClient(channel)
        settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
        stream, _ = await rocket.connect(settings)
        await sent_by_grpc(rocket, message_of("order", b"x"))
        [message] = await received(rocket, auto_renew=True)
        assert codes_of([await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())]) == ["OK"]
        assert await stream.code() == grpc.StatusCode.OK
        stream, _ = await rocket.connect(settings)
        await asyncio.sleep(leaving.LEAVE_S + 0.5)
        assert handle_of(message) in parts.renewals
        assert "nack" not in [action for action, _ in service.asked]
        stream.cancel()


async def test_a_message_that_cannot_be_given_to_a_client_keeps_no_others(dsn: str, db: Connection) -> None:
    settings = settings_of(dsn, headers_limit_bytes=65_536)
    async with (
        assembled(settings, dsn) as runtime,
        client_of(runtime) as client,
        remoting_over(client._transport) as (parts, port),
    ):
        peer = await RemotingPeer.connect(port)
        await joined(peer)
        # Its keys have more bytes than the format of RocketMQ's messages has room for.
        headers = {"rocketmq-keys": json.dumps(["k" * 40_000])}
        assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
        keys = [{}, {"key": "a"}, {"key": "a"}, {"key": "b"}]
        messages = [
            {"topic": "order", "body": n, "headers": headers if n == 1 else {}, **key} for n, key in enumerate(keys)
        ]
        answer = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
        assert answer.status_code == 201, answer.text
        assert [(one.body, one.reconsume_times) for one in await pulled(peer, 0)] == [(b"0", 0), (b"3", 0)]
        # What comes after it with its key comes again.
        async with asyncio.timeout(SOON_S):
            while not (rest := await pulled(peer, 2)):
                await asyncio.sleep(0.05)
        assert [(one.body, one.reconsume_times) for one in rest] == [(b"2", 0)]
        assert len(parts.renewals) == 3
        # It is a failed attempt, and comes again as `retry` of the subscription says.
        due_s = await db.fetchval("select extract(epoch from due_at - now()) from delivery_retry where attempts = 1 ")
        assert float(due_s) > 2
        await peer.close()


async def test_a_send_is_answered_and_a_pull_ended_as_a_gateway_stops(service: RefusingService, db: Connection) -> None:
    sending, waits, stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hold_a_send() -> None:
        sending.set()
        await stopping.wait()

    async def note_a_claim() -> None:
        waits.set()

    async with remoting_over(service) as (gateway, port):
        peer, idle = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
        await joined(peer)
        assert (await idle.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
        service.before = {"messages": hold_a_send, "claim": note_a_claim}
        peer.write(RequestCode.PULL_MESSAGE, {**PULL, "sysFlag": 2, "suspendTimeoutMillis": 20_000})
        answer = asyncio.create_task(peer.send(b"a"))
        await asyncio.gather(sending.wait(), waits.wait())
        async with asyncio.timeout(SOON_S / 2):
            stopped = asyncio.create_task(gateway.stop())
            # A connection without a request ends at once, and the port takes no others.
            await idle.ended()
            with pytest.raises(ConnectionRefusedError):
                await RemotingPeer.connect(port)
            assert not answer.done()
            stopping.set()
            assert (await answer).code == ResultCode.SUCCESS
            await peer.ended()
            await stopped
        assert await db.fetchval("select count(*) from outbox") == 1
        await peer.close()
        await idle.close()


async def test_a_request_that_is_not_answered_in_time_keeps_no_gateway(service: RefusingService) -> None:
    sending, ended = asyncio.Event(), asyncio.Event()

    async def hold_until_the_connection_ended() -> None:
        sending.set()
        await ended.wait()

    async with remoting_over(service, drain_s=0.1) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
        service.before["messages"] = hold_until_the_connection_ended
        answer = asyncio.create_task(peer.send(b"a"))
        await sending.wait()
        stopped = asyncio.create_task(gateway.stop())
        await peer.ended()
        ended.set()
        async with asyncio.timeout(SOON_S):
            await stopped
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await peer.close()


async def test_what_is_given_back_as_a_gateway_stops_is_given_back(service: RefusingService) -> None:
    async with remoting_over(service) as (_, port):
        peer = await RemotingPeer.connect(port)
        await joined(peer)
        await sent(peer, b"a")
        claimed = asyncio.Event()

        async def wait() -> None:
            service.after.clear()
            claimed.set()
            await asyncio.sleep(0.2)

        service.after["claim"] = wait
        peer.write(RequestCode.PULL_MESSAGE, PULL)
        async with asyncio.timeout(SOON_S):
            await claimed.wait()
    await peer.close()
    assert [action for action, _ in service.asked].count("nack") == 1


async def test_what_a_client_left_just_before_a_gateway_stops_is_given_back(service: RefusingService) -> None:
    async with remoting_over(service) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        await joined(peer)
        await sent(peer, b"a")
        assert len(await pulled(peer, 0)) == 1
        left = {"clientID": peer.client_id, "consumerGroup": "points"}
        assert (await peer.call(RequestCode.UNREGISTER_CLIENT, left)).code == ResultCode.SUCCESS
        await gateway.stop()
        assert [action for action, _ in service.asked].count("nack") == 1
        await peer.close()
