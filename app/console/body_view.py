"""How a page shows a message's body: JSON indented, other text as it is, and binary bytes in hex."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from app.field_rules import json_of

# A longer body is cut in the page; the API has all of it.
SHOWN_BYTES = 64 * 1024
_ROW = 16
_INDENT = b"  "
_SPACE = re.compile(rb"[ \t\r\n]*")
# A token of JSON. A string without its closing quote is one that was cut.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}:,]|[^\[\]{}:," \t\r\n]+', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


@dataclass(frozen=True, slots=True)
class BodyView:
    """A body as text. `size` is in bytes."""

    form: str
    text: str
    size: int
    is_cut: bool


def body_of(body: bytes, content_type: str) -> BodyView:
    """Return a message's body. JSON keeps its numbers as they were."""
    if json_of(body, content_type) is None:
        return _text(body) or _hex(body)
    pretty = _indented(body)
    return BodyView("JSON", pretty[:SHOWN_BYTES].decode(errors="replace"), len(body), len(pretty) > SHOWN_BYTES)


def _indented(json: bytes) -> bytes:
    """Return valid JSON indented, up to the first token past SHOWN_BYTES.

    The rest is not written: at 900 levels each element has 1,800 spaces, so 4 MiB of JSON would become gigabytes.
    """
    pretty, depth, opened = bytearray(), 0, False
    for token in _tokens(json):
        closes = token in (b"]", b"}")
        depth -= closes
        # An empty array or object stays on one line.
        if opened != closes:
            pretty += b"\n" + _INDENT * depth
        pretty += token
        opened = token in (b"[", b"{")
        depth += opened
        if token == b",":
            pretty += b"\n" + _INDENT * depth
        elif token == b":":
            pretty += b" "
        if len(pretty) > SHOWN_BYTES:
            break
    return bytes(pretty)


def _tokens(json: bytes) -> Iterator[bytes]:
    """Yield the tokens of valid JSON, of each at most what a page shows."""
    at = 0
    while True:
        space = _SPACE.match(json, at)
        assert space is not None
        token = _TOKEN.match(json, space.end(), space.end() + SHOWN_BYTES + 2)
        if token is None:
            return
        yield token[0]
        at = token.end()


def _text(raw: bytes) -> BodyView | None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if _CONTROL.search(raw):
        return None
    return BodyView("text", text[:SHOWN_BYTES], len(raw), len(text) > SHOWN_BYTES)


def _hex(raw: bytes) -> BodyView:
    shown = raw[: SHOWN_BYTES // 4]
    lines = []
    for start in range(0, len(shown), _ROW):
        row = shown[start : start + _ROW]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<{_ROW * 3 - 1}}  {characters}")
    return BodyView("binary", "\n".join(lines), len(raw), len(shown) < len(raw))
