"""What the three hot paths accept and return, as msgspec structs: the one source of their validation and their part of
the OpenAPI document. Bodies stay the producer's bytes (`msgspec.Raw`)."""

import re
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

NAME_MAX = 255
MESSAGES_MAX = 100
REASON_MAX = 1000
POLICY_MAX_S = 86_400

HEADER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
JSON_TYPE = r"application/([a-z0-9.+-]+\+)?json( *; *charset=utf-8)?"
_WORD = r"[A-Za-z0-9!#$&^_.+-]+"
# It becomes an HTTP header of a delivery, so a parameter holds what a header may.
MEDIA_TYPE = rf"{_WORD}/{_WORD}( *; *{_WORD}=({_WORD}|\"[ !#-\[\]-~]*\"))*"

_CONTROL = re.compile(r"[\x00-\x1f\x7f]").search
_header_name = re.compile(HEADER_NAME).fullmatch
_json_type = re.compile(JSON_TYPE, re.IGNORECASE | re.ASCII).fullmatch
_media_type = re.compile(MEDIA_TYPE).fullmatch

# Python's `$` also matches before a last newline, so the document's patterns and the checks are written apart.
NAME_PATTERN = r"^[^\u0000-\u001f\u007f]*$"
UUID7_PATTERN = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-7[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"

Name = Annotated[str, Meta(min_length=1, max_length=NAME_MAX, extra_json_schema={"pattern": NAME_PATTERN})]
Group = Annotated[Name, Meta(description="the producer group, registered before", examples=["shop"])]
# Whole numbers, however they are written: to JSON Schema 6.0 is an integer, to msgspec's `int` it is not.
PolicySeconds = Annotated[float, Meta(ge=1, le=POLICY_MAX_S, multiple_of=1)]
Time = Annotated[datetime, Meta(tz=True)]
UUID7 = Annotated[UUID, Meta(extra_json_schema={"pattern": UUID7_PATTERN})]
ChosenId = Annotated[
    UUID7 | None,
    Meta(
        description="a UUIDv7 of the producer's choice (recommended: repeating a request with it is safe), its time "
        "within 5 minutes of the coordinator's if it is new; else the coordinator chooses",
    ),
]


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message: `body` (any JSON, delivered byte for byte) or `body_base64` (any bytes), exactly one of the two."""

    topic: Annotated[Name, Meta(description="not beginning with `halfnote.`", examples=["order"])]
    key: Annotated[Name | None, Meta(description="what it is about; orders deliveries that are ordered by key")] = None
    tag: Annotated[Name | None, Meta(description="what subscriptions may filter by")] = None
    headers: Annotated[
        dict[str, str] | None,
        Meta(description="delivered along; names differ not by case alone; 8 KiB in all"),
    ] = None
    body: Annotated[Raw, Meta(description="any JSON, also null; it is delivered byte for byte")] | UnsetType = UNSET
    body_base64: Annotated[str | None, Meta(description="any bytes, in base64 (RFC 4648 §4)")] = None
    content_type: Annotated[
        Annotated[str, Meta(min_length=3, max_length=NAME_MAX)] | None,
        Meta(description="of the body; a JSON type with `body`"),
    ] = None
    deliver_after_s: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="seconds from the commit to the delivery")
    ] = None

    def __post_init__(self) -> None:
        _no_control("topic", self.topic)
        _no_control("key", self.key)
        _no_control("tag", self.tag)
        if (self.body is UNSET) == (self.body_base64 is None):
            raise ValueError("`body`: give exactly one of `body` and `body_base64`")
        if self.headers is not None:
            _check_headers(self.headers)
        if self.content_type is not None:
            _check_content_type(self.content_type, is_json=self.body is not UNSET)


class CheckPolicy(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Check-back policy of one transaction, over its group's."""

    immunity_s: Annotated[PolicySeconds | None, Meta(description="seconds before the first check")] = None
    interval_s: Annotated[PolicySeconds | None, Meta(description="seconds between checks")] = None
    max_checks: Annotated[
        Annotated[float, Meta(ge=1, le=1000, multiple_of=1)] | None,
        Meta(description="answered checks before `on_exhausted`"),
    ] = None
    on_exhausted: Annotated[
        Literal["rollback", "park"] | None, Meta(description="what max_checks answers of `unknown` lead to")
    ] = None
    include_body: Annotated[bool, Meta(description="send the bodies along with a check")] = False

    def __post_init__(self) -> None:
        for name in ("immunity_s", "interval_s", "max_checks"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, int(value))


class HalfRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A half message: stored, invisible until its commit."""

    producer_group: Group
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    transaction_id: ChosenId = None
    context: (
        Annotated[Raw, Meta(description="any JSON, 4 KiB; a check brings it back, so that the producer finds its row")]
        | UnsetType
    ) = UNSET
    check: CheckPolicy | None = None

    def __post_init__(self) -> None:
        _no_control("producer_group", self.producer_group)


class PlainRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Messages with nothing to coordinate: half and commit at once."""

    producer_group: Group
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    transaction_id: ChosenId = None

    def __post_init__(self) -> None:
        _no_control("producer_group", self.producer_group)


class EndRequest(Struct, forbid_unknown_fields=True):
    """The producer's verdict. `unknown` changes nothing; with `from_check` it answers the open check."""

    transaction_id: Annotated[UUID, Meta(description="as `/half` answered it")]
    producer_group: Annotated[Name, Meta(description="the group that posted the half", examples=["shop"])]
    verdict: Literal["commit", "rollback", "unknown"]
    from_check: Annotated[bool, Meta(description="it answers a check; counts only while one is open")] = False
    reason: Annotated[
        Annotated[str, Meta(max_length=REASON_MAX, extra_json_schema={"pattern": r"^[^\u0000]*$"})] | None,
        Meta(description="why, for whoever reads it later"),
    ] = None

    def __post_init__(self) -> None:
        _no_control("producer_group", self.producer_group)
        if self.reason is not None and "\x00" in self.reason:
            raise ValueError("`reason`: NUL cannot be stored")


class HalfMessageAnswer(Struct):
    """A stored message's id."""

    message_id: str
    topic: str


class HalfAnswer(Struct):
    """The half is on disk. `first_check_at`: before it nobody is asked."""

    transaction_id: UUID
    born_at: Time
    first_check_at: Time
    replayed: bool
    messages: list[HalfMessageAnswer]


class PublishedMessage(Struct):
    """A committed message and its place in the log."""

    message_id: str
    topic: str
    offset: int


class EndAnswer(Struct, omit_defaults=True):
    """The verdict that stands, on disk; `messages` only after a commit."""

    transaction_id: UUID
    verdict: Literal["commit", "rollback"]
    source: Literal["producer", "check", "policy", "operator"]
    decided_at: Time
    replayed: bool
    messages: list[PublishedMessage] | None = None


class UnknownAnswer(Struct):
    """`unknown` was heard; the transaction is as it was."""

    transaction_id: UUID
    verdict: Literal["unknown"]
    state: Literal["half", "in_doubt", "parked", "committed", "rolled_back"]


class PlainAnswer(Struct):
    """The messages are committed and on disk."""

    transaction_id: UUID
    committed_at: Time
    replayed: bool
    messages: list[PublishedMessage]


def has_control_character(value: str) -> bool:
    """Tell whether a name holds a control character (NUL among them, which Postgres cannot store)."""
    return _CONTROL(value) is not None


def is_json_type(content_type: str) -> bool:
    """Tell whether a content type is JSON: `application/json` or one that ends in `+json`."""
    return _json_type(content_type) is not None


def _no_control(field: str, value: str | None) -> None:
    if value is not None and _CONTROL(value):
        raise ValueError(f"`{field}`: control characters are not allowed")


def _check_headers(headers: dict[str, str]) -> None:
    for name, value in headers.items():
        if not _header_name(name):
            raise ValueError("`headers`: a name is 1 to 128 of A-Z a-z 0-9 . _ - and begins with a letter or digit")
        if _CONTROL(value):
            raise ValueError(f"`headers.{name}`: control characters are not allowed")
    if len({name.lower() for name in headers}) < len(headers):
        raise ValueError("`headers`: two names differ by case alone")


def _check_content_type(content_type: str, *, is_json: bool) -> None:
    if is_json and not _json_type(content_type):
        raise ValueError("`content_type`: `body` is JSON, so this is a JSON type; other types need `body_base64`")
    if not _media_type(content_type):
        raise ValueError("`content_type`: not a media type, as `application/json`")
