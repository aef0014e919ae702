"""Deliver to Kafka: one record a message, acknowledged by all in-sync replicas (`acks=all`), by an idempotent producer.

The message's key is the record's key and selects the partition as Java's clients do. Records without a key are spread.
Headers follow CloudEvents' Kafka binding 1.0.2 (`content-type`, `ce_<attribute>`, UTF-8), with `halfnote-…` and the
message's own as `halfnote-h-<name>` beside them. The record's time is the message's commit.

Calls take turns to enqueue records, so records of one partition are in the order of the calls. Idempotence keeps the
client's own retries from making duplicates or changing that order. A message that Halfnote retries may be stored twice,
as with every destination.

The broker refuses a batch as a whole. Each record of a refused batch is sent once more, in a batch of its own and in
the same order, so that only the record that causes the refusal fails.

A broker's rule about records may refuse one record, or all of them, such as those without a key in a topic that is
compacted by mistake. So a refused record is a dead letter only while its topic takes others. Else it is a failure, and
the circuit breaker opens. One in a minute is a dead letter even then: with an order of keys, each key may have such a
record before those that the topic would take.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from aiokafka.errors import KafkaError, TopicAuthorizationFailedError, UnknownTopicOrPartitionError

from app.delivery import Delivered, Delivery, Failed, Outcome
from app.destinations.base import Destination
from app.destinations.kafka_producer import Future, KafkaAddress, Producer, open_producer
from app.destinations.kafka_records import AGAIN, PendingRecord, error_text, pending_record, record_of, topic_part
from app.destinations.name_templates import filled
from app.egress.network_policy import NetworkPolicy

# The most messages of one call.
BATCH_MAX = 500
PORT = 9092
# How long a missing topic may take to be created, where brokers create topics.
TOPIC_WITHIN_S = 3.0
ASKED_TIMES = 3
# So many records in a row that a rule of a topic refuses are dead letters. Later ones are failures until the topic
# takes a record, but for one in so many seconds.
REFUSED_MOST, REFUSED_EVERY_S = 100, 60.0


@dataclass(slots=True)
class Refusals:
    """The records of a topic that a rule refused since the topic took one, and when the last one was a dead letter."""

    # At first it is not known whether the topic takes any.
    in_a_row: int = REFUSED_MOST
    dead_at: float = -inf

    def is_dead(self, at: float) -> bool:
        """Count a refused record; return whether it is a dead letter. `at`: seconds of a monotonic clock."""
        self.in_a_row += 1
        if self.in_a_row > REFUSED_MOST and at - self.dead_at < REFUSED_EVERY_S:
            return False
        self.dead_at = at
        return True


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, network_policy: NetworkPolicy
) -> Destination:
    """Return the destination of a stored `{type: "kafka", bootstrap, topic?, tls?, sasl?, username?}`."""
    tls, sasl = destination.get("tls", False), destination.get("sasl")
    security: dict[str, Any] = {"security_protocol": ("SASL_" if sasl else "") + ("SSL" if tls else "PLAINTEXT")}
    if sasl:
        security["sasl_mechanism"] = sasl
        security["sasl_plain_username"] = destination.get("username") or ""
        security["sasl_plain_password"] = credentials.get("password") or ""
    servers = [urlsplit(f"//{server}") for server in destination["bootstrap"]]
    bootstrap = [(server.hostname or "", server.port or PORT) for server in servers]
    return Kafka(
        KafkaAddress(bootstrap, security, tls, network_policy, timeout_s), destination.get("topic") or "{topic}"
    )


class Kafka:
    """One topic, or several by placeholders, with one producer at a time."""

    batch_max = BATCH_MAX

    def __init__(self, broker_address: KafkaAddress, topic: str) -> None:
        self.address = "kafka://" + ",".join(f"{host}:{port}" for host, port in broker_address.bootstrap)
        self._broker_address = broker_address
        self._topic = topic
        self._turn = asyncio.Lock()
        self._opening: asyncio.Task[Producer] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        # By topic.
        self._refusals: defaultdict[str, Refusals] = defaultdict(Refusals)

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Send records and wait until each is acknowledged or refused, or the time is over."""
        started = perf_counter()
        records = [
            pending_record(delivery, filled(self._topic, delivery, topic_part), started) for delivery in deliveries
        ]
        error = f"no connection within {self._broker_address.timeout_s:g} s"
        try:
            async with asyncio.timeout(self._broker_address.timeout_s):
                while waiting := [record for record in records if record.outcome is None]:
                    await self._send(waiting)
        except TimeoutError:
            pass
        except (OSError, KafkaError) as failure:
            error = error_text(failure)
        duration_ms = round((perf_counter() - started) * 1000)
        lost = Failed(error, None, None, None, duration_ms, unreachable=True)
        self._judge_refusals(records)
        return [record.outcome or lost for record in records]

    async def close(self) -> None:
        """End the producer, and wait for producers that are ending."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            [producer] = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(producer, Producer):
                await producer.end()
        await asyncio.gather(*self._ending)

    async def _connected(self) -> Producer:
        """Return the producer, made once for all calls. Raises the error of a failed start."""
        opening = self._opening
        if opening is not None and opening.done():
            if opening.cancelled() or opening.exception() is not None:
                opening = None
            elif not (opening.result().connected or opening.result().calls):
                # Its idle connections were closed. A new producer detects at once whether Kafka is reachable.
                self._discard(opening.result())
                opening = None
        if opening is None:
            opening = self._opening = asyncio.create_task(open_producer(self._broker_address))
            opening.add_done_callback(_retrieve_exception)
        return await asyncio.shield(opening)

    def _discard(self, producer: Producer) -> None:
        if not producer.ended:
            producer.ended, self._opening = True, None
            ending = asyncio.create_task(producer.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _send(self, waiting: Sequence[PendingRecord]) -> None:
        """Send all once. Records that have no outcome afterwards are sent again."""
        producer = await self._connected()
        try:
            unknown = {record.topic for record in waiting if not producer.knows(record.topic)}
            await asyncio.gather(*(self._find(producer, topic, waiting) for topic in unknown))
            answers: list[Future] = []
            with producer.answering(answers):
                async with self._turn:
                    for record in waiting:
                        await self._put(producer, record, answers)
                for answer in answers:
                    # Records of one batch are answered together.
                    if not answer.done():
                        await asyncio.wait({answer})
            wrong = [record for record in waiting if record.judge()]
            for record in wrong:
                if record.too_large:
                    record.refuse(await self._largest(record.topic))
        except asyncio.CancelledError:
            self._give_up(producer, waiting)
            raise
        if wrong:
            self._discard(producer)

    def _judge_refusals(self, records: Sequence[PendingRecord]) -> None:
        """Make failures of the records that a rule refused, unless their topics took others not long before."""
        taken = {record.topic for record in records if isinstance(record.outcome, Delivered)}
        for topic in taken:
            self._refusals[topic].in_a_row = 0
        at = perf_counter()
        for record in records:
            if record.refused_by_rule and record.topic not in taken and not self._refusals[record.topic].is_dead(at):
                record.hold()

    async def _largest(self, topic: str) -> int | None:
        """Return the largest record that a topic takes. Ask again if another call ended the producer meanwhile."""
        limit = None
        for _ in range(ASKED_TIMES):
            producer = await self._connected()
            limit = await producer.largest(topic)
            if limit is not None or not producer.ended:
                break
        return limit

    async def _find(self, producer: Producer, topic: str, waiting: Sequence[PendingRecord]) -> None:
        """Wait for an unknown topic; fail its messages if it does not appear in time."""
        try:
            async with asyncio.timeout(min(TOPIC_WITHIN_S, self._broker_address.timeout_s / 2)):
                await producer.partitions(topic)
            return
        except (TimeoutError, UnknownTopicOrPartitionError):
            error = f"Kafka has no topic {topic}: create it, or let brokers do so (auto.create.topics.enable)"
        except KafkaError as failure:
            error = error_text(failure)
        if not producer.connected:
            error = "the connections to all brokers are closed"
        for record in waiting:
            if record.topic == topic:
                record.fail(error, unreachable=not producer.connected)

    async def _put(self, producer: Producer, record: PendingRecord, answers: list[Future]) -> None:
        """Enqueue a record at the client, unless it has an outcome."""
        if record.outcome is not None:
            return
        try:
            answer = await producer.send(record.topic, record_of(record.delivery), alone=record.alone)
            record.answer = answer
            answers.append(answer)
        except AGAIN:
            self._discard(producer)
        except (TopicAuthorizationFailedError, UnknownTopicOrPartitionError) as failure:
            record.fail(error_text(failure))
        except KafkaError as failure:
            record.fail(error_text(failure))
            self._discard(producer)

    def _give_up(self, producer: Producer, waiting: Sequence[PendingRecord]) -> None:
        """Set the outcomes when the time is over. Records in the client's queue must not be sent later."""
        unreachable = not producer.connected
        for record in waiting:
            if record.answer is not None and not record.answer.done():
                record.answer.cancel()
                record.answer = None
                self._discard(producer)
            record.judge()
            record.fail(f"no acknowledgement within {self._broker_address.timeout_s:g} s", unreachable=unreachable)


def _retrieve_exception(opening: asyncio.Task[Producer]) -> None:
    # Retrieves the exception: callers got it, and a producer without callers must not log a warning.
    if not opening.cancelled():
        opening.exception()
