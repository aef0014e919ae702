"""Requests and answers of the dead-letter routes. An absent optional field is left out; null is a value."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from app.field_rules import ERROR_KIND_MAX, has_control_character
from app.ids import parse_message_id
from app.schemas.fields import Actor, Name, Reason, Strict, Time, Whole
from app.schemas.totals import TOTAL, TotalShown
from app.schemas.transactions import ID, Shown

IDS_MAX = 1000
AT_MOST = 10_000
REPLAY_MAX = 2**31 - 1

_UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
MESSAGE_ID = f"^{_UUID}-[0-9]{{1,3}}$"
AT = "2026-11-21T08:00:00.000000Z"

FILTER_EXAMPLE = {"subscription": "mailer", "topic": "order", "died_after": "2026-11-21T00:00:00Z"}
BY_IDS_EXAMPLE: dict[str, Any] = {
    "ids": [{"subscription": "mailer", "message_id": f"{ID}-0"}],
    "reason": "the receiver is repaired",
    "actor": "dana",
}
BY_FILTER_EXAMPLE: dict[str, Any] = {
    "filter": FILTER_EXAMPLE,
    "dry_run": False,
    "at_most": 1000,
    "reason": "the receiver is repaired",
    "actor": "dana",
}


def _check_message_id(value: str) -> str:
    if parse_message_id(value) is None:
        raise ValueError("a message_id is `<transaction_id>-<position>`")
    return value


MessageIdText = Annotated[
    str, AfterValidator(_check_message_id), WithJsonSchema({"type": "string", "pattern": MESSAGE_ID})
]


def _check_kind(value: str) -> str:
    if has_control_character(value):
        raise ValueError("control characters are not allowed")
    return value


OF_KIND = "of this kind of error: `error` of a group of `GET /dead-letters/groups`"
Kind = Annotated[
    str,
    Field(min_length=1, max_length=ERROR_KIND_MAX, json_schema_extra={"pattern": r"^[^\u0000-\u001f\u007f]*$"}),
    AfterValidator(_check_kind),
]


# Time of death in microseconds, message, subscription and replay.
_CURSOR = "([0-9]{1,16})_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-([0-9]{1,3})_([0-9]{1,9})_([0-9]{1,9})"
match_cursor = re.compile(_CURSOR).fullmatch


def _check_cursor(value: str) -> str:
    if match_cursor(value) is None:
        raise ValueError("send the `next_cursor` of the previous answer")
    return value


Cursor = Annotated[
    str, AfterValidator(_check_cursor), WithJsonSchema({"type": "string", "pattern": f"^{_CURSOR.replace('?:', '')}$"})
]


class DeadLetterId(Strict):
    """One dead letter."""

    subscription: Name = Field(examples=["mailer"])
    message_id: MessageIdText = Field(examples=[f"{ID}-0"])
    replay: Whole = Field(0, ge=0, le=REPLAY_MAX, description="the replay of the dead letter; 0: live delivery")


def _write_filter(schema: dict[str, Any]) -> None:
    schema.update(minProperties=1, examples=[FILTER_EXAMPLE])
    for field in schema["properties"].values():
        field.pop("default")


class DeadLetterFilter(Strict):
    """A filter. A dead letter must match all of it. At least one field is required."""

    model_config = ConfigDict(json_schema_extra=_write_filter)

    subscription: Name | SkipJsonSchema[None] = Field(None, description="of this subscription", examples=["mailer"])
    topic: Name | SkipJsonSchema[None] = Field(None, description="of this topic", examples=["order"])
    key: Name | SkipJsonSchema[None] = Field(None, description="of this key", examples=["order-1030"])
    reason: Name | SkipJsonSchema[None] = Field(
        None, description="dead for this reason", examples=["retries_exhausted"]
    )
    error: Kind | SkipJsonSchema[None] = Field(None, description=OF_KIND, examples=["answered 503"])
    died_after: Time | SkipJsonSchema[None] = Field(None, description="died at this time or later")
    died_before: Time | SkipJsonSchema[None] = Field(None, description="died before this time")

    @field_validator("*", mode="before")
    @classmethod
    def _is_something(cls, value: Any) -> Any:
        # A null, as from an unset variable, must not select everything.
        if value is None:
            raise ValueError("leave it out instead of sending null")
        return value

    @model_validator(mode="after")
    def _asks_for_something(self) -> "DeadLetterFilter":
        if not self.model_fields_set:
            raise ValueError("name at least one of subscription, topic, key, reason, error, died_after, died_before")
        return self


class _Deed(Strict):
    reason: Reason | None = None
    actor: Actor = None


class ByIds(_Deed):
    """Selects dead letters by id."""

    model_config = ConfigDict(json_schema_extra={"examples": [BY_IDS_EXAMPLE]})

    ids: list[DeadLetterId] = Field(min_length=1, max_length=IDS_MAX)
    died_before: Time | SkipJsonSchema[None] = Field(
        None, description="only those that died before this time: not one that was redelivered and died again"
    )


class ByFilter(_Deed):
    """Selects all dead letters that match a filter, newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [BY_FILTER_EXAMPLE]})

    filter: DeadLetterFilter
    dry_run: bool = Field(True, strict=True, description="report what would change; send false to change it")
    at_most: Whole = Field(1000, ge=1, le=AT_MOST, description="the maximum number; `left` says how many remain")
    cursor: Cursor | SkipJsonSchema[None] = Field(
        None, description="`next_cursor` of the previous answer, to go on where it ended"
    )


