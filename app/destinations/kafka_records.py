"""Make a Kafka record of a message, and turn the answer into an outcome."""

import asyncio
import re
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from aiokafka.errors import (
    BrokerNotAvailableError,
    BrokerResponseError,
    ClusterAuthorizationFailedError,
    InvalidProducerEpoch,
    InvalidRequiredAcksError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    RecordListTooLargeError,
    ReplicaNotAvailableError,
    TopicAuthorizationFailedError,
    UnknownProducerId,
    UnsupportedVersionError,
    kafka_errors,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from app.delivery import Delivered, Delivery, Failed, Outcome, Refused
from app.destinations.cloudevents import attributes, own_headers
from app.destinations.kafka_producer import BATCH_BYTES, ProducerEnded
from app.egress.network_policy import AddressRefused
from app.observability.trace_context import trace_headers

TOO_LARGE, BAD_TOPIC, BAD_MESSAGE = "too_large", "bad_topic", "bad_message"
# Errors of the producer, not of the message: another producer sends it.
AGAIN = (
    ProducerEnded,
    InvalidProducerEpoch,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    UnknownProducerId,
)
# Answers that no single record of a batch causes.
NOT_THE_RECORDS = (
    BrokerNotAvailableError,
    ClusterAuthorizationFailedError,
    InvalidRequiredAcksError,
    InvalidTopicError,
    ReplicaNotAvailableError,
    TopicAuthorizationFailedError,
    UnsupportedVersionError,
)


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]
    """The broker refuses a record (KIP-467). aiokafka does not know this code."""

    errno = 87
    message = "INVALID_RECORD"

    def __str__(self) -> str:
        """Return what to do."""
        return "the topic refuses the record; a compacted topic needs a key"


# The client makes its error from the broker's code by this table.
kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)

# Kafka's own rule for names (org.apache.kafka.common.internals.Topic).
_is_topic = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}").fullmatch
_replace = re.compile(r"[^A-Za-z0-9._-]").sub


@dataclass(slots=True, eq=False)
class PendingRecord:
    """One message of a call that began at `started`.

    `alone`: sent in a batch of its own, so that the answer is about this record only. `too_large`: refused even so.
    `refused_by_rule`: the outcome is that the topic refuses the record for another reason.
    """

    started: float
    delivery: Delivery
    topic: str
    alone: bool = False
    too_large: bool = False
    refused_by_rule: bool = False
    answer: asyncio.Future[Any] | None = None
    outcome: Outcome | None = None

    @property
    def duration_ms(self) -> int:
        """Milliseconds since its call began."""
        return round((perf_counter() - self.started) * 1000)

    def fail(self, error: str, *, unreachable: bool = False) -> None:
        """Set the outcome to a failure unless there is one."""
        if self.outcome is None:
            self.outcome = Failed(error, None, None, None, self.duration_ms, unreachable)

    def refuse(self, limit: int | None) -> None:
        """Set the outcome: the topic never takes this record."""
        most = "more than the topic takes" if limit is None else f"the topic takes at most {limit:,}"
        record = record_of(self.delivery)
        size = DefaultRecordBatchBuilder.estimate_size_in_bytes(record["key"], record["value"], record["headers"])
        error = f"a record of {size:,} bytes; {most} (max.message.bytes of {self.topic})"
        self.outcome = Refused(TOO_LARGE, error, None, None, self.duration_ms)

    def hold(self) -> None:
        """Make a failure, which is retried, of a refusal by a rule."""
        if isinstance(self.outcome, Refused):
            self.outcome = Failed(self.outcome.error, None, None, None, self.outcome.duration_ms)

    def judge(self) -> bool:
        """Set the outcome from the answer, if one was awaited; return whether the answer is an error.

        A record without an outcome afterwards is sent again, or is `too_large`.
        """
        answer, self.answer = self.answer, None
        if answer is None:
            return False
        error = answer.exception()
        if error is None:
            self.outcome = Delivered(None, self.duration_ms)
        elif isinstance(error, (MessageSizeTooLargeError, RecordListTooLargeError)):
            # Another record of its batch may be the one that is too large.
            self.too_large, self.alone = self.alone, True
        elif not self.alone and _may_be_one_record(error):
            # Likewise. The broker stores nothing of a batch that it refuses.
            self.alone = True
        elif isinstance(error, InvalidRecordError):
            # Not retriable for Kafka's own clients either. A refused time is retried: a clock may be wrong.
            self.refused_by_rule = True
            self.outcome = Refused(BAD_MESSAGE, error_text(error), None, None, self.duration_ms)
        elif not isinstance(error, AGAIN):
            self.fail(error_text(error), unreachable=isinstance(error, AddressRefused))
        return error is not None


def _may_be_one_record(error: BaseException) -> bool:
    """Return whether one record of a batch may have caused the broker's answer."""
    return isinstance(error, BrokerResponseError) and not (
        error.retriable or isinstance(error, (*AGAIN, *NOT_THE_RECORDS))
    )


def pending_record(delivery: Delivery, topic: str, started: float) -> PendingRecord:
    """Return a pending record for a topic; refuse a name that no topic can have."""
    # A record that fills a batch is alone in it.
    pending = PendingRecord(started, delivery, topic, alone=len(delivery.body) >= BATCH_BYTES)
    if not _is_topic(topic):
        error = f"{topic!r} is not a name for a Kafka topic: 1 to 249 of A-Z, a-z, 0-9, '.', '_' and '-'"
        pending.outcome = Refused(BAD_TOPIC, error, None, None, 0, asked=False)
    return pending


def record_of(delivery: Delivery) -> dict[str, Any]:
    """Return aiokafka's arguments for a message: CloudEvents' Kafka binding 1.0.2 in binary mode."""
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
    """Return a value for a topic's name: in keys and tags each character that is not allowed becomes `_`.

    Topics and groups stay unchanged: two of them must not silently become one.
    """
    return _replace("_", value) if name in ("key", "tag") else value


def error_text(error: BaseException) -> str:
    """Return an error's text for people."""
    text = str(error)
    name = type(error).__name__
    return text if name in text else f"{name}: {text}"
