"""How a page shows a message's body: JSON indented, other text as it is, and binary bytes in hex."""

from dataclasses import dataclass

import msgspec

from app.field_rules import json_of

# A longer body is cut in the page; the API has all of it.
SHOWN_BYTES = 64 * 1024
_ROW = 16


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
    pretty = msgspec.json.format(body, indent=2)
    return BodyView("JSON", pretty[:SHOWN_BYTES].decode(errors="replace"), len(body), len(pretty) > SHOWN_BYTES)


def _text(raw: bytes) -> BodyView | None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if any(ord(character) < 32 and character not in "\t\r\n" for character in text):
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
