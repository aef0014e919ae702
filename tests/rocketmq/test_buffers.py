"""What requests and claimed messages hold of the gateway's memory at the same time, counted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rocketmq import buffers, claiming
from app.rocketmq.buffers import SMALL_BYTES, Budget, Buffers
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.protocol.service_pb2 import SendMessageRequest
from app.rocketmq.remoting import connections
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from tests.support.gateway import (
    GatewayProcess,
    RocketClient,
    codes_of,
    consumer_of,
    gateway_over,
    message_of,
    receive_of,
)
from tests.support.remoting import RemotingPeer, read_messages, remoting_over

WITHIN_S = 60.0
MIB = 1024 * 1024


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


class Counted(httpx.AsyncBaseTransport):
    """Halfnote, with a count of requests under way and of answers whose bodies were read, by the end of the path.

    Requests to `held_up` get their answers only when `goes_on` is set.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, held_up: str = "") -> None:
        self._inner, self._held_up = inner, held_up
        self.goes_on = asyncio.Event()
        self.under_way = self.most_under_way = self.answered = self.bodies = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/claim"):
            answer = await self._inner.handle_async_request(request)
            self.answered += 1
            return httpx.Response(answer.status_code, headers=answer.headers, stream=Body(self, answer))
        if request.url.path != self._held_up:
            return await self._inner.handle_async_request(request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.goes_on.wait()
            return await self._inner.handle_async_request(request)
        finally:
            self.under_way -= 1


class Body(httpx.AsyncByteStream):
    """The body of an answer, which counts as read from its first byte on."""

    def __init__(self, counted: Counted, answer: httpx.Response) -> None:
        self._counted, self._answer = counted, answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._counted.bodies += 1
        async for part in self._answer.aiter_raw():
            yield part


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3), st.booleans()), max_size=30))
def test_callers_never_hold_more_than_there_is_and_each_gets_its_turn(
    callers: list[tuple[int, int, bool]],
) -> None:
    budget = Budget(10)

    async def hold(size: int, turns: int) -> None:
        taken = await budget.take(size)
        try:
            assert taken == min(size, 10)
            for _ in range(turns):
                assert 0 <= budget.held <= 10
                await asyncio.sleep(0)
        finally:
            budget.give(taken)

    async def run() -> None:
        tasks = []
        for size, turns, leaves in callers:
            task = asyncio.create_task(hold(size, turns))
            tasks.append(task)
            await asyncio.sleep(0)
            if leaves and budget._waiting:
                # The last of those that wait, or one that waits no more by then.
                task.cancel()
        async with asyncio.timeout(WITHIN_S):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert (budget.held, len(budget._waiting)) == (0, 0)

    asyncio.run(run())


async def test_a_caller_that_leaves_lets_those_behind_it_go_on() -> None:
    budget = Budget(10)
    assert await budget.take(6) == 6
    giant = asyncio.create_task(budget.take(100))
    behind = asyncio.create_task(budget.take(4))
    await asyncio.sleep(0)
    assert (budget.held, giant.done(), behind.done()) == (6, False, False)
    giant.cancel()
    await asyncio.wait([giant])
    assert (await behind, budget.held) == (4, 10)
    # One that leaves in the moment of its turn gives it back.
    late = asyncio.create_task(budget.take(10))
    await asyncio.sleep(0)
    budget.give(10)
    assert budget.held == 10
    late.cancel()
    await asyncio.wait([late])
    assert budget.held == 0


