"""Who is woken by a publication: relays that take its topic, here at once and elsewhere by NOTIFY."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from app.config import Settings
from app.loops.relay import Relay
from app.loops.wakeups import Woken
from app.runtime import Runtime
from app.start import assemble
from app.wakeups import PAYLOAD_MAX_BYTES, Interest
from tests.relays import order, publish, subscribe
from tests.responders import Responder


@pytest.fixture
async def other(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


def test_an_interest_is_in_names_and_in_beginnings() -> None:
    interest = Interest.of(["order", "billing.*", "order"])
    assert interest.takes(["order"])
    assert interest.takes(["parcel", "billing.late"])
    assert not interest.takes(["orders", "billing"])
    assert not interest.takes([])
    assert not Interest.of([]).takes(["order"])
    assert Interest.of(["*"]).takes(["order"])


async def test_only_what_its_streams_take_wakes_a_relay(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, topics=["order", "billing.*"])
        relay = Relay(runtime)
        woken = Woken(relay)
        await woken.step(runtime, runtime.clock.now())
        # The streams are new: it looks once more, for what came while they opened.
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


async def test_a_notify_says_topics_and_wakes_who_takes_them(runtime: Runtime, other: Runtime) -> None:
    await other.wake_ups.listen()
    other.wake_ups.relay.clear()
    other.wake_ups.interest = Interest.of(["order"])
    runtime.wake_ups.published(["parcel", "billing.late"])
    assert await runtime.wake_ups.tell()
    # A round trip on the listening session: by its end it has heard what was told before.
    await other.wake_ups.listen()
    assert not other.wake_ups.relay.is_set()
    many = [f"topic-{n}" for n in range(PAYLOAD_MAX_BYTES // 6)]
    for topics in (["parcel", "order"], many, None):
        runtime.wake_ups.published(topics)
        assert await runtime.wake_ups.tell()
        async with asyncio.timeout(10):
            await other.wake_ups.relay.wait()
        other.wake_ups.relay.clear()
    assert not await runtime.wake_ups.tell()
