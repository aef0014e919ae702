"""`python -m bench.client_side URL`: the process whose CPU time `bench.client` measures.

Each line `<sender> <seconds>` on stdin runs one slice. The answer is a line of JSON, `{"transactions", "cpu_s",
"wall_s"}`. `client` and `bare` are the client with `batching=False` and bare httpx calls on one event loop;
`client-batching` is the client as it is by default; `client-sync` and `bare-sync` send one transaction after the other.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx
from halfnote import Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote.ids import new_id

from bench.bare import bare_client
from bench.payload import GROUP, TOPIC

AT_ONCE = 64
BODY = {"order": 1030, "amount": "129.90", "currency": "EUR", "note": "x" * 88}

Slice = Callable[[float], Awaitable[int]]


def order() -> Outgoing:
    """Return the message that both senders send."""
    return Outgoing(TOPIC, BODY, key="customer-77")


def half(transaction_id: str) -> dict[str, Any]:
    """Return the same message as the JSON of a `/half`."""
    message = {"topic": TOPIC, "body": BODY, "key": "customer-77"}
    return {"producer_group": GROUP, "transaction_id": transaction_id, "messages": [message]}


def end(transaction_id: str) -> dict[str, Any]:
    """Return the JSON of its `/end`."""
    return {"transaction_id": transaction_id, "producer_group": GROUP, "verdict": "commit"}


async def by_client(producer: TransactionProducer) -> None:
    """Run one transaction without local work."""
    async with producer.transaction(order()) as transaction:
        pass
    if transaction.result is None or transaction.result.end != "recorded":
        raise RuntimeError(f"an end was not recorded: {transaction.result}")


async def bare(client: httpx.AsyncClient) -> None:
    """Send the same two requests and check only their status."""
    transaction_id = str(new_id())
    (await client.post("/half", json=half(transaction_id))).raise_for_status()
    (await client.post("/end", json=end(transaction_id))).raise_for_status()


def by_client_in_turn(producer: SyncTransactionProducer) -> None:
    """Like `by_client`, without an event loop."""
    with producer.transaction(order()) as transaction:
        pass
    if transaction.result is None or transaction.result.end != "recorded":
        raise RuntimeError(f"an end was not recorded: {transaction.result}")


def bare_in_turn(client: httpx.Client) -> None:
    """Like `bare`, without an event loop."""
    transaction_id = str(new_id())
    client.post("/half", json=half(transaction_id)).raise_for_status()
    client.post("/end", json=end(transaction_id)).raise_for_status()


async def at_once(one: Callable[[], Awaitable[None]], seconds: float) -> int:
    """Run transactions, AT_ONCE of them at a time; return how many."""
    until, done = time.monotonic() + seconds, 0

    async def caller() -> None:
        nonlocal done
        while time.monotonic() < until:
            await one()
            done += 1

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return done


async def in_turn(one: Callable[[], None], seconds: float) -> int:
    """Run transactions one after the other; return how many. This blocks the event loop, which has no other work."""
    until, done = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        one()
        done += 1
    return done


async def main(url: str) -> None:
    """Answer lines until stdin ends."""
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(TransactionProducer(url, group=GROUP, batching=False))
        batching = await stack.enter_async_context(TransactionProducer(url, group=GROUP))
        client = await stack.enter_async_context(bare_client(AT_ONCE))
        client.base_url = httpx.URL(url)
        sync_producer = stack.enter_context(SyncTransactionProducer(url, group=GROUP, batching=False))
        sync_client = stack.enter_context(httpx.Client(base_url=url, trust_env=False))
        slices: dict[str, Slice] = {
            "client": partial(at_once, partial(by_client, producer)),
            "client-batching": partial(at_once, partial(by_client, batching)),
            "bare": partial(at_once, partial(bare, client)),
            "client-sync": partial(in_turn, partial(by_client_in_turn, sync_producer)),
            "bare-sync": partial(in_turn, partial(bare_in_turn, sync_client)),
        }
        while line := await asyncio.to_thread(sys.stdin.readline):
            who, seconds = line.split()
            wall, cpu = time.monotonic(), time.process_time()
            done = await slices[who](float(seconds))
            took = {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall}
            print(json.dumps({"transactions": done, **took}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
