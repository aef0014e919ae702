"""Kafka as a destination, against a real broker."""

import asyncio
import ipaddress
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import NewTopic

from app.delivery import Delivered, Failed, Refused
from app.destinations.base import Destination
from app.destinations.kafka import BATCH_MAX, REFUSED_MOST, Refusals, of
from app.egress.denied_addresses import Network
from app.egress.network_policy import NetworkPolicy
from tests.support import brokers
from tests.support.brokers import Server
from tests.support.deliveries import (
    ELSEWHERE,
    LOOPBACK,
    NOW,
    certificate,
    delivery,
    full_attributes,
    full_delivery,
    open_tasks_and_sockets,
)
from tests.support.kafka_admin import kafka_admin

PARTITIONS = 4


@asynccontextmanager
async def destination(
    server: Server,
    *,
    timeout_s: float = 20,
    networks: tuple[Network, ...] = LOOPBACK,
    password: str | None = None,
    **fields: Any,
) -> AsyncIterator[Destination]:
    """Yield the Kafka destination of a subscription."""
    stored = {"type": "kafka", "bootstrap": [server.url], **fields}
    opened = of(stored, {"password": password} if password else {}, timeout_s, NetworkPolicy(opened=networks))
    try:
        yield opened
    finally:
        await opened.close()


async def create(server: Server, *topics: str, **configs: str) -> None:
    """Create topics."""
    async with kafka_admin(server.url) as admin:
        await admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs=configs) for topic in topics])


async def records(server: Server, topic: str) -> list[ConsumerRecord]:
    """Return all records of a topic, by partition and then by offset."""
    consumer = AIOKafkaConsumer(bootstrap_servers=server.url, auto_offset_reset="earliest", enable_auto_commit=False)
    await consumer.start()
    try:
        parts = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(parts)
        ends = await consumer.end_offsets(parts)
        found: list[ConsumerRecord] = []
        async with asyncio.timeout(30):
            while any([await consumer.position(part) < ends[part] for part in parts]):
                for listed in (await consumer.getmany(timeout_ms=200)).values():
                    found += listed
        return sorted(found, key=lambda record: (record.partition, record.offset))
    finally:
        await consumer.stop()


async def restart_with(server: Server, changes: Mapping[str, str]) -> None:
    """Stop a server and start it with other settings."""
    await asyncio.to_thread(server.stop)
    settings = server.directory / "server.properties"
    lines = [line for line in settings.read_text().splitlines() if line.partition("=")[0] not in changes]
    settings.write_text("\n".join([*lines, *(f"{name}={value}" for name, value in changes.items())]) + "\n")
    await asyncio.to_thread(server.start)


def offsets(found: Sequence[ConsumerRecord]) -> list[int]:
    """Return the messages' offsets in the outbox, from the records' headers."""
    return [int(dict(record.headers)["halfnote-offset"]) for record in found]


@pytest.fixture
async def topic() -> str:
    """Create a topic on the shared server that only this test uses."""
    name = f"orders-{uuid4()}"
    await create(brokers.kafka(), name)
    return name


async def test_a_consumer_reads_key_time_body_and_every_attribute(topic: str) -> None:
    server = brokers.kafka()
    sent = full_delivery(topic)
    async with destination(server) as kafka:
        [outcome] = await kafka.deliver([sent], NOW)
    assert isinstance(outcome, Delivered)
    [record] = await records(server, topic)
    assert record.key == 'café "1"'.encode()
    assert record.value == bytes(range(256))
    assert record.timestamp == 1795255200123
    assert dict(record.headers) == full_attributes(sent)


async def test_an_empty_body_without_a_key_is_no_tombstone(topic: str) -> None:
    server = brokers.kafka()
    async with destination(server) as kafka:
        await kafka.deliver([delivery(topic=topic, key=None, body=b"")], NOW)
    [record] = await records(server, topic)
    assert (record.key, record.value) == (None, b"")
    assert "ce_subject" not in dict(record.headers)


