"""Messages that RocketMQ's clients send, as Halfnote takes them. Checked as RocketMQ's proxy checks them."""

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from app.field_rules import NAME_MAX
from app.rocketmq import headers as names
from app.rocketmq.bodies import body_of
from app.rocketmq.message_ids import made_at
from app.rocketmq.protocol.definition_pb2 import Code, Message, MessageType, SystemProperties
from app.rocketmq.refusals import CallRefused

PROPERTIES_MAX = 128
PROPERTY_BYTES_MAX = 16 * 1024
MESSAGE_GROUP_BYTES_MAX = 64
RECOVERY_MAX_S = 3600
# RocketMQ's proxy reads of the type only whether it is TRANSACTION, so a message may have none.
_TYPES = frozenset(
    {
        MessageType.MESSAGE_TYPE_UNSPECIFIED,
        MessageType.NORMAL,
        MessageType.FIFO,
        MessageType.DELAY,
        MessageType.TRANSACTION,
    }
)
_DELAY_FIELD, _KEY_FIELD = "messages[0].deliver_after_s", "messages[0].key"
# Names that RocketMQ uses in a message itself.
RESERVED = frozenset(
    [
        "TRACE_ON",
        "MSG_REGION",
        "KEYS",
        "TAGS",
        "WAIT",
        "DELAY",
        "RETRY_TOPIC",
        "REAL_TOPIC",
        "REAL_QID",
        "TRAN_MSG",
        "PGROUP",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "BUYER_ID",
        "ORIGIN_MESSAGE_ID",
        "TRANSFER_FLAG",
        "CORRECTION_FLAG",
        "MQ2_FLAG",
        "RECONSUME_TIME",
        "UNIQ_KEY",
        "MAX_RECONSUME_TIMES",
        "CONSUME_START_TIME",
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "DUP_INFO",
        "EXTEND_UNIQ_INFO",
        "INSTANCE_ID",
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "TTL",
        "ARRIVE_TIME",
        "PUSH_REPLY_TIME",
        "CLUSTER",
        "MSG_TYPE",
        "INNER_MULTI_QUEUE_OFFSET",
        "TIMER_DELAY_MS",
        "TIMER_DELAY_SEC",
        "TIMER_DELIVER_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_OUT_MS",
        "TIMER_DEL_UNIQKEY",
        "TIMER_DELAY_LEVEL",
        "__BORNHOST",
        "BORN_TIMESTAMP",
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
        "__CRC32#",
    ]
)


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message as Halfnote takes it. `content` is the same at each repeat, so it names the transaction.

    `made_at` is the time in the message's id; None: it has none. `queue` is that of a message without keys, which gives
    the order: a repeat may have another one. `forwarded` is the handle of a delivery whose message a consumer sends on
    with the id that it came with: each delivery's is a transaction of its own.
    """

    message_id: str
    transactional: bool
    fields: Mapping[str, Any]
    deliver_at: datetime | None
    immunity_s: int | None
    made_at: datetime | None
    queue: int | None = None
    forwarded: str = ""

    @property
    def key(self) -> str | None:
        """The message's key in Halfnote: messages of a key have an order."""
        return f"queue-{self.queue}" if self.queue is not None else self.fields.get("key")

    @property
    def may_differ(self) -> frozenset[str]:
        """In which fields a repeat may differ: a delay ends at a time, so a repeat has a shorter one."""
        return frozenset((_DELAY_FIELD,) if self.queue is None else (_DELAY_FIELD, _KEY_FIELD))

    @property
    def content(self) -> bytes:
        """The bytes of which the transaction id is made."""
        named: list[object] = [self.fields, self.immunity_s]
        if self.forwarded:
            named.append(self.forwarded)
        return json.dumps(named, sort_keys=True).encode()

    def request(self, group: str, transaction_id: str, now: datetime) -> dict[str, Any]:
        """Return the body of `POST /half` or `POST /messages`."""
        message = dict(self.fields)
        if self.queue is not None:
            message["key"] = self.key
            message["headers"] = {**message["headers"], names.QUEUE: str(self.queue)}
        if self.deliver_at is not None:
            message["deliver_after_s"] = round(max(0.0, (self.deliver_at - now).total_seconds()), 3)
        request: dict[str, Any] = {"producer_group": group, "transaction_id": transaction_id, "messages": [message]}
        if self.transactional:
            # A check needs the body: RocketMQ gives the checker the whole message.
            request["check"] = {"include_body": True}
            if self.immunity_s is not None:
                request["check"]["immunity_s"] = self.immunity_s
        return request


