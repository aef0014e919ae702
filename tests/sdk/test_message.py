"""Messages as consumers get them: parse the service's deliveries, over sockets and through brokers."""

import json
from datetime import UTC, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from halfnote.message import Message, NotAMessage, from_aio_pika, from_aiokafka, from_http, from_nats, from_redis

from app.delivery import Delivery
from app.destinations.cloudevents import event, joined
from app.destinations.kafka_records import record_of
from app.destinations.nats import headers_of
from app.destinations.rabbitmq import message_of
from app.destinations.webhook import batch_headers, message_headers, structured_headers
from app.observability.trace_context import trace_headers
from tests.destinations import test_kafka, test_nats, test_rabbitmq, test_redis
from tests.support import brokers
from tests.support.webhooks import COMMITTED, message

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FULL: dict[str, Any] = {
    "key": 'café "1"',
    "tag": "50% öff",
    "headers": {"traceparent": "its own", "x.y_z": "naïve, 100%"},
    "trace": TRACE + ' shop=a b%22",of=2',
    "producer_group": "the shop/1",
    "subscription": "mail er",
    "attempt": 3,
    "replay": "7",
}
LEAST: dict[str, Any] = {"key": None, "tag": None, "headers": {}, "replay": None, "trace": None}


def expected(sent: Delivery) -> Message:
    """Return the message that a delivery is to be read as."""
    return Message(
        message_id=sent.message_id,
        topic=sent.topic,
        body=sent.body,
        content_type=sent.content_type,
        key=sent.key,
        tag=sent.tag,
        headers=dict(sent.headers),
        group=sent.producer_group,
        transaction_id=str(sent.transaction_id),
        offset=sent.offset,
        attempt=sent.attempt,
        subscription=sent.subscription,
        replay=sent.replay,
        committed_at=sent.committed_at,
        traceparent=trace_headers(sent.trace).get("traceparent"),
        tracestate=trace_headers(sent.trace).get("tracestate"),
    )


def as_http(headers: dict[str, str]) -> dict[str, str]:
    """Return headers as a server hands them over."""
    return {name.lower(): value for name, value in headers.items()}


@pytest.mark.parametrize("fields", [FULL, LEAST, {**FULL, "body": bytes(range(256)), "content_type": "image/png"}])
def test_each_mode_of_http(fields: dict[str, Any]) -> None:
    sent = message(body=fields.get("body", b'{"order":1030}'), **{k: v for k, v in fields.items() if k != "body"})
    [binary] = from_http(as_http(message_headers(sent)), sent.body)
    assert binary == expected(sent)
    [structured] = from_http(as_http(structured_headers(sent)), event(sent))
    assert structured == expected(sent)
    other = message(2, body=b"[1]")
    both = from_http(as_http(batch_headers(sent)), joined([event(sent), event(other)]))
    assert both == [expected(sent), expected(other)]


def test_a_body_in_binary_mode_is_byte_for_byte() -> None:
    sent = message(body=b'{ "n": 1.10 }')
    [found] = from_http(as_http(message_headers(sent)), sent.body)
    assert found.body == b'{ "n": 1.10 }'
    assert found.json() == {"n": 1.1}
    assert found.committed_at == COMMITTED + timedelta(seconds=1)
    assert found.committed_at.tzinfo == UTC


@pytest.mark.parametrize(
    "body",
    [
        b'{ "n": 1.10 }',
        b'{"n":1e999,"n":-0}',
        b'"caf\\u00e9 \xc3\xa9"',
        b" [ ] ",
        b"7",
        # Python parses neither of them: too many digits, and too many brackets.
        b"[" + b"7" * 5000 + b',"]\\"}"]',
        b"7" * 5000,
        b"[" + b"7" * 5000 + b',"' + b'x\\"' * 50_000 + b'"]',
        b"[" * 5000 + b'"]"' + b"]" * 5000,
    ],
)
def test_a_body_within_an_event_is_byte_for_byte(body: bytes) -> None:
    one = b'{"id":"m","type":"order", "data" : ' + body + b' , "subject":"k"}'
    [found] = from_http({"content-type": "application/cloudevents+json"}, one)
    assert (found.message_id, found.body, found.key) == ("m", body.strip(), "k")
    both = from_http({"content-type": "application/cloudevents-batch+json"}, b"[" + one + b"," + one + b"]")
    assert both == [found, found]


