"""Messages in the format of RocketMQ's commit log, in which its clients read them, and texts of properties."""

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NAME_END, PROPERTY_END = "\x01", "\x02"
# A message that is not known by its client's own ids is known by an address and a position, in hexadecimal.
_id = struct.Struct(">4siq")
_MAGIC = -626843481
_before_body = struct.Struct(">iiiiiqqiq4siq4siiq")
_batched = struct.Struct(">iiii")
PROPERTIES_MOST_BYTES = 32_767

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LogMessage:
    """A message as a client reads it. Times are milliseconds; `position` is its place in the commit log."""

    topic: str
    body: bytes
    properties: Mapping[str, str]
    queue_id: int
    queue_offset: int
    position: int
    born_ms: int
    stored_ms: int
    reconsume_times: int = 0


def encode_message(message: LogMessage, host: Host) -> bytes:
    """Return a message's bytes. `host`: the address of this server."""
    topic = message.topic.encode()
    properties = properties_text(message.properties).encode()
    if len(properties) > PROPERTIES_MOST_BYTES:
        raise ValueError("the properties of a message are too long")
    size = _before_body.size + 4 + len(message.body) + 1 + len(topic) + 2 + len(properties)
    address = _ipv4(host)
    return b"".join(
        (
            _before_body.pack(
                size,
                _MAGIC,
                zlib.crc32(message.body) & 0x7FFFFFFF,
                message.queue_id,
                0,
                message.queue_offset,
                message.position,
                0,
                message.born_ms,
                bytes(4),
                0,
                message.stored_ms,
                address,
                host[1],
                message.reconsume_times,
                0,
            ),
            len(message.body).to_bytes(4, "big"),
            message.body,
            bytes([len(topic)]),
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )


def batched_messages(content: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield the body and the text of properties of each message in a batch. Raises ValueError."""
    at = 0
    while at < len(content):
        try:
            _, _, _, _ = _batched.unpack_from(content, at)
            start = at + _batched.size + 4
            end = start + int.from_bytes(content[start - 4 : start], "big")
            properties_end = end + 2 + int.from_bytes(content[end : end + 2], "big")
        except struct.error:
            raise ValueError("the batch ends early") from None
        if properties_end > len(content) or end + 2 > len(content):
            raise ValueError("the batch ends early")
        yield content[start:end], content[end + 2 : properties_end].decode()
        at = properties_end


def message_id(host: Host, position: int) -> str:
    """Return the id of a message by its place. Clients read the place from it when they end a transaction."""
    return _id.pack(_ipv4(host), host[1], position).hex().upper()


def properties_text(properties: Mapping[str, str]) -> str:
    """Return properties as a text."""
    return "".join(f"{name}{NAME_END}{value}{PROPERTY_END}" for name, value in properties.items())


def read_properties(text: str) -> dict[str, str]:
    """Return the properties in a text. What is no property is left out, as RocketMQ's servers do."""
    pairs = (part.partition(NAME_END) for part in text.split(PROPERTY_END))
    return {name: value for name, _, value in pairs if name and value}


def _ipv4(host: Host) -> bytes:
    try:
        numbers = bytes(int(part) for part in host[0].split("."))
    except ValueError:
        return bytes(4)
    return numbers if len(numbers) == 4 else bytes(4)
