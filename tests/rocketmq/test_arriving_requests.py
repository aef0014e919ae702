"""Requests of remoting clients that arrive slowly or in part, and what they hold of the gateway's memory."""

import asyncio
from collections.abc import Callable, Sequence

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rocketmq.buffers import Budget, Buffers
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from tests.support.remoting import RemotingPeer, remoting_over

WITHIN_S = 60.0
MIB = 1024 * 1024


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def group(client: httpx.AsyncClient) -> None:
    assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201


class HalfSent:
    """A client that has sent the beginning of a frame."""

    def __init__(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        self._writer, self._content = writer, content

    @classmethod
    async def begin(cls, port: int, announced: int, sent: int) -> "HalfSent":
        """Announce so many bytes, and send so many of them."""
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        content = announced.to_bytes(4, "big") + bytes(announced)
        writer.write(content[: 4 + sent])
        return cls(writer, content[4 + sent :])

    def go_on(self) -> None:
        """Send the rest."""
        self._writer.write(self._content)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


@pytest.mark.usefixtures("group")
async def test_frames_that_are_only_announced_hold_up_no_others(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, buffered_bytes=4 * MIB) as (gateway, port):
        announced = [await HalfSent.begin(port, 1_000_000, 100) for _ in range(20)]
        await until(lambda: gateway.buffers.large.held == 2000)
        peer = await RemotingPeer.connect(port)
        async with asyncio.timeout(WITHIN_S):
            assert (await peer.send(b"x" * 900_000)).code == ResultCode.SUCCESS
        for one in announced:
            one.close()
        await until(lambda: gateway.buffers.held == 0)
        await peer.close()


@pytest.mark.parametrize("announced", [400_000, 40_000], ids=["large", "small"])
async def test_frames_that_together_hold_everything_arrive_one_after_the_other(
    client: httpx.AsyncClient, announced: int
) -> None:
    async with remoting_over(client._transport, buffered_bytes=announced * 10) as (gateway, port):
        budget = gateway.buffers.large if announced > 65_536 else gateway.buffers.small
        # Room for two and a half, and a quarter of each has come.
        begun = [await HalfSent.begin(port, announced, announced // 4) for _ in range(30)]
        await until(lambda: budget.held > budget.most - 16 * 1024)
        for one in begun:
            one.go_on()
        for _ in range(100):
            assert budget.held <= budget.most + announced
            await asyncio.sleep(0.001)
        # They are no frames: each connection ends when its own has arrived.
        refused = 'connections_refused_total{cause="frame"} 30.0'
        await until(lambda: refused in gateway.metrics.exposition().decode())
        assert gateway.buffers.held == 0
        for one in begun:
            one.close()


@pytest.mark.usefixtures("group")
async def test_frames_that_never_end_hold_others_up_for_their_time_only(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, buffered_bytes=MIB, arrives_s=1.5) as (gateway, port):
        large = gateway.buffers.large
        begun = [await HalfSent.begin(port, 1_000_000, 100_000) for _ in range(3)]
        await until(lambda: large.held >= large.most)
        peer = await RemotingPeer.connect(port)
        async with asyncio.timeout(WITHIN_S):
            assert (await peer.send(b"x" * 200_000)).code == ResultCode.SUCCESS
        await until(lambda: 'refused_total{cause="slow"} 3.0' in gateway.metrics.exposition().decode())
        await until(lambda: gateway.buffers.held == 0)
        for one in begun:
            one.close()
        await peer.close()


async def test_a_frame_in_many_pieces_is_read_as_one(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        answer = asyncio.get_running_loop().create_future()
        written: list[bytes] = []
        write, peer.writer.write = peer.writer.write, written.append  # type: ignore[method-assign, assignment]
        peer._answers[peer.write(RequestCode.GET_ROUTE, {"topic": "order", "padding": "x" * 50_000})] = answer
        for start in range(0, len(written[0]), 7001):
            write(written[0][start : start + 7001])
            await asyncio.sleep(0.005)
        async with asyncio.timeout(WITHIN_S):
            assert (await answer).code == ResultCode.SUCCESS
        await until(lambda: gateway.buffers.held == 0)
        await peer.close()


Arriving = tuple[Sequence[int], bool]


@given(st.lists(st.tuples(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.booleans()), max_size=12))
def test_requests_that_arrive_in_parts_end_however_they_meet(requests: list[Arriving]) -> None:
    both = Buffers(40)
    budget = both.small
    largest = max((min(sum(parts), budget.most) for parts, _ in requests), default=0)

    async def arrive(parts: Sequence[int]) -> None:
        buffered = both.part()
        try:
            for part in parts:
                await buffered.arrived(part, sum(parts))
                assert 0 <= budget.held <= budget.most + largest
                await asyncio.sleep(0)
        finally:
            buffered.release()

    async def run() -> None:
        tasks = []
        for parts, leaves in requests:
            task = asyncio.create_task(arrive(parts))
            tasks.append(task)
            await asyncio.sleep(0)
            # Callers that ask for all at once are among them.
            tasks.append(asyncio.create_task(whole(budget)))
            if leaves:
                tasks[len(tasks) // 2].cancel()
        async with asyncio.timeout(WITHIN_S):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in outcomes)
        assert (both.held, budget._waiting, budget._beyond) == (0, [], None)

    asyncio.run(run())


async def whole(budget: Budget) -> None:
    taken = await budget.take(6)
    try:
        await asyncio.sleep(0)
    finally:
        budget.give(taken)


async def test_a_request_that_came_first_gets_what_is_given_back() -> None:
    both = Buffers(40)
    first, second, third = both.part(), both.part(), both.part()
    await first.arrived(4, 8)
    await second.arrived(4, 8)
    await third.arrived(2, 8)
    going = [asyncio.create_task(one.arrived(4, 8)) for one in (third, second, first)]
    await asyncio.sleep(0)
    # The third one asked first, and goes beyond.
    assert [one.done() for one in going] == [True, False, False]
    third.release()
    await asyncio.wait(going[1:], timeout=0.01)
    # There is room for none of the others. The oldest goes beyond.
    assert [one.done() for one in going] == [True, False, True]
    first.release()
    await going[1]
    second.release()
    assert both.held == 0
