"""RabbitMQ as a destination, against a real server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.frame import marshal
from pamqp.header import ContentHeader

from app.delivery import Delivered, Delivery, Failed, Refused
from app.destinations.base import Destination
from app.destinations.rabbitmq import BATCH_MAX, message_of, of
from app.egress.denied_addresses import Network
from app.egress.network_policy import NetworkPolicy
from tests.support import brokers
from tests.support.deliveries import (
    ELSEWHERE,
    LOOPBACK,
    NOW,
    certificate,
    delivery,
    full_delivery,
    open_tasks_and_sockets,
)
from tests.support.faulty_proxy import FaultyProxy


@asynccontextmanager
async def destination(
    url: str,
    *,
    timeout_s: float = 20,
    networks: tuple[Network, ...] = LOOPBACK,
    password: str | None = None,
    **fields: Any,
) -> AsyncIterator[Destination]:
    """Yield the RabbitMQ destination of a subscription."""
    stored = {"type": "rabbitmq", "url": url, "exchange": "", **fields}
    opened = of(stored, {"password": password} if password else {}, timeout_s, NetworkPolicy(opened=networks))
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def channel_of(server: brokers.Server) -> AsyncIterator[AbstractChannel]:
    """Yield a channel of the test, to declare and read queues."""
    async with await aio_pika.connect(server.url) as connection:
        yield await connection.channel()


async def first_messages(channel: AbstractChannel, queue: str, count: int) -> list[AbstractIncomingMessage]:
    """Return the first messages of a queue; they were confirmed, so they are in it."""
    found = await channel.get_queue(queue)
    return [await found.get(no_ack=True, timeout=20) for _ in range(count)]


def header_frame_bytes(sent: Delivery) -> int:
    """Return the size of the frame of a message's properties and headers."""
    return len(marshal(ContentHeader(body_size=0, properties=message_of(sent).properties), 1))


@pytest.fixture
def name() -> str:
    """Return a name that only this test uses, for topics, queues and exchanges."""
    return f"orders-{uuid4()}"


async def test_a_consumer_gets_the_body_and_every_attribute(name: str) -> None:
    server = brokers.rabbitmq()
    sent = full_delivery(name)
    async with channel_of(server) as channel, destination(server.url) as rabbit:
        await channel.declare_queue(name, durable=True)
        [outcome] = await rabbit.deliver([sent], NOW)
        [message] = await first_messages(channel, name, 1)
    assert isinstance(outcome, Delivered)
    assert message.body == bytes(range(256))
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.message_id == sent.message_id
    assert (message.content_type, message.type) == ("application/octet-stream", name)
    assert message.timestamp == datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
    assert message.headers == {
        "cloudEvents_specversion": "1.0",
        "cloudEvents_id": sent.message_id,
        "cloudEvents_source": "/producer-groups/shop",
        "cloudEvents_type": name,
        "cloudEvents_subject": 'café "1"',
        "cloudEvents_time": "2026-11-21T10:00:00.123456Z",
        "cloudEvents_halfnotetransaction": str(sent.transaction_id),
        "cloudEvents_halfnoteoffset": "1030",
        "cloudEvents_halfnoteattempt": "3",
        "cloudEvents_halfnotesubscription": "orders-out",
        "cloudEvents_halfnotetag": "new",
        "cloudEvents_halfnotereplay": "7",
        "halfnote-transaction": str(sent.transaction_id),
        "halfnote-offset": "1030",
        "halfnote-attempt": "3",
        "halfnote-subscription": "orders-out",
        "halfnote-tag": "new",
        "halfnote-replay": "7",
        "halfnote-h-trace": "50% öff",
    }


async def test_placeholders_make_the_routing_key(name: str) -> None:
    server = brokers.rabbitmq()
    async with (
        channel_of(server) as channel,
        destination(server.url, exchange=name, routing_key="{group}.{topic}.{tag}.{key}") as rabbit,
    ):
        exchange = await channel.declare_exchange(name, aio_pika.ExchangeType.TOPIC)
        queue = await channel.declare_queue(name)
        await queue.bind(exchange, "shop.order.new.#")
        deliveries = [delivery(tag="new", key="a b*"), delivery(tag="new", key=None), delivery(tag="old")]
        outcomes = await rabbit.deliver(deliveries, NOW)
        messages = await first_messages(channel, name, 2)
    assert [type(outcome) for outcome in outcomes] == [Delivered, Delivered, Failed]
    assert [message.routing_key for message in messages] == ["shop.order.new.a b*", "shop.order.new."]


