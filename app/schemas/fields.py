"""Field types that the request and answer models share: names, ids, times, whole numbers."""

import re
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from app.field_rules import (
    NAME_MAX,
    REASON_MAX,
    SUBSCRIPTION_NAME_FORM,
    SUBSCRIPTION_NAME_PATTERN,
    has_control_character,
    is_subscription_name,
)


def _clean(value: str) -> str:
    if has_control_character(value):
        raise ValueError("control characters are not allowed")
    return value


# The pattern is for the document; `_clean` decides, because Python's `$` also matches before a last newline.
_NAME = {"min_length": 1, "max_length": NAME_MAX, "json_schema_extra": {"pattern": r"^[^\u0000-\u001f\u007f]*$"}}
Name = Annotated[str, Field(**_NAME), AfterValidator(_clean)]
NamePath = Annotated[str, Path(**_NAME), AfterValidator(_clean)]


def _subscription_name(value: str) -> str:
    if not is_subscription_name(value):
        raise ValueError(f"a name has {SUBSCRIPTION_NAME_FORM}")
    return value


# The name in a subscription's PUT. Other requests take any name, so that one with a former name can be deleted.
SubscriptionNamePath = Annotated[
    str,
    Path(description=f"it has {SUBSCRIPTION_NAME_FORM}"),
    AfterValidator(_subscription_name),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": NAME_MAX, "pattern": SUBSCRIPTION_NAME_PATTERN}),
]
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_WHOLE_TEXT = re.compile(r"-?\d+(?:\.0+)?", re.A)
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.A)


def _canonical(value: object) -> object:
    # pydantic also takes braces, `urn:uuid:` and bytes, which the document does not promise.
    if isinstance(value, str) and not _UUID.fullmatch(value):
        raise ValueError("a UUID is 36 characters, as 0193a7d6-a5c8-7b1e-8f00-1030a1030a10")
    return value


def _rfc_3339(value: object) -> object:
    # pydantic also takes numbers and times without an offset.
    if not isinstance(value, str) or not _RFC_3339.fullmatch(value):
        raise ValueError("a time is RFC 3339 with its offset, as 2026-11-21T08:00:00Z")
    return value


def _utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time must be between the years 1 and 9999") from None


def _whole(value: object) -> object:
    # pydantic also takes strings and true; to JSON Schema 184.0 is an integer.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


# In a body; in a query everything is a string, and a plain int reads it.
WHOLE = BeforeValidator(_whole)
Whole = Annotated[int, WHOLE]
# The limits come first, or the document would name them as Python does.
Position = Annotated[int, Field(ge=0, le=99), WHOLE]
Id = Annotated[UUID, BeforeValidator(_canonical)]
Time = Annotated[datetime, BeforeValidator(_rfc_3339), AfterValidator(_utc)]


class Strict(BaseModel):
    """A request or answer that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("limit", mode="before", check_fields=False)
    @classmethod
    def _digits(cls, value: object) -> object:
        # In a query pydantic also takes `1_0`, a sign and spaces. To JSON Schema 10.0 is an integer.
        if isinstance(value, str) and not _WHOLE_TEXT.fullmatch(value):
            raise ValueError("must be a whole number")
        return value


class PutChanges(BaseModel):
    """What a PUT changed."""

    changed: list[str] = Field(
        [],
        description="the fields that this PUT changed; empty for a new resource. Secrets are named, not shown",
        examples=[["rate_per_s"]],
    )
    reset: list[str] = Field(
        [],
        description="those of `changed` that the request left out, so they got their defaults",
        examples=[["rate_per_s"]],
    )


DryRun = Annotated[
    bool,
    Query(
        description="true: check the request and answer what it would change, but change nothing and ask no webhook "
        "for consent. No secret is made"
    ),
]


COUNT = "true: the answer has `total`, how many match; this costs more"


class PageQuery(Strict):
    """A page of a list."""

    cursor: Name | None = Field(None, description="`next_cursor` of the page before, with the same order")
    limit: int = Field(100, ge=1, le=1000, description="how many on a page")


class StandingQuery(PageQuery):
    """A page of a list whose items can have their state now."""

    standing: bool = Field(False, description="true: each item has `standing`, its state now; this costs more")
    count: bool = Field(False, description=COUNT)


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("NUL cannot be stored")
    return value


Reason = Annotated[
    str,
    Field(
        min_length=1,
        max_length=REASON_MAX,
        description="the reason, for later readers of the audit",
        examples=["the bank confirmed order 1030 by phone"],
        json_schema_extra={"pattern": r"^[^\u0000]*$"},
    ),
    AfterValidator(_storable),
]
Actor = Annotated[
    Name | None,
    Field(
        description="the person who decides; together with a key's name it is recorded as `erin (key dana)`",
        examples=["dana"],
    ),
]


class ActNote(Strict):
    """The reason of a person's act, and the person, for the audit."""

    reason: Reason | None = None
    actor: Actor = None
