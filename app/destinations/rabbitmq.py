"""RabbitMQ: one persistent, mandatory message each, delivered once the broker confirmed it (publisher confirms).

Properties: `message_id`, `content_type`, `type` (the topic), `timestamp` (the commit, whole seconds). Headers:
CloudEvents' AMQP binding 1.0.2 (`cloudEvents_<attribute>`), with `halfnote-…` and the message's own as
`halfnote-h-<name>` beside them; all text. An exchange and queues must exist: Halfnote declares nothing.
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
from yarl import URL

from app.destinations.base import Delivery, Destination, Outcome
from app.destinations.cloudevents import attributes, own_headers
from app.destinations.lines import BAD_MESSAGE, TOO_LARGE, Lines, Sending
from app.destinations.placeholders import filled
from app.destinations.rabbitmq_line import Place, RabbitLine, connected, told
from app.dialling import Dialling
from app.trace_context import trace_headers

# How many messages one call takes; they go out one behind the other.
BATCH_MAX = 100
# AMQP's short strings: routing keys, names of headers, some properties.
SHORT_BYTES = 255

_size_limit = re.compile(r"larger than (?:configured )?max(?:imum)? size (\d+)").search
_topic_refused = re.compile(r"access to topic '(.*)' in exchange ", re.DOTALL).search


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, dialling: Dialling
) -> Destination:
    """Return the destination of a stored `{type: "rabbitmq", url, exchange?, routing_key?, username?}`.

    Without an account it is RabbitMQ's own `guest`.
    """
    username = destination.get("username")
    place = Place(
        URL(destination["url"], encoded=True),
        destination.get("exchange") or "",
        username or "guest",
        credentials.get("password", "") if username else "guest",
        dialling,
    )
    return RabbitMq(destination["url"], place, destination.get("routing_key") or "{topic}", timeout_s)


class RabbitMq:
    """An exchange, on one connection and channel for all calls; a call's messages are confirmed in any order."""

    batch_max = BATCH_MAX

    def __init__(self, address: str, place: Place, routing_key: str, timeout_s: float) -> None:
        self.address = address
        self._routing_key = routing_key
        self._lines = Lines(partial(connected, place), self._publish, (AMQPError, RuntimeError), timeout_s)
        self._largest: int | None = None

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Publish and wait until each is confirmed, returned or refused, or the time is over."""
        started = perf_counter()
        return await self._lines.send([self._sending(delivery, started) for delivery in deliveries])

    async def close(self) -> None:
        """Close the connection."""
        await self._lines.close()

    def _sending(self, delivery: Delivery, started: float) -> Sending:
        sending = Sending(delivery, filled(self._routing_key, delivery), started)
        if len(sending.name) > SHORT_BYTES // 4 and (size := len(sending.name.encode())) > SHORT_BYTES:
            sending.refuse(BAD_MESSAGE, f"a routing key of {size} bytes; AMQP takes at most {SHORT_BYTES}")
        self._judge_size(sending)
        return sending

    def _judge_size(self, sending: Sending) -> None:
        size = len(sending.delivery.body)
        if self._largest is not None and size > self._largest:
            error = f"a body of {size:,} bytes; this RabbitMQ takes at most {self._largest:,} (max_message_size)"
            sending.refuse(TOO_LARGE, error)

    async def _publish(self, line: RabbitLine, waiting: Sequence[Sending]) -> None:
        """Publish all once; those without an outcome then are to be sent again."""
        exchange = await line.exchange()
        await asyncio.gather(*(self._publish_one(line, exchange, sending) for sending in waiting))

    async def _publish_one(self, line: RabbitLine, exchange: AbstractExchange, sending: Sending) -> None:
        try:
            await exchange.publish(message_of(sending.delivery), sending.name, mandatory=True)
            sending.done()
        except PublishError:
            sending.fail(unroutable(exchange.name, sending.name))
        except DeliveryError:
            sending.fail("RabbitMQ did not take it over (basic.nack): a queue that it goes to is full or failing")
        except ChannelClosed as closed:
            line.forget(exchange)
            self._judge_closing(sending, told(closed))
        except asyncio.CancelledError:
            # The client ends those who wait in this way too when a connection breaks.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._broken(line, sending, "the connection was closed")
            return
        except (AMQPError, OSError, RuntimeError) as failure:
            if not line.open or not line.closed(exchange):
                self._broken(line, sending, told(failure))
            # Else RabbitMQ closed the channel, which is told to another message.
            return
        line.heard_at = asyncio.get_running_loop().time()

    def _broken(self, line: RabbitLine, sending: Sending, error: str) -> None:
        self._lines.drop(line)
        sending.broken(error)

    def _judge_closing(self, sending: Sending, error: str) -> None:
        """RabbitMQ closed the channel: it says why, not for which message. Those it was not about go again."""
        limit, refused = _size_limit(error), _topic_refused(error)
        if limit is not None:
            self._largest = int(limit[1])
            self._judge_size(sending)
        elif refused is None or refused[1] == sending.name:
            sending.fail(error)


def message_of(delivery: Delivery) -> Message:
    """Return the message, by CloudEvents' AMQP binding in binary mode; `_`, which JMS can select by, not `:`."""
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
        # A topic in other letters than Latin may be too long; it is in `cloudEvents_type` all the same.
        type=delivery.topic if len(delivery.topic.encode()) <= SHORT_BYTES else None,
    )


def unroutable(exchange: str, routing_key: str) -> str:
    """Say what is to be done about a message that no queue takes."""
    if not exchange:
        return f"RabbitMQ has no queue {routing_key!r}: declare it, or name an exchange"
    return f"no queue takes routing key {routing_key!r} of exchange {exchange!r}: bind one to it"