async def test_a_key_keeps_its_partition_and_messages_without_one_are_spread(topic: str) -> None:
    server = brokers.kafka()
    for _ in range(2):
        async with destination(server) as kafka:
            keys = ["foobar", *(f"k{number}" for number in range(49)), *[None] * 50]
            await kafka.deliver([delivery(topic=topic, key=key) for key in keys], NOW)
    found = await records(server, topic)
    assert len(found) == 200
    partitions: dict[bytes | None, set[int]] = {}
    for record in found:
        partitions.setdefault(record.key, set()).add(record.partition)
    assert len(partitions.pop(None)) == PARTITIONS
    assert {len(numbers) for numbers in partitions.values()} == {1}
    # Java clients choose the same partition: in Kafka's own tests -790332482 is the hash of this key.
    assert partitions[b"foobar"] == {(-790332482 & 0x7FFFFFFF) % PARTITIONS}
    assert set().union(*partitions.values()) == set(range(PARTITIONS))


async def test_many_calls_at_once_are_all_acknowledged_and_in_order_per_key(topic: str) -> None:
    server = brokers.kafka()
    sent = [delivery(topic=topic, offset=offset, key=f"k{offset % 7}") for offset in range(1, 1001)]
    async with destination(server) as kafka:
        outcomes = await asyncio.gather(*(kafka.deliver([one], NOW) for one in sent))
    assert {type(outcome) for [outcome] in outcomes} == {Delivered}
    found = await records(server, topic)
    assert sorted(offsets(found)) == list(range(1, 1001))
    for rest in range(7):
        in_order = offsets([record for record in found if record.key == f"k{rest}".encode()])
        assert in_order == sorted(in_order)


async def test_a_record_too_large_for_the_topic_is_refused_and_the_others_keep_their_order() -> None:
    """Small records share a batch with the large one, and the broker refuses that batch as a whole."""
    server, topic = brokers.kafka(), f"small-{uuid4()}"
    await create(server, topic, **{"max.message.bytes": "20000"})
    sizes = {5: 30_000, 40: 300_000}
    sent = [delivery(topic=topic, offset=number, body=b"x" * sizes.get(number, 10)) for number in range(60)]
    async with destination(server) as kafka:
        other = [delivery(topic=topic, offset=100 + number) for number in range(20)]
        outcomes, others = await asyncio.gather(kafka.deliver(sent, NOW), kafka.deliver(other, NOW))
    for number in (40, 5):
        refused = list(outcomes)[number]
        assert isinstance(refused, Refused)
        assert refused.reason == "too_large"
        assert f"a record of {sizes[number] // 10_000}" in refused.error
        assert "at most 20,000 (max.message.bytes" in refused.error
    assert {type(outcome) for number, outcome in enumerate(outcomes) if number not in sizes} == {Delivered}
    assert {type(outcome) for outcome in others} == {Delivered}
    found = offsets(await records(server, topic))
    assert [number for number in found if number < 100] == [number for number in range(60) if number not in sizes]
    assert [number for number in found if number >= 100] == list(range(100, 120))


async def test_only_records_without_a_key_are_refused_by_a_compacted_topic_and_the_others_keep_their_order() -> None:
    """The broker refuses a batch as a whole, and one batch has records of several calls."""
    server, topic = brokers.kafka(), f"compacted-{uuid4()}"
    await create(server, topic, **{"cleanup.policy": "compact"})
    keyless = {13, 77}
    sent = [
        delivery(topic=topic, offset=number, key=None if number in keyless else f"k{number % 3}")
        for number in range(100)
    ]
    async with destination(server) as kafka:
        calls = await asyncio.gather(*(kafka.deliver(sent[first : first + 10], NOW) for first in range(0, 100, 10)))
        outcomes = [outcome for call in calls for outcome in call]
        [later] = await kafka.deliver([delivery(topic=topic, offset=200)], NOW)
    for number in keyless:
        refused = outcomes[number]
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.asked) == ("bad_message", True)
        assert "the topic refuses the record; a compacted topic needs a key" in refused.error
    assert {type(outcome) for number, outcome in enumerate(outcomes) if number not in keyless} == {Delivered}
    assert isinstance(later, Delivered)
    found = offsets(await records(server, topic))
    assert {*found} == {200, *range(100)} - keyless
    # A record whose acknowledgement was lost with another call's producer may be in the topic twice.
    for first in range(0, 100, 10):
        for rest in range(3):
            once = [*dict.fromkeys(found)]
            in_order = [number for number in once if first <= number < first + 10 and number % 3 == rest]
            assert in_order == sorted(in_order)