def _kind(value: Any) -> str:
    return "by_ids" if isinstance(value, dict) and "ids" in value else "by_filter"


# The fields of the request select the kind, so a refusal names only fields of that kind.
Selection = Annotated[Annotated[ByIds, Tag("by_ids")] | Annotated[ByFilter, Tag("by_filter")], Discriminator(_kind)]


class DeadLetterRef(Shown):
    """The id of a dead letter in a request."""

    subscription: str = Field(examples=["mailer"])
    message_id: str = Field(examples=[f"{ID}-0"])
    replay: int | None = Field(None, description="the replay, if not the live delivery")


class DeadLetterRow(DeadLetterRef):
    """A dead letter in a list."""

    topic: str = Field(examples=["order"])
    key: str | None = Field(examples=["order-1030"])
    offset: int = Field(examples=[1030])
    attempts: int = Field(description="tries that were used up", examples=[17])
    reason: str = Field(
        description="`retries_exhausted`, `day_left` (its day was removed first), `expired` or `backlog` (it waited "
        "too long, or too many waited), or the reason of the receiver",
        examples=["retries_exhausted"],
    )
    status: int | None = Field(None, description="the HTTP status of the last answer", examples=[500])
    error: str | None = Field(None, description="the last error", examples=["answered 500"])
    died_at: datetime = Field(examples=[AT])


class DeadLetterPage(Shown):
    """A page of dead letters, newest first."""

    items: list[DeadLetterRow]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)


class DeadLetterGroupShown(Shown):
    """Dead letters of one subscription, with one reason and one kind of error."""

    subscription: str = Field(examples=["mailer"])
    reason: str = Field(examples=["retries_exhausted"])
    error: str = Field(
        description="the kind of error: the text with `#` for addresses, ids and numbers of four digits or more, cut "
        "at 200 characters; `none`: no error is on record",
        examples=["answered 503"],
    )
    newest: str | None = Field(description="the error of the newest, as it was", examples=["answered 503"])
    status: int | None = Field(description="an HTTP status of the last answers", examples=[503])
    count: int = Field(examples=[42])
    first_at: datetime = Field(description="when the first of them died", examples=[AT])
    last_at: datetime = Field(description="when the last of them died", examples=[AT])


class DeadLetterGroupPage(Shown):
    """Groups of dead letters."""

    items: list[DeadLetterGroupShown]
    groups: int = Field(description="the number of groups, those that `limit` left out included", examples=[1])
    looked_at: int = Field(description="the dead letters that were looked at", examples=[42])
    complete: bool = Field(description="false: older dead letters were not looked at", examples=[True])


class EarlierRedelivery(Shown):
    """An earlier redelivery, after which the message died again."""

    at: datetime
    actor: str | None = None
    reason: str | None = None


class DeadLetterShown(DeadLetterRow):
    """A dead letter: the result of its last attempt, and the message."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    tag: str | None = Field(examples=["created"])
    headers: dict[str, str]
    content_type: str = Field(examples=["application/json"])
    first_at: datetime | None = Field(None, description="the first attempt")
    committed_at: datetime | None = None
    response: str | None = Field(None, description="the beginning of the last answer")
    redelivered: list[EarlierRedelivery] = Field(
        description="earlier redeliveries, oldest first; the latest `HALFNOTE_ATTEMPTS_PAGE_MAX` (1,000)"
    )
    body: Any = Field(None, description="the body, byte for byte, if it is JSON", examples=[{"order": 1030}])
    body_base64: str | None = Field(None, description="any other body; one of the three is there")
    body_hidden: bool | None = Field(None, description="true: the key may not read bodies")


class Waiting(Shown):
    """A subscription that does not deliver now."""

    subscription: str = Field(examples=["mailer"])
    state: Literal["paused", "disabled"]


class _Acted(Shown):
    dry_run: bool = Field(description="true: nothing was changed")
    not_found: int = Field(description="the number of `ids` that are not dead letters, or no longer")
    left: int = Field(
        description="dead letters that still match the filter, counted up to 100,000 and for 10 s; 0 for `ids`"
    )
    left_exact: bool = Field(description="false: there are more, or may be")
    ids: list[DeadLetterRef] = Field(
        description="the dead letters; in a dry run the first ones concerned, newest first"
    )
    died_before: datetime | None = Field(
        None,
        description="of a dry run: send it in the filter to leave out what dies after this answer",
        examples=[AT],
    )
    next_cursor: str | None = Field(
        None,
        description="of an act by a filter that ended after `at_most`, after 30 s, or by a failure of the database "
        "after a part was done: send it as `cursor` to go on",
    )


class RedeliverAnswer(_Acted):
    """The result of a redelivery."""

    redelivered: int
    waiting: list[Waiting] = Field(description="subscriptions that must be resumed before delivery")


class DropAnswer(_Acted):
    """The result of a drop."""

    dropped: int
