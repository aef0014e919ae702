"""`close` beside a loop over `messages()`: no message is given back while the body of the loop works on it."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from halfnote import Consumer, SyncConsumer

from tests.sdk.pulled import ACK, NACK, URL, claimed, scripted

# For a busy machine.
SOON_S = 30.0
KINDS = pytest.mark.parametrize("kind", [Consumer, SyncConsumer])


async def until(condition: Callable[[], Any]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < SOON_S
        await asyncio.sleep(0.01)


class Looping:
    """A loop over messages 1 and 2, whose body waits until `goes_on` is set. `how`: what the body does after that."""

    def __init__(self, kind: type[Consumer | SyncConsumer], how: str = "", **options: Any) -> None:
        self.coordinator = scripted(claimed(1, 2), claimed())
        self.consumer: Any = kind(URL, "worker", transport=self.coordinator.transport(), **options)
        self.is_sync, self.how = kind is SyncConsumer, how
        self.began, self.goes_on = threading.Event(), threading.Event()
        # What holds the loop's iterator, as a program may.
        self.iterator: Any = None

    async def run(self) -> None:
        await (asyncio.to_thread(self._sync_loop) if self.is_sync else self._loop())

    async def _loop(self) -> None:
        if "held" in self.how:
            self.iterator = self.consumer.messages()
        async for _ in self.iterator or self.consumer.messages():
            self.began.set()
            if "closes" in self.how:
                await self.consumer.close()
            await until(self.goes_on.is_set)
            if "raises" in self.how:
                raise ValueError("no paper")
            if "breaks" in self.how:
                break
        if "then close" in self.how:
            await self.consumer.close()

    def _sync_loop(self) -> None:
        if "held" in self.how:
            self.iterator = self.consumer.messages()
        for _ in self.iterator or self.consumer.messages():
            self.began.set()
            if "closes" in self.how:
                self.consumer.close()
            assert self.goes_on.wait(50)
            if "raises" in self.how:
                raise ValueError("no paper")
            if "breaks" in self.how:
                break
        if "then close" in self.how:
            self.consumer.close()

    async def close(self) -> None:
        await (asyncio.to_thread(self.consumer.close) if self.is_sync else self.consumer.close())

    def settled(self) -> tuple[list[str], list[tuple[str, bool]]]:
        """Return which handles were acknowledged, and which were given back and whether they had been begun."""
        acknowledged = [handle for one in self.coordinator.asked(ACK) for handle in one["handles"]]
        back = [(handle, one.get("begun", True)) for one in self.coordinator.asked(NACK) for handle in one["handles"]]
        return acknowledged, sorted(back)


@KINDS
async def test_a_close_beside_a_loop_waits_for_its_body(kind: type[Consumer | SyncConsumer]) -> None:
    made = Looping(kind)
    work = asyncio.create_task(made.run())
    await until(made.began.is_set)
    close = asyncio.create_task(made.close())
    await until(made.consumer._stopping.is_set)
    done, _ = await asyncio.wait([close], timeout=0.3)
    assert not done
    assert made.settled() == ([], [])
    made.goes_on.set()
    await asyncio.gather(work, close)
    assert made.settled() == (["h1"], [("h2", False)])
    assert made.consumer._keeper is None or not made.consumer._keeper.is_alive()


@KINDS
@pytest.mark.parametrize("how", ["raises", "breaks"])
async def test_a_close_beside_a_loop_that_is_left_ends(kind: type[Consumer | SyncConsumer], how: str) -> None:
    made = Looping(kind, how)
    work = asyncio.create_task(made.run())
    await until(made.began.is_set)
    close = asyncio.create_task(made.close())
    await until(made.consumer._stopping.is_set)
    made.goes_on.set()
    await asyncio.wait_for(asyncio.gather(work, close, return_exceptions=True), SOON_S)
    await until(lambda: len(made.settled()[1]) == 2)
    assert made.settled() == ([], [("h1", True), ("h2", False)])


@KINDS
async def test_a_close_in_the_body_gives_back_the_rest_and_its_message_is_acknowledged(
    kind: type[Consumer | SyncConsumer],
) -> None:
    made = Looping(kind, "closes")
    work = asyncio.create_task(made.run())
    await until(lambda: made.settled()[1])
    assert made.settled() == ([], [("h2", False)])
    made.goes_on.set()
    await work
    assert made.settled() == (["h1"], [("h2", False)])
    assert made.consumer._keeper is None or not made.consumer._keeper.is_alive()
    await made.close()


@KINDS
@pytest.mark.parametrize("how", ["breaks, then close", "closes, breaks"])
async def test_a_loop_that_is_left_gives_its_message_back(kind: type[Consumer | SyncConsumer], how: str) -> None:
    made = Looping(kind, how)
    made.goes_on.set()
    await made.run()
    await until(lambda: len(made.settled()[1]) == 2)
    assert made.settled() == ([], [("h1", True), ("h2", False)])


@KINDS
async def test_the_end_of_with_gives_the_message_of_a_loop_back_whose_iterator_is_held(
    kind: type[Consumer | SyncConsumer],
) -> None:
    made = Looping(kind, "held, breaks")
    made.goes_on.set()

    def inside() -> None:
        with made.consumer:
            made._sync_loop()

    if made.is_sync:
        await asyncio.to_thread(inside)
    else:
        async with made.consumer:
            await made._loop()
    assert made.settled() == ([], [("h1", True), ("h2", False)])


async def test_a_close_that_is_canceled_leaves_the_rest_to_the_loop() -> None:
    made = Looping(Consumer)
    work = asyncio.create_task(made.run())
    await until(made.began.is_set)
    close = asyncio.create_task(made.close())
    await until(made.consumer._stopping.is_set)
    close.cancel()
    with pytest.raises(asyncio.CancelledError):
        await close
    made.goes_on.set()
    await work
    assert made.settled() == (["h1"], [("h2", False)])
    assert made.consumer._keeper is None


async def test_a_task_of_the_body_that_closes_does_not_wait_for_the_body() -> None:
    made = Looping(Consumer)
    async for _ in made.consumer.messages():
        await asyncio.wait_for(asyncio.create_task(made.consumer.close()), SOON_S)
    assert made.settled() == (["h1"], [("h2", False)])


async def test_a_message_of_a_task_that_is_over_is_given_back() -> None:
    made = Looping(Consumer)
    iterator = made.consumer.messages()
    await asyncio.ensure_future(anext(iterator))
    await asyncio.wait_for(made.consumer.close(), SOON_S)
    assert made.settled() == ([], [("h1", True), ("h2", False)])


@KINDS
@pytest.mark.parametrize("how", ["", "held, breaks"])
async def test_a_close_waits_no_longer_than_the_message_in_the_body_is_held(
    kind: type[Consumer | SyncConsumer], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = {*threading.enumerate()}
    made = Looping(kind, how, invisible_s=1)
    work = asyncio.create_task(made.run())
    await until(made.began.is_set)
    if how:
        # The task, or the thread, goes on after the loop that it left.
        made.goes_on.set()
    began = time.monotonic()
    await made.close()
    assert time.monotonic() - began < SOON_S
    if not how:
        assert not work.done()
        # It is not given back: it has lapsed, or does soon.
        assert made.settled() == ([], [("h2", False)])
        assert "is still worked on as its consumer closes" in caplog.text
        made.goes_on.set()
    await work
    if not how:
        assert made.settled()[0] == ["h1"]
    assert ("h2", False) in made.settled()[1]
    left = {*threading.enumerate()} - before
    assert [one.name for one in left if one.name.startswith("halfnote-leases")] == []


async def test_the_end_of_a_block_waits_for_a_loop_of_another_task() -> None:
    """A loop before it was left by `break`, in the task that leaves the block."""
    coordinator = scripted(claimed(1), claimed(2), claimed())
    began, goes_on = asyncio.Event(), asyncio.Event()
    async with Consumer(URL, "worker", transport=coordinator.transport()) as consumer:
        async for _ in consumer.messages():
            break

        async def loop() -> None:
            async for _ in consumer.messages():
                began.set()
                await goes_on.wait()

        task = asyncio.create_task(loop())
        await began.wait()
        asyncio.get_running_loop().call_later(0.2, goes_on.set)
    assert goes_on.is_set()
    await task
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h2"]]
    assert [one["handles"] for one in coordinator.asked(NACK)] == [["h1"]]


@KINDS
async def test_an_iterator_that_was_left_gives_back_nothing_of_a_newer_loop(
    kind: type[Consumer | SyncConsumer],
) -> None:
    coordinator = scripted(claimed(1), claimed(2), claimed())
    consumer: Any = kind(URL, "worker", transport=coordinator.transport())
    left, newer = consumer.messages(), consumer.messages()
    if isinstance(consumer, SyncConsumer):
        assert (next(left) is not None, next(newer) is not None) == (True, True)
        left.close()
        back = [handle for one in coordinator.asked(NACK) for handle in one["handles"]]
        newer.close()
    else:
        assert (await anext(left) is not None, await anext(newer) is not None) == (True, True)
        await left.aclose()
        back = [handle for one in coordinator.asked(NACK) for handle in one["handles"]]
        await newer.aclose()
    assert back == ["h1"]
    consumer.close() if isinstance(consumer, SyncConsumer) else await consumer.close()
