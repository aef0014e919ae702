"""Run a story: customers place orders while processes die, and a person resolves refused orders."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from demo.processes import StepFailed
from examples.order_1030.counting import Counts, counted, fetch, read_ledger, read_saved
from examples.order_1030.deaths import HEADER
from examples.order_1030.plan import Placed, plan
from examples.order_1030.stage import Stage

CUSTOMER_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """The results of one way: deaths of the service and of consumers, and dead letters.

    `waiting`: dead letters before, and `left` after, a person opened the missing accounts and redelivered them.
    """

    counts: Counts
    deaths: int
    consumer_deaths: int
    waiting: int
    left: int


async def crashes(stage: Stage, count: int, report_progress: Callable[[int], None]) -> Outcome:
    """Place orders while the service and its consumers die; count the results at the end.

    `report_progress` is called with the number of orders that are done.
    """
    done = 0
    async with _customers() as customers:
        for group in plan(count, stage.way.steps, stage.story.consumers):
            for placed in group:
                await _befall(stage, placed, customers)
            await asyncio.gather(*(_place(stage, placed, customers) for placed in group))
            report_progress(done := done + len(group))
    for program in stage.consumers.values():
        if program.down:
            await program.start()
    await stage.until_over()
    waiting = await stage.dead_letters()
    await _person(stage)
    return Outcome(
        counts=await counts_of(stage),
        deaths=stage.service.deaths,
        consumer_deaths=sum(program.deaths for program in stage.consumers.values()),
        waiting=waiting,
        left=await stage.dead_letters(),
    )


async def counts_of(stage: Stage) -> Counts:
    """Count the results from the databases."""
    saved = await read_saved(stage.databases["own"], stage.story.table)
    return counted(saved, {name: await read_ledger(stage.databases[name]) for name in stage.story.consumers})


def _customers() -> httpx.AsyncClient:
    # One connection per order: the next order must not use a connection that died with the service.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=CUSTOMER_S, limits=limits)


async def _befall(stage: Stage, placed: Placed, customers: httpx.AsyncClient) -> None:
    """Kill and start consumers, and mark the deliveries at which they die, before an order is placed."""
    if placed.up is not None and stage.consumers[placed.up].down:
        await stage.consumers[placed.up].start()
    if placed.down is not None:
        await stage.consumers[placed.down].kill()
    if placed.unanswered_by is None or stage.consumers[placed.unanswered_by].down:
        return
    url = f"{stage.consumers[placed.unanswered_by].url}/fault"
    # The consumer may still be dying from the previous order.
    await _until_heard(customers, url, {"number": placed.number}, again=httpx.TransportError)


async def _place(stage: Stage, placed: Placed, customers: httpx.AsyncClient) -> None:
    """Place an order. A customer whose shop dies gets no answer and does not try again."""
    headers = {HEADER: placed.dies_at} if placed.dies_at is not None else {}
    url = stage.service.url + stage.story.path
    with suppress(httpx.RemoteProtocolError, httpx.NetworkError):
        answer = await _until_heard(customers, url, stage.story.request(placed), headers)
        if placed.dies_at is not None and answer.is_success:
            raise StepFailed(f"order {placed.number} was answered, although its shop was to die {placed.dies_at}")


async def _until_heard(
    customers: httpx.AsyncClient,
    url: str,
    content: object,
    headers: dict[str, str] | None = None,
    again: type[httpx.TransportError] = httpx.ConnectError,
) -> httpx.Response:
    """Post, and repeat while the port refuses connections."""
    async with asyncio.timeout(CUSTOMER_S):
        while True:
            try:
                return await customers.post(url, json=content, headers=headers)
            except again:
                await asyncio.sleep(0.02)


async def _person(stage: Stage) -> None:
    """Open the accounts that billing missed, and redeliver the messages that it refused."""
    if "billing" not in stage.story.consumers:
        return
    await fetch(stage.databases["billing"], "delete from without_account")
    wanted = {"subscription": stage.subscription("billing")}
    deed = {"reason": "the account is open now", "actor": "the bookkeeper", "dry_run": False}
    await stage.call("POST", "/dead-letters/redeliver", {"filter": wanted, **deed})
    await stage.until_over()
