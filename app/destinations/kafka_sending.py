"""A message on its way to Kafka: the record that is made of it, and what an answer means for it."""

import asyncio
import re
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from aiokafka.errors import (
    InvalidProducerEpoch,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    RecordListTooLargeError,
    UnknownProducerId,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from app.destinations.base import Delivered, Delivery, Failed, Outcome, Refused
from app.destinations.cloudevents import attributes, own_headers
from app.destinations.kafka_producer import BATCH_BYTES, Ended
from app.dialling import AddressRefused
from app.trace_context import trace_headers

TOO_LARGE, BAD_TOPIC = "too_large", "bad_topic"
# Not written, and the message is not to blame: another producer sends it.
AGAIN = (Ended, InvalidProducerEpoch, OutOfOrderSequenceNumber, ProducerClosed, ProducerFenced, UnknownProducerId)

# Kafka's own rule for names (org.apache.kafka.common.internals.Topic).
_is_topic = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}").fullmatch
_replace = re.compile(r"[^A-Za-z0-9._-]").sub


@dataclass(slots=True, eq=False)
class Sending:
    """One message of a call that began at `started`.

    `alone`: it goes in a batch of its own, so that nothing but its own size counts; `too_large`: even so it was.
    """

    started: float
    delivery: Delivery
    topic: str
    alone: bool = False
    too_large: bool = False
    answer: asyncio.Future[Any] | None = None
    outcome: Outcome | None = None

    @property
    def duration_ms(self) -> int:
        """How long its call has taken."""
        return round((perf_counter() - self.started) * 1000)

    def fail(self, error: str, *, unreachable: bool = False) -> None:
        """Set the outcome, unless there is one."""
        if self.outcome is None:
            self.outcome = Failed(error, None, None, None, self.duration_ms, unreachable)

    def refuse(self, limit: int | None) -> None:
        """Set the outcome of one that the topic will never take."""
        most = "more than the topic takes" if limit is None else f"the topic takes at most {limit:,}"
        record = record_of(self.delivery)
        size = DefaultRecordBatchBuilder.estimate_size_in_bytes(record["key"], record["value"], record["headers"])
        error = f"a record of {size:,} bytes; {most} (max.message.bytes of {self.topic})"
        self.outcome = Refused(TOO_LARGE, error, None, None, self.duration_ms)

    def judge(self) -> bool:
        """Take the answer in, if one was waited for, and return whether anything was wrong.

        Without an outcome afterwards it is to be sent again, or `too_large`.
        """
        answer, self.answer = self.answer, None
        if answer is None:
            return False
        error = answer.exception()
        if error is None:
            self.outcome = Delivered(None, self.duration_ms)
        elif isinstance(error, (MessageSizeTooLargeError, RecordListTooLargeError)):
            # With others in its batch it may be one of them that is too large.
            self.too_large, self.alone = self.alone, True
        elif not isinstance(error, AGAIN):
            self.fail(told(error), unreachable=isinstance(error, AddressRefused))
        return error is not None


def sending_of(delivery: Delivery, topic: str, started: float) -> Sending:
    """Return a message that is to be sent to a topic; one that no topic can be called by is refused."""
    # The client puts nothing beside a record that fills a batch.
    sending = Sending(started, delivery, topic, alone=len(delivery.body) >= BATCH_BYTES)
    if not _is_topic(topic):
        error = f"{topic!r} is no name for a Kafka topic: 1 to 249 of A-Z, a-z, 0-9, '.', '_' and '-'"
        sending.outcome = Refused(BAD_TOPIC, error, None, None, 0)
    return sending


def record_of(delivery: Delivery) -> dict[str, Any]:
    """Return what aiokafka takes of a message: CloudEvents' Kafka binding 1.0.2 in binary mode."""
    headers = [("content-type", delivery.content_type.encode())]
    headers += [
        ("ce_" + name, value.encode()) for name, value in attributes(delivery).items() if name != "datacontenttype"
    ]
    own = {**own_headers(delivery), **trace_headers(delivery.trace)}
    headers += [(name, value.encode()) for name, value in own.items()]
    return {
        "key": None if delivery.key is None else delivery.key.encode(),
        "value": delivery.body,
        "timestamp_ms": int(delivery.committed_at.timestamp() * 1000),
        "headers": headers,
    }


def topic_part(name: str, value: str) -> str:
    """Return a value as it may stand in a topic's name: of keys and tags, which differ from message to message, each
    character that may not becomes `_`. Topics and groups stay: two of them must not silently become one."""
    return _replace("_", value) if name in ("key", "tag") else value


def told(error: BaseException) -> str:
    """Return an error as a person may read it."""
    text = str(error)
    name = type(error).__name__
    return text if name in text else f"{name}: {text}"
