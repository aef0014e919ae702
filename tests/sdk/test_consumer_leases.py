"""Consumers whose time for a message is over: what they still begin, and what they give back."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import httpx
import pytest
from halfnote import Consumer, Outgoing, SyncConsumer, SyncTransactionProducer
from halfnote.consuming import Consuming, HeldMessage
from halfnote.exchange import Request, Response
from halfnote.inbox import Reject
from halfnote.message import Message
from halfnote.testing import Coordinator

from tests.sdk.coordinators import answer, problem
from tests.sdk.pulled import ACK, EXTEND, NACK, REJECT, URL, claimed, outcomes, scripted

WAYS = ["run", "messages", "run of threads", "messages of threads"]
Handle = Callable[[Any, Message], None]


async def worked(way: str, transport: httpx.MockTransport, handle: Handle, **options: Any) -> None:
    """Let a consumer call `handle(consumer, message)` on a thread, until that stops the consumer."""
    if way.endswith("of threads"):
        await asyncio.wait_for(asyncio.to_thread(worked_on_a_thread, way, transport, handle, options), 60)
        return
    # Python 3.10 has no asyncio.timeout.
    await asyncio.wait_for(worked_on_the_loop(way, transport, handle, options), 60)


async def worked_on_the_loop(way: str, transport: httpx.MockTransport, handle: Handle, options: dict[str, Any]) -> None:
    async with Consumer(URL, "worker", transport=transport, **options) as consumer:

        async def handler(message: Message) -> None:
            await asyncio.to_thread(handle, consumer, message)

        if way == "run":
            await consumer.run(handler)
            return
        async for message in consumer.messages():
            await handler(message)


def worked_on_a_thread(way: str, transport: httpx.MockTransport, handle: Handle, options: dict[str, Any]) -> None:
    with SyncConsumer(URL, "worker", transport=transport, wait_s=0.2, **options) as consumer:
        if way == "run of threads":
            consumer.run(lambda message: handle(consumer, message))
            return
        for message in consumer.messages():
            handle(consumer, message)


def until(condition: Callable[[], Any]) -> None:
    """Wait on a thread."""
    ends_at = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


@pytest.mark.parametrize("way", WAYS)
async def test_a_message_whose_time_is_over_is_not_begun(way: str) -> None:
    """Leases are not extended, the claim lapses while a handler runs, and another consumer gets its messages."""
    made = Coordinator("shop")
    inner = made.transport()
    with httpx.Client(base_url=URL, transport=inner) as other:
        put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
        assert other.put("/subscriptions/worker", json=put).status_code == 201
        with SyncTransactionProducer(URL, group="shop", transport=inner) as producer:
            producer.send_plain([Outgoing("order", number, key=key) for number, key in enumerate("aabb")])
        handled: list[Any] = []
        again: list[dict[str, Any]] = []

        def answers(request: httpx.Request) -> httpx.Response:
            if request.url.path == EXTEND:
                return problem(503, "overloaded")
            return inner.handle_request(request)

        def handle(consumer: Any, message: Message) -> None:
            handled.append((message.json(), message.attempt))
            if len(handled) > 1:
                consumer.stop()
                return
            time.sleep(1.2)
            made.subscriptions["worker"].lapse()
            again.extend(other.post("/subscriptions/worker/claim", json={}).json()["messages"])
            with SyncTransactionProducer(URL, group="shop", transport=inner) as producer:
                producer.send_plain(Outgoing("order", 4, key="c"))

        await worked(way, httpx.MockTransport(answers), handle, invisible_s=1.0)
        # The first one, and what was claimed later.
        assert handled == [(0, 1), (4, 1)]
        assert [(one["body"], one["attempt"]) for one in again] == [(0, 2), (1, 2), (2, 2), (3, 2)]
        settled = other.post("/subscriptions/worker/ack", json={"handles": [one["handle"] for one in again]})
        assert [one["status"] for one in settled.json()["outcomes"]] == [200] * 4


@pytest.mark.parametrize("way", WAYS)
async def test_after_a_lost_acknowledgement_the_later_messages_of_the_key_are_given_back(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = scripted(claimed(1, 2, 3, 4, key="a"), claimed(5, key="a"))
    coordinator.answers[ACK] = [answer(200, {"outcomes": [{"status": 409}]}), outcomes]  # type: ignore[index]
    handled: list[Any] = []

    def handle(consumer: Any, message: Message) -> None:
        handled.append(message.json())
        if message.json() == 2:
            until(lambda: "1 messages were not settled" in caplog.text)
        if message.json() == 5:
            consumer.stop()

    await worked(way, coordinator.transport(), handle)
    # The second one may have begun before the answer.
    begun = [number for number in (1, 2) if number in handled]
    assert handled == [*begun, 5]
    left = [f"h{number}" for number in range(len(begun) + 1, 5)]
    assert [(one["handles"], one["begun"]) for one in coordinator.asked(NACK)] == [(left, False)]


@pytest.mark.parametrize("way", WAYS)
async def test_a_message_that_is_lost_keeps_the_later_ones_of_its_key_back(way: str) -> None:
    def loses_the_second(request: httpx.Request) -> httpx.Response:
        handles = json.loads(request.content)["handles"]
        return answer(200, {"outcomes": [{"status": 409 if handle == "h2" else 200} for handle in handles]})

    coordinator = scripted(claimed(1, 2, 3, key="a"), claimed(4, key="a"))
    coordinator.answers[EXTEND] = [loses_the_second]  # type: ignore[index]
    handled: list[Any] = []

    def handle(consumer: Any, message: Message) -> None:
        handled.append(message.json())
        if message.json() == 1:
            until(lambda: "h2" not in consumer._held)
        else:
            consumer.stop()

    await worked(way, coordinator.transport(), handle, invisible_s=3.0)
    assert handled == [1, 4]
    assert [(one["handles"], one["begun"]) for one in coordinator.asked(NACK)] == [(["h3"], False)]


@pytest.mark.parametrize("way", ["run", "run of threads"])
async def test_after_a_rejection_that_was_lost_the_later_messages_of_the_key_are_given_back(way: str) -> None:
    coordinator = scripted(claimed(1, 2, key="a"), claimed(3, key="a"))
    coordinator.answers[REJECT] = [answer(200, {"outcomes": [{"status": 409}]})]  # type: ignore[index]
    handled: list[Any] = []

    def handle(consumer: Any, message: Message) -> None:
        handled.append(message.json())
        if message.json() == 1:
            raise Reject("no address")
        consumer.stop()

    await worked(way, coordinator.transport(), handle)
    assert handled == [1, 3]
    assert [(one["handles"], one["begun"]) for one in coordinator.asked(NACK)] == [(["h2"], False)]


def test_a_claim_that_waits_for_longer_than_its_lease_is_worked_on() -> None:
    def answers(_: httpx.Request) -> httpx.Response:
        threading.Event().wait(2.2)
        return claimed(1)

    coordinator = scripted(answers)
    with SyncConsumer(URL, "worker", invisible_s=2.0, transport=coordinator.transport()) as consumer:
        for message in consumer.messages():
            assert message.json() == 1
            consumer.stop()
    assert coordinator.asked(NACK) == []


class Clocked:
    """The requests of a consumer whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.consuming = Consuming("worker", None, 60.0, 5.0, lambda: self.now)

    def ran(self, exchange: Generator[Any, Any, Any], *answers: tuple[float, httpx.Response]) -> Any:
        """Run an exchange, with each answer after so many seconds."""
        waiting = list(answers)
        try:
            effect = next(exchange)
            while True:
                came = None
                if isinstance(effect, Request):
                    after_s, given = waiting.pop(0)
                    self.now += after_s
                    came = Response(given.status_code, {}, given.content)
                effect = exchange.send(came)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize(("waited_s", "until_s"), [(1.0, 60.0), (20.0, 60.0), (24.0, 64.0)])