async def test_large_messages_wait_unread_while_halfnote_is_slow_and_heartbeats_go_on(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
    halfnote = Counted(client._transport, "/messages")
    async with remoting_over(halfnote, buffered_bytes=4 * MIB) as (gateway, port):
        large = gateway.buffers.large
        peers = [await RemotingPeer.connect(port) for _ in range(8)]
        sends = [asyncio.create_task(peer.send(b"x" * 400_000)) for peer in peers]
        await until(lambda: halfnote.under_way >= 1)
        other = await RemotingPeer.connect(port)
        for _ in range(100):
            assert (await other.heartbeat(producers=("shop",))).code == ResultCode.SUCCESS
            # One of those that have begun to arrive goes beyond.
            assert large.held <= large.most + 401_000 == MIB + 401_000
        halfnote.goes_on.set()
        async with asyncio.timeout(WITHIN_S):
            assert {one.code for one in await asyncio.gather(*sends)} == {ResultCode.SUCCESS}
        assert halfnote.most_under_way <= 3
        await until(lambda: gateway.buffers.held == 0)
        for peer in (*peers, other):
            await peer.close()


async def backlog_of(peer: RemotingPeer, *groups: str) -> None:
    """Begin the groups, and send 8 messages of 900 KB: more than sockets keep for a client that does not read."""
    for group in groups:
        assert (await peer.heartbeat(consumers={group: "*"})).code == ResultCode.SUCCESS
    for _ in range(8):
        assert (await peer.send(b"x" * 900_000)).code == ResultCode.SUCCESS


async def reading_late(gateway: RemotingGateway, port: int, group: str) -> RemotingPeer:
    """Return a consumer that has pulled and does not read the answer."""
    peer = await RemotingPeer.connect(port)
    assert (await peer.heartbeat(consumers={group: "*"})).code == ResultCode.SUCCESS
    transport = peer.writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()
    peer._answers[peer.write(RequestCode.PULL_MESSAGE, pull_of(group))] = asyncio.get_running_loop().create_future()
    await until(lambda: gateway.buffers.answers.held > 0)
    return peer


def pull_of(group: str) -> dict[str, object]:
    asked = {"consumerGroup": group, "topic": "order", "queueId": 0, "queueOffset": 0, "maxMsgNums": 32}
    return {**asked, "sysFlag": 2, "commitOffset": 0, "suspendTimeoutMillis": 20_000, "subVersion": 1}


async def test_claimed_messages_wait_at_halfnote_until_a_client_has_taken_those_before(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "ROOM_WITHIN_S", 2 * WITHIN_S)
    halfnote = Counted(client._transport)
    async with remoting_over(halfnote, buffered_bytes=4 * MIB) as (gateway, port):
        answers = gateway.buffers.answers
        second = await RemotingPeer.connect(port)
        await backlog_of(second, "slow", "points")
        slow = await reading_late(gateway, port, "slow")
        await until(lambda: halfnote.bodies == 1)
        pulling = asyncio.create_task(second.call(RequestCode.PULL_MESSAGE, pull_of("points")))
        await until(lambda: halfnote.answered == 2)
        for _ in range(100):
            # Another answer is larger than what is left, and waits. Other requests do not.
            assert (await second.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
        assert (halfnote.bodies, answers.held, pulling.done()) == (1, answers.most, False)
        transport = slow.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.resume_reading()
        async with asyncio.timeout(WITHIN_S):
            pulled = await pulling
        assert pulled.code == ResultCode.SUCCESS
        assert len(read_messages(pulled.body)) > 1
        await until(lambda: gateway.buffers.held == 0)
        await slow.close()
        await second.close()


async def test_what_was_claimed_for_a_client_that_left_before_there_was_room_comes_again(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "ROOM_WITHIN_S", 2 * WITHIN_S)
    monkeypatch.setattr(claiming, "ROOM_WITHIN_S", 2 * WITHIN_S)
    monkeypatch.setattr(claiming, "AT_ONCE_S", 0.0)
    halfnote = Counted(client._transport)
    async with remoting_over(halfnote, buffered_bytes=4 * MIB) as (gateway, port):
        second = await RemotingPeer.connect(port)
        await backlog_of(second, "slow", "points")
        slow = await reading_late(gateway, port, "slow")
        await until(lambda: halfnote.bodies == 1)
        second.write(RequestCode.PULL_MESSAGE, pull_of("points"))
        await until(lambda: halfnote.answered == 2)
        await second.close()
        transport = slow.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.resume_reading()
        third = await RemotingPeer.connect(port)
        assert (await third.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
        # Halfnote would hold them for a minute.
        asked = pull_of("points") | {"suspendTimeoutMillis": 100}
        async with asyncio.timeout(claiming.HELD_S / 2):
            while (await third.call(RequestCode.PULL_MESSAGE, asked)).code != ResultCode.SUCCESS:
                await asyncio.sleep(0.05)
        await slow.close()
        await third.close()


async def test_an_answer_of_halfnote_does_not_wait_for_room_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "ROOM_WITHIN_S", 0.01)
    both = Buffers(4 * MIB)
    first, second, small = both.part(), both.part(), both.part()
    await first.answer(2 * MIB)
    await second.answer(MIB)
    await small.answer(SMALL_BYTES)
    assert both.held == 3 * MIB + SMALL_BYTES
    for part in (first, second, small):
        part.release()
    assert both.held == 0


async def test_a_client_that_does_not_take_its_answer_is_ended(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remoting_over(client._transport, buffered_bytes=4 * MIB) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        await backlog_of(peer, "slow")
        monkeypatch.setattr(connections, "UNREAD_S", 0.2)
        slow = await reading_late(gateway, port, "slow")
        await until(lambda: gateway.buffers.held == 0)
        await until(lambda: 'refused_total{cause="unread"} 1.0' in gateway.metrics.exposition().decode())
        await slow.close()
        await peer.close()


@pytest.mark.parametrize("body", [b"x" * 10_000, b"x" * 300_000], ids=["small", "large"])
async def test_a_request_over_grpc_without_room_is_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(buffers, "ROOM_WITHIN_S", 0.05)
    assert (await client.put("/producer-groups/order", json={"checks": "claim"})).status_code == 201
    halfnote = Counted(client._transport, "/messages")
    request = SendMessageRequest(messages=[message_of("order", body)])
    # Room for one of each.
    async with gateway_over(halfnote, buffered_bytes=60_000) as (gateway, channel):
        rocket = RocketClient(channel)
        first = asyncio.create_task(rocket.call("SendMessage", request))
        await until(lambda: halfnote.under_way == 1)
        budget = gateway.buffers.small if request.ByteSize() <= SMALL_BYTES else gateway.buffers.large
        assert 0 < budget.held <= budget.most
        answer = await rocket.call("SendMessage", SendMessageRequest(messages=[message_of("order", body)]))
        assert answer.status.code == Code.TOO_MANY_REQUESTS
        assert "--max-buffered-bytes" in answer.status.message
        halfnote.goes_on.set()
        assert codes_of([await first]) == ["OK"]
        assert codes_of([await rocket.call("SendMessage", request)]) == ["OK"]
        await until(lambda: gateway.buffers.held == 0)


class Watched(httpx.AsyncBaseTransport):
    """Halfnote, with an action as each answer to a claim is read."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.claimed: Callable[[], Awaitable[None]] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        if request.url.path.endswith("/claim") and self.claimed is not None:
            await self.claimed()
        return answer


async def test_what_is_received_over_grpc_is_released_also_if_the_client_leaves(client: httpx.AsyncClient) -> None:
    halfnote = Watched(client._transport)
    async with gateway_over(halfnote) as (gateway, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order"))
        for _ in range(2):
            request = SendMessageRequest(messages=[message_of("order", b"x" * 100_000)])
            assert codes_of([await rocket.call("SendMessage", request)]) == ["OK"]
        code, messages = await rocket.receive(receive_of("points", "order", batch_size=1))
        assert (code, len(messages)) == (Code.OK, 1)
        await until(lambda: gateway.buffers.held == 0)
        claimed, goes_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            claimed.set()
            await goes_on.wait()

        halfnote.claimed = wait
        receiving = asyncio.create_task(rocket.receive(receive_of("points", "order")))
        async with asyncio.timeout(WITHIN_S):
            await claimed.wait()
        receiving.cancel()
        await asyncio.wait([receiving])
        # The gateway reads another request of the connection only after it has read that the client left.
        request = SendMessageRequest(messages=[message_of("other", b"x")])
        assert codes_of([await rocket.call("SendMessage", request)]) == ["OK"]
        goes_on.set()
        halfnote.claimed = None
        # What it did not get comes again.
        async with asyncio.timeout(WITHIN_S):
            while not (await rocket.receive(receive_of("points", "order")))[1]:
                await asyncio.sleep(0.05)
        await until(lambda: gateway.buffers.held == 0)
        stream.cancel()


async def test_the_bytes_are_an_option_and_a_metric(tmp_path: Path) -> None:
    more = ("--operations-port", "0", "--max-buffered-bytes", str(MIB))
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9", *more)
    await gateway.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as operator:
            found = await operator.get(f"http://127.0.0.1:{gateway.operations_port}/metrics")
        assert "halfnote_rocketmq_buffered_bytes 0.0" in found.text
    finally:
        assert gateway.stop() == 0


def test_half_is_for_answers_and_a_quarter_each_for_large_and_small_requests() -> None:
    buffers = Buffers(4 * MIB)
    assert (buffers.answers.most, buffers.large.most, buffers.small.most) == (2 * MIB, MIB, MIB)
