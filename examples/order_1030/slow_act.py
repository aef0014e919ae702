"""Measures the effect of a slow broker on a service's database connections and readers."""

import asyncio
from dataclasses import dataclass

import httpx

from examples.order_1030.acts import counts_of
from examples.order_1030.counting import Counts
from examples.order_1030.plan import FIRST, Placed
from examples.order_1030.slow import SlowWay
from examples.order_1030.stage import Servers, staged
from examples.order_1030.stories import SHOP
from examples.order_1030.ways import Way

ORDERS, READERS = 20, 20


@dataclass(frozen=True)
class Slowness:
    """The results of one way. `held_s`: connection-seconds; `refused`: requests that got no connection."""

    counts: Counts
    held_s: float
    refused: int


async def slow_answers(servers: Servers, way: Way, slow: SlowWay, slow_s: float, ready: asyncio.Barrier) -> Slowness:
    """Place orders at once, and read an order now and then, while the broker does not answer for `slow_s` seconds.

    `ready`: the barrier at which all ways wait until each is set up, and again until the broker is slow. The check
    immunity is longer than `slow_s`. Otherwise a check would come before the answer, and the orders would be refused.
    """
    immunity_s = int(slow_s) + 20
    async with staged(servers, SHOP, way, act="slow", to_halfnote=slow.url, immunity_s=immunity_s) as stage:
        async with httpx.AsyncClient(base_url=stage.service.url, timeout=120) as customers:
            # One order first, so that there is an order to read, and open connections to the broker.
            await customers.post("/orders", json=SHOP.request(Placed(FIRST)))
            await stage.until_over()
            before = (await customers.get("/pool")).json()
            await ready.wait()
            await ready.wait()
            await asyncio.gather(
                *(_order(customers, FIRST + 1 + index) for index in range(ORDERS)),
                *(_read(customers, slow_s * index / READERS) for index in range(READERS)),
            )
            figures = (await customers.get("/pool")).json()
        await stage.until_over()
        held_s = figures["held_s"] - before["held_s"]
        return Slowness(await counts_of(stage), held_s, int(figures["refused"]))


async def _order(customers: httpx.AsyncClient, number: int) -> None:
    await customers.post("/orders", json=SHOP.request(Placed(number)))


async def _read(customers: httpx.AsyncClient, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await customers.get(f"/orders/{FIRST}")