async def test_without_a_queue_the_delivery_fails_and_says_what_to_bind(name: str) -> None:
    server = brokers.rabbitmq()
    async with channel_of(server) as channel, destination(server.url) as plain:
        await channel.declare_queue(name)
        delivered, absent = await plain.deliver([delivery(topic=name), delivery(topic=name + "-absent")], NOW)
        await channel.declare_exchange(name)
        async with destination(server.url, exchange=name) as rabbit:
            [unbound] = await rabbit.deliver([delivery(topic="order")], NOW)
    assert isinstance(delivered, Delivered)
    assert isinstance(absent, Failed)
    assert isinstance(unbound, Failed)
    assert absent.error == f"RabbitMQ has no queue '{name}-absent': declare it, or name an exchange"
    assert unbound.error == f"no queue takes routing key 'order' of exchange '{name}': bind a queue to it"
    assert not absent.unreachable
    assert not unbound.unreachable


async def test_a_missing_exchange_fails_until_it_is_there(name: str) -> None:
    server = brokers.rabbitmq()
    async with channel_of(server) as channel, destination(server.url, exchange=name) as rabbit:
        before = await asyncio.gather(*(rabbit.deliver([delivery(), delivery()], NOW) for _ in range(3)))
        exchange = await channel.declare_exchange(name)
        await (await channel.declare_queue(name)).bind(exchange, "order")
        [after] = await rabbit.deliver([delivery()], NOW)
    for outcome in [outcome for outcomes in before for outcome in outcomes]:
        assert isinstance(outcome, Failed)
        assert f"no exchange '{name}'" in outcome.error
        assert not outcome.unreachable
    assert isinstance(after, Delivered)


async def test_a_full_queue_fails(name: str) -> None:
    server = brokers.rabbitmq()
    async with channel_of(server) as channel, destination(server.url) as rabbit:
        await channel.declare_queue(name, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        [first] = await rabbit.deliver([delivery(topic=name)], NOW)
        [second] = await rabbit.deliver([delivery(topic=name)], NOW)
    assert isinstance(first, Delivered)
    assert isinstance(second, Failed)
    assert "basic.nack" in second.error


async def test_a_message_too_large_is_refused_and_the_others_are_delivered(name: str) -> None:
    server = brokers.rabbitmq()
    limit = brokers.RABBITMQ_LARGEST_BYTES
    bodies = [b"small", b"x" * limit, b"x" * (limit + 1), b"small too"]
    async with channel_of(server) as channel, destination(server.url) as rabbit:
        await channel.declare_queue(name)
        outcomes = await rabbit.deliver([delivery(topic=name, body=body) for body in bodies], NOW)
        [again] = await rabbit.deliver([delivery(topic=name, body=bodies[2])], NOW)
        # Messages that were under way when RabbitMQ closed the channel may be in the queue twice.
        queue = await channel.declare_queue(name, passive=True)
        messages = await first_messages(channel, name, queue.declaration_result.message_count or 0)
    assert [type(outcome) for outcome in outcomes] == [Delivered, Delivered, Refused, Delivered]
    for refused in (outcomes[2], again):
        assert isinstance(refused, Refused)
        assert refused.reason == "too_large"
        assert "a body of 5,242,881 bytes; this RabbitMQ takes at most 5,242,880" in refused.error
    assert {len(message.body) for message in messages} == {5, limit, 9}


async def test_a_limit_that_was_raised_is_noticed_after_the_restart(name: str) -> None:
    limit = brokers.RABBITMQ_LARGEST_BYTES
    with brokers.own("rabbitmq") as server:
        async with channel_of(server) as channel:
            await channel.declare_queue(name, durable=True)
        async with destination(server.url) as rabbit:
            large = delivery(topic=name, body=b"x" * (limit + 1))
            [asked] = await rabbit.deliver([large], NOW)
            [known] = await rabbit.deliver([large], NOW)
            await asyncio.to_thread(server.stop)
            settings = server.directory / "advanced.config"
            settings.write_text(settings.read_text().replace(str(limit), str(2 * limit)))
            await asyncio.to_thread(server.start)
            [after] = await rabbit.deliver([large], NOW)
    for refused, was_asked in ((asked, True), (known, False)):
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.asked) == ("too_large", was_asked)
    assert isinstance(after, Delivered)


