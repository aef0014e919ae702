"""Many subscriptions: the cost of a delivery if 100 take one topic, and the cost of 200 idle subscriptions."""

import asyncio
from contextlib import AsyncExitStack
from statistics import median

from bench.relay_stage import Drained, Relaying, relaying
from bench.report import Report
from bench.stage import Stage, backend_cpu_s
from bench.statistic import median_ratio

TOPIC = "bench.many"
MANY = 100
ROUNDS = 4
# The deliveries of one slice.
COUNT, COUNT_QUICK = 10_000, 2_000

IDLE = 200
IDLE_S, IDLE_S_QUICK = 30, 5
CALM_S = 5
SHARE_OF_A_CORE = 5


async def fan_out(stage: Stage, report: Report) -> None:
    """Measure the same number of deliveries by a worker with one subscription and by one with 100, in turn."""
    count = COUNT_QUICK if stage.quick else COUNT
    found: dict[int, list[Drained]] = {1: [], MANY: []}
    async with AsyncExitStack() as stack:
        sides = {
            number: await stack.enter_async_context(relaying(stage, f"relay_many_{number}")) for number in (1, MANY)
        }
        for number, relay in sides.items():
            await _subscribe(relay, number)
            await relay.drain(TOPIC, 500 // number, to=number)
        for turn in range(stage.seconds(ROUNDS)):
            for number in (1, MANY) if turn % 2 == 0 else (MANY, 1):
                found[number].append(await sides[number].drain(TOPIC, count // number, to=number))
    one, many = ([drained.cpu_us for drained in found[number]] for number in (1, MANY))
    ratio = median_ratio(many, one)
    base = "CPU of a delivery, 1 subscription"
    report.add(base, median(one), "µs")
    report.add(f"CPU of a delivery, {MANY} subscriptions", median(many), "µs", ratio_to=base, ratio=ratio)
    rates = [median(drained.rate for drained in found[number]) for number in (1, MANY)]
    report.add("1 subscription to the topic", rates[0], "messages/s")
    report.add(f"{MANY} subscriptions to the topic", rates[1], "messages/s", ratio_to="1 subscription to the topic")
    report.hold(f"CPU of worker and Postgres a delivery, {MANY} subscriptions against one", ratio, at_most=1.5)


async def idle(stage: Stage, report: Report) -> None:
    """Measure one replica in role `all` whose subscriptions have no messages."""
    seconds = stage.seconds(IDLE_S, IDLE_S_QUICK)
    async with relaying(stage, "relay_idle", role="all") as relay:
        await _subscribe(relay, IDLE)
        await relay.drain(TOPIC, 2, to=IDLE)
        await asyncio.sleep(stage.seconds(CALM_S))
        service_s, before = relay.workers[0].cpu_s(), await backend_cpu_s(relay.watch, relay.name)
        await asyncio.sleep(seconds)
        service_s = relay.workers[0].cpu_s() - service_s
        after = await backend_cpu_s(relay.watch, relay.name)
    share = service_s / seconds * 100
    backends = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items()) / seconds * 100
    report.add(f"idle replica with {IDLE} subscriptions", share, "% of a core")
    report.add("its Postgres backends", backends, "% of a core")
    report.hold(f"CPU of an idle replica with {IDLE} subscriptions, % of a core", share, at_most=SHARE_OF_A_CORE)


async def _subscribe(relay: Relaying, number: int) -> None:
    for n in range(number):
        await relay.subscribe(n, TOPIC)
