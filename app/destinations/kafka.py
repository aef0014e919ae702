"""Kafka: one record a message, acknowledged by all in-sync replicas (`acks=all`), by an idempotent producer.

The message's key is the record's and decides its partition, as Java's clients do; records without one are spread.
Headers follow CloudEvents' Kafka binding 1.0.2 (`content-type`, `ce_<attribute>`, UTF-8), with `halfnote-…` and the
message's own as `halfnote-h-<name>` beside them. The record's time is the message's commit.

Calls take turns at putting records in line, so records of one partition are in the order of the calls. Idempotence
keeps the client's own repetitions from making duplicates or changing that order; a message that Halfnote tries again
may be there twice, as with every destination.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from aiokafka.errors import KafkaError, TopicAuthorizationFailedError, UnknownTopicOrPartitionError

from app.destinations.base import Delivery, Destination, Failed, Outcome
from app.destinations.kafka_producer import Future, Place, Producer, opened
from app.destinations.kafka_sending import AGAIN, Sending, record_of, sending_of, told, topic_part
from app.destinations.placeholders import filled
from app.dialling import Dialling

# How many messages one call takes.
BATCH_MAX = 500
PORT = 9092
# How long a topic that is not there may take to be created, where brokers create topics.
TOPIC_WITHIN_S = 3.0
ASKED_TIMES = 3


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, dialling: Dialling
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
    return Kafka(Place(bootstrap, security, tls, dialling, timeout_s), destination.get("topic") or "{topic}")


class Kafka:
    """A topic, or several by placeholders, by one producer at a time."""

    batch_max = BATCH_MAX

    def __init__(self, place: Place, topic: str) -> None:
        self.address = "kafka://" + ",".join(f"{host}:{port}" for host, port in place.bootstrap)
        self._place = place
        self._topic = topic
        self._turn = asyncio.Lock()
        self._opening: asyncio.Task[Producer] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Send records and wait until each is acknowledged or refused, or the time is over."""
        started = perf_counter()
        sendings = [sending_of(delivery, filled(self._topic, delivery, topic_part), started) for delivery in deliveries]
        error = f"no connection within {self._place.timeout_s:g} s"
        try:
            async with asyncio.timeout(self._place.timeout_s):
                while waiting := [sending for sending in sendings if sending.outcome is None]:
                    await self._send(waiting)
        except TimeoutError:
            pass
        except (OSError, KafkaError) as failure:
            error = told(failure)
        duration_ms = round((perf_counter() - started) * 1000)
        lost = Failed(error, None, None, None, duration_ms, unreachable=True)
        return [sending.outcome or lost for sending in sendings]

    async def close(self) -> None:
        """End the producer, and wait for those that are ending."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            [producer] = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(producer, Producer):
                await producer.end()
        await asyncio.gather(*self._ending)

    async def _connected(self) -> Producer:
        """Return the producer, made once for all calls. Raises what kept it from being made."""
        opening = self._opening
        if opening is not None and opening.done():
            if opening.cancelled() or opening.exception() is not None:
                opening = None
            elif not (opening.result().connected or opening.result().calls):
                # Its connections were closed while nothing was sent; a new one sees at once whether Kafka is there.
                self._discard(opening.result())
                opening = None
        if opening is None:
            opening = self._opening = asyncio.create_task(opened(self._place))
            opening.add_done_callback(_seen)
        return await asyncio.shield(opening)

    def _discard(self, producer: Producer) -> None:
        if not producer.ended:
            producer.ended, self._opening = True, None
            ending = asyncio.create_task(producer.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _send(self, waiting: Sequence[Sending]) -> None:
        """Send all once; those without an outcome then are to be sent again."""
        producer = await self._connected()
        try:
            unknown = {sending.topic for sending in waiting if not producer.knows(sending.topic)}
            await asyncio.gather(*(self._find(producer, topic, waiting) for topic in unknown))
            answers: list[Future] = []
            with producer.answering(answers):
                async with self._turn:
                    for sending in waiting:
                        await self._put(producer, sending, answers)
                for answer in answers:
                    # Those of one batch are answered together.
                    if not answer.done():
                        await asyncio.wait({answer})
            wrong = [sending for sending in waiting if sending.judge()]
            for sending in wrong:
                if sending.too_large:
                    sending.refuse(await self._largest(sending.topic))
        except asyncio.CancelledError:
            self._give_up(producer, waiting)
            raise
        if wrong:
            self._discard(producer)

    async def _largest(self, topic: str) -> int | None:
        """Return what a topic takes at most. Another call may end the producer that is being asked."""
        limit = None
        for _ in range(ASKED_TIMES):
            producer = await self._connected()
            limit = await producer.largest(topic)
            if limit is not None or not producer.ended:
                break
        return limit

    async def _find(self, producer: Producer, topic: str, waiting: Sequence[Sending]) -> None:
        """Wait for a topic that is not known; if it does not come about, its messages failed."""
        try:
            async with asyncio.timeout(min(TOPIC_WITHIN_S, self._place.timeout_s / 2)):
                await producer.partitions(topic)
            return
        except (TimeoutError, UnknownTopicOrPartitionError):
            error = f"Kafka has no topic {topic}: create it, or let brokers do so (auto.create.topics.enable)"
        except KafkaError as failure:
            error = told(failure)
        if not producer.connected:
            error = "no broker is connected any more"
        for sending in waiting:
            if sending.topic == topic:
                sending.fail(error, unreachable=not producer.connected)

    async def _put(self, producer: Producer, sending: Sending, answers: list[Future]) -> None:
        """Put a message in the client's line, unless it failed already."""
        if sending.outcome is not None:
            return
        try:
            answer = await producer.send(sending.topic, record_of(sending.delivery), alone=sending.alone)
            sending.answer = answer
            answers.append(answer)
        except AGAIN:
            self._discard(producer)
        except (TopicAuthorizationFailedError, UnknownTopicOrPartitionError) as failure:
            sending.fail(told(failure))
        except KafkaError as failure:
            sending.fail(told(failure))
            self._discard(producer)

    def _give_up(self, producer: Producer, waiting: Sequence[Sending]) -> None:
        """The time is over: keep what is known. What is still in the client's line must not be sent later."""
        unreachable = not producer.connected
        for sending in waiting:
            if sending.answer is not None and not sending.answer.done():
                sending.answer.cancel()
                sending.answer = None
                self._discard(producer)
            sending.judge()
            sending.fail(f"no acknowledgement within {self._place.timeout_s:g} s", unreachable=unreachable)


def _seen(opening: asyncio.Task[Producer]) -> None:
    # Who waited for it was told; if nobody does any more, nobody is to be warned either.
    if not opening.cancelled():
        opening.exception()
