"""Consumers of RocketMQ 4 that begin a queue again: at another gateway process, or while a message is given back."""

import asyncio
import time
from itertools import pairwise

import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.remoting.claim_queues import ClaimQueue, QueueName
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.pulling import HELD_MAX
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from tests.support.refusing_service import RefusingService
from tests.support.remoting import RemotingPeer, read_messages, remoting_over

QUEUE = {"consumerGroup": "points", "topic": "order", "queueId": 0}


async def connected(port: int, client_id: str) -> RemotingPeer:
    peer = await RemotingPeer.connect(port)
    peer.client_id = client_id
    assert (await peer.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
    return peer


async def sent(peer: RemotingPeer, *bodies: bytes) -> None:
    for body in bodies:
        assert (await peer.send(body)).code == ResultCode.SUCCESS


async def pulled(peer: RemotingPeer, offset: int, commit: int = 0) -> list[bytes]:
    return [one.body for one in read_messages((await peer.pull(offset, commitOffset=commit)).body)]


async def left(gateway: RemotingGateway, peer: RemotingPeer) -> None:
    await peer.close()
    async with asyncio.timeout(30):
        while gateway.clients.get(peer.client_id, ApiKeys(None, None)) is not None:
            await asyncio.sleep(0.01)


async def begun(peer: RemotingPeer) -> int:
    return int((await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, QUEUE)).fields["offset"])


async def left_with_two(gateway: RemotingGateway, port: int) -> int:
    """Let a client leave that was sent `a` and `b`; return the offset at which it had begun."""
    peer = await connected(port, "test@1")
    offset = await begun(peer)
    await sent(peer, b"a", b"b")
    assert await pulled(peer, offset) == [b"a", b"b"]
    await left(gateway, peer)
    return offset


async def acknowledged(db: Connection) -> int:
    return int(await db.fetchval("select count(*) from receipt"))


@pytest.mark.parametrize("ordered", [False, True], ids=["in any order", "in order"])
@pytest.mark.parametrize("by_pull", [True, False], ids=["pull", "commit"])
async def test_what_a_consumer_dropped_meanwhile_is_not_acknowledged(
    client: httpx.AsyncClient, db: Connection, ordered: bool, by_pull: bool
) -> None:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key" if ordered else "none"}
    assert (await client.put("/subscriptions/points@order", json=put)).status_code == 201
    async with remoting_over(client._transport) as (gateway, first), remoting_over(client._transport) as (_, second):
        await left_with_two(gateway, first)
        # At another process it begins again, which drops what it had.
        elsewhere = await connected(second, "test@1")
        offset = await begun(elsewhere)
        await elsewhere.send(b"c", e=1)
        assert await pulled(elsewhere, offset) == [b"c"]
        await elsewhere.commit(offset + 1)
        await elsewhere.close()
        assert await acknowledged(db) == 1
        back = await connected(first, "test@1")
        if by_pull:
            answer = await back.pull(offset + 1, commitOffset=offset + 1)
            assert (answer.code == ResultCode.PULL_OFFSET_MOVED) is ordered
        else:
            await back.commit(offset + 1)
        assert await acknowledged(db) == 1
        offset = await begun(back)
        async with asyncio.timeout(30):
            found: set[bytes] = set()
            while found != {b"a", b"b"}:
                taken = await pulled(back, offset)
                found |= set(taken)
                offset += len(taken)
                await asyncio.sleep(0.05)
        await back.close()


@pytest.mark.parametrize("elsewhere", [[b"c"], [b"c", b"d"]], ids=["fewer", "as many"])
@pytest.mark.parametrize("by_pull", [True, False], ids=["pull", "commit"])
async def test_what_a_consumer_did_not_get_is_not_acknowledged_when_it_went_on_at_another_process(
    client: httpx.AsyncClient, db: Connection, elsewhere: list[bytes], by_pull: bool
) -> None:
    async with remoting_over(client._transport) as (gateway, first), remoting_over(client._transport) as (_, second):
        # The connection ends before the answer arrives.
        offset = await left_with_two(gateway, first)
        # At another process it goes on with the offset that it has.
        other = await connected(second, "test@1")
        await sent(other, *elsewhere)
        answer = await other.pull(offset)
        assert [one.body for one in read_messages(answer.body)] == elsewhere
        offset = int(answer.fields["nextBeginOffset"])
        await other.commit(offset)
        await other.close()
        assert await acknowledged(db) == len(elsewhere)
        back = await connected(first, "test@1")
        if not by_pull:
            await back.commit(offset)
        found: set[bytes] = set()
        async with asyncio.timeout(30):
            while found != {b"a", b"b"}:
                answer = await back.pull(offset, commitOffset=offset)
                found |= {one.body for one in read_messages(answer.body)}
                assert await acknowledged(db) <= len(elsewhere) + len(found)
                offset = int(answer.fields["nextBeginOffset"])
                await asyncio.sleep(0.05)
        await back.commit(offset)
        assert await acknowledged(db) == len(elsewhere) + 2
        await back.close()


def test_a_queue_begins_above_what_another_process_gave_whatever_the_clocks_say() -> None:
    name = QueueName("points", "order", 0)
    later = int((time.time() + 3600) * 1000) << 20
    for after in (later, 1, 0):
        queues = [ClaimQueue(name, "points@order", after) for _ in range(100)]
        begins = sorted(queue.next_offset for queue in queues)
        # The other process may have given as many above that offset that the client did not get.
        assert begins[0] > after + HELD_MAX
        assert all(above - below > HELD_MAX for below, above in pairwise(begins))
        assert all(queue.gave(after) and not queue.gave(after + 1) for queue in queues)


async def test_a_queue_begins_at_offsets_that_no_process_gave_before(client: httpx.AsyncClient) -> None:
    given: list[int] = []
    for _ in range(3):
        async with remoting_over(client._transport) as (_, port):
            peer = await connected(port, "test@1")
            offset = await begun(peer)
            await sent(peer, b"a")
            while not (taken := await pulled(peer, offset)):
                await asyncio.sleep(0.05)
            given += range(offset, offset + len(taken))
            await peer.commit(offset + len(taken))
            given.append(await begun(peer))
            await peer.close()
    assert len(set(given)) == len(given)


async def test_a_message_that_could_not_be_given_back_before_is_not_acknowledged(
    client: httpx.AsyncClient, db: Connection
) -> None:
    transport = client._transport
    assert isinstance(transport, httpx.AsyncBaseTransport)
    service = RefusingService(transport)
    settling, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        settling.set()
        await goes_on.wait()

    async with remoting_over(service) as (gateway, port):
        peer = await connected(port, "test@1")
        offset = await begun(peer)
        await sent(peer, b"a")
        [message] = read_messages((await peer.pull(offset)).body)
        service.before["nack"] = wait
        service.whole.add("nack")
        back = {"offset": message.position, "group": "points", "delayLevel": 0, "originMsgId": message.unique_key}
        giving_back = asyncio.create_task(peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, back))
        async with asyncio.timeout(30):
            await settling.wait()
        # Halfnote does not answer yet, and the client begins again, which drops the message.
        offset = await begun(peer)
        goes_on.set()
        assert (await giving_back).code == ResultCode.SYSTEM_BUSY
        await sent(peer, b"b")
        assert await pulled(peer, offset) == [b"b"]
        await peer.commit(offset + 1)
        assert await acknowledged(db) == 1
        assert len(gateway.renewals) == 0
        await peer.close()
