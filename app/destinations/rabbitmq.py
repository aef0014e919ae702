"""Deliver to RabbitMQ: persistent, mandatory messages, delivered when the broker confirms them (publisher confirms).

Properties: `message_id`, `content_type`, `type` (the topic), `timestamp` (the commit, whole seconds). Headers:
CloudEvents' AMQP binding 1.0.2 (`cloudEvents_<attribute>`), with `halfnote-…` and the message's own as
`halfnote-h-<name>` beside them; all text. The exchange and queues must exist: Halfnote declares nothing.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from time import perf_counter
from typing import Any

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractExchange
from aio_pika.exceptions import AMQPError, ChannelClosed, DeliveryError, PublishError
from pamqp import frame
from pamqp.header import ContentHeader
from yarl import URL

from app.delivery import Delivery, Outcome
from app.destinations.base import Destination, current_task_cancelled
from app.destinations.broker_connection import BAD_MESSAGE, TOO_LARGE, BrokerConnections, PendingMessage
from app.destinations.cloudevents import OWN_HEADER, attributes, own_headers
from app.destinations.name_templates import filled
from app.destinations.rabbitmq_connection import RabbitAddress, RabbitConnection, connected, error_text
from app.egress.network_policy import NetworkPolicy
from app.observability.trace_context import trace_headers

# The most messages of one call. They are sent without a wait in between.
BATCH_MAX = 100
# AMQP's short strings: routing keys, names of headers, some properties.
SHORT_BYTES = 255
# AMQP's names of headers.
NAME_BYTES = 128
# More than the frame of a message without headers of its own takes, and than each of these adds to their texts.
PROPERTIES_BYTES = 16 * 1024
HEADER_BYTES = 20

_size_limit = re.compile(r"larger than (?:configured )?max(?:imum)? size (\d+)").search
_topic_refused = re.compile(r"access to topic '(.*)' in exchange ", re.DOTALL).search


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, network_policy: NetworkPolicy
) -> Destination:
    """Return the destination of a stored `{type: "rabbitmq", url, exchange?, routing_key?, username?}`.

    Without a username the account is RabbitMQ's `guest`.
    """
    username = destination.get("username")
    broker_address = RabbitAddress(
        URL(destination["url"], encoded=True),
        destination.get("exchange") or "",
        username or "guest",
        credentials.get("password", "") if username else "guest",
        network_policy,
    )
    return RabbitMq(destination["url"], broker_address, destination.get("routing_key") or "{topic}", timeout_s)


class RabbitMq:
    """An exchange, on one connection and channel for all calls. Messages of a call are confirmed in any order."""

    batch_max = BATCH_MAX

    def __init__(self, address: str, broker_address: RabbitAddress, routing_key: str, timeout_s: float) -> None:
        self.address = address
        self._routing_key = routing_key
        self._connections = BrokerConnections(
            partial(connected, broker_address), self._publish, (AMQPError, RuntimeError), timeout_s
        )

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Publish and wait until each is confirmed, returned or refused, or the time is over."""
        started = perf_counter()
        return await self._connections.send([self._pending(delivery, started) for delivery in deliveries])

    async def close(self) -> None:
        """Close the connection."""
        await self._connections.close()

    def _pending(self, delivery: Delivery, started: float) -> PendingMessage:
        message = PendingMessage(delivery, filled(self._routing_key, delivery), started)
        _judge_texts(message)
        return message

    async def _publish(self, connection: RabbitConnection, waiting: Sequence[PendingMessage]) -> None:
        """Publish all once. Messages that have no outcome afterwards are sent again."""
        for message in waiting:
            _judge_size(message, connection.largest, asked=False)
            _judge_properties(message, connection.frame_max)
        fitting = [message for message in waiting if message.outcome is None]
        if not fitting:
            return
        exchange = await connection.exchange()
        unexplained: list[PendingMessage] = []
        await asyncio.gather(*(self._publish_one(connection, exchange, message, unexplained) for message in fitting))
        if not connection.replaced(exchange):
            # No message got a reason: the connection broke. The client closes its channels first.
            for message in unexplained:
                self._broken(connection, message, "the connection was closed")

    async def _publish_one(
        self,
        connection: RabbitConnection,
        exchange: AbstractExchange,
        message: PendingMessage,
        unexplained: list[PendingMessage],
    ) -> None:
        """Publish once. Add the message to `unexplained` if its channel was closed without a reason for it."""
        try:
            await exchange.publish(message_of(message.delivery), message.name, mandatory=True)
            message.done()
        except PublishError:
            message.fail(unroutable(exchange.name, message.name))
        except DeliveryError:
            message.fail("RabbitMQ did not accept the message (basic.nack): one of its queues is full or failing")
        except ChannelClosed as closed:
            connection.forget(exchange)
            _judge_closing(connection, message, error_text(closed))
        except asyncio.CancelledError:
            # The client also cancels waiting callers when a connection breaks.
            if current_task_cancelled():
                raise
            self._broken(connection, message, "the connection was closed")
            return
        except (AMQPError, OSError, RuntimeError) as failure:
            if connection.open and connection.closed(exchange):
                # If RabbitMQ closed the channel, another message gets the reason.
                unexplained.append(message)
            else:
                self._broken(connection, message, error_text(failure))
            return
        connection.last_answer_at = asyncio.get_running_loop().time()

    def _broken(self, connection: RabbitConnection, message: PendingMessage, error: str) -> None:
        self._connections.drop(connection)
        message.broken(error)


