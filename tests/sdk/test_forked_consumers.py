"""A consumer and a fork: the process that claims keeps what it holds, and a child is refused instead of hanging."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from halfnote import Consumer, SyncConsumer

from tests.sdk.pulled import ACK, NACK, URL, claimed, scripted

# A child that hangs is killed after so long, and its test fails.
SOON_S = 50
NEEDED = "create a consumer in the child process, after the fork"

# A fork beside threads is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def in_a_child(reported: Callable[[], str]) -> str:
    """Return the result of a function in a forked child; "" if it hangs, and what it raised if it raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SOON_S)
        try:
            os.write(write, reported().encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def refused(act: Callable[[], Any]) -> None:
    """Check that a call is refused, with what to do."""
    with pytest.raises(RuntimeError, match=NEEDED):
        act()


@pytest.mark.parametrize("locked", [False, True])
def test_a_child_of_a_process_that_claims_is_refused_and_settles_nothing(locked: bool) -> None:
    """Also if a thread has a lock of the consumer at the fork."""
    halfnote = scripted(claimed(1, 2), claimed())
    consumer = SyncConsumer(URL, "worker", transport=halfnote.transport())
    begun, go_on, handled = threading.Event(), threading.Event(), list[Any]()

    def handler(message: Any) -> None:
        begun.set()
        assert go_on.wait(SOON_S)
        handled.append(message.json())
        if len(handled) == 2:
            consumer.stop()

    running = threading.Thread(target=consumer.run, args=(handler,))
    running.start()

    def child() -> str:
        before = len(halfnote.came)
        refused(lambda: consumer.run(handler))
        refused(lambda: next(consumer.messages()))
        consumer.stop()
        consumer.close()
        with consumer:
            pass
        return f"refused, {len(halfnote.came) - before} requests"

    try:
        assert begun.wait(SOON_S)
        if locked:
            with Held(consumer._lock):
                said = in_a_child(child)
        else:
            said = in_a_child(child)
    finally:
        go_on.set()
        running.join(SOON_S)
    assert said == "refused, 0 requests"
    assert handled == [1, 2]
    assert not halfnote.asked(NACK)
    assert [handle for one in halfnote.asked(ACK) for handle in one["handles"]] == ["h1", "h2"]
    consumer.close()


class Held:
    """Has a lock on a thread of its own."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._has, self._over = lock, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self._lock:
            self._has.set()
            assert self._over.wait(SOON_S)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._has.wait(SOON_S)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_loop_whose_body_forks_ends_in_the_child_and_goes_on_in_the_parent() -> None:
    halfnote, handled = scripted(claimed(1, 2), claimed()), list[Any]()
    read, write = os.pipe()
    parent, child, before = os.getpid(), 1, 0
    try:
        with SyncConsumer(URL, "worker", transport=halfnote.transport()) as consumer:
            for message in consumer.messages():
                if not handled and (child := os.fork()) == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(SOON_S)
                    before = len(halfnote.came)
                    continue
                handled.append(message.json())
                if len(handled) == 2:
                    consumer.stop()
    except RuntimeError as error:
        if os.getpid() != parent:
            os.write(write, f"{len(halfnote.came) - before} requests: {error}".encode())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    assert said.startswith("0 requests: ")
    assert said.endswith(NEEDED)
    assert handled == [1, 2]
    assert not halfnote.asked(NACK)


def test_a_consumer_that_has_not_claimed_works_in_a_child() -> None:
    halfnote = scripted(claimed(1), claimed())
    consumer = SyncConsumer(URL, "worker", transport=halfnote.transport())

    def child() -> str:
        with consumer:
            consumer.run(lambda _: consumer.stop())
        return f"{len(halfnote.asked(ACK))} acknowledged"

    assert in_a_child(child) == "1 acknowledged"
    # And in its parent: no process has claimed with that one.
    with consumer:
        consumer.run(lambda _: consumer.stop())
    assert len(halfnote.asked(ACK)) == 1


def test_a_child_of_a_process_whose_event_loop_claims_is_refused_and_settles_nothing() -> None:
    halfnote = scripted(claimed(1, 2), claimed())
    consumer = Consumer(URL, "worker", transport=halfnote.transport())
    begun, go_on, handled = threading.Event(), threading.Event(), list[Any]()

    async def handler(message: Any) -> None:
        begun.set()
        assert await asyncio.to_thread(go_on.wait, SOON_S)
        handled.append(message.json())
        if len(handled) == 2:
            consumer.stop()

    async def run() -> None:
        async with consumer:
            await consumer.run(handler)

    async def loop() -> None:
        async for _ in consumer.messages():
            pass

    async def leave() -> None:
        async with consumer:
            await consumer.close()

    def child() -> str:
        before = len(halfnote.came)
        refused(lambda: asyncio.run(consumer.run(handler)))
        refused(lambda: asyncio.run(loop()))
        asyncio.run(leave())
        return f"refused, {len(halfnote.came) - before} requests"

    running = threading.Thread(target=lambda: asyncio.run(run()))
    running.start()
    try:
        assert begun.wait(SOON_S)
        said = in_a_child(child)
    finally:
        go_on.set()
        running.join(SOON_S)
    assert said == "refused, 0 requests"
    assert handled == [1, 2]
    assert not halfnote.asked(NACK)
