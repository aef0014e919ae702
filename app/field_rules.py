"""Rules of single fields that the wire structs, the API models and the destinations share."""

import re
from functools import lru_cache

import msgspec

NAME_MAX = 255
REASON_MAX = 1000
# One message or request in 10,000 seconds. The time between two must be one that can be added to a date.
RATE_LEAST_PER_S = 0.0001
# The kind of an error: its text without what varies.
ERROR_KIND_MAX = 200
# What a producer may send with `body`: as narrow as the API document says. Reading is wider, see `is_json_type`.
JSON_BODY_TYPE = r"application/([a-z0-9.+-]+\+)?json( *; *charset=utf-8)?"
# Names of subscriptions: one segment of a URL's path without percent-encoding, and no `*`, which means a prefix in a
# key's scope.
SUBSCRIPTION_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$"
SUBSCRIPTION_NAME_FORM = "1 to 255 letters, digits, `.`, `_`, `-`, `:` and `@`, the first one a letter or a digit"
_subscription_name = re.compile(SUBSCRIPTION_NAME_PATTERN[1:-1]).fullmatch
_CONTROL = re.compile(r"[\x00-\x1f\x7f]").search
_json_body_type = re.compile(JSON_BODY_TYPE, re.IGNORECASE | re.ASCII).fullmatch
_raw = msgspec.json.Decoder(msgspec.Raw).decode
# Python's `$` also matches before a last newline, so the document's patterns and the checks are written apart.
NAME_PATTERN = r"^[^\u0000-\u001f\u007f]*$"


def has_control_character(value: str) -> bool:
    """Return whether a name holds a control character (NUL among them, which Postgres cannot store)."""
    # Almost all names are printable, and then hold none. The method takes a fraction of the time of the expression.
    return not value.isprintable() and _CONTROL(value) is not None


def rate_of_stored(rate_per_s: float | None) -> float | None:
    """Return a stored rate, or the lowest one that is accepted: an older version also stored lower ones."""
    return None if rate_per_s is None else max(rate_per_s, RATE_LEAST_PER_S)


def is_subscription_name(name: str) -> bool:
    """Return whether a new subscription may have this name."""
    return len(name) <= NAME_MAX and _subscription_name(name) is not None


def may_send_as_json(content_type: str) -> bool:
    """Return whether a producer may send a message of this content type with `body` rather than `body_base64`."""
    return _json_body_type(content_type) is not None


@lru_cache(maxsize=1024)
def is_json_type(content_type: str) -> bool:
    """Return whether a content type declares JSON: the subtype is `json` or ends in `+json`; parameters do not matter.

    RFC 8259 §11 registers `application/json`, RFC 6838 §4.2.8 the suffix for any type; CloudEvents' JSON format 1.0.2
    §3.1.1 takes a subtype `json` of any type, such as the unregistered `text/json`.
    """
    subtype = content_type.partition(";")[0].partition("/")[2].strip().lower()
    return subtype == "json" or subtype.endswith("+json")


def json_of(body: bytes, content_type: str) -> msgspec.Raw | None:
    """Return a message's body as JSON that may stand verbatim inside other JSON; None: it can be shown in base64 only.

    A body sent as `body_base64` under a JSON content type was never parsed, so it is parsed here: it must be one JSON
    value (RFC 8259) in UTF-8.
    """
    if not is_json_type(content_type):
        return None
    try:
        # The decoder copies raw values without a look at their encoding.
        body.decode()
        _raw(body)
    except (UnicodeDecodeError, RecursionError, msgspec.DecodeError):
        return None
    return msgspec.Raw(body)


# What a subscription's own headers may not set: what HTTP needs, and what Halfnote says itself.
DENIED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
DENIED_PREFIXES = ("webhook-", "ce-", "halfnote-", "proxy-")


def header_fault(name: str, value: str) -> str | None:
    """Say why a subscription may not send this header of its own, or None."""
    if not name or not name.isascii() or not all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name):
        return "is not an HTTP header name"
    if name.lower() in DENIED or name.lower().startswith(DENIED_PREFIXES):
        return "is set by Halfnote or by HTTP itself and cannot be given"
    if not all(" " <= c <= "~" for c in value) or value != value.strip():
        return "has a value that is not printable ASCII without outer spaces"
    return None
