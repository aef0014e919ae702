"""Halfnote's answers to claims, of messages and of checks, and their messages as RocketMQ's clients take them."""

from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from app.rocketmq import headers as names
from app.rocketmq.bodies import digest_of
from app.rocketmq.message_ids import made_at
from app.rocketmq.protocol.definition_pb2 import Encoding, Message, MessageType, Resource, SystemProperties

STORE_HOST = "halfnote"


class MessageFields(msgspec.Struct):
    """The fields that a claimed message and the message of a check share."""

    message_id: str
    topic: str
    key: str | None
    tag: str | None
    headers: dict[str, str]
    body: msgspec.Raw = msgspec.Raw()
    body_base64: str | None = None

    @property
    def content(self) -> bytes:
        """The body: the producer's bytes."""
        if self.body_base64 is not None:
            return b64decode(self.body_base64)
        return bytes(self.body)


class ClaimedDelivery(MessageFields, kw_only=True):
    """A message that is out to this consumer."""

    handle: str
    offset: int
    committed_at: datetime
    attempt: int


class MessageClaimed(msgspec.Struct):
    """The answer of `POST /subscriptions/{name}/claim`."""

    messages: list[ClaimedDelivery]
    more: bool = False


class ClaimedOrphan(msgspec.Struct):
    """A transaction whose producer is asked."""

    transaction_id: UUID
    born_at: datetime
    messages: list[MessageFields]
    handle: str


class ChecksClaimed(msgspec.Struct):
    """The answer of `POST /producer-groups/{name}/checks/claim`."""

    checks: list[ClaimedOrphan]


read_messages = msgspec.json.Decoder(MessageClaimed).decode
read_checks = msgspec.json.Decoder(ChecksClaimed).decode


def delivered(one: ClaimedDelivery, topic: Resource, invisible_s: float) -> Message:
    """Return a claimed message for a consumer, which holds it for `invisible_s` seconds."""
    message = _message(one, topic, one.committed_at)
    system = message.system_properties
    system.receipt_handle = one.handle
    system.delivery_attempt = one.attempt
    system.queue_offset = one.offset
    system.invisible_duration.FromMilliseconds(round(invisible_s * 1000))
    return message


def orphaned(check: ClaimedOrphan, topic: Resource) -> Message:
    """Return the message of a transaction for its producer's checker."""
    return _message(check.messages[0], topic, check.born_at)


def _message(one: MessageFields, topic: Resource, stored_at: datetime) -> Message:
    headers, body, due = one.headers, one.content, _due(one.headers)
    message_id = headers.get(names.MESSAGE_ID) or one.message_id
    system = SystemProperties(
        tag=one.tag,
        keys=names.to_keys(headers, one.key),
        message_id=message_id,
        body_digest=digest_of(body),
        body_encoding=Encoding.IDENTITY,
        message_type=_type_of(headers, due),
        born_host=headers.get(names.BORN_HOST, ""),
        store_host=STORE_HOST,
        message_group=headers.get(names.GROUP),
        trace_context=headers.get(names.TRACE),
        delivery_timestamp=due,
    )
    # A repeated send has another time of birth, so it is not stored; the id has its second.
    system.born_timestamp.FromDatetime(made_at(message_id) or stored_at)
    system.store_timestamp.FromDatetime(stored_at)
    return Message(topic=topic, user_properties=names.to_properties(headers), system_properties=system, body=body)


def _due(headers: Mapping[str, str]) -> Timestamp | None:
    """Return when a delayed message was to come. Any producer can set the header: what is no such time is ignored."""
    said, due = headers.get(names.DELIVERY, ""), Timestamp()
    if not said.isdecimal():
        return None
    try:
        due.FromMilliseconds(int(said))
    except ValueError:
        return None
    return due


def _type_of(headers: Mapping[str, str], due: Timestamp | None) -> MessageType:
    if headers.get(names.TYPE) == names.TRANSACTION_WORD:
        return MessageType.TRANSACTION
    if names.GROUP in headers:
        return MessageType.FIFO
    return MessageType.NORMAL if due is None else MessageType.DELAY