async def test_only_the_record_with_a_time_that_the_topic_refuses_fails() -> None:
    server, topic = brokers.kafka(), f"timed-{uuid4()}"
    await create(server, topic, **{"message.timestamp.before.max.ms": "86400000"})
    now = datetime.now(UTC)
    sent = [
        delivery(topic=topic, offset=number, committed_at=now - timedelta(days=3 if number == 4 else 0))
        for number in range(10)
    ]
    async with destination(server) as kafka:
        outcomes = list(await kafka.deliver(sent, NOW))
    failed = outcomes.pop(4)
    assert isinstance(failed, Failed)
    assert "InvalidTimestampError" in failed.error
    assert {type(outcome) for outcome in outcomes} == {Delivered}
    assert offsets(await records(server, topic)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


async def test_a_call_of_records_that_the_topic_refuses_ends_with_their_error() -> None:
    server, topic = brokers.kafka(), f"compacted-{uuid4()}"
    await create(server, topic, **{"cleanup.policy": "compact"})
    async with destination(server) as kafka:
        outcomes = await kafka.deliver([delivery(topic=topic, key=None) for _ in range(BATCH_MAX)], NOW)
    errors = {outcome.error for outcome in outcomes if isinstance(outcome, Failed | Refused)}
    assert Counter(type(outcome) for outcome in outcomes) == {Refused: 1, Failed: BATCH_MAX - 1}
    assert errors == {"InvalidRecordError: the topic refuses the record; a compacted topic needs a key"}


async def test_records_that_are_refused_in_a_row_are_dead_only_until_it_is_clear_that_all_are() -> None:
    server, topic = brokers.kafka(), f"compacted-{uuid4()}"
    await create(server, topic, **{"cleanup.policy": "compact"})
    keyless = [delivery(topic=topic, key=None) for _ in range(REFUSED_MOST // 2 + 10)]
    async with destination(server) as kafka:
        unproven = await kafka.deliver([delivery(topic=topic, key=None) for _ in range(2)], NOW)
        [taken] = await kafka.deliver([delivery(topic=topic)], NOW)
        first, second = [await kafka.deliver(keyless, NOW) for _ in range(2)]
        [taken_again] = await kafka.deliver([delivery(topic=topic)], NOW)
        [refused] = await kafka.deliver([delivery(topic=topic, key=None)], NOW)
    assert [type(outcome) for outcome in (*unproven, taken, taken_again, refused)] == [
        Refused,
        Failed,
        Delivered,
        Delivered,
        Refused,
    ]
    assert [type(outcome) for outcome in (*first, *second)] == [Refused] * REFUSED_MOST + [Failed] * 20


async def test_what_other_topics_take_says_nothing_about_a_topic_that_refuses_all(topic: str) -> None:
    server, other = brokers.kafka(), f"compacted-{uuid4()}"
    await create(server, other, **{"cleanup.policy": "compact"})
    mixed = [delivery(topic=topic), *(delivery(topic=other, key=None) for _ in range(3))]
    async with destination(server) as kafka:
        first, second = [await kafka.deliver(mixed, NOW) for _ in range(2)]
    assert [type(outcome) for outcome in first] == [Delivered, Refused, Failed, Failed]
    assert [type(outcome) for outcome in second] == [Delivered, Failed, Failed, Failed]


def test_a_topic_that_refuses_all_makes_a_dead_letter_in_a_minute() -> None:
    # A refused record may be the first one of each key, and those behind it are not sent.
    refusals = Refusals()
    assert [at for at in range(0, 200, 10) if refusals.is_dead(float(at))] == [0, 60, 120, 180]


async def test_an_unknown_topic_fails_with_advice_and_other_topics_are_delivered(topic: str) -> None:
    server = brokers.kafka()
    unknown = f"nobody-made-{uuid4()}"
    async with destination(server, timeout_s=2) as kafka:
        missing, delivered = await kafka.deliver([delivery(topic=unknown), delivery(topic=topic)], NOW)
        assert isinstance(missing, Failed)
        assert f"no topic {unknown}: create it" in missing.error
        assert not missing.unreachable
        assert isinstance(delivered, Delivered)
        await create(server, unknown)
        [outcome] = await kafka.deliver([delivery(topic=unknown)], NOW)
        assert isinstance(outcome, Delivered)


async def test_a_name_that_no_topic_can_have_is_refused(topic: str) -> None:
    async with destination(brokers.kafka()) as kafka:
        refused, delivered = await kafka.deliver([delivery(topic="billing/new"), delivery(topic=topic)], NOW)
    assert isinstance(refused, Refused)
    assert refused.reason == "bad_topic"
    assert "'billing/new' is not a name for a Kafka topic" in refused.error
    assert isinstance(delivered, Delivered)


async def test_topics_are_named_by_placeholders() -> None:
    server, topic = brokers.kafka(), f"{uuid4()}"
    await create(server, f"shop.{topic}.a_b")
    async with destination(server, topic="{group}.{topic}.{key}") as kafka:
        [outcome] = await kafka.deliver([delivery(topic=topic, key="a b")], NOW)
    assert isinstance(outcome, Delivered)
    [record] = await records(server, f"shop.{topic}.a_b")
    assert record.key == b"a b"


async def test_a_broker_that_is_down_is_unreachable_and_used_again_after_its_restart() -> None:
    with brokers.own("kafka") as server:
        await create(server, "orders")
        async with destination(server, timeout_s=10) as kafka:
            [before] = await kafka.deliver([delivery(topic="orders", offset=1)], NOW)
            await asyncio.to_thread(server.stop)
            [down] = await kafka.deliver([delivery(topic="orders", offset=2)], NOW)
            await asyncio.to_thread(server.start)
            [after] = await kafka.deliver([delivery(topic="orders", offset=3)], NOW)
        assert isinstance(before, Delivered)
        assert isinstance(down, Failed)
        assert down.unreachable
        assert isinstance(after, Delivered)
        assert sorted(offsets(await records(server, "orders"))) == [1, 3]


async def test_calls_to_a_broker_that_hangs_end_in_time_and_nothing_is_sent_later() -> None:
    with brokers.own("kafka") as server:
        await create(server, "orders")
        async with destination(server, timeout_s=1) as kafka:
            [before] = await kafka.deliver([delivery(topic="orders", offset=1)], NOW)
            [process] = server.processes
            process.send_signal(signal.SIGSTOP)
            started = asyncio.get_running_loop().time()
            calls = [
                [delivery(topic="orders", offset=2 + 10 * call + number, body=b"x" * 100_000) for number in range(10)]
                for call in range(20)
            ]
            outcomes = await asyncio.gather(*(kafka.deliver(call, NOW) for call in calls))
            took_s = asyncio.get_running_loop().time() - started
            process.send_signal(signal.SIGCONT)
        assert isinstance(before, Delivered)
        errors = [outcome.error for call in outcomes for outcome in call if isinstance(outcome, Failed)]
        assert len(errors) == 200
        # After one call closed the producer, other calls may have tried to open a new one.
        assert (
            {"no acknowledgement within 1 s"}
            <= {*errors}
            <= {
                "no acknowledgement within 1 s",
                "no connection within 1 s",
            }
        )
        assert took_s < 10
        # One request, with one batch a partition, may have been under way. Nothing else may arrive.
        async with destination(server) as kafka:
            [after] = await kafka.deliver([delivery(topic="orders", offset=1000)], NOW)
        assert isinstance(after, Delivered)
        found = offsets(await records(server, "orders"))
        assert 1000 in found
        assert len(found) < 20


async def test_with_tls_and_sasl_the_name_is_verified_and_the_password_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate_file, key_file = certificate(tmp_path, "localhost")
    keystore = tmp_path / "keystore.pem"
    keystore.write_bytes(key_file.read_bytes() + certificate_file.read_bytes())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    with brokers.own("kafka") as server:
        await create(server, "orders")
        # This listener is beside the plain one, by which the fixture sees that the server is up.
        [port] = brokers.free_ports(1)
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{server.port},SECURE://127.0.0.1:{port},"
            f"CONTROLLER://127.0.0.1:{server.ports[1]}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{server.port},SECURE://localhost:{port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keystore),
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secure.plain.sasl.jaas.config": f'{module} required user_halfnote="right";',
        }
        await restart_with(server, settings)
        fields = {"tls": True, "sasl": "PLAIN", "username": "halfnote"}
        logins = [("localhost", "right"), ("127.0.0.1", "right"), ("localhost", "wrong"), ("localhost", "right")]
        outcomes = []
        for number, (host, password) in enumerate(logins):
            if number:
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file))
            bootstrap = [f"{host}:{port}"]
            async with destination(server, bootstrap=bootstrap, password=password, **fields) as kafka:
                outcomes += await kafka.deliver([delivery(topic="orders")], NOW)
    untrusted, misnamed, refused, delivered = outcomes
    for failed, text in ((untrusted, "self-signed certificate"), (misnamed, "127.0.0.1"), (refused, "SaslAuth")):
        assert isinstance(failed, Failed)
        assert failed.unreachable
        assert text in failed.error
        assert "wrong" not in failed.error
    assert isinstance(delivered, Delivered)


