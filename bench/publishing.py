"""Publish messages with each broker's client library alone, as the relay does: pipelined, with acknowledgements."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from app.delivery import Delivery
from app.destinations.cloudevents import attributes, own_headers
from app.ids import message_id
from bench.payload import GROUP, half_body, message_of, transaction_ids
from tests.support.brokers import Server

# The most messages that wait for an acknowledgement, as in one call of a destination.
PIPELINED = 500


@dataclass(frozen=True, slots=True)
class Broker:
    """A kind of broker. `destination` names it in a subscription; `prepare` creates the objects that a topic needs.

    `publish` sends messages and returns the seconds from the first message until all are acknowledged. `count` returns
    the number of messages in the topic.
    """

    destination: Callable[[Server], Mapping[str, Any]]
    prepare: Callable[[Server, str], Awaitable[None]]
    publish: Callable[[Server, str, Sequence[Delivery]], Awaitable[float]]
    count: Callable[[Server, str], Awaitable[int]]


def deliveries(topic: str, count: int) -> list[Delivery]:
    """Return messages like those of `fill_committed`, in the form that a destination gets."""
    body, now = message_of(half_body()), datetime.now(UTC)
    return [
        Delivery(
            "bench-1",
            message_id(UUID(id_), 0),
            UUID(id_),
            n,
            GROUP,
            topic,
            f"customer-{n % 1000}",
            None,
            {},
            "application/json",
            body,
            now,
            1,
        )
        for n, id_ in enumerate(transaction_ids(count))
    ]


def headers(delivery: Delivery, prefix: str) -> dict[str, str]:
    """Return the headers that a destination sends: the attributes of CloudEvents with a binding's prefix."""
    found = {prefix + name: value for name, value in attributes(delivery).items() if name != "datacontenttype"}
    return found | own_headers(delivery)


async def _pipelined(begin: Callable[[int], Awaitable[Awaitable[Any]]], count: int) -> float:
    """Start the sends in order, at most PIPELINED without an answer. Return the seconds until all are answered."""
    slots, tasks = asyncio.Semaphore(PIPELINED), set[asyncio.Future[Any]]()
    started = time.perf_counter()
    for n in range(count):
        await slots.acquire()
        answer = asyncio.ensure_future(await begin(n))
        tasks.add(answer)
        answer.add_done_callback(lambda _: slots.release())
    await asyncio.gather(*tasks)
    return time.perf_counter() - started


async def _nothing(server: Server, topic: str) -> None:
    """Prepare nothing: the first message creates the stream."""


async def _redis(server: Server, topic: str, sent: Sequence[Delivery]) -> float:
    from redis.asyncio import Redis

    entries = [{"body": one.body, "content-type": one.content_type, **headers(one, "ce_")} for one in sent]
    async with Redis(host=server.host, port=server.port) as redis:
        await redis.ping()
        started = time.perf_counter()
        for at in range(0, len(entries), PIPELINED):
            pipeline = redis.pipeline(transaction=False)
            for entry in entries[at : at + PIPELINED]:
                pipeline.xadd(topic, entry)  # type: ignore[arg-type]
            await pipeline.execute()
        return time.perf_counter() - started


async def _redis_count(server: Server, topic: str) -> int:
    from redis.asyncio import Redis

    async with Redis(host=server.host, port=server.port) as redis:
        return int(await redis.xlen(topic))


async def _kafka_topic(server: Server, topic: str) -> None:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

    admin = AIOKafkaAdminClient(bootstrap_servers=server.url)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, num_partitions=8, replication_factor=1)])
    finally:
        await admin.close()


async def _kafka(server: Server, topic: str, sent: Sequence[Delivery]) -> float:
    from aiokafka import AIOKafkaProducer

    records = [
        (one.body, (one.key or "").encode(), [(name, value.encode()) for name, value in headers(one, "ce_").items()])
        for one in sent
    ]
    async with AIOKafkaProducer(bootstrap_servers=server.url, acks="all", enable_idempotence=True) as producer:
        await producer.partitions_for(topic)

        async def begin(n: int) -> Awaitable[Any]:
            value, key, named = records[n]
            future: Awaitable[Any] = await producer.send(topic, value, key=key, headers=named)
            return future

        return await _pipelined(begin, len(records))


async def _kafka_count(server: Server, topic: str) -> int:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async with AIOKafkaConsumer(bootstrap_servers=server.url) as consumer:
        ends = await consumer.end_offsets([TopicPartition(topic, number) for number in range(8)])
    return int(sum(ends.values()))


async def _nats_stream(server: Server, topic: str) -> None:
    import nats

    client = await nats.connect(server.url)
    try:
        await client.jetstream().add_stream(name="bench", subjects=[topic])
    finally:
        await client.close()


async def _nats(server: Server, topic: str, sent: Sequence[Delivery]) -> float:
    import nats

    named = [{"Nats-Msg-Id": one.message_id, "content-type": one.content_type, **headers(one, "ce-")} for one in sent]
    client = await nats.connect(server.url)
    try:
        stream = client.jetstream(publish_async_max_pending=PIPELINED)

        async def begin(n: int) -> Awaitable[Any]:
            return await stream.publish_async(topic, sent[n].body, headers=named[n])

        return await _pipelined(begin, len(sent))
    finally:
        await client.close()


async def _nats_count(server: Server, topic: str) -> int:
    import nats

    client = await nats.connect(server.url)
    try:
        return (await client.jetstream().stream_info("bench")).state.messages
    finally:
        await client.close()


async def _rabbitmq_queue(server: Server, topic: str) -> None:
    import aio_pika

    async with await aio_pika.connect(server.url) as connection:
        await (await connection.channel()).declare_queue(topic, durable=True)


async def _rabbitmq(server: Server, topic: str, sent: Sequence[Delivery]) -> float:
    import aio_pika

    messages = [
        aio_pika.Message(
            one.body,
            headers=dict(headers(one, "cloudEvents:")),
            content_type=one.content_type,
            message_id=one.message_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        for one in sent
    ]
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel(publisher_confirms=True)

        async def begin(n: int) -> Awaitable[Any]:
            return channel.default_exchange.publish(messages[n], routing_key=topic, mandatory=True)

        return await _pipelined(begin, len(messages))


async def _rabbitmq_count(server: Server, topic: str) -> int:
    import aio_pika

    async with await aio_pika.connect(server.url) as connection:
        queue = await (await connection.channel()).declare_queue(topic, durable=True, passive=True)
        return queue.declaration_result.message_count or 0


BROKERS = {
    "rabbitmq": Broker(
        lambda server: {"type": "rabbitmq", "url": server.url, "username": "guest", "password": "guest"},
        _rabbitmq_queue,
        _rabbitmq,
        _rabbitmq_count,
    ),
    "nats": Broker(lambda server: {"type": "nats", "url": server.url}, _nats_stream, _nats, _nats_count),
    "kafka": Broker(lambda server: {"type": "kafka", "bootstrap": [server.url]}, _kafka_topic, _kafka, _kafka_count),
    "redis": Broker(lambda server: {"type": "redis", "url": f"{server.url}/0"}, _nothing, _redis, _redis_count),
}
