"""Messages in requests of remoting clients, as Halfnote takes them."""

import re
import zlib
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from app.field_rules import NAME_MAX, has_control_character
from app.rocketmq import headers as names
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.codes import RequestCode
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.store_format import batched_messages, read_properties
from app.rocketmq.remoting.unique_keys import made_at
from app.rocketmq.sending import PROPERTIES_MAX, PROPERTY_BYTES_MAX, RESERVED, SentMessage

# RocketMQ's default levels, in seconds; a level above the last is the last.
DELAY_LEVELS = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
MESSAGES_MAX = 100
# A consumer gets this property with each message, and gives it back with a message that it sends back. One that it
# sends on has it too, and the id that it came with: by the handle the two are not taken for one.
HANDLE = "HALFNOTE_HANDLE"
SHARDING_KEY = "__SHARDINGKEY"
# As `immunity_s` of Halfnote, in seconds.
IMMUNITY_MAX_S = 86_400
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
_is_number = re.compile(r"[+-]?[0-9]{1,18}").fullmatch
_COMPRESSED, _PREPARED = 0x1, 0x4
_COMPRESSION, _ZLIB = 0x700, (0x000, 0x300)
# Kept out of a message's own properties, as RESERVED.
_INTERNAL = RESERVED | {HANDLE, SHARDING_KEY, "TRACE_CONTEXT", "INNER_NUM", "INNER_BASE", "__transactionId__"}
# `SEND_MESSAGE_V2` and batches name their fields by letters.
_LETTERS = {
    "producerGroup": "a",
    "topic": "b",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "properties": "i",
    "reconsumeTimes": "j",
    "maxReconsumeTimes": "l",
    "batch": "m",
}


@dataclass(frozen=True, slots=True)
class SendFields:
    """The fields of a request that sends. `max_reconsume_times`: -1 if the client says none."""

    producer_group: str
    topic: str
    queue_id: int
    system_flag: int
    sent_ms: int
    properties: str
    reconsume_times: int
    max_reconsume_times: int
    batch: bool


def send_fields(request: RemotingFrame) -> SendFields:
    """Return the fields of a request that sends. Raises CallRefused."""
    letters = request.code != RequestCode.SEND_MESSAGE
    given = {name: request.fields.get(_LETTERS[name] if letters else name, "") for name in _LETTERS}
    try:
        return SendFields(
            given["producerGroup"],
            given["topic"],
            int(given["queueId"]),
            int(given["sysFlag"]),
            int(given["bornTimestamp"]),
            given["properties"],
            int(given["reconsumeTimes"] or 0),
            int(given["maxReconsumeTimes"] or -1),
            request.code == RequestCode.SEND_BATCH_MESSAGE or given["batch"] == "true",
        )
    except ValueError:
        raise CallRefused(Code.BAD_REQUEST, "A number in the request is missing, or is none.") from None


def sent_messages(request: RemotingFrame, fields: SendFields, topic: str, limit: int) -> list[SentMessage]:
    """Return the messages of a request. `limit`: bytes of a body. Raises CallRefused."""
    if not fields.batch:
        body = _plain_body(request.body, fields.system_flag, limit)
        return [sent_message(body, read_properties(fields.properties), fields, topic, limit)]
    try:
        parts = list(batched_messages(request.body))
    except ValueError as error:
        raise CallRefused(Code.MESSAGE_CORRUPTED, f"The batch cannot be read: {error}.") from None
    if not 0 < len(parts) <= MESSAGES_MAX:
        raise CallRefused(Code.PAYLOAD_TOO_LARGE, f"A batch has 1 to {MESSAGES_MAX} messages.")
    return [sent_message(body, read_properties(text), fields, topic, limit) for body, text in parts]


def sent_message(body: bytes, properties: Mapping[str, str], fields: SendFields, topic: str, limit: int) -> SentMessage:
    """Return one message with a plain body. Raises CallRefused."""
    if not body:
        raise CallRefused(Code.MESSAGE_BODY_EMPTY, "The message's body is empty.")
    if len(body) > limit:
        raise CallRefused(
            Code.MESSAGE_BODY_TOO_LARGE, f"A message's body has at most {limit} bytes (--max-body-bytes)."
        )
    own = {name: value for name, value in properties.items() if name not in _INTERNAL}
    _check(own, properties)
    message_id = properties.get("UNIQ_KEY", "")
    if not message_id or len(message_id) > NAME_MAX:
        raise CallRefused(Code.ILLEGAL_MESSAGE_ID, "The message has no id (UNIQ_KEY), or a long one.")
    transactional = _is_half(properties, fields)
    keys = properties.get("KEYS", "").split()
    group = properties.get(SHARDING_KEY)
    key = group or (keys[0] if keys and len(keys[0]) <= NAME_MAX else None)
    tag = properties.get("TAGS")
    content: dict[str, Any] = {
        "topic": topic,
        "headers": {
            **names.of_properties(own),
            names.MESSAGE_ID: message_id,
            **names.of_keys(keys, key, group),
            **({names.GROUP: group} if group else {}),
            **({names.TYPE: names.TRANSACTION_WORD} if transactional else {}),
        },
        "body_base64": b64encode(body).decode(),
        "content_type": "application/octet-stream",
        **({"key": key} if key else {}),
        **({"tag": tag} if tag else {}),
    }
    return SentMessage(
        message_id,
        transactional,
        content,
        None if transactional else _deliver_at(properties),
        _immunity_s(properties) if transactional else None,
        made_at(message_id, fields.sent_ms),
        None if key else fields.queue_id,
        properties.get(HANDLE, ""),
    )


