"""Claims of consumers: requests and answers."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from app.field_rules import REASON_MAX
from app.schemas.fields import Strict, Whole
from app.schemas.transactions import ID

# A claim that the request does not bound; a setting may bound it more.
CLAIM_DEFAULT, HELD_DEFAULT_S = 10, 30
# The longest time for which a claim waits for a message, and for which a message waits that was given back.
WAIT_MOST_S, RETRY_AFTER_MOST_S = 30, 43_200
# The longest time for which a consumer may hold messages.
HELD_MOST_S = 43_200
HANDLES_MAX, HANDLE_MAX = 1000, 500

HANDLE = "AQAAAAcAAAAA" + "A" * 128
MESSAGE_EXAMPLE: dict[str, Any] = {
    "handle": HANDLE,
    "message_id": f"{ID}-0",
    "offset": 1030,
    "producer_group": "shop",
    "topic": "order",
    "key": "order-1030",
    "tag": None,
    "headers": {},
    "content_type": "application/json",
    "committed_at": "2026-11-21T08:00:05Z",
    "attempt": 1,
    "replay": None,
    "traceparent": None,
    "body": {"order": 1030},
}

Handle = Annotated[str, Field(min_length=1, max_length=HANDLE_MAX)]
Handles = Annotated[
    list[Handle], Field(min_length=1, max_length=HANDLES_MAX, description="of messages that this consumer holds")
]
Seconds = Annotated[float, Field(gt=0, strict=True)]


class MessageClaim(Strict):
    """What a consumer asks for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"max": 100, "invisible_s": 60, "wait_s": 20}]})

    max: Whole = Field(
        CLAIM_DEFAULT,
        ge=1,
        le=10_000,
        description="the most messages; at most HALFNOTE_CLAIM_MAX (1000 by default), which also lowers the default",
    )
    invisible_s: float = Field(
        HELD_DEFAULT_S,
        ge=1,
        le=HELD_MOST_S,
        strict=True,
        description="for how long the messages are this consumer's; what is not settled by then comes again, as the "
        "next attempt. At most HALFNOTE_CLAIM_HELD_MAX_S (12 hours by default), which also lowers the default",
    )
    wait_s: float = Field(
        0,
        ge=0,
        le=WAIT_MOST_S,
        strict=True,
        description="how long the request waits for a message if there is none. A waiting request costs the database "
        "nothing",
    )


class AcknowledgeRequest(Strict):
    """Messages that a consumer has worked on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"handles": [HANDLE]}]})

    handles: Handles


class GiveBackRequest(Strict):
    """Messages that a consumer could not work on."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"handles": [HANDLE], "retry_after_s": 5.0, "error": "the printer is out"}]}
    )

    handles: Handles
    retry_after_s: float | None = Field(
        None,
        ge=0,
        le=RETRY_AFTER_MOST_S,
        strict=True,
        description="when they come again; not given: as the subscription's `retry` says, or after a second if they "
        "were not begun",
    )
    begun: bool = Field(
        True,
        strict=True,
        description="false: the consumer has not begun to work on them. Each then comes again as the same attempt, and "
        "no try is used up, for 72 hours from its first claim; not sooner than after a second",
    )
    error: str = Field(
        "the consumer gave it back",
        min_length=1,
        max_length=REASON_MAX,
        description="the reason, for people who look at the delivery; NUL is replaced by U+FFFD",
    )


class ExtendRequest(Strict):
    """Messages that a consumer still works on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"handles": [HANDLE], "invisible_s": 300}]})

    handles: Handles
    invisible_s: float = Field(ge=1, le=HELD_MOST_S, strict=True, description="from now on, as in a claim")


class RejectRequest(Strict):
    """Messages that no consumer can work on."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"handles": [HANDLE], "reason": "the order has no address"}]}
    )

    handles: Handles
    reason: str = Field(
        "rejected by the consumer",
        min_length=1,
        max_length=REASON_MAX,
        description="the reason of the dead letters; NUL is replaced by U+FFFD",
    )


class ClaimedMessageShown(BaseModel):
    """A message of a claim, with its body: `body` if it is JSON, else `body_base64`."""

    model_config = ConfigDict(json_schema_extra={"examples": [MESSAGE_EXAMPLE]})

    handle: str = Field(description="what settles the message; opaque, and the same until it is settled")
    message_id: str = Field(description="the same at each attempt; a consumer knows a message by it that came before")
    offset: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: dict[str, str]
    content_type: str
    committed_at: datetime
    attempt: int = Field(description="from 1")
    replay: int | None = Field(description="the replay that sends it again; null: the live delivery")
    traceparent: str | None = Field(description="the trace context of the producer's half, if it had one")
    body: Any = Field(None, description="the producer's JSON, byte for byte")
    body_base64: str | None = Field(None, description="any other body")


class ClaimedMessages(BaseModel):
    """The messages of a claim; none if nothing was there."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [MESSAGE_EXAMPLE], "held_until": "2026-11-21T08:00:35Z", "more": False}]
        }
    )

    messages: list[ClaimedMessageShown]
    held_until: datetime = Field(description="the messages are this consumer's until then")
    more: bool = Field(description="there may be more to claim now")


class SettledMessage(BaseModel):
    """The outcome of one handle: 200, or the fields of a problem, with its status."""

    status: int
    message_id: str | None = Field(None, description="null if the handle is none")
    replayed: bool | None = Field(None, description="acknowledge: true if it was acknowledged before by this handle")
    result: str | None = Field(None, description="nack, reject: `retry` or `dead`")
    due_at: datetime | None = Field(None, description="when a retry is due")
    held_until: datetime | None = Field(None, description="extend: the message is this consumer's until then")
    type: str | None = Field(None, description="of a problem: `/problems/not-held` or `/problems/handle-invalid`")
    title: str | None = None
    detail: str | None = None


class SettledMessages(BaseModel):
    """An outcome for each handle, in the order of the request."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"outcomes": [{"status": 200, "message_id": f"{ID}-0", "replayed": False}]}],
        }
    )

    outcomes: list[SettledMessage]
