"""What a consumer says of work that failed, and when the message comes again, by the real service."""

import asyncio
import logging
from contextlib import suppress
from datetime import timedelta
from typing import Any

import httpx
import pytest
from halfnote import Consumer, SyncConsumer
from halfnote.inbox import Reject
from halfnote.message import Message

from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.sdk.in_process import FromThreads, service
from tests.support.consumers import put_pulled
from tests.support.relay_stepping import order, publish

KINDS = pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
# What the subscription asks for, and what no machine is too slow for.
RETRY_S, LONG_S = 3600.0, 1800.0


@pytest.fixture
async def worker(client: httpx.AsyncClient, group: str) -> str:
    """The subscription `worker`, which tries a message again after an hour, once."""
    await put_pulled(client, retry=[RETRY_S])
    return "worker"


def made(kind: type[Consumer | SyncConsumer], name: str, runtime: Runtime) -> Any:
    """Return a consumer of either kind."""
    if kind is Consumer:
        return Consumer("http://localhost", name, transport=service(runtime))
    return SyncConsumer("http://localhost", name, transport=FromThreads(service(runtime)), wait_s=0.2)


async def left(consumer: Any, error: BaseException | None) -> None:
    """Leave a loop over messages, and its block, at the first message: by an exception, or by `break`."""

    def on_a_thread() -> None:
        with consumer:
            for _ in consumer.messages():
                if error is None:
                    break
                raise error

    with suppress(BaseException):
        if isinstance(consumer, SyncConsumer):
            await asyncio.to_thread(on_a_thread)
            return
        async with consumer:
            async for _ in consumer.messages():
                if error is None:
                    break
                raise error


async def waits(db: Connection) -> tuple[int, timedelta]:
    """Return how many attempts the one message that was given back has had, and how long it waits from now on."""
    async with asyncio.timeout(60):
        while not (found := await db.fetch("select attempts, due_at - now() as left from delivery_retry")):
            await asyncio.sleep(0.01)
    [row] = found
    return row["attempts"], row["left"]


@KINDS
@pytest.mark.parametrize("error", [ValueError("no paper"), None], ids=["raises", "breaks"])
async def test_a_message_whose_loop_was_left_comes_again_as_the_subscription_says(
    kind: type[Consumer | SyncConsumer],
    error: Exception | None,
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    worker: str,
) -> None:
    await publish(client, order(1))
    await left(made(kind, worker, runtime), error)
    attempts, waiting = await waits(db)
    assert attempts == 1
    assert waiting > timedelta(seconds=LONG_S)


async def test_a_message_whose_task_was_canceled_comes_again_at_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, worker: str
) -> None:
    await publish(client, order(1))
    await left(made(Consumer, worker, runtime), asyncio.CancelledError())
    assert (await waits(db))[1] < timedelta(seconds=LONG_S)


@KINDS
@pytest.mark.parametrize("error", [Reject("bad file \udcff"), Reject(OSError("bad file \udcff"))])  # type: ignore[arg-type]
async def test_a_rejection_whose_text_is_not_utf_8_makes_a_dead_letter(
    kind: type[Consumer | SyncConsumer],
    error: Reject,
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    worker: str,
) -> None:
    await publish(client, order(1))
    await failed(made(kind, worker, runtime), error)
    assert await db.fetchval("select reason from dead_letter") == "bad file ?"


@KINDS
async def test_a_failure_whose_text_is_not_utf_8_is_kept(
    kind: type[Consumer | SyncConsumer],
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    worker: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The log has the exception as it is, and xdist fails to send a report with such a text.
    monkeypatch.setattr(logging.getLogger("halfnote"), "disabled", True)
    await publish(client, order(1))
    await failed(made(kind, worker, runtime), ValueError("bad file \udcff"))
    assert await db.fetchval("select last_error from delivery_retry") == "ValueError: bad file ?"


async def failed(consumer: Any, error: Exception) -> None:
    """Run a consumer whose handler stops it and raises."""

    def handle(message: Message) -> None:
        consumer.stop()
        raise error

    async def handle_async(message: Message) -> None:
        handle(message)

    if isinstance(consumer, SyncConsumer):
        await asyncio.to_thread(consumer.run, handle)
        await asyncio.to_thread(consumer.close)
    else:
        async with consumer:
            await consumer.run(handle_async)