def read_message(message: Message, topic: str, limit: int) -> SentMessage:
    """Return a sent message. `limit`: bytes of a body. Raises CallRefused."""
    system = message.system_properties
    if system.message_type not in _TYPES:
        word = MessageType.Name(system.message_type) if system.message_type in MessageType.values() else "unknown"
        raise CallRefused(Code.UNSUPPORTED, f"Messages of the type {word} are not supported.")
    body = body_of(message, limit)
    _check_properties(message)
    if not system.message_id.strip():
        raise CallRefused(Code.ILLEGAL_MESSAGE_ID, "The message has no id.")
    if _has_control(system.message_id) or len(system.message_id) > NAME_MAX:
        raise CallRefused(Code.ILLEGAL_MESSAGE_ID, "The message's id is too long or has a control character.")
    keys = [key for key in system.keys if key]
    key = system.message_group or (keys[0] if keys and len(keys[0]) <= NAME_MAX else None)
    transactional = system.message_type == MessageType.TRANSACTION
    fields: dict[str, Any] = {
        "topic": topic,
        "headers": _headers(message, keys, key),
        "body_base64": b64encode(body).decode(),
        "content_type": "application/octet-stream",
    }
    if key:
        fields["key"] = key
    if system.tag:
        fields["tag"] = system.tag
    return SentMessage(
        system.message_id,
        transactional,
        fields,
        system.delivery_timestamp.ToDatetime(UTC) if system.HasField("delivery_timestamp") else None,
        _immunity_s(system) if transactional else None,
        made_at(system.message_id),
    )


def _headers(message: Message, keys: list[str], key: str | None) -> dict[str, str]:
    system = message.system_properties
    headers = names.of_properties(message.user_properties)
    headers[names.MESSAGE_ID] = system.message_id
    headers.update(names.of_keys(keys, key, system.message_group))
    if system.message_group:
        headers[names.GROUP] = system.message_group
    if system.message_type == MessageType.TRANSACTION:
        headers[names.TYPE] = names.TRANSACTION_WORD
    if system.HasField("delivery_timestamp"):
        headers[names.DELIVERY] = str(system.delivery_timestamp.ToMilliseconds())
    for name, value in ((names.TRACE, system.trace_context), (names.BORN_HOST, system.born_host)):
        if value and not _has_control(value):
            headers[name] = value
    return headers


def _check_properties(message: Message) -> None:
    system = message.system_properties
    if len(message.user_properties) > PROPERTIES_MAX:
        raise CallRefused(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"A message has at most {PROPERTIES_MAX} properties.")
    for name, value in message.user_properties.items():
        if name in RESERVED:
            raise CallRefused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"The property `{name}` is RocketMQ's own.")
        if not name or _has_control(name) or _has_control(value):
            raise CallRefused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                "A property has no name, or a control character in its name or value.",
            )
    if system.tag and (not system.tag.strip() or "|" in system.tag or _has_control(system.tag)):
        raise CallRefused(Code.ILLEGAL_MESSAGE_TAG, "A tag is not blank and has no `|` and no control character.")
    if len(system.tag) > NAME_MAX:
        raise CallRefused(Code.ILLEGAL_MESSAGE_TAG, f"A tag has at most {NAME_MAX} characters.")
    for key in system.keys:
        if key and (not key.strip() or _has_control(key)):
            raise CallRefused(Code.ILLEGAL_MESSAGE_KEY, "A key is not blank and has no control character.")
    group = system.message_group
    if group and (not group.strip() or len(group.encode()) >= MESSAGE_GROUP_BYTES_MAX or _has_control(group)):
        raise CallRefused(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"A message group is not blank, has less than {MESSAGE_GROUP_BYTES_MAX} bytes and no control character.",
        )
    texts = [*message.user_properties.keys(), *message.user_properties.values(), system.tag, *system.keys]
    if sum(len(text.encode()) for text in texts) > PROPERTY_BYTES_MAX:
        raise CallRefused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE, f"Properties, tag and keys have at most {PROPERTY_BYTES_MAX} bytes."
        )


def _immunity_s(system: SystemProperties) -> int | None:
    if not system.HasField("orphaned_transaction_recovery_duration"):
        return None
    seconds = system.orphaned_transaction_recovery_duration.seconds
    if seconds > RECOVERY_MAX_S:
        raise CallRefused(Code.BAD_REQUEST, f"The recovery duration of a transaction is at most {RECOVERY_MAX_S} s.")
    return max(1, seconds)


def _has_control(text: str) -> bool:
    return any(char < " " or "\x7f" <= char <= "\x9f" for char in text)
