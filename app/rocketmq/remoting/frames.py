"""Frames of the remoting protocol: a length, a header (JSON or binary) with its own length, and a body.

The first byte of the header's length says how the header is written.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JSON_HEADER, BINARY_HEADER = 0, 1
_ANSWER, _ONEWAY = 1, 2
# What servers and clients of RocketMQ 4.9.8 say of themselves; clients use SQL92 filters only from 4.1 on.
VERSION = 409
# The number of `OTHER` among RocketMQ's languages.
_OTHER = 7
_fixed = struct.Struct(">hBhii")


class FrameFault(Exception):
    """Bytes that are no frame; the connection cannot go on."""


@dataclass(frozen=True, slots=True)
class RemotingFrame:
    """A request or an answer. `opaque` is the number that an answer repeats; `fields` are `extFields`."""

    code: int
    opaque: int
    flag: int = 0
    remark: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    header: int = JSON_HEADER

    @property
    def is_answer(self) -> bool:
        """Whether it answers a request."""
        return bool(self.flag & _ANSWER)

    @property
    def wants_no_answer(self) -> bool:
        """Whether the sender takes no answer."""
        return bool(self.flag & _ONEWAY)

    def answered(
        self, code: int, remark: str | None = None, fields: Mapping[str, object] | None = None, body: bytes = b""
    ) -> "RemotingFrame":
        """Return an answer to this request, with a header of the same kind."""
        named = {name: str(value) for name, value in (fields or {}).items()}
        return RemotingFrame(code, self.opaque, _ANSWER, remark, named, body, self.header)


def oneway(code: int, opaque: int, fields: Mapping[str, object], body: bytes = b"") -> RemotingFrame:
    """Return a request that takes no answer."""
    return RemotingFrame(code, opaque, _ONEWAY, None, {name: str(value) for name, value in fields.items()}, body)


def decode(content: bytes) -> RemotingFrame:
    """Return the frame in what follows a frame's length. Raises FrameFault."""
    if len(content) < 4:
        raise FrameFault("the frame has no header")
    kind, length = content[0], int.from_bytes(content[1:4], "big")
    if length > len(content) - 4:
        raise FrameFault("the header is longer than its frame")
    header, body = content[4 : 4 + length], content[4 + length :]
    try:
        if kind == JSON_HEADER:
            return _of_json(header, body)
        if kind == BINARY_HEADER:
            return _of_binary(header, body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, IndexError) as error:
        raise FrameFault(f"the header cannot be read: {type(error).__name__}") from None
    raise FrameFault(f"the header is of the unknown kind {kind}")


def encode(frame: RemotingFrame) -> bytes:
    """Return a frame's bytes, its length included."""
    header = _to_binary(frame) if frame.header == BINARY_HEADER else _to_json(frame)
    length = 4 + len(header) + len(frame.body)
    return b"".join(
        (length.to_bytes(4, "big"), bytes([frame.header]), len(header).to_bytes(3, "big"), header, frame.body)
    )


def _of_json(header: bytes, body: bytes) -> RemotingFrame:
    read: dict[str, Any] = json.loads(header)
    named = (read.get("extFields") or {}).items()
    fields = {_whole(str(name)): _whole(str(value)) for name, value in named if value is not None}
    remark = read.get("remark")
    return RemotingFrame(
        _int32(read["code"]),
        _int32(read.get("opaque", 0)),
        _int32(read.get("flag", 0)),
        None if remark is None else _whole(str(remark)),
        fields,
        body,
    )


def _whole(text: str) -> str:
    """Return a text with a question mark for each half of a surrogate pair, as Java writes it in UTF-8."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _to_json(frame: RemotingFrame) -> bytes:
    content: dict[str, Any] = {
        "code": frame.code,
        "flag": frame.flag,
        "language": "OTHER",
        "opaque": frame.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": VERSION,
    }
    if frame.remark is not None:
        content["remark"] = frame.remark
    if frame.fields:
        content["extFields"] = dict(frame.fields)
    return json.dumps(content).encode()


def _of_binary(header: bytes, body: bytes) -> RemotingFrame:
    code, _, _, opaque, flag = _fixed.unpack_from(header)
    remark, at = _text(header, _fixed.size, 4)
    at, end = at + 4, at + 4 + int.from_bytes(header[at : at + 4], "big")
    if end > len(header):
        raise FrameFault("the fields are longer than their header")
    fields: dict[str, str] = {}
    while at < end:
        name, at = _text(header, at, 2)
        fields[name], at = _text(header, at, 4)
    return RemotingFrame(code, opaque, flag, remark or None, fields, body, BINARY_HEADER)


def _to_binary(frame: RemotingFrame) -> bytes:
    fields = b"".join(_sized(name, 2) + _sized(value, 4) for name, value in frame.fields.items())
    return b"".join(
        (
            _fixed.pack(frame.code, _OTHER, VERSION, frame.opaque, frame.flag),
            _sized(frame.remark or "", 4),
            len(fields).to_bytes(4, "big"),
            fields,
        )
    )


def _text(header: bytes, at: int, width: int) -> tuple[str, int]:
    if at + width > len(header):
        raise FrameFault("the header ends early")
    start = at + width
    end = start + int.from_bytes(header[at:start], "big")
    if end > len(header):
        raise FrameFault("a text is longer than its header")
    return header[start:end].decode(), end


def _sized(text: str, width: int) -> bytes:
    content = text.encode()
    return len(content).to_bytes(width, "big") + content


def _int32(value: object) -> int:
    number = int(str(value))
    if not -(2**31) <= number < 2**31:
        raise ValueError(value)
    return number