def _judge_texts(message: PendingMessage) -> None:
    """Refuse a message with a text that AMQP has no place for. The client would fail the call or cut the name."""
    delivery = message.delivery
    texts = {"routing key": message.name, "content type": delivery.content_type, "message id": delivery.message_id}
    for what, text in texts.items():
        if len(text) > SHORT_BYTES // 4 and (size := len(text.encode())) > SHORT_BYTES:
            message.refuse(BAD_MESSAGE, f"a {what} of {size} bytes; AMQP takes at most {SHORT_BYTES}")
    for name in delivery.headers:
        if len(name) > (NAME_BYTES - len(OWN_HEADER)) // 4 and (size := len((OWN_HEADER + name).encode())) > NAME_BYTES:
            error = f"the name of the header {OWN_HEADER}{name} has {size} bytes; AMQP takes at most {NAME_BYTES}"
            message.refuse(BAD_MESSAGE, error)


def _judge_properties(message: PendingMessage, frame_max: int) -> None:
    """Refuse a message whose properties and headers exceed a frame, for which RabbitMQ would close the connection.

    The body is split into frames, these are not. `frame_max` 0: RabbitMQ has no limit.
    """
    headers = message.delivery.headers
    # At most 4 bytes for a character. Encoding all messages twice would be slow.
    most = PROPERTIES_BYTES + sum(4 * (len(name) + len(value)) + HEADER_BYTES for name, value in headers.items())
    if message.outcome is not None or not 0 < frame_max < most:
        return
    properties = message_of(message.delivery).properties
    size = len(frame.marshal(ContentHeader(body_size=len(message.delivery.body), properties=properties), 1))
    if size > frame_max:
        error = f"properties and headers of {size:,} bytes; this RabbitMQ takes at most {frame_max:,} (frame_max)"
        message.refuse(BAD_MESSAGE, error)


def _judge_size(message: PendingMessage, largest: int | None, *, asked: bool) -> None:
    """Refuse a message that is larger than the limit, if that is known. `asked`: RabbitMQ refused it just now."""
    size = len(message.delivery.body)
    if largest is not None and size > largest:
        error = f"a body of {size:,} bytes; this RabbitMQ takes at most {largest:,} (max_message_size)"
        message.refuse(TOO_LARGE, error, asked=asked)


def _judge_closing(connection: RabbitConnection, message: PendingMessage, error: str) -> None:
    """Fail the message if it is the reason why RabbitMQ closed the channel; other messages are sent again.

    RabbitMQ says why it closed the channel, and not because of which message.
    """
    limit, refused = _size_limit(error), _topic_refused(error)
    if limit is not None:
        connection.largest = int(limit[1])
        _judge_size(message, connection.largest, asked=True)
    elif refused is None or refused[1] == message.name:
        message.fail(error)


def message_of(delivery: Delivery) -> Message:
    """Return the message by CloudEvents' AMQP binding in binary mode; with `_` rather than `:`, for JMS selectors."""
    headers: dict[str, Any] = {
        f"cloudEvents_{name}": value for name, value in attributes(delivery).items() if name != "datacontenttype"
    }
    headers.update(own_headers(delivery))
    headers.update(trace_headers(delivery.trace))
    return Message(
        delivery.body,
        headers=headers,
        content_type=delivery.content_type,
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=delivery.message_id,
        timestamp=delivery.committed_at,
        # A topic of non-Latin letters may be too long. `cloudEvents_type` has it in any case.
        type=delivery.topic if len(delivery.topic.encode()) <= SHORT_BYTES else None,
    )


def unroutable(exchange: str, routing_key: str) -> str:
    """Return the error of a message that no queue takes, with what to do."""
    if not exchange:
        return f"RabbitMQ has no queue {routing_key!r}: declare it, or name an exchange"
    return f"no queue takes routing key {routing_key!r} of exchange {exchange!r}: bind a queue to it"