def test_the_time_of_a_message_begins_before_the_answer_to_its_claim(waited_s: float, until_s: float) -> None:
    clocked = Clocked()
    [held] = clocked.ran(clocked.consuming.claimed(20.0), (waited_s, claimed(1)))
    assert begins_until(clocked, held) == until_s


def test_an_extension_counts_from_its_last_request() -> None:
    clocked = Clocked()
    one, two = clocked.ran(clocked.consuming.claimed(0.0), (1.0, claimed(1, 2)))
    clocked.now = 20.0
    lost = answer(200, {"outcomes": [{"status": 200}, {"status": 409}]})
    assert clocked.ran(clocked.consuming.extended([one, two]), (5.0, problem(503, "overloaded")), (3.0, lost)) == [two]
    assert (begins_until(clocked, one), begins_until(clocked, two)) == (85.0, 60.0)


def begins_until(clocked: Clocked, held: HeldMessage) -> float:
    """Return the first second at which a message must not be begun."""
    clocked.now = 0.0
    while clocked.consuming.may_begin(held):
        clocked.now += 1
    return clocked.now


def test_a_lease_that_ends_while_a_consumer_of_threads_gives_back_does_not_end_that() -> None:
    coordinator = scripted(claimed(*range(500)))
    gives_back = SyncConsumer._nack_held.__code__

    def lose(frame: FrameType, event: str, _: Any) -> Any:
        """Lose a message at each step of giving back, as the thread may that holds messages for longer."""
        outer = frame.f_back
        if frame.f_code is gives_back or (outer is not None and outer.f_code is gives_back):
            frame.f_trace_opcodes = True
            if event == "opcode" and held:
                held.popitem()
        return lose

    before = sys.gettrace()
    with SyncConsumer(URL, "worker", transport=coordinator.transport()) as consumer:
        # Kept, because an iterator that is dropped gives back.
        loop = consumer.messages()
        assert next(loop).json() == 0
        held = consumer._held
        sys.settrace(lose)
        try:
            consumer._give_back(None)
        finally:
            sys.settrace(before)
    handles = [handle for one in coordinator.asked(NACK) for handle in one["handles"]]
    assert len(set(handles)) == len(handles) > 400