@pytest.mark.parametrize("fields", [FULL, LEAST])
def test_each_broker_s_form(fields: dict[str, Any]) -> None:
    sent = message(**fields)
    rabbit = message_of(sent)
    assert from_aio_pika(rabbit) == expected(sent)
    assert from_nats(SimpleNamespace(headers=headers_of(sent), data=sent.body)) == expected(sent)
    record = record_of(sent)
    assert from_aiokafka(SimpleNamespace(headers=record["headers"], value=record["value"])) == expected(sent)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"{}"),
        ({"ce-id": "m-0"}, b"{}"),
        ({"ce-type": "order"}, b"{}"),
        ({"ce-id": "m-0", "ce-type": "order", "halfnote-offset": "many"}, b"{}"),
        ({"ce-id": "m-0", "ce-type": "order", "ce-time": "noon"}, b"{}"),
        ({"content-type": "application/cloudevents+json"}, b"{"),
        ({"content-type": "application/cloudevents+json"}, b"[]"),
        ({"content-type": "application/cloudevents+json"}, b'{"id": 1, "type": "order"}'),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "m", "type": "order", "data_base64": "!"}'),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "m", "type": "order", "halfnoteheaders": "[]"}'),
        ({"content-type": "application/cloudevents+json"}, b"[" * 100_000),
        ({"content-type": "application/cloudevents-batch+json; charset=utf-8"}, b"{}"),
        ({"content-type": "application/cloudevents-batch+json"}, b"[1]"),
        ({"content-type": "application/cloudevents-batch+json"}, b'[{"id": "m", "type": "order"}'),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "m", "type": "order"} x'),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "m", "type": "order",}'),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "m", "type": "order", "data": ["\xff"]}'),
        ({"content-type": "application/cloudevents+json"}, b'{"id": "m", "type": "order", "data": ' + b"[" * 9000),
        # In linear time: each quote would else begin a search for the end of a text.
        (
            {"content-type": "application/cloudevents+json"},
            b'{"id": "m", "type": "order", "data": ' + b"[" * 5000 + b'"' + b'\\"' * 1_000_000,
        ),
    ],
)
def test_what_is_no_message_is_refused(headers: dict[str, str], body: bytes) -> None:
    with pytest.raises(NotAMessage):
        from_http(headers, body)


def test_an_event_without_data_is_null() -> None:
    [found] = from_http({"content-type": "application/cloudevents+json"}, json.dumps({"id": "m", "type": "t"}).encode())
    assert found.json() is None


@pytest.mark.slow
async def test_through_rabbitmq_nats_kafka_and_redis() -> None:
    """By their own clients, from real servers."""
    name = f"orders-{uuid4()}"
    sent = message(topic=name, **FULL)
    rabbit, stream, log, cache = brokers.rabbitmq(), brokers.nats(), brokers.kafka(), brokers.redis()
    async with test_rabbitmq.channel_of(rabbit) as channel, test_rabbitmq.destination(rabbit.url) as destination:
        await channel.declare_queue(name, durable=True)
        await destination.deliver([sent], COMMITTED)
        [incoming] = await test_rabbitmq.first_messages(channel, name, 1)
    assert from_aio_pika(incoming) == expected(sent)
    async with test_nats.jetstream(stream) as js, test_nats.destination(stream.url) as destination:
        await js.add_stream(name=name, subjects=[name])
        await destination.deliver([sent], COMMITTED)
        [got] = await test_nats.first_messages(js, name, 1)
    assert from_nats(got) == expected(sent)
    await test_kafka.create(log, name)
    async with test_kafka.destination(log) as destination:
        await destination.deliver([sent], COMMITTED)
    [record] = await test_kafka.records(log, name)
    assert from_aiokafka(record) == expected(sent)
    async with test_redis.destination(cache) as destination:
        await destination.deliver([sent], COMMITTED)
    [entry] = await test_redis.entries(cache, name)
    assert from_redis(entry) == expected(sent)
    assert from_redis({name.decode(): value.decode() for name, value in entry.items()}) == expected(sent)
