"""One idempotent Kafka producer that connects only to allowed addresses and can be ended at any time.

aiokafka retries an idempotent batch without end until it is acknowledged, and a refused batch leaves a gap in the
sequence numbers by which brokers detect duplicates: they refuse the batches after it. So a producer is ended after any
error, and another one with a new producer id replaces it. The code that ends it, and that keeps it from addresses that
are not allowed, uses names that aiokafka may change, so pyproject.toml bounds its version.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.client import ConnectionGroup
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.protocol.admin import DescribeConfigsRequest

from app.egress.http_client import AGENT
from app.egress.network_policy import OWN_PORTS, AddressRefused, NetworkPolicy

# Larger batches gain little, and a topic refuses a batch above its limit with all of its records.
BATCH_BYTES = 256 * 1024
# The brokers decide what is too large, not the client.
REQUEST_BYTES = 64 * 1024 * 1024
# How long a producer may take to end after its sockets are closed. It sleeps 0.1 s before it notices.
END_WITHIN_S = 5.0
# The type of a topic in Kafka's protocol (KIP-133).
TOPIC_RESOURCE = 2

Future = asyncio.Future[Any]


class ProducerEnded(KafkaError):  # type: ignore[misc]
    """The producer was ended before this message was acknowledged."""


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """A Kafka cluster and how to connect: `bootstrap` as (host, port), `security` as aiokafka's options."""

    bootstrap: Sequence[tuple[str, int]]
    security: Mapping[str, Any]
    tls: bool
    network_policy: NetworkPolicy
    timeout_s: float

    def options(self, name: str) -> dict[str, Any]:
        """Return aiokafka's options for connections to the broker with this name."""
        request_timeout_ms = max(1, int(self.timeout_s * 1000))
        known = {"client_id": AGENT, "request_timeout_ms": request_timeout_ms, **self.security}
        return {**known, "ssl_context": self.network_policy.named_tls(name)} if self.tls else known

    async def judged(self, host: str, port: int) -> str:
        """Return the checked address of a broker. Raises AddressRefused and OSError."""
        own_ports = OWN_PORTS["kafka"]
        return (await self.network_policy.resolved(host, port, own_ports=own_ports, encrypted=self.tls))[0]


@dataclass(slots=True, eq=False)
class Producer:
    """A producer. `calls`: the answers that each caller waits for."""

    broker_address: KafkaAddress
    client: AIOKafkaProducer
    calls: dict[int, list[Future]] = field(default_factory=dict)
    transports: list[asyncio.WriteTransport] = field(default_factory=list)
    ended: bool = False

    @property
    def connected(self) -> bool:
        """Whether any broker is connected."""
        return any(not transport.is_closing() for transport in self.transports)

    async def partitions(self, topic: str) -> set[int]:
        """Return a topic's partitions; wait while the topic does not exist. Raises KafkaError."""
        found: set[int] = await self.client.partitions_for(topic)
        return found

    def knows(self, topic: str) -> bool:
        """Whether the cluster's last metadata has the topic."""
        return self.client.client.cluster.partitions_for_topic(topic) is not None

    async def send(self, topic: str, record: Mapping[str, Any], *, alone: bool) -> Future:
        """Enqueue a record (`key`, `value`, `timestamp_ms`, `headers`); the future ends when it is acknowledged.

        `alone`: in a batch of its own. Raises KafkaError.
        """
        if self.ended:
            raise ProducerEnded
        if alone:
            batch = self.client.create_batch()
            batch.append(
                timestamp=record["timestamp_ms"], key=record["key"], value=record["value"], headers=record["headers"]
            )
            batch.close()
            partitions = sorted(await self.partitions(topic))
            partition = DefaultPartitioner()(record["key"], partitions, partitions)
            sent = await self.client.send_batch(batch, topic, partition=partition)
        else:
            sent = await self.client.send(topic, **record)
        answer: Future = sent
        return answer

    @contextlib.contextmanager
    def answering(self, answers: list[Future]) -> Iterator[None]:
        """Register `answers`, to which the caller adds, so that ending the producer fails each of them."""
        self.calls[id(answers)] = answers
        try:
            yield
        finally:
            del self.calls[id(answers)]

    async def largest(self, topic: str) -> int | None:
        """Return the topic's `max.message.bytes`, or None if the brokers do not answer that."""
        client = self.client.client
        request = DescribeConfigsRequest([(TOPIC_RESOURCE, topic, ["max.message.bytes"])])
        try:
            response = await client.send(client.get_random_node(), request)
            return int(response.resources[0][4][0][1])
        except (KafkaError, IndexError, TypeError, ValueError):
            return None

    def add_connection(self, transport: asyncio.WriteTransport) -> None:
        """Add a connection; close it at once if the producer has ended."""
        self.transports = [*(known for known in self.transports if not known.is_closing()), transport]
        if self.ended:
            transport.abort()

    async def end(self) -> None:
        """Close the sockets, send nothing more, and fail the waiting answers. Never raises."""
        self.ended = True
        for transport in self.transports:
            transport.abort()
        # Both raise the error that ended their tasks, which the callers already have.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_WITHIN_S):
                await self.client._sender.close()
        with contextlib.suppress(Exception):
            await self.client.client.close()
        self.client._closed = True
        self._fail_all()
        self.fail_waiting(ProducerEnded())

    def _fail_all(self) -> None:
        """Fail every batch, so that callers that wait for room in a batch continue."""
        waiting = self.client._message_accumulator
        batches = [batch for line in waiting._batches.values() for batch in line]
        # A batch that was once taken for sending removes itself from these when it ends.
        waiting._pending_batches.update(batches)
        waiting.fail_all(ProducerEnded())
        for batch in batches:
            # Retrieves the exception, so that a batch without callers logs no warning.
            batch._drain_waiter.exception()

    def fail_waiting(self, error: BaseException) -> None:
        """Fail the answers that are still pending."""
        for answers in self.calls.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)


