"""The answer to why a transaction's messages were delivered or were not."""

import re
from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import AfterValidator, Field, WithJsonSchema

from app.schemas.transactions import AT, ID, Shown
from app.verdicts import DeliveryReason, State

_CURSOR = "([0-9]{1,2})-([0-9]{1,9})"
_cursor = re.compile(_CURSOR).fullmatch


def _is_cursor(value: str) -> str:
    if _cursor(value) is None:
        raise ValueError("send the `deliveries_cursor` of the previous answer")
    return value


WhyCursor = Annotated[str, AfterValidator(_is_cursor), WithJsonSchema({"type": "string", "pattern": f"^{_CURSOR}$"})]


def why_cursor(place: tuple[int, int] | None) -> str | None:
    """Return the cursor of a place, a message's position and how many of its explanations came before; None: none."""
    return None if place is None else f"{place[0]}-{place[1]}"


def place_of_why(cursor: WhyCursor) -> tuple[int, int]:
    """Return the place that a cursor names."""
    position, skip = cursor.split("-")
    return int(position), int(skip)


class DeliveryWhy(Shown):
    """Why one subscription has got a message or has not."""

    subscription: str = Field(examples=["mailer"])
    reason: DeliveryReason = Field(examples=["breaker_open"])
    sentence: str = Field(
        description="the reason for people, with names and times",
        examples=["Not sent: the circuit breaker is open since 2026-11-21 08:00:00 UTC, as the destination fails."],
    )
    attempts: int = Field(description="attempts so far")
    at: datetime | None = Field(
        description="when it was delivered, died, expired or was dropped, or since when the reason holds", examples=[AT]
    )
    next_at: datetime | None = Field(description="when it is tried next, or the producer is asked", examples=[None])
    error: str | None = Field(description="the last error", examples=[None])
    behind: str | None = Field(description="the earlier message of its key that it waits for", examples=[None])


class MessageWhy(Shown):
    """Why a message was delivered or was not: as a whole, and by each subscription. Those that take it come first."""

    message_id: str = Field(examples=[f"{ID}-0"])
    topic: str = Field(examples=["order"])
    key: str | None = Field(examples=["order-1030"])
    tag: str | None = Field(examples=[None])
    offset: int | None = Field(description="null before the commit", examples=[1030])
    reason: DeliveryReason = Field(description="`no_subscription` if no subscription takes it")
    sentence: str = Field(examples=["Delivered to 1 of 2 subscriptions; not to `mailer`."])
    subscriptions: list[DeliveryWhy]
    left_out: int = Field(description="subscriptions of other topics that are not listed", examples=[0])


class TransactionWhy(Shown):
    """Why the messages of a transaction were delivered or were not."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    state: State
    messages: list[MessageWhy]
    deliveries_cursor: WhyCursor | None = Field(
        description="null: nothing is left out; otherwise the same request with it as `cursor` explains the others, "
        "which may begin with the rest of the last message",
        examples=[None],
    )