async def test_a_routing_key_too_long_for_amqp_is_refused_alone(name: str) -> None:
    server = brokers.rabbitmq()
    async with channel_of(server) as channel, destination(server.url, routing_key="{tag}") as rabbit:
        await channel.declare_queue(name)
        outcomes = await rabbit.deliver([delivery(tag="ö" * 128), delivery(tag=name), delivery(tag="k" * 255)], NOW)
    refused, delivered, unknown = outcomes
    assert isinstance(refused, Refused)
    assert "a routing key of 256 bytes; AMQP takes at most 255" in refused.error
    assert isinstance(delivered, Delivered)
    assert isinstance(unknown, Failed)


async def test_headers_above_the_frame_limit_are_refused_alone(name: str) -> None:
    server = brokers.rabbitmq()
    most = 131_072
    async with FaultyProxy(server.port) as proxy, channel_of(server) as channel:
        await channel.declare_queue(name)
        async with destination(f"amqp://127.0.0.1:{proxy.port}") as rabbit:
            small = delivery(topic=name)
            fits = most - header_frame_bytes(delivery(topic=name, headers={"a": ""}))
            sizes = (0, fits + 1, fits, 200_000, 0)
            outcomes = await rabbit.deliver(
                [delivery(topic=name, headers={"a": "x" * size}) if size else small for size in sizes], NOW
            )
            assert proxy.connections == 1
        messages = await first_messages(channel, name, 3)
    assert [type(outcome) for outcome in outcomes] == [Delivered, Refused, Delivered, Refused, Delivered]
    for refused, size in ((outcomes[1], most + 1), (outcomes[3], most - fits + 200_000)):
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.asked) == ("bad_message", False)
        assert (
            refused.error
            == f"properties and headers of {size:,} bytes; this RabbitMQ takes at most 131,072 (frame_max)"
        )
    assert max(len(str(message.headers.get("halfnote-h-a", ""))) for message in messages) == fits


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"content_type": "text/" + "x" * 251}, "a content type of 256 bytes; AMQP takes at most 255"),
        ({"message_id": "ö" * 128}, "a message id of 256 bytes; AMQP takes at most 255"),
        (
            {"headers": {"n" * 118: "1"}},
            f"the name of the header halfnote-h-{'n' * 118} has 129 bytes; AMQP takes at most 128",
        ),
    ],
    ids=["content type", "message id", "header name"],
)
async def test_text_too_long_for_amqp_is_refused_alone(name: str, fields: dict[str, Any], error: str) -> None:
    server = brokers.rabbitmq()
    longest = {"content_type": "text/" + "x" * 250, "message_id": "i" * 255, "headers": {"n" * 117: "1"}}
    async with channel_of(server) as channel, destination(server.url) as rabbit:
        await channel.declare_queue(name)
        refused, delivered = await rabbit.deliver(
            [delivery(topic=name, **fields), delivery(topic=name, **longest)], NOW
        )
        [message] = await first_messages(channel, name, 1)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.asked, refused.error) == ("bad_message", False, error)
    assert isinstance(delivered, Delivered)
    assert (message.content_type, message.message_id) == (longest["content_type"], longest["message_id"])
    assert message.headers["halfnote-h-" + "n" * 117] == "1"


async def test_a_topic_too_long_for_a_property_is_in_the_headers(name: str) -> None:
    server = brokers.rabbitmq()
    topic = "ö" * 255
    async with channel_of(server) as channel, destination(server.url, routing_key=name) as rabbit:
        await channel.declare_queue(name)
        [outcome] = await rabbit.deliver([delivery(topic=topic)], NOW)
        [message] = await first_messages(channel, name, 1)
    assert isinstance(outcome, Delivered)
    assert message.headers["cloudEvents_type"] == topic
    assert not message.type


async def test_a_thousand_at_once_are_all_confirmed_on_one_connection(name: str) -> None:
    server = brokers.rabbitmq()
    deliveries = [delivery(topic=name, body=str(number).encode()) for number in range(1_000)]
    calls = [deliveries[:BATCH_MAX], *([one] for one in deliveries[BATCH_MAX:])]
    async with FaultyProxy(server.port) as proxy, channel_of(server) as channel:
        await channel.declare_queue(name)
        async with destination(f"amqp://127.0.0.1:{proxy.port}") as rabbit:
            outcomes = await asyncio.gather(*(rabbit.deliver(call, NOW) for call in calls))
            assert proxy.connections == 1
        messages = await first_messages(channel, name, 1_000)
    assert all(isinstance(outcome, Delivered) for call in outcomes for outcome in call)
    assert {int(message.body) for message in messages} == set(range(1_000))
    # The messages of one call keep their order.
    first = [int(message.body) for message in messages if int(message.body) < BATCH_MAX]
    assert first == sorted(first)


