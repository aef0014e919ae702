"""Each broker: the relay delivers a backlog, in turn with the client library alone, which sends the same messages."""

import asyncio
from importlib.util import find_spec
from statistics import median

from bench.filling import fill_committed
from bench.publishing import BROKERS, Broker, deliveries
from bench.relay_stage import WARM, Relaying, relaying, subscription
from bench.report import Report
from bench.stage import Stage, put
from bench.statistic import median_ratio
from bench.wrk import BrokenRunError
from tests.support.brokers import Server, missing, own

ROUNDS = 3
COUNT, COUNT_QUICK = 20_000, 2_000
CLIENTS = {"rabbitmq": "aio_pika", "nats": "nats", "kafka": "aiokafka", "redis": "redis"}
LOOK_EVERY_S, WITHIN_S = 0.1, 40.0

# A receipt is written when the broker has acknowledged the message.
RECEIPTS = """
select count(*), extract(epoch from max(settled_at) - $3)::float8
from receipt where subscription_id = $1 and replay = 0 and "offset" > $2
"""
LAST_ERROR = "select error from attempt where subscription_id = $1 order by attempt_id desc limit 1"


async def bench(stage: Stage, report: Report) -> None:
    """Measure one broker after another; report and skip a broker that is not installed."""
    async with relaying(stage, "relay_brokers") as relay:
        for number, (kind, broker) in enumerate(BROKERS.items()):
            reason = missing(kind) or (None if find_spec(CLIENTS[kind]) else f"no client: pip install '.[{kind}]'")
            if reason:
                report.notes.append(f"{kind}: skipped, {reason}")
                continue
            try:
                with own(kind) as server:
                    await _compare(stage, report, relay, number, kind, broker, server)
                    await relay.pause(number)
            except (BrokenRunError, OSError, RuntimeError) as error:
                report.break_off(f"{kind}: {error}")


async def _compare(
    stage: Stage, report: Report, relay: Relaying, number: int, kind: str, broker: Broker, server: Server
) -> None:
    count, topic = COUNT_QUICK if stage.quick else COUNT, f"bench.{kind}"
    await broker.prepare(server, topic)
    body = {"topics": [topic], "destination": dict(broker.destination(server))}
    await put(relay.workers[0], f"/subscriptions/{subscription(number)}", body)
    ours, theirs = [], []
    await broker.publish(server, topic, deliveries(topic, WARM))
    await _drain(relay, number, topic, WARM)
    for _ in range(stage.seconds(ROUNDS)):
        theirs.append(count / await broker.publish(server, topic, deliveries(topic, count)))
        ours.append(await _drain(relay, number, topic, count))
    there = await broker.count(server, topic)
    if there != (sent := 2 * (WARM + count * len(ours))):
        raise BrokenRunError(f"{kind} has {there:,} messages of {sent:,}")
    ratio = median_ratio(ours, theirs)
    report.add(f"{kind}'s client alone", median(theirs), "messages/s")
    report.add(f"{kind} by the relay", median(ours), "messages/s", ratio_to=f"{kind}'s client alone", ratio=ratio)
    report.hold(f"{kind} by the relay against its client alone", ratio, at_least=0.5)


async def _drain(relay: Relaying, number: int, topic: str, count: int) -> float:
    """Publish a backlog. Return its receipts per second, from the commit of the messages to the last receipt."""
    known: int = await relay.watch.fetchval(
        "select subscription_id from subscription where name = $1", subscription(number)
    )
    after: int = await relay.watch.fetchval('select coalesce(max("offset"), 0) from outbox')
    await fill_committed(relay.dsn, topic, count)
    began = await relay.watch.fetchval("select clock_timestamp()")
    for _ in range(int(WITHIN_S / LOOK_EVERY_S)):
        [(there, seconds)] = await relay.watch.fetch(RECEIPTS, known, after, began)
        if there >= count:
            return float(count / seconds)
        await asyncio.sleep(LOOK_EVERY_S)
    error = await relay.watch.fetchval(LAST_ERROR, known)
    raise BrokenRunError(f"{there:,} of {count:,} messages delivered within {WITHIN_S:g} s; last error: {error}")