async def test_an_address_outside_the_allowed_networks_is_not_dialed(topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        bootstrap = [f"127.0.0.1:{listening.getsockname()[1]}"]
        async with destination(brokers.kafka(), bootstrap=bootstrap, networks=ELSEWHERE) as kafka:
            [outcome] = await kafka.deliver([delivery(topic=topic)], NOW)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert isinstance(outcome, Failed)
    assert outcome.unreachable
    assert "HALFNOTE_ALLOW_NETWORKS" in outcome.error


async def test_a_broker_that_the_cluster_names_outside_the_allowed_networks_is_not_dialed() -> None:
    with brokers.own("kafka") as server, socket.create_server(("127.0.0.2", 0)) as listening:
        listening.setblocking(False)
        await create(server, "orders")
        address, port = listening.getsockname()
        await restart_with(server, {"advertised.listeners": f"PLAINTEXT://{address}:{port}"})
        only: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.1/32"),)
        async with destination(server, networks=only) as kafka:
            [outcome] = await kafka.deliver([delivery(topic="orders")], NOW)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert isinstance(outcome, Failed)
    assert outcome.unreachable
    assert f"the cluster's broker {address}:{port}: {address} is loopback, and HALFNOTE_ALLOW_NETWORKS" in outcome.error


async def test_one_bootstrap_server_of_two_is_enough(topic: str) -> None:
    server = brokers.kafka()
    [closed] = brokers.free_ports(1)
    for _ in range(4):
        async with destination(server, bootstrap=[f"127.0.0.1:{closed}", server.url]) as kafka:
            [outcome] = await kafka.deliver([delivery(topic=topic)], NOW)
        assert isinstance(outcome, Delivered)


async def test_close_leaves_no_task_and_no_socket(topic: str) -> None:
    server = brokers.kafka()
    before = open_tasks_and_sockets()
    async with destination(server) as kafka:
        await asyncio.gather(*(kafka.deliver([delivery(topic=topic)], NOW) for _ in range(10)))
        assert open_tasks_and_sockets() != before
    assert open_tasks_and_sockets() == before


async def test_close_while_the_producer_is_being_opened_leaves_nothing() -> None:
    """The server accepts the connection and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        before = open_tasks_and_sockets()
        async with destination(brokers.kafka(), bootstrap=[f"127.0.0.1:{listening.getsockname()[1]}"]) as kafka:
            delivering = asyncio.create_task(kafka.deliver([delivery()], NOW))
            async with asyncio.timeout(10):
                accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
        accepted.close()
        assert open_tasks_and_sockets() == before
