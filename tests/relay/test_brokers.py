"""The relay with real brokers: every message has its receipt, and a broker that stops and starts again loses none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aio_pika
import httpx
import nats
import pytest
import redis.asyncio
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support import brokers
from tests.support.brokers import Server
from tests.support.kafka_admin import kafka_admin
from tests.support.relay_stepping import order, publish, turn_until

KINDS = ("rabbitmq", "nats", "redis", "kafka")


@pytest.fixture
async def relay(runtime: Runtime, group: str) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


@asynccontextmanager
async def rabbit(server: Server) -> AsyncIterator[Any]:
    connection = await aio_pika.connect(f"amqp://guest:guest@{server.host}:{server.port}/")
    try:
        yield await (await connection.channel()).declare_queue("order", durable=True)
    finally:
        await connection.close()


@asynccontextmanager
async def jetstream(server: Server) -> AsyncIterator[Any]:
    client = await nats.connect(server.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def prepare(server: Server) -> None:
    """Create what receives messages of the topic `order`."""
    match server.kind:
        case "rabbitmq":
            async with rabbit(server):
                pass
        case "nats":
            async with jetstream(server) as stream:
                await stream.add_stream(name="orders", subjects=["order"])
        case "kafka":
            async with kafka_admin(server.url) as admin:
                await admin.create_topics([NewTopic("order", 2, 1)])


async def arrived(server: Server) -> list[str]:
    """Return the message ids that the broker holds."""
    match server.kind:
        case "rabbitmq":
            found = []
            async with rabbit(server) as queue:
                while (message := await queue.get(fail=False)) is not None:
                    found.append(str(message.message_id))
            return found
        case "nats":
            async with jetstream(server) as stream:
                count = (await stream.stream_info("orders")).state.messages
                messages = [await stream.get_msg("orders", number + 1) for number in range(count)]
            return [message.headers["ce-id"] for message in messages]
        case "redis":
            client = redis.asyncio.Redis(host=server.host, port=server.port)
            entries = await client.xrange("order")
            await client.aclose()
            return [fields[b"ce_id"].decode() for _, fields in entries]
        case _:
            return await _from_kafka(server)


async def _from_kafka(server: Server) -> list[str]:
    consumer = AIOKafkaConsumer(bootstrap_servers=server.url, auto_offset_reset="earliest")
    await consumer.start()
    try:
        parts = [TopicPartition("order", number) for number in (0, 1)]
        consumer.assign(parts)
        ends = await consumer.end_offsets(parts)
        found: list[str] = []
        while any([await consumer.position(part) < ends[part] for part in parts]):
            for messages in (await consumer.getmany(timeout_ms=500)).values():
                found += [dict(message.headers)["ce_id"].decode() for message in messages]
        return found
    finally:
        await consumer.stop()


def destination(server: Server) -> dict[str, Any]:
    match server.kind:
        case "rabbitmq":
            return {"type": "rabbitmq", "url": f"amqp://{server.host}:{server.port}/", **GUEST}
        case "kafka":
            return {"type": "kafka", "bootstrap": [f"{server.host}:{server.port}"]}
        case kind:
            return {"type": kind, "url": server.url}


GUEST = {"username": "guest", "password": "guest"}


async def ids_of(db: Connection) -> set[str]:
    return {
        row[0]
        for row in await db.fetch(
            "select transaction_id::text || '-' || position from outbox o where not topic ^@ 'halfnote.'"
        )
    }


@pytest.mark.parametrize("kind", KINDS)
async def test_a_broker_that_stops_and_starts_again_loses_nothing(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, kind: str
) -> None:
    with brokers.own(kind) as server:
        await prepare(server)
        subscription = {"topics": ["order"], "destination": destination(server), "timeout_s": 5.0, "retry": [1] * 10}
        answer = await client.put("/subscriptions/mailer", json=subscription)
        assert answer.status_code == 201, answer.text
        await publish(client, *(order(number) for number in range(20)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 20 from receipt"))
        found = await arrived(server)
        assert set(found) == await ids_of(db)
        assert len(found) == 20
        await asyncio.to_thread(server.stop)
        await publish(client, *(order(number) for number in range(20)))
        down = "select exists (select from checkpoint where opened_at is not null)"
        await _until(relay, runtime, db, down)
        await asyncio.to_thread(server.start)
        await _until(relay, runtime, db, "select count(*) = 40 from receipt")
        found += [message_id for message_id in await arrived(server) if kind == "rabbitmq" or message_id not in found]
        assert set(found) == await ids_of(db)
        await relay.drain(runtime)
    assert await db.fetchval("select count(*) from dead_letter") == 0


async def _until(relay: Relay, runtime: Runtime, db: Connection, query: str) -> None:
    """Step until the query returns true. Each second the clock advances by half a minute, so probes are soon due."""
    async with asyncio.timeout(60):
        while not await db.fetchval(query):
            runtime.clock.offset_s += 31
            for _ in range(20):
                await relay.step(runtime, runtime.clock.now())
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("topics", "filters", "sent"),
    [
        (["order"], None, "order."),
        (["invoice*", "order"], {"tags": ["new", "old"]}, "order.new"),
        (["order*"], None, "halfnote.test."),
    ],
    ids=["a topic", "a topic and tags", "a pattern"],
)
async def test_a_test_message_goes_where_the_messages_go(
    client: httpx.AsyncClient, topics: list[str], filters: dict[str, Any] | None, sent: str
) -> None:
    server = brokers.rabbitmq()
    subscription = {
        "topics": topics,
        "filters": filters,
        "destination": {**destination(server), "exchange": f"test-{uuid4()}", "routing_key": "{topic}.{tag}"},
    }
    answer = await client.put("/subscriptions/mailer", json=subscription)
    assert answer.status_code == 201, answer.text
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange(subscription["destination"]["exchange"], auto_delete=True)
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind(exchange, sent)
        outcome = (await client.post("/subscriptions/mailer/test")).json()
        assert (outcome["outcome"], outcome["error"]) == ("delivered", None)
        message = await queue.get(no_ack=True, timeout=20)
    assert (message.type, message.headers["cloudEvents_type"]) == ("halfnote.test", "halfnote.test")


async def test_a_message_that_a_broker_can_never_accept_is_dead_at_once(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    with brokers.own("nats") as server:
        await prepare(server)
        async with jetstream(server) as stream:
            await stream.update_stream(name="orders", subjects=["order"], max_msg_size=2000)
        subscription = {"topics": ["order"], "destination": destination(server)}
        assert (await client.put("/subscriptions/mailer", json=subscription)).status_code == 201
        large, small = await publish(client, {**order(1), "body": "x" * 5000}, order(2))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        await relay.drain(runtime)
    dead = await db.fetchrow('select "offset", attempts, reason from dead_letter')
    assert (dead["offset"], dead["attempts"]) == (large, 1)
    assert "large" in dead["reason"] or "size" in dead["reason"] or "exceed" in dead["reason"], dead["reason"]
    assert await db.fetchval('select "offset" from receipt') == small


async def test_messages_for_a_topic_that_takes_none_wait_until_it_does(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    server, topic = brokers.kafka(), f"compacted-{uuid4()}"
    async with kafka_admin(server.url) as admin:
        await admin.create_topics([NewTopic(topic, 2, 1, topic_configs={"cleanup.policy": "compact"})])
        subscription = {"topics": ["order"], "destination": {**destination(server), "topic": topic}}
        answer = await client.put("/subscriptions/mailer", json=subscription)
        assert answer.status_code == 201, answer.text
        await publish(client, *(order(number, key=None) for number in range(20)))
        await _until(relay, runtime, db, "select exists (select from checkpoint where opened_at is not null)")
        found = (await client.get("/subscriptions/mailer")).json()
        assert "InvalidRecordError: the topic refuses the record" in found["breaker"]["because"]
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"cleanup.policy": "delete"})])
        await _until(relay, runtime, db, "select count(*) = 19 from receipt where outcome = 'delivered'")
    # The first one that was refused: until then it was not known that all are.
    assert await db.fetchval("select count(*) from dead_letter") == 1
