"""One idempotent Kafka producer that dials allowed addresses only and can be ended at any moment.

aiokafka sends an idempotent batch again until it is acknowledged, without end, and a batch that a broker refused leaves
a hole in the numbers by which brokers know duplicates: they refuse whatever follows. So a producer with which anything
went wrong is ended, and another, with an identity of its own, takes its place. What ends it, and what keeps it from
addresses that are not allowed, are names that aiokafka does not promise to keep: hence the bound in pyproject.toml.
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

from app.callbacks import AGENT
from app.destinations.base import OWN_PORTS
from app.dialling import AddressRefused, Dialling

# Larger batches gain little, and one that is larger than a topic takes is refused with all that is in it.
BATCH_BYTES = 256 * 1024
# The brokers are the judges of what is too large, not the client.
REQUEST_BYTES = 64 * 1024 * 1024
# How long a producer may take to end once its sockets are closed: it rests 0.1 s before it sees that it has to.
END_WITHIN_S = 5.0
# The type of a topic in Kafka's protocol (KIP-133).
TOPIC_RESOURCE = 2

Future = asyncio.Future[Any]


class Ended(KafkaError):  # type: ignore[misc]
    """The producer was ended before this message was acknowledged."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which Kafka, and how to dial it: `bootstrap` are (host, port); `security` are aiokafka's options."""

    bootstrap: Sequence[tuple[str, int]]
    security: Mapping[str, Any]
    tls: bool
    dialling: Dialling
    timeout_s: float

    def options(self, name: str) -> dict[str, Any]:
        """Return aiokafka's options for connections to the broker that has this name."""
        request_timeout_ms = max(1, int(self.timeout_s * 1000))
        known = {"client_id": AGENT, "request_timeout_ms": request_timeout_ms, **self.security}
        return {**known, "ssl_context": self.dialling.named_tls(name)} if self.tls else known

    async def judged(self, host: str, port: int) -> str:
        """Return the address to dial for a broker. Raises AddressRefused and OSError."""
        own_ports = OWN_PORTS["kafka"]
        return (await self.dialling.resolved(host, port, own_ports=own_ports, encrypted=self.tls))[0]


@dataclass(slots=True, eq=False)
class Producer:
    """What `opened` returns. `calls`: the answers that each caller waits for."""

    place: Place
    client: AIOKafkaProducer
    calls: dict[int, list[Future]] = field(default_factory=dict)
    transports: list[asyncio.WriteTransport] = field(default_factory=list)
    ended: bool = False

    @property
    def connected(self) -> bool:
        """Whether any broker is connected."""
        return any(not transport.is_closing() for transport in self.transports)

    async def partitions(self, topic: str) -> set[int]:
        """Return a topic's partitions; waits while there is no such topic. Raises KafkaError."""
        found: set[int] = await self.client.partitions_for(topic)
        return found

    def knows(self, topic: str) -> bool:
        """Whether the cluster has the topic, by what it said last."""
        return self.client.client.cluster.partitions_for_topic(topic) is not None

    async def send(self, topic: str, record: Mapping[str, Any], *, alone: bool) -> Future:
        """Put a record (`key`, `value`, `timestamp_ms`, `headers`) in line; the future ends when it is acknowledged.

        `alone`: in a batch of its own. Raises KafkaError.
        """
        if self.ended:
            raise Ended
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
        """See to it that each of `answers`, also those added later, is answered even if the producer is ended."""
        self.calls[id(answers)] = answers
        try:
            yield
        finally:
            del self.calls[id(answers)]

    async def largest(self, topic: str) -> int | None:
        """Return the topic's `max.message.bytes`, None if the brokers do not tell."""
        client = self.client.client
        request = DescribeConfigsRequest([(TOPIC_RESOURCE, topic, ["max.message.bytes"])])
        try:
            response = await client.send(client.get_random_node(), request)
            return int(response.resources[0][4][0][1])
        except (KafkaError, IndexError, TypeError, ValueError):
            return None

    def dialled(self, transport: asyncio.WriteTransport) -> None:
        """Note a connection that was made."""
        self.transports = [*(known for known in self.transports if not known.is_closing()), transport]
        if self.ended:
            transport.abort()

    async def end(self) -> None:
        """Close the sockets, let nothing more be sent, and tell those who wait. Never raises."""
        self.ended = True
        for transport in self.transports:
            transport.abort()
        # Both raise what ended their own tasks before; by now nobody asks.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_WITHIN_S):
                await self.client._sender.close()
        with contextlib.suppress(Exception):
            await self.client.client.close()
        self.client._closed = True
        self._fail_all()
        self.tell(Ended())

    def _fail_all(self) -> None:
        """End every batch, and with it the waiting of those who have a record that found no room yet."""
        waiting = self.client._message_accumulator
        batches = [batch for line in waiting._batches.values() for batch in line]
        # Each batch that was taken once for sending expects to be among these when it ends.
        waiting._pending_batches.update(batches)
        waiting.fail_all(Ended())
        for batch in batches:
            # If nobody waits for it, nobody is to be warned.
            batch._drain_waiter.exception()

    def tell(self, error: BaseException) -> None:
        """Answer those who wait."""
        for answers in self.calls.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)


async def opened(place: Place) -> Producer:
    """Return a connected producer. Raises OSError (also a timeout, at `timeout_s`) and KafkaError."""
    async with asyncio.timeout(place.timeout_s):
        name, address, port = await _reachable(place)
        client = AIOKafkaProducer(
            bootstrap_servers=[f"[{address}]:{port}" if ":" in address else f"{address}:{port}"],
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES,
            max_request_size=REQUEST_BYTES,
            **place.options(name),
        )
        producer = Producer(place, client)
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
    refused.add_done_callback(lambda refusal: producer.tell(refusal.exception() or Ended()))
    return producer


async def _reachable(place: Place) -> tuple[str, str, int]:
    """Return name, address and port of the first of `bootstrap` that lets us in. Raises what was wrong with the last.

    The client's own start tells only that none did, not why.
    """
    failure: Exception = OSError("no bootstrap server is named")
    for host, port in random.sample(place.bootstrap, len(place.bootstrap)):
        try:
            async with asyncio.timeout(place.timeout_s / len(place.bootstrap)):
                address = await place.judged(host, port)
                connection = await create_conn(address, port, **place.options(host))
                await connection.close()
        except (OSError, KafkaError) as error:
            failure = error
        else:
            return host, address, port
    raise failure


def _judge_brokers(producer: Producer) -> Future:
    """Let the client dial a broker only after what the cluster calls its address was judged, and that address then.

    The future fails as soon as one is refused. With TLS the certificate is the name's all the same: the client has one
    TLS context for all brokers, so it is set anew for each connection, and connections are made one after another, as
    the client does anyway.
    """
    client, place = producer.client.client, producer.place
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
                addresses[node_id] = await place.judged(broker.host, broker.port)
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
            if place.tls and broker is not None:
                client._ssl_context = place.dialling.named_tls(broker.host)
            connection = await connect(node_id, group=group, **options)
        if connection is not None:
            producer.dialled(connection._writer.transport)
        return connection

    def pinned(node_id: Any) -> Any:
        broker = described(node_id)
        return broker._replace(host=addresses[node_id]) if broker and node_id in addresses else broker

    client._get_conn, client.cluster.broker_metadata = judged, pinned
    return refused