def delay_s(level: int) -> int:
    """Return the seconds of a delay level above 0."""
    return DELAY_LEVELS[min(level, len(DELAY_LEVELS)) - 1]


def _plain_body(body: bytes, flag: int, limit: int) -> bytes:
    if not flag & _COMPRESSED:
        return body
    if flag & _COMPRESSION not in _ZLIB:
        raise CallRefused(
            Code.MESSAGE_CORRUPTED, "The body is compressed by LZ4 or ZSTD. Halfnote reads ZLIB, the client's default."
        )
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error:
        raise CallRefused(Code.MESSAGE_CORRUPTED, "The body is not compressed as the message says.") from None
    if len(plain) <= limit and not stream.eof:
        raise CallRefused(Code.MESSAGE_CORRUPTED, "The compressed body ends early.")
    return plain


def _is_half(properties: Mapping[str, str], fields: SendFields) -> bool:
    """Return whether a message is a half.

    A committed message comes to its consumer with TRAN_MSG, of which the client makes the transaction id. A consumer
    that sends it on gives that back. Only `sendMessageInTransaction` adds PGROUP, and a batch has no halves.
    """
    if fields.batch or (HANDLE in properties and "PGROUP" not in properties):
        return False
    return bool(fields.system_flag & _PREPARED) or properties.get("TRAN_MSG") == "true"


def _check(own: Mapping[str, str], properties: Mapping[str, str]) -> None:
    if len(own) > PROPERTIES_MAX:
        raise CallRefused(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"A message has at most {PROPERTIES_MAX} properties.")
    if sum(len(name.encode()) + len(value.encode()) for name, value in properties.items()) > PROPERTY_BYTES_MAX:
        raise CallRefused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE, f"Properties, tag and keys have at most {PROPERTY_BYTES_MAX} bytes."
        )
    # These become an id, a key and a tag of Halfnote. Other properties that no header can have are stored as JSON.
    for name in ("UNIQ_KEY", "TAGS", "KEYS", SHARDING_KEY):
        if has_control_character(properties.get(name, "")):
            raise CallRefused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"The property `{name}` has a control character.")
    if len(properties.get("TAGS", "")) > NAME_MAX:
        raise CallRefused(Code.ILLEGAL_MESSAGE_TAG, f"A tag has at most {NAME_MAX} characters.")
    if len(properties.get(SHARDING_KEY, "")) > NAME_MAX:
        raise CallRefused(Code.ILLEGAL_MESSAGE_KEY, f"A sharding key has at most {NAME_MAX} characters.")


def _deliver_at(properties: Mapping[str, str]) -> datetime | None:
    # From now, and not from the time that the client says: its clock may be wrong.
    now = datetime.now(UTC)
    try:
        if "TIMER_DELIVER_MS" in properties:
            return datetime.fromtimestamp(int(properties["TIMER_DELIVER_MS"]) / 1000, UTC)
        if "TIMER_DELAY_MS" in properties:
            return now + timedelta(milliseconds=int(properties["TIMER_DELAY_MS"]))
        if "TIMER_DELAY_SEC" in properties:
            return now + timedelta(seconds=int(properties["TIMER_DELAY_SEC"]))
        level = int(properties.get("DELAY", 0))
    except (ValueError, OverflowError, OSError):
        raise CallRefused(Code.ILLEGAL_DELIVERY_TIME, "The delay of the message is no number of its kind.") from None
    return now + timedelta(seconds=delay_s(level)) if level > 0 else None


def _immunity_s(properties: Mapping[str, str]) -> int | None:
    """Return the seconds; None: those of the producer group. RocketMQ's servers read the text so too."""
    text = properties.get(IMMUNITY, "")
    if _is_number(text) is None or int(text) == -1:
        return None
    if int(text) > IMMUNITY_MAX_S:
        raise CallRefused(Code.BAD_REQUEST, f"{IMMUNITY} is at most {IMMUNITY_MAX_S}.")
    return max(1, int(text))