async def test_a_stopped_server_is_unreachable_until_it_runs_again(name: str) -> None:
    with brokers.own("rabbitmq") as server:
        async with destination(server.url, timeout_s=5) as rabbit:
            async with channel_of(server) as channel:
                await channel.declare_queue(name, durable=True)
            [before] = await rabbit.deliver([delivery(topic=name, body=b"1")], NOW)
            await asyncio.to_thread(server.stop)
            meanwhile = await asyncio.gather(*(rabbit.deliver([delivery(topic=name)], NOW) for _ in range(10)))
            await asyncio.to_thread(server.start)
            [after] = await rabbit.deliver([delivery(topic=name, body=b"2")], NOW)
            async with channel_of(server) as channel:
                messages = await first_messages(channel, name, 2)
    assert isinstance(before, Delivered)
    for [outcome] in meanwhile:
        assert isinstance(outcome, Failed)
        assert outcome.unreachable
    assert isinstance(after, Delivered)
    # Confirmed messages have outlived the stop.
    assert [message.body for message in messages] == [b"1", b"2"]


async def test_each_message_has_an_outcome_when_the_server_is_killed(name: str) -> None:
    with brokers.own("rabbitmq") as server:
        async with destination(server.url, timeout_s=20) as rabbit, channel_of(server) as channel:
            await channel.declare_queue(name, durable=True)
            calls = [
                asyncio.create_task(rabbit.deliver([delivery(topic=name, body=b"x" * 100_000) for _ in range(20)], NOW))
                for _ in range(20)
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(server.kill)
            outcomes = [outcome for call in calls for outcome in await call]
    assert len(outcomes) == 400
    assert {type(outcome) for outcome in outcomes} <= {Delivered, Failed}
    assert any(isinstance(outcome, Delivered) for outcome in outcomes)


async def test_a_cut_connection_is_replaced_within_the_call(name: str) -> None:
    server = brokers.rabbitmq()
    async with FaultyProxy(server.port) as proxy, channel_of(server) as channel:
        await channel.declare_queue(name)
        async with destination(f"amqp://127.0.0.1:{proxy.port}") as rabbit:
            [first] = await rabbit.deliver([delivery(topic=name)], NOW)
            proxy.hold()
            calls = asyncio.gather(*(rabbit.deliver([delivery(topic=name)], NOW) for _ in range(20)))
            await asyncio.wait({calls}, timeout=0.05)
            assert not calls.done()
            proxy.cut()
            proxy.release()
            others = await calls
            assert proxy.connections == 2
    assert all(isinstance(outcome, Delivered) for [outcome] in [[first], *others])


@pytest.mark.parametrize("replacement", [b"", b"poison and more"], ids=["closed by the proxy", "refused by RabbitMQ"])
async def test_a_message_that_breaks_its_connection_is_sent_twice(name: str, replacement: bytes) -> None:
    """A body that is longer than its frame says is a frame error: RabbitMQ closes the connection."""
    server = brokers.rabbitmq()
    async with FaultyProxy(server.port) as proxy, channel_of(server) as channel:
        await channel.declare_queue(name)
        proxy.damage(b"poison", replacement)
        async with destination(f"amqp://127.0.0.1:{proxy.port}", timeout_s=5) as rabbit:
            [failed] = await rabbit.deliver([delivery(topic=name, body=b"poison")], NOW)
            assert proxy.connections == 2
            outcomes = await rabbit.deliver([delivery(topic=name), delivery(topic=name, body=b"poison")], NOW)
            assert proxy.connections <= 4
            [after] = await rabbit.deliver([delivery(topic=name)], NOW)
    for outcome in (failed, outcomes[1]):
        assert isinstance(outcome, Failed)
        assert outcome.error.startswith("the connection broke before the broker acknowledged: ")
        assert not outcome.unreachable
    assert isinstance(after, Delivered)


async def test_a_connection_that_the_client_gives_up_is_replaced_within_the_call(name: str) -> None:
    """Without heartbeats from RabbitMQ the client cancels what waits for it, here the opening of a channel."""
    server = brokers.rabbitmq()
    async with FaultyProxy(server.port) as proxy, channel_of(server) as channel:
        await channel.declare_queue(name)
        # The answer to the opening of the first channel.
        proxy.hold_answer(b"\x00\x14\x00\x0b")
        async with destination(f"amqp://127.0.0.1:{proxy.port}?heartbeat=1", timeout_s=30) as rabbit:
            [outcome] = await rabbit.deliver([delivery(topic=name)], NOW)
            assert proxy.holding_answer.is_set()
            assert proxy.connections == 2
    assert isinstance(outcome, Delivered)


async def test_a_call_to_a_silent_server_ends_in_time_and_the_next_one_reconnects(name: str) -> None:
    server = brokers.rabbitmq()
    async with FaultyProxy(server.port) as proxy, channel_of(server) as channel:
        await channel.declare_queue(name)
        async with destination(f"amqp://127.0.0.1:{proxy.port}", timeout_s=2) as rabbit:
            [first] = await rabbit.deliver([delivery(topic=name)], NOW)
            proxy.hold()
            [unanswered] = await rabbit.deliver([delivery(topic=name, body=b"x" * 4_000_000)], NOW)
            proxy.release()
            [after] = await rabbit.deliver([delivery(topic=name)], NOW)
            assert proxy.connections == 2
    assert isinstance(first, Delivered)
    assert isinstance(unanswered, Failed)
    assert unanswered.error == "no acknowledgement within 2 s"
    assert not unanswered.unreachable
    assert isinstance(after, Delivered)


async def test_a_server_that_sends_nothing_is_unreachable() -> None:
    before = open_tasks_and_sockets()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with destination(f"amqp://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3) as rabbit:
            outcomes = await asyncio.gather(*(rabbit.deliver([delivery()], NOW) for _ in range(3)))
        assert open_tasks_and_sockets()[0] == before[0]
    for [outcome] in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.error == "no connection within 0.3 s"
        assert outcome.unreachable


async def test_the_error_of_a_wrong_password_does_not_contain_it() -> None:
    server = brokers.rabbitmq()
    async with destination(server.url, username="guest", password="not-the-password") as rabbit:
        [outcome] = await rabbit.deliver([delivery()], NOW)
    assert isinstance(outcome, Failed)
    assert "Login was refused" in outcome.error
    assert "not-the-password" not in outcome.error
    assert outcome.unreachable


async def test_the_error_of_an_unknown_vhost_names_it() -> None:
    server = brokers.rabbitmq()
    async with destination(f"{server.url}/no%2Fsuch") as rabbit:
        [outcome] = await rabbit.deliver([delivery()], NOW)
    assert isinstance(outcome, Failed)
    assert "does not let user 'guest' into the vhost of amqp://127.0.0.1" in outcome.error


async def test_an_address_that_is_not_allowed_is_not_dialed() -> None:
    server = brokers.rabbitmq()
    async with (
        FaultyProxy(server.port) as proxy,
        destination(f"amqp://localhost:{proxy.port}", networks=ELSEWHERE) as rabbit,
    ):
        [outcome] = await rabbit.deliver([delivery()], NOW)
        assert proxy.connections == 0
    assert isinstance(outcome, Failed)
    assert "HALFNOTE_ALLOW_NETWORKS" in outcome.error
    assert outcome.unreachable


async def test_tls_is_verified_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate_file, key_file = certificate(tmp_path, "localhost")
    [port] = brokers.free_ports(1)
    with brokers.own("rabbitmq") as server:
        settings = f"listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.certfile = {certificate_file}\n"
        await asyncio.to_thread(server.reconfigure, f"{settings}ssl_options.keyfile = {key_file}\n")
        async with channel_of(server) as channel:
            await channel.declare_queue(name)
            async with destination(f"amqps://localhost:{port}") as rabbit:
                [unknown] = await rabbit.deliver([delivery(topic=name)], NOW)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file))
            async with destination(f"amqps://localhost:{port}") as rabbit:
                [trusted] = await rabbit.deliver([delivery(topic=name)], NOW)
            async with destination(f"amqps://127.0.0.1:{port}") as rabbit:
                [other_name] = await rabbit.deliver([delivery(topic=name)], NOW)
    for refused in (unknown, other_name):
        assert isinstance(refused, Failed)
        assert "CERTIFICATE_VERIFY_FAILED" in refused.error
        assert refused.unreachable
    assert isinstance(trusted, Delivered)


async def test_close_leaves_no_task_and_no_socket(name: str) -> None:
    server = brokers.rabbitmq()
    async with channel_of(server) as channel:
        await channel.declare_queue(name)
        before = open_tasks_and_sockets()
        async with destination(server.url) as rabbit:
            await rabbit.deliver([delivery(topic=name)], NOW)
            assert open_tasks_and_sockets() != before
        assert open_tasks_and_sockets() == before
