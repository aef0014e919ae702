"""Shared by the relay's tests: publish, subscribe, and step a relay until a condition is true."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx

from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Responder


def order(number: int, **fields: Any) -> dict[str, Any]:
    """Return a message of the topic `order`."""
    return {"topic": "order", "key": f"order-{number}", "body": {"order": number}, **fields}


async def publish(client: httpx.AsyncClient, *messages: dict[str, Any]) -> list[int]:
    """Commit messages, each in its own transaction; return their offsets."""
    found = []
    for message in messages:
        answer = await client.post("/messages", json={"producer_group": "shop", "messages": [message]})
        assert answer.status_code == 201, answer.text
        found.append(answer.json()["messages"][0]["offset"])
    return found


async def subscribe(client: httpx.AsyncClient, receiver: Responder, name: str = "mailer", **fields: Any) -> Any:
    """Subscribe a receiver to `order`; `fields` replace the fields of the subscription. Return the answer's body."""
    answer = await client.put(
        f"/subscriptions/{name}",
        json={"topics": ["order"], "destination": {"type": "webhook", "url": receiver.url}, **fields},
    )
    assert answer.status_code == 201, answer.text
    return answer.json()


async def step(relay: Relay, runtime: Runtime) -> None:
    """Give the relay one turn, and up to 50 ms to what it started."""
    await relay.step(runtime, runtime.clock.now())
    with suppress(TimeoutError):
        await asyncio.wait_for(runtime.wake_ups.relay.wait(), 0.05)
    runtime.wake_ups.relay.clear()


async def turn_until(relay: Relay, runtime: Runtime, reached: Callable[[], Any], within_s: float = 15) -> None:
    """Step the relay until `reached()`, which may be awaitable, is true; fails after `within_s`."""
    async with asyncio.timeout(within_s):
        while True:
            result = reached()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await step(relay, runtime)


def offsets(receivers: Responder | Sequence[Responder]) -> list[int]:
    """Return the received offsets, in order of arrival."""
    all_receivers = [receivers] if isinstance(receivers, Responder) else receivers
    return [int(call.headers["halfnote-offset"]) for receiver in all_receivers for call in receiver.calls]
