"""Decodes a request's bytes to a struct, with errors that name the field."""

import re
from typing import TypeVar

import msgspec

from app.errors import Invalid, MalformedJson

T = TypeVar("T")

_any = msgspec.json.Decoder(msgspec.Raw).decode

# msgspec's text ends with " - at `$.messages[0].topic`". The text of our own checks begins with "`topic`: ".
_WHERE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"^`(?P<field>[^`]+)`: ")
# Of an escaped surrogate without its other half, near the end of a body, msgspec says only that the body is cut.
_CUT = "Input data was truncated"
_half_at_end = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}.{0,5}\Z", re.DOTALL).search
_UNKNOWN = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<field>[^`]+)`")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a JSON body. Raises MalformedJson if it is not JSON, Invalid (with `field`) if it does not fit."""
    try:
        if not body.isascii():
            # msgspec copies raw values unchecked, so their encoding is checked here.
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # msgspec stops at the first wrong field, so the rest of the body is not checked yet.
        check_json(body)
        raise _invalid(str(error)) from None
    except UnicodeDecodeError as error:
        raise MalformedJson(f"The body is not UTF-8 (byte {error.start}).") from None
    except (RecursionError, msgspec.DecodeError) as error:
        raise _malformed(error, body) from None


def check_json(body: bytes) -> None:
    """Raise MalformedJson unless the whole body is JSON."""
    try:
        body.decode()
        _any(body)
    except UnicodeDecodeError as error:
        raise MalformedJson(f"The body is not UTF-8 (byte {error.start}).") from None
    except (RecursionError, msgspec.DecodeError) as error:
        raise _malformed(error, body) from None


def _malformed(error: Exception, body: bytes) -> MalformedJson:
    if isinstance(error, RecursionError):
        return MalformedJson("The body is nested too deeply.")
    if str(error) == _CUT and _ends_with_half_a_pair(body):
        return MalformedJson("JSON is malformed: an escaped utf-16 surrogate pair has only its first half.")
    return MalformedJson(f"{error}.")


def _ends_with_half_a_pair(body: bytes) -> bool:
    found = _half_at_end(body, max(0, len(body) - 16))
    if found is None:
        return False
    # After an odd number of backslashes this one is escaped itself.
    before = body[: found.start()]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _invalid(text: str) -> Invalid:
    where = _WHERE.search(text)
    path = where["path"] if where else ""
    text = text[: where.start()] if where else text
    own = _FIELD.search(text) or _UNKNOWN.search(text)
    if own is not None:
        path = f"{path}.{own['field']}" if path else own["field"]
    return Invalid(f"{text}." if not text.endswith(".") else text, field=path or "(body)")
