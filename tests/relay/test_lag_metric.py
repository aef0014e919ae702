"""The lag metrics of a worker whose receiver does not answer."""

import asyncio

import httpx
from aiohttp import web

from app.database.connection import Connection
from app.relay.loop import Relay
from app.relay.window import WINDOW_LEAST
from app.runtime.state import Runtime
from tests.relay.test_unrouted import metric
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import order, subscribe, turn_until


async def publish_many(client: httpx.AsyncClient, count: int) -> None:
    """Commit messages in one transaction."""
    messages = [order(number) for number in range(count)]
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
    assert answer.status_code == 201, answer.text


async def test_the_count_follows_the_log_while_a_receiver_never_answers(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    answers = asyncio.Event()

    async def never(call: Call) -> web.Response:
        await answers.wait()
        return web.Response()

    relay = Relay(runtime)
    async with Responder(never) as receiver:
        await subscribe(client, receiver, max_in_flight=1, timeout_s=60)
        await publish_many(client, WINDOW_LEAST)
        await publish_many(client, 20)
        await turn_until(relay, runtime, lambda: receiver.calls)

        async def committed(count: int) -> None:
            def is_shown() -> bool:
                # The relay measures and reads the head by the clock.
                runtime.clock.offset_s += 1
                return metric(runtime, "halfnote_relay_lag_messages{") == count

            await turn_until(relay, runtime, is_shown, within_s=10)

        try:
            await committed(WINDOW_LEAST + 20)
            for more in (1, 2):
                await publish_many(client, 100)
                await committed(WINDOW_LEAST + 20 + more * 100)
            assert len(receiver.calls) == 1
        finally:
            # A receiver that still has a call open does not close.
            answers.set()
            await relay.drain(runtime)
