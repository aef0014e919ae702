"""Which relays a publication wakes: those that take its topic, in this process at once, elsewhere by NOTIFY."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import datetime
from time import monotonic

import httpx
import pytest

from app.config import Settings
from app.database.notifier import PAYLOAD_MAX_BYTES
from app.lifecycle.startup import assemble
from app.relay.loop import Relay
from app.relay.wakeups import RelayWakeups
from app.runtime.loop_runner import Loop, StepResult, run
from app.runtime.state import Runtime
from app.topic_patterns import TopicPatterns
from tests.support.check_responder import Responder
from tests.support.relay_stepping import order, publish, subscribe


@pytest.fixture
async def other(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


def test_an_interest_is_in_names_and_in_prefixes() -> None:
    interest = TopicPatterns(["order", "billing.*", "order"])
    assert interest.match_any(["order"])
    assert interest.match_any(["parcel", "billing.late"])
    assert not interest.match_any(["orders", "billing"])
    assert not interest.match_any([])
    assert not TopicPatterns([]).match_any(["order"])
    assert TopicPatterns(["*"]).match_any(["order"])


async def test_reserved_topics_wake_no_relay_that_does_not_match_them(runtime: Runtime) -> None:
    for patterns, woken in ((["*"], False), (["half*"], False), (["halfnote.*"], True), (["halfnote.finding"], True)):
        runtime.wake_ups.relay.clear()
        runtime.wake_ups.interest = TopicPatterns(patterns)
        runtime.wake_ups.published(["halfnote.finding"])
        assert runtime.wake_ups.relay.is_set() == woken, patterns


async def test_only_topics_of_its_streams_wake_a_relay(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, topics=["order", "billing.*"])
        relay = Relay(runtime)
        # It gets no messages but from the log.
        runtime.publications.relay = None
        woken = RelayWakeups(relay)
        await woken.step(runtime, runtime.clock.now())
        # The streams are new, so the relay looks once more for what was committed while they opened.
        assert runtime.wake_ups.relay.is_set()
        runtime.wake_ups.relay.clear()
        await woken.step(runtime, runtime.clock.now())
        assert not runtime.wake_ups.relay.is_set()
        await publish(client, {"topic": "parcel", "body": 1})
        assert not runtime.wake_ups.relay.is_set()
        await publish(client, {"topic": "billing.late", "body": 1})
        assert runtime.wake_ups.relay.is_set()
        runtime.wake_ups.relay.clear()
        await publish(client, order(1))
        assert runtime.wake_ups.relay.is_set()
        await relay.drain(runtime)


async def test_a_notify_names_topics_and_wakes_the_relays_that_take_them(runtime: Runtime, other: Runtime) -> None:
    await other.wake_ups.listen()
    other.wake_ups.relay.clear()
    other.wake_ups.interest = TopicPatterns(["order"])
    runtime.wake_ups.published(["parcel", "billing.late"])
    assert await runtime.wake_ups.notify()
    # After a round trip on the listening session, it has received every earlier NOTIFY.
    await other.wake_ups.listen()
    assert not other.wake_ups.relay.is_set()
    many = [f"topic-{n}" for n in range(PAYLOAD_MAX_BYTES // 6)]
    for topics in (["parcel", "order"], many, None):
        runtime.wake_ups.published(topics)
        assert await runtime.wake_ups.notify()
        async with asyncio.timeout(10):
            await other.wake_ups.relay.wait()
        other.wake_ups.relay.clear()
    assert not await runtime.wake_ups.notify()


async def test_after_a_rest_a_burst_of_steps_follows_wake_ups_at_once(runtime: Runtime) -> None:
    stopping, wake, steps = asyncio.Event(), asyncio.Event(), []

    async def step(runtime: Runtime, now: datetime) -> StepResult:
        steps.append(now)
        wake.set()
        return StepResult()

    running = asyncio.create_task(run(Loop("burst", step, 3600, wake, None, (3600, 3600), 3), runtime, stopping))
    async with asyncio.timeout(10):
        while len(steps) < 3:
            await asyncio.sleep(0)
    # The fourth is due in an hour.
    for _ in range(100):
        await asyncio.sleep(0)
    stopping.set()
    await running
    assert len(steps) == 3


async def test_a_loop_rests_as_long_as_its_step_took(runtime: Runtime) -> None:
    stopping, wake, began, took_s = asyncio.Event(), asyncio.Event(), [], []

    async def step(runtime: Runtime, now: datetime) -> StepResult:
        began.append(monotonic())
        wake.set()
        await asyncio.sleep(0.02)
        took_s.append(monotonic() - began[-1])
        return StepResult()

    running = asyncio.create_task(run(Loop("rests", step, 3600, wake, None, (0, 3600)), runtime, stopping))
    async with asyncio.timeout(10):
        while len(began) < 3:
            await asyncio.sleep(0)
    stopping.set()
    await running
    for first, second, step_s in zip(began, began[1:], took_s, strict=False):
        assert second - first >= 2 * step_s


async def test_consumers_that_wait_are_woken_though_the_relay_has_the_messages(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    woken: list[int] = []
    runtime.wake_ups.on_wake = lambda: woken.append(1)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        relay = Relay(runtime)
        for _ in range(2):
            await relay.step(runtime, runtime.clock.now())
        runtime.wake_ups.relay.clear()
        woken.clear()
        await publish(client, order(1))
        assert woken == [1]
        assert not runtime.wake_ups.relay.is_set()
        await relay.drain(runtime)
