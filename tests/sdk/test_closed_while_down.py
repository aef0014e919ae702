"""Consumers that close while Halfnote does not answer: they wait for their grace, and not for their leases."""

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from halfnote import Consumer, SyncConsumer
from halfnote.consuming import Consuming
from halfnote.errors import Unconfirmed
from halfnote.exchange import NoAnswer, Request, Wait
from halfnote.message import Message

from tests.sdk.pulled import URL, claimed, scripted

KINDS = pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
# Leases are longer by far, for a busy machine.
HELD_S, SOON_S = 600.0, 50.0


class Failing:
    """A service that hands out three messages, and cannot be reached once `is_down` is set."""

    def __init__(self) -> None:
        self.is_down = threading.Event()
        self._coordinator = scripted(claimed(1, 2, 3), claimed())

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_down.is_set():
            raise httpx.ReadTimeout("no answer")
        return self._coordinator.transport().handle_request(request)


def loop(consumer: Any, service: Failing) -> None:
    with consumer:
        for message in consumer.messages():
            if message.json() == 2:
                service.is_down.set()
                raise ValueError("no paper")


async def async_loop(consumer: Any, service: Failing) -> None:
    async with consumer:
        async for message in consumer.messages():
            if message.json() == 2:
                service.is_down.set()
                raise ValueError("no paper")


@KINDS
async def test_a_block_that_is_left_while_the_service_is_down_ends_after_the_grace(
    kind: type[Consumer | SyncConsumer], caplog: pytest.LogCaptureFixture
) -> None:
    service = Failing()
    consumer: Any = kind(
        URL, "worker", invisible_s=HELD_S, grace_s=0.5, attempt_s=0.5, transport=httpx.MockTransport(service)
    )
    began = time.monotonic()
    with pytest.raises(ValueError, match="no paper"):
        if kind is Consumer:
            await async_loop(consumer, service)
        else:
            await asyncio.to_thread(loop, consumer, service)
    assert time.monotonic() - began < SOON_S
    assert "messages were not settled" in caplog.text


@KINDS
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_run_that_is_stopped_while_the_service_is_down_ends_after_the_grace(
    kind: type[Consumer | SyncConsumer], at_once: int, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = Failing()
    consumer: Any = kind(
        URL, "worker", invisible_s=HELD_S, grace_s=0.5, attempt_s=0.5, transport=httpx.MockTransport(service)
    )

    def handle(_: Message) -> None:
        service.is_down.set()
        consumer.stop()
        if fails:
            raise ValueError("no paper")

    async def async_handle(message: Message) -> None:
        handle(message)

    def run() -> None:
        with consumer:
            consumer.run(handle, at_once=at_once)

    began = time.monotonic()
    if kind is Consumer:
        async with consumer:
            await consumer.run(async_handle, at_once=at_once)
    else:
        await asyncio.to_thread(run)
    assert time.monotonic() - began < SOON_S
    assert "messages were not settled" in caplog.text


def test_a_loop_that_is_stopped_at_the_last_message_of_a_claim_ends_after_the_grace() -> None:
    service = Failing()
    transport = httpx.MockTransport(service)
    consumer = SyncConsumer(URL, "worker", invisible_s=HELD_S, grace_s=0.5, attempt_s=0.5, transport=transport)
    began = time.monotonic()
    with consumer:
        for message in consumer.messages():
            if message.json() == 3:
                service.is_down.set()
                consumer.stop()
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("act", ["ack", "extend"])
@pytest.mark.parametrize("stops_after_s", [-10, 0, 30])
def test_a_stop_bounds_what_is_settled_and_no_extension(act: str, stops_after_s: float) -> None:
    now = 0.0
    consuming = Consuming("worker", None, HELD_S, 5.0, lambda: now, grace_s=5.0)
    is_stopped = False
    if stops_after_s < 0:
        consuming.stop()
        now, is_stopped = -stops_after_s, True
    began, came = now, None
    exchange = consuming.settled(act, held())
    with pytest.raises(Unconfirmed):
        while True:
            if now >= stops_after_s and not is_stopped:
                consuming.stop()
                is_stopped = True
            effect = exchange.send(came)
            now, came = (
                (now + effect.timeout_s, NoAnswer("no answer", sent=True))
                if isinstance(effect, Request)
                else (now + effect.seconds, None)  # type: ignore[union-attr]
            )
    # A request and a pause, of up to 5 s each, are finished.
    assert (now - began <= max(stops_after_s, 0) + 5 + 5 + 5 + 5) == (act != "extend")


@pytest.mark.parametrize("hurries_after_s", [0, 30])
def test_a_hurry_bounds_what_is_settled_also_if_it_is_under_way(hurries_after_s: float) -> None:
    now = 0.0
    consuming = Consuming("worker", None, HELD_S, 5.0, lambda: now, grace_s=5.0)
    hurry = consuming.hurrying()
    exchange = consuming.settled("ack", held())
    sent: list[float] = []
    entered = False
    with pytest.raises(Unconfirmed):
        came: Any = None
        while True:
            if now >= hurries_after_s and not entered:
                hurry.__enter__()
                entered = True
            effect = exchange.send(came)
            came = None
            if isinstance(effect, Request):
                sent.append(now)
                now += effect.timeout_s
                came = NoAnswer("no answer", sent=True)
            elif isinstance(effect, Wait):
                now += effect.seconds
    hurry.__exit__(None, None, None)
    # A request and a pause, of up to 5 s each, are finished.
    assert now <= hurries_after_s + 5 + 5 + 5 + 5


def held() -> list[Any]:
    """Return one held message, of which only the handle matters."""

    class Held:
        handle = "h1"

    return [Held()]
