"""Destinations that take long to close keep no lease from being renewed: they close at the same time."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Responder
from tests.support.relay_stepping import step, subscribe, turn_until

NAMES = ("points", "billing", "delivery")


def closing_together(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let each destination close only once all of them have begun to; return how many have closed."""
    together, closed = asyncio.Barrier(len(NAMES)), 0

    def waits(close: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], Coroutine[Any, Any, None]]:
        async def waiting() -> None:
            nonlocal closed
            async with asyncio.timeout(10):
                await together.wait()
            closed += 1
            await close()

        return waiting

    for stream in relay.streams.values():
        destination = stream.sender.destination
        monkeypatch.setattr(destination, "close", waits(destination.close))
    return lambda: closed


@pytest.fixture
async def relay(client: httpx.AsyncClient, runtime: Runtime, group: str) -> Relay:
    """A relay with the streams of all subscriptions."""
    async with Responder() as receiver:
        for name in NAMES:
            await subscribe(client, receiver, name=name)
    relay = Relay(runtime)
    await turn_until(relay, runtime, lambda: len(relay.streams) == len(NAMES))
    return relay


async def test_those_of_paused_subscriptions(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closing_together(relay, monkeypatch)
    for name in NAMES:
        assert (await client.post(f"/subscriptions/{name}/pause")).is_success
    await turn_until(relay, runtime, lambda: closed() == len(NAMES))
    assert not relay.streams
    await relay.drain(runtime)


async def test_those_of_lost_leases(
    runtime: Runtime, relay: Relay, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closing_together(relay, monkeypatch)
    await db.execute("update lease set owner = 'another', epoch = epoch + 1")
    runtime.clock.offset_s += timedelta(seconds=5).total_seconds()
    await step(relay, runtime)
    assert closed() == len(NAMES)
    await relay.drain(runtime)


async def test_those_that_a_worker_leaves(runtime: Runtime, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closing_together(relay, monkeypatch)
    await relay.drain(runtime)
    assert closed() == len(NAMES)
