"""One subscription with 1, 2 and 4 shards and as many workers."""

import asyncio
from collections import defaultdict
from statistics import median

from bench.relay_stage import WARM, Relaying, relaying
from bench.report import Report
from bench.stage import Stage
from bench.wrk import BrokenRunError

TOPIC = "bench.shards"
NUMBERS, NUMBERS_QUICK = (1, 2, 4), (1, 2)
COUNT, COUNT_QUICK = 15_000, 3_000
ROUNDS = 3
# A released lease is taken at once. A lease moves to another worker after a few turns of the loop.
SPREAD_WITHIN_S = 30.0
HOLDERS = """
select count(distinct owner) from lease where starts_with(name, 'relay:') and expires_at > clock_timestamp()
"""


async def bench(stage: Stage, report: Report) -> None:
    """Start each number of workers in turn, first upward, then downward."""
    numbers = NUMBERS_QUICK if stage.quick else NUMBERS
    found: dict[int, list[float]] = defaultdict(list)
    for turn in range(stage.seconds(ROUNDS)):
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            async with relaying(stage, f"relay_shards_{number}", workers=number) as relay:
                await relay.subscribe(1, TOPIC, shards=number)
                await _spread(relay, number)
                await relay.drain(TOPIC, WARM)
                drained = await relay.drain(TOPIC, COUNT_QUICK if stage.quick else COUNT)
                found[number].append(drained.rate)
    for number in numbers:
        report.add(_name(number), median(found[number]), "messages/s", ratio_to=None if number == 1 else _name(1))


async def _spread(relay: Relaying, number: int) -> None:
    """Wait until each worker holds a shard."""
    until = asyncio.get_running_loop().time() + SPREAD_WITHIN_S
    while (holders := await relay.watch.fetchval(HOLDERS)) < number:
        if asyncio.get_running_loop().time() > until:
            raise BrokenRunError(f"{holders} of {number} workers hold a shard after {SPREAD_WITHIN_S:g} s")
        await asyncio.sleep(0.1)


def _name(number: int) -> str:
    return f"{number} shard{'s' if number > 1 else ''} over as many workers" if number > 1 else "1 shard, 1 worker"
