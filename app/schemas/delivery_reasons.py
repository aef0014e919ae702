"""The answer to why a transaction's messages were delivered or were not."""

from datetime import datetime
from uuid import UUID

from pydantic import Field

from app.schemas.transactions import AT, ID, Shown
from app.verdicts import DeliveryReason, State


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
