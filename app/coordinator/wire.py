"""The requests and answers of the fast path as msgspec structs.

Their validation and their part of the OpenAPI document come from here. Bodies stay the producer's bytes
(`msgspec.Raw`)."""

import re
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app.field_rules import NAME_MAX, NAME_PATTERN, REASON_MAX, has_control_character, may_send_as_json

MESSAGES_MAX = 100
TRANSACTIONS_MAX = 500
POLICY_MAX_S = 86_400

HEADER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_WORD = r"[A-Za-z0-9!#$&^_.+-]+"
# A content type becomes an HTTP header of a delivery, so its parameters hold only what a header may hold.
MEDIA_TYPE = rf"{_WORD}/{_WORD}( *; *{_WORD}=({_WORD}|\"[ !#-\[\]-~]*\"))*"

_header_name = re.compile(HEADER_NAME).fullmatch
_media_type = re.compile(MEDIA_TYPE).fullmatch

UUID7_PATTERN = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-7[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"

Name = Annotated[str, Meta(min_length=1, max_length=NAME_MAX, extra_json_schema={"pattern": NAME_PATTERN})]
Group = Annotated[Name, Meta(description="the producer group, registered before", examples=["shop"])]
# Whole numbers as floats: JSON Schema takes 6.0 for an integer, msgspec's `int` does not.
PolicySeconds = Annotated[float, Meta(ge=1, le=POLICY_MAX_S, multiple_of=1)]
Time = Annotated[datetime, Meta(tz=True)]
UUID7 = Annotated[UUID, Meta(extra_json_schema={"pattern": UUID7_PATTERN})]
ChosenId = Annotated[
    UUID7 | None,
    Meta(
        description="a UUIDv7 that the producer chooses (recommended: a request with it can be repeated safely); a new "
        "id's time is near the coordinator's, by default within 5 minutes (HALFNOTE_ID_SKEW_S). Without it the "
        "coordinator chooses one",
    ),
]


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message: `body` (any JSON, delivered byte for byte) or `body_base64` (any bytes), exactly one of the two."""

    topic: Annotated[Name, Meta(description="not beginning with `halfnote.`", examples=["order"])]
    key: Annotated[
        Name | None,
        Meta(description="what the message is about; a subscription ordered by key delivers in order within it"),
    ] = None
    tag: Annotated[Name | None, Meta(description="a label that subscriptions can filter by")] = None
    headers: Annotated[
        dict[str, str] | None,
        Meta(description="delivered with the message; names must not differ by case only; 8 KiB in total"),
    ] = None
    body: Annotated[Raw, Meta(description="any JSON value, null included; delivered byte for byte")] | UnsetType = UNSET
    body_base64: Annotated[str | None, Meta(description="any bytes, in base64 (RFC 4648 §4)")] = None
    content_type: Annotated[
        Annotated[str, Meta(min_length=3, max_length=NAME_MAX)] | None,
        Meta(description="the body's media type; with `body` a JSON type"),
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
    """Check-back policy of one transaction; overrides its group's."""

    immunity_s: Annotated[PolicySeconds | None, Meta(description="seconds before the first check")] = None
    interval_s: Annotated[PolicySeconds | None, Meta(description="seconds between checks")] = None
    max_checks: Annotated[
        Annotated[float, Meta(ge=1, le=1000, multiple_of=1)] | None,
        Meta(description="answered checks before `on_exhausted`"),
    ] = None
    on_exhausted: Annotated[
        Literal["rollback", "park"] | None, Meta(description="what happens after `max_checks` answers of `unknown`")
    ] = None
    include_body: Annotated[bool, Meta(description="send the bodies with a check")] = False

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
        Annotated[
            Raw, Meta(description="any JSON, at most 4 KiB; a check sends it to the producer, to find its own row by")
        ]
        | UnsetType
    ) = UNSET
    check: CheckPolicy | None = None

    def __post_init__(self) -> None:
        _no_control("producer_group", self.producer_group)


class PlainRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Plain messages, with no local transaction to coordinate: half and commit in one request."""

    producer_group: Group
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    transaction_id: ChosenId = None

    def __post_init__(self) -> None:
        _no_control("producer_group", self.producer_group)


class EndRequest(Struct, forbid_unknown_fields=True):
    """The producer's verdict. `unknown` changes nothing; with `from_check` it answers the open check."""

    transaction_id: Annotated[UUID, Meta(description="the id from the answer of `/half`")]
    producer_group: Annotated[Name, Meta(description="the group that posted the half", examples=["shop"])]
    verdict: Literal["commit", "rollback", "unknown"]
    from_check: Annotated[
        bool, Meta(description="the End answers a check; has an effect only while a check is open")
    ] = False
    reason: Annotated[
        Annotated[str, Meta(max_length=REASON_MAX, extra_json_schema={"pattern": r"^[^\u0000]*$"})] | None,
        Meta(description="why, for people who read it later"),
    ] = None

    def __post_init__(self) -> None:
        _no_control("producer_group", self.producer_group)
        if self.reason is not None and "\x00" in self.reason:
            raise ValueError("`reason`: NUL cannot be stored")


# A request has one `traceparent` header, and clients put the requests of many callers into one.
TraceParents = (
    Annotated[
        list[str | None],
        Meta(
            max_length=TRANSACTIONS_MAX,
            description="the W3C trace context of each transaction, in place of the request's header",
        ),
    ]
    | UnsetType
)


class HalvesRequest(Struct, forbid_unknown_fields=True):
    """Many half messages in one request. Each is stored or refused on its own, as by a request of its own."""

    halves: Annotated[list[HalfRequest], Meta(min_length=1, max_length=TRANSACTIONS_MAX)]
    traceparents: TraceParents = UNSET


class EndsRequest(Struct, forbid_unknown_fields=True):
    """Many verdicts in one request. Each is recorded or refused on its own, as by a request of its own."""

    ends: Annotated[list[EndRequest], Meta(min_length=1, max_length=TRANSACTIONS_MAX)]
    traceparents: TraceParents = UNSET


class PlainsRequest(Struct, forbid_unknown_fields=True):
    """Many transactions of plain messages in one request. Each is committed or refused on its own."""

    transactions: Annotated[list[PlainRequest], Meta(min_length=1, max_length=TRANSACTIONS_MAX)]
    traceparents: TraceParents = UNSET


class HalfMessageAnswer(Struct):
    """A stored message's id."""

    message_id: str
    topic: str


class HalfAnswer(Struct, omit_defaults=True):
    """The half is on disk. No check is sent before `first_check_at`.

    `verdict` is present only if the half was stored before and its verdict is recorded: then do no local work.
    """

    transaction_id: UUID
    born_at: Time
    first_check_at: Time
    replayed: bool
    messages: list[HalfMessageAnswer]
    verdict: Literal["commit", "rollback"] | None = None


class PublishedMessage(Struct):
    """A committed message and its offset in the log."""

    message_id: str
    topic: str
    offset: int


class EndAnswer(Struct, omit_defaults=True):
    """The recorded verdict, on disk. `messages` is present only after a commit."""

    transaction_id: UUID
    verdict: Literal["commit", "rollback"]
    source: Literal["producer", "check", "policy", "operator"]
    decided_at: Time
    replayed: bool
    messages: list[PublishedMessage] | None = None


class UnknownAnswer(Struct):
    """The answer to `unknown`: the transaction is unchanged."""

    transaction_id: UUID
    verdict: Literal["unknown"]
    state: Literal["half", "in_doubt", "parked", "committed", "rolled_back"]


class PlainAnswer(Struct):
    """The messages are committed and on disk."""

    transaction_id: UUID
    committed_at: Time
    replayed: bool
    messages: list[PublishedMessage]


def _no_control(field: str, value: str | None) -> None:
    if value is not None and has_control_character(value):
        raise ValueError(f"`{field}`: control characters are not allowed")


def _check_headers(headers: dict[str, str]) -> None:
    for name, value in headers.items():
        if not _header_name(name):
            raise ValueError("`headers`: a name is 1 to 128 of A-Z a-z 0-9 . _ - and begins with a letter or digit")
        if has_control_character(value):
            raise ValueError(f"`headers.{name}`: control characters are not allowed")
    if len({name.lower() for name in headers}) < len(headers):
        raise ValueError("`headers`: two names differ only by case")


def _check_content_type(content_type: str, *, is_json: bool) -> None:
    if is_json and not may_send_as_json(content_type):
        raise ValueError("`content_type`: `body` is JSON, so this is a JSON type; other types need `body_base64`")
    if not _media_type(content_type):
        raise ValueError("`content_type`: not a media type; send one like `application/json`")