async def open_producer(broker_address: KafkaAddress) -> Producer:
    """Return a connected producer. Raises OSError (also a timeout, at `timeout_s`) and KafkaError."""
    async with asyncio.timeout(broker_address.timeout_s):
        name, address, port = await _reachable(broker_address)
        client = AIOKafkaProducer(
            bootstrap_servers=[f"[{address}]:{port}" if ":" in address else f"{address}:{port}"],
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES,
            max_request_size=REQUEST_BYTES,
            **broker_address.options(name),
        )
        producer = Producer(broker_address, client)
        refused = _judge_brokers(producer)
        starting = asyncio.create_task(client.start())
        try:
            await asyncio.wait({starting, refused}, return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                refused.result()
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await producer.end()
            raise
    refused.add_done_callback(lambda refusal: producer.fail_waiting(refusal.exception() or ProducerEnded()))
    return producer


async def _reachable(broker_address: KafkaAddress) -> tuple[str, str, int]:
    """Return name, address and port of the first of `bootstrap` that accepts the login. Raises the last one's error.

    The client's own start does not say why none accepted it.
    """
    failure: Exception = OSError("no bootstrap server is named")
    for host, port in random.sample(broker_address.bootstrap, len(broker_address.bootstrap)):
        try:
            async with asyncio.timeout(broker_address.timeout_s / len(broker_address.bootstrap)):
                address = await broker_address.judged(host, port)
                connection = await create_conn(address, port, **broker_address.options(host))
                await connection.close()
        except (OSError, KafkaError) as error:
            failure = error
        else:
            return host, address, port
    raise failure


def _judge_brokers(producer: Producer) -> Future:
    """Make the client check the address that the cluster advertises for a broker, and connect to the checked address.

    The future fails when an address is refused. With TLS the certificate must be valid for the broker's name: the
    client has one TLS context for all brokers, so it is replaced for each connection, and connections are made one at a
    time, as the client does by itself.
    """
    client, broker_address = producer.client.client, producer.broker_address
    connect, described = client._get_conn, client.cluster.broker_metadata
    addresses: dict[Any, str] = {}
    refused: Future = asyncio.get_running_loop().create_future()
    turn = asyncio.Lock()

    async def judged(node_id: Any, group: Any = ConnectionGroup.DEFAULT, **options: Any) -> Any:
        known = client._conns.get((node_id, group))
        if known is not None and known.connected():
            return known
        broker = described(node_id)
        if producer.ended:
            return None
        if broker is not None:
            try:
                addresses[node_id] = await broker_address.judged(broker.host, broker.port)
            except AddressRefused as refusal:
                if not refused.done():
                    refused.set_exception(
                        AddressRefused(f"the cluster's broker {broker.host}:{broker.port}: {refusal}")
                    )
                return None
            except OSError:
                client.force_metadata_update()
                return None
        async with turn:
            if broker_address.tls and broker is not None:
                client._ssl_context = broker_address.network_policy.named_tls(broker.host)
            connection = await connect(node_id, group=group, **options)
        if connection is not None:
            producer.add_connection(connection._writer.transport)
        return connection

    def pinned(node_id: Any) -> Any:
        broker = described(node_id)
        return broker._replace(host=addresses[node_id]) if broker and node_id in addresses else broker

    client._get_conn, client.cluster.broker_metadata = judged, pinned
    return refused
