"""The body of `PUT /subscriptions/{name}`."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from app.field_rules import NAME_MAX, NAME_PATTERN, RATE_LEAST_PER_S
from app.policy.delivery_retry import DEFAULT_RETRY
from app.schemas.destination_fields import HEADERS_MAX
from app.schemas.destinations import PULL_EXAMPLE, PUT_EXAMPLES, WEBHOOK_EXAMPLE, DestinationPut
from app.schemas.fields import Name, Strict, Time, Whole

TOPICS_MAX = 100
TAGS_MAX = 100
RETRIES_MAX = 100
SHARDS_MAX = 64
# A limit of waiting messages that is lower would expire messages of a healthy subscription.
EXPIRE_AFTER_LEAST_S, EXPIRE_AFTER_MOST_S = 60, 3_888_000
BACKLOG_LEAST = 100
# The largest integer that every reader of JSON keeps.
OFFSET_MAX = 2**53 - 1

_TOPIC = r"([^\u0000-\u001f\u007f*]+\*?|\*)"
_topic = re.compile(r"([^\x00-\x1f\x7f*]+\*?|\*)").fullmatch


def _check_topic(value: str) -> str:
    if len(value) > 255 or not _topic(value):
        raise ValueError("a topic, or the beginning of one with a single `*` at its end, of 1 to 255 characters")
    return value


TopicPattern = Annotated[
    str,
    AfterValidator(_check_topic),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 255, "pattern": f"^{_TOPIC}$"}),
]
_NAME = {"type": "string", "minLength": 1, "maxLength": NAME_MAX, "pattern": NAME_PATTERN}
WantedHeaders = Annotated[
    dict[Name, Name],
    Field(min_length=1, max_length=HEADERS_MAX),
    # pydantic would write the pattern of the names as optional for other names.
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": HEADERS_MAX,
            "propertyNames": _NAME,
            "additionalProperties": _NAME,
        }
    ),
]
WantedTags = Annotated[list[Name], Field(min_length=1, max_length=TAGS_MAX)]
Backlog = Annotated[
    Whole,
    Field(ge=BACKLOG_LEAST, le=OFFSET_MAX),
    WithJsonSchema({"type": "integer", "minimum": BACKLOG_LEAST, "maximum": OFFSET_MAX}),
]
RetryWait = Annotated[float, Field(ge=0, le=2_592_000, strict=True)]

SHAPE_EXAMPLE: dict[str, Any] = {
    "topics": ["order", "billing.*"],
    "filters": {"tags": ["created"], "headers": {"region": "eu"}},
    "destination": WEBHOOK_EXAMPLE,
    "start": "latest",
    "ordered": "none",
    "on_dead": "release",
    "shards": 1,
    "max_in_flight": 64,
    "rate_per_s": 500.0,
    "timeout_s": 10,
    "retry": [10, 30, 60, 120, 300],
    "expire_after_s": 604_800,
    "max_backlog": None,
}
_EXAMPLES: list[Any] = [
    SHAPE_EXAMPLE,
    *(
        {"topics": ["order"], "destination": one, "ordered": "key", "on_dead": "hold", "shards": 4}
        for one in PUT_EXAMPLES[1:]
    ),
    {"topics": ["order"], "destination": PULL_EXAMPLE, "ordered": "key"},
]


_IS_PULL: dict[str, Any] = {"properties": {"type": {"const": "pull"}}}
# What a subscription may have whose messages consumers claim, as JSON Schema.
PULL_ONLY: dict[str, Any] = {
    "shards": {"const": 1},
}


class Filters(Strict):
    """Filters besides the topic: one of the tags, and every header, as the producer sent them."""

    tags: WantedTags | None = Field(None, description="any of these")
    headers: WantedHeaders | None = Field(None, description="all of these, names and values exactly")


class StartOffset(Strict):
    """Begin after an offset."""

    offset: Whole = Field(ge=0, le=OFFSET_MAX)


class StartTime(Strict):
    """Begin with what was committed at a time or later, and up to a second before, because clocks step."""

    time: Time


Start = Literal["latest", "earliest"] | StartOffset | StartTime


class SubscriptionPut(Strict):
    """A subscription in a PUT. Durations are seconds. A missing field gets its default."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": _EXAMPLES,
            "anyOf": [
                {"properties": {"on_dead": {"const": "release"}}},
                {"properties": {"ordered": {"const": "key"}}, "required": ["ordered"]},
            ],
            "allOf": [{"anyOf": [{"properties": {"destination": {"not": _IS_PULL}}}, {"properties": PULL_ONLY}]}],
        }
    )

    topics: Annotated[
        list[TopicPattern],
        Field(
            min_length=1,
            max_length=TOPICS_MAX,
            description="names, or prefixes with one `*` at the end. Reserved topics (`halfnote.…`) match only a name "
            "or prefix that begins with `halfnote.`; `*` does not match them",
        ),
    ]
    filters: Filters | None = None
    destination: DestinationPut
    start: Start = Field("latest", description="the start position; read only when the subscription is created")
    ordered: Literal["none", "key"] = Field(
        "none",
        description="key: messages of one key go one at a time, in offset order, over retries, restarts and replicas. "
        "A failing key delays only its own messages. Messages without a key have no order",
    )
    on_dead: Literal["release", "hold"] = Field(
        "release",
        description="with `ordered: key`, after a death: `release` delivers the next messages of its key; `hold` "
        "keeps them until a person redelivers or drops the dead letter",
    )
    shards: Whole = Field(
        1,
        ge=1,
        le=SHARDS_MAX,
        description="how many workers share the subscription, each with a part by hash of the key (without a key, of "
        "the message id). A new number takes effect within seconds, once the leases are released, and keeps the order",
    )
    max_in_flight: Whole = Field(64, ge=1, le=1000, description="requests in flight at once, per shard")
    rate_per_s: float | None = Field(
        None,
        ge=RATE_LEAST_PER_S,
        le=100_000,
        strict=True,
        description="messages per second at most, replays and retries included, divided among the shards. Bursts "
        "are smoothed and wait in the log. Not given: no limit",
    )
    timeout_s: float = Field(10.0, ge=0.1, le=60, strict=True, description="for a whole answer")
    retry: list[RetryWait] = Field(
        default_factory=lambda: list(DEFAULT_RETRY),
        max_length=RETRIES_MAX,
        description="wait after each failed try, ± 10 %; after the last one a dead letter. Not given: 10 s, "
        "30 s, 1 to 10 min by minutes, 20 min, 30 min, 1 h, 2 h",
    )
    expire_after_s: float | None = Field(
        None,
        ge=EXPIRE_AFTER_LEAST_S,
        le=EXPIRE_AFTER_MOST_S,
        strict=True,
        description="a message that waits longer becomes a dead letter with the reason `expired`, also while the "
        "subscription is paused or disabled. It waits from its commit, or from its due time; a replay's message from "
        "the start of the replay; a redelivered one from then on. Not given: messages wait until their day is removed",
    )
    max_backlog: Backlog | None = Field(
        None,
        description="while more messages than this wait, the oldest become dead letters with the reason `backlog`; "
        "counted for each shard, without replays. A longer backlog of less than ten seconds has no effect. Not given: "
        "no limit",
    )

    @field_validator("on_dead")
    @classmethod
    def _holds_keys(cls, value: str, info: ValidationInfo) -> str:
        if value == "hold" and info.data.get("ordered") == "none":
            raise ValueError("`hold` requires `ordered: key`")
        return value
