"""Webhooks of one worker, 64 requests in flight, with 1 and 100 messages each, against the bare client."""

import asyncio
from statistics import median

import httpx

from bench.arrivals import came, rate, sample
from bench.bare import bare_client
from bench.relay_stage import WARM, Drained, relaying
from bench.report import Report
from bench.services import Service
from bench.stage import Stage
from bench.statistic import median_ratio
from bench.wrk import capacity

IN_FLIGHT = 64
BATCH = 100
ROUNDS = 5
# The messages of one slice, which takes a few seconds.
SINGLE, BATCHED, BARE = 10_000, 60_000, 8_000
SINGLE_QUICK, BATCHED_QUICK, BARE_QUICK = 2_000, 10_000, 2_000
SINGLES, BATCHES = (1, "bench.single"), (2, "bench.batch")


async def bench(stage: Stage, report: Report) -> None:
    """Measure single messages, batches and the bare client in turn, a whole backlog each."""
    found: dict[str, list[Drained]] = {"single": [], "batch": []}
    bare: list[float] = []
    single, batch, bare_count = (SINGLE_QUICK, BATCHED_QUICK, BARE_QUICK) if stage.quick else (SINGLE, BATCHED, BARE)
    async with relaying(stage, "relay_webhook") as relay:
        await relay.subscribe(*SINGLES, max_in_flight=IN_FLIGHT)
        await relay.subscribe(
            *BATCHES, "batch", max_in_flight=IN_FLIGHT, destination={"mode": "batch", "batch_max": BATCH}
        )
        await relay.drain(BATCHES[1], WARM)
        await relay.drain(SINGLES[1], WARM)
        sent = await sample(relay.receiver)
        for _ in range(stage.seconds(ROUNDS)):
            found["single"].append(await relay.drain(SINGLES[1], single))
            bare.append(await post_all(relay.receiver, sent, bare_count))
            found["batch"].append(await relay.drain(BATCHES[1], batch))
        alone = await capacity(stage.place, f"{relay.receiver.url}/hook/0", *sent, stage.seconds(3))
        report.add("receiver alone (wrk)", alone, "requests/s")
    _add_figures(report, found, bare)


def _add_figures(report: Report, found: dict[str, list[Drained]], bare: list[float]) -> None:
    single, batch = ([drained.rate for drained in found[name]] for name in ("single", "batch"))
    report.add("bare client", median(bare), "requests/s")
    ratio = median_ratio(single, bare)
    report.add("webhook", median(single), "messages/s", ratio_to="bare client", ratio=ratio)
    times = median_ratio(batch, single)
    report.add(f"webhook, batches of {BATCH}", median(batch), "messages/s", ratio_to="webhook", ratio=times)
    for name, drained in found.items():
        for whose, of in (("worker", "workers_s"), ("Postgres", "backends_s")):
            cost = median(getattr(run, of) / run.messages for run in drained) * 1e6
            report.add(f"CPU of {whose}, {name}", cost, "µs/message")
    report.hold("one worker's webhooks against the bare client's requests", ratio, at_least=0.6)
    report.hold(f"batches of {BATCH} against single messages", times, at_least=5)


async def post_all(receiver: Service, sent: tuple[dict[str, str], bytes], count: int) -> float:
    """POST the same request `count` times, IN_FLIGHT at once; return the rate at the receiver."""
    headers, body = sent
    left = iter(range(count))

    async def post(client: httpx.AsyncClient) -> None:
        for _ in left:
            response = await client.post(f"{receiver.url}/hook/0", content=body, headers=headers)
            response.raise_for_status()

    async with bare_client(IN_FLIGHT) as client, asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(post(client))
    return rate(await came(receiver, count, 1))
