"""A subscription in the order of keys: one key alone, many keys, and many keys behind a long backlog of one key."""

import asyncio
from statistics import median

from bench.arrivals import Arrival
from bench.filling import KEYS, fill_committed
from bench.relay_stage import Relaying, relaying
from bench.report import Report
from bench.stage import Stage

TOPIC = "bench.keys"
ONE, ONE_QUICK = 1_000, 300
MANY, MANY_QUICK = 10_000, 1_000
# The backlog of one key, and the messages of other keys that are published after it. More than the part of the log that
# a shard reads with bodies.
BACKLOG, BACKLOG_QUICK = 4_000, 2_500
ROUNDS = 3


async def bench(stage: Stage, report: Report) -> None:
    """Deliver to one subscription with `ordered: key`, in each of the three ways."""
    one, many, backlog = (ONE_QUICK, MANY_QUICK, BACKLOG_QUICK) if stage.quick else (ONE, MANY, BACKLOG)
    alone, spread, others, hot, hold = [], [], [], [], []
    async with relaying(stage, "relay_keys") as relay:
        await relay.subscribe(1, TOPIC, ordered="key")
        await relay.drain(TOPIC, 100)
        for _ in range(stage.seconds(ROUNDS)):
            await fill_committed(relay.dsn, TOPIC, one, keys=1)
            alone.append((await relay.wait(one)).rate)
            spread.append((await relay.drain(TOPIC, many)).rate)
            others_s, drained = await _behind(relay, backlog)
            others.append(others_s)
            hot.append(drained)
        await relay.subscribe(1, TOPIC, ordered="key", on_dead="hold")
        for _ in range(stage.seconds(ROUNDS)):
            await fill_committed(relay.dsn, TOPIC, one, keys=1)
            hold.append((await relay.wait(one)).rate)
    report.add("1 key, in order", median(alone), "messages/s")
    report.add("1 key, in order, on_dead: hold", median(hold), "messages/s")
    report.add(f"{KEYS:,} keys, in order", median(spread), "messages/s")
    report.add(f"backlog of 1 key, {backlog:,} messages", median(hot), "s")
    report.add(f"{KEYS:,} keys behind it", median(others), "s")
    report.hold(
        "other keys behind a backlog of one key: their time against that of the backlog",
        median(mine / all_ for mine, all_ in zip(others, hot, strict=True)),
        at_most=0.15,
    )


async def _behind(relay: Relaying, backlog: int) -> tuple[float, float]:
    """Return after how many seconds one message of each other key has arrived, and the whole backlog."""
    await relay.pause(1)
    await asyncio.sleep(1.5)
    await fill_committed(relay.dsn, TOPIC, backlog, keys=1)
    head = await relay.watch.fetchval('select max("offset") from outbox')
    await fill_committed(relay.dsn, TOPIC, KEYS)
    await relay.resume(1)
    arrivals = (await relay.wait(backlog + KEYS)).arrivals
    others = 'select transaction_id::text from outbox where "offset" > $1 and key <> $2'
    behind = await relay.watch.fetch(others, head, "customer-0")
    names = {row[0] for row in behind}
    began = arrivals[0].at_s
    return _last(arrivals, names) - began, arrivals[-1].at_s - began


def _last(arrivals: list[Arrival], names: set[str]) -> float:
    times = [arrival.at_s for arrival in arrivals if arrival.transaction_id in names]
    assert len(times) == len(names), "the receiver's log names each message's transaction"
    return times[-1]
