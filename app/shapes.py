"""What the transaction and message routes answer. A field that is optional and absent is left out; null is a value."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from app.verdicts import State

VerdictWord = Literal["commit", "rollback"]
SourceWord = Literal["producer", "check", "policy", "operator"]
What = Literal[
    "born",
    "swept",
    "check",
    "verdict",
    "refused",
    "published",
    "attempt",
    "delivered",
    "dead",
    "redelivered",
    "dropped",
    "replayed",
    "parked",
    "reissued",
]

ID = "0193a7d6-a5c8-7b1e-8f00-1030a1030a10"
REISSUE_ID = "0193a7db-11c2-7f6d-9a00-1030b1030b10"
AT = "2026-11-21T08:00:00.000000Z"


class Shown(BaseModel):
    """An answer."""

    model_config = ConfigDict(frozen=True)


class VerdictShown(Shown):
    """The recorded verdict: exactly one for each transaction, for good."""

    verdict: VerdictWord
    source: SourceWord = Field(description="who gave it")
    actor: str | None = Field(
        None, description="the person, where one gave it: the key's name, or both as `erin (key dana)`"
    )
    reason: str | None = None
    decided_at: datetime


class DeliveryShown(Shown):
    """Where one message stands with one subscription."""

    subscription: str = Field(examples=["mailer"])
    state: str = Field(description="delivered, waiting, in_retry, dead or dropped", examples=["delivered"])
    replay: int | None = Field(None, description="the replay that sends it once more, if this is not the live delivery")
    attempts: int
    first_at: datetime | None = Field(None, description="the first attempt")
    at: datetime | None = Field(None, description="when it was delivered, died, or was dropped")
    due_at: datetime | None = Field(None, description="when it is tried next")
    status: int | None = Field(None, description="the HTTP status of the last answer")
    duration_ms: int | None = None
    error: str | None = None
    reason: str | None = Field(None, description="why it is dead")


class MessageShown(Shown):
    """A message without its body (`GET /messages/{message_id}` has that)."""

    message_id: str = Field(examples=[f"{ID}-0"])
    topic: str = Field(examples=["order"])
    key: str | None = Field(examples=["order-1030"])
    tag: str | None = Field(examples=["created"])
    headers: dict[str, str]
    content_type: str = Field(examples=["application/json"])
    deliver_after_s: float | None = Field(None, description="how long after the commit it is delivered")
    due_at: datetime | None = Field(None, description="when a delayed message is delivered, once committed")
    offset: int | None = Field(None, description="its place in the log, once committed", examples=[1030])
    deliveries: list[DeliveryShown]


class TimelineEntry(Shown):
    """One thing that happened, with what is known of it; fields that say nothing here are left out."""

    at: datetime
    what: What
    reissued_from: UUID | None = None
    reissued_as: UUID | None = None
    verdict: VerdictWord | None = None
    source: SourceWord | None = None
    actor: str | None = None
    producer_group: str | None = None
    reason: str | None = None
    check: int | None = Field(None, description="the number of the check, from 1")
    url: str | None = None
    outcome: str | None = None
    status: int | None = None
    duration_ms: int | None = None
    error: str | None = None
    response: str | None = Field(None, description="the beginning of what was answered")
    message_id: str | None = None
    subscription: str | None = None
    attempt: int | None = Field(None, description="the number of the delivery's attempt, from 1")
    attempts: int | None = None
    replay: int | None = Field(None, description="the replay it happened in, if not in the live delivery")
    offset: int | None = None
    next_check_at: datetime | None = None


class TransactionShown(Shown):
    """Where a transaction stands, its messages, and all that happened to it."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    state: State
    born_at: datetime = Field(examples=[AT])
    first_check_at: datetime = Field(description="before it nobody is asked")
    context: Any = Field(None, description="what the producer sent along, any JSON", examples=[{"order": 1030}])
    verdict: VerdictShown | None = None
    next_check_at: datetime | None = Field(
        None, description="when the producer is asked next, if nobody decides before"
    )
    parked_reason: str | None = None
    reissued_from: UUID | None = Field(None, description="the rolled-back transaction whose messages these are")
    reissued_as: UUID | None = Field(None, description="the transaction that sent these messages after all")
    messages: list[MessageShown]
    timeline: list[TimelineEntry] = Field(description="by time; of checks and attempts the latest 1,000")


class TransactionRow(Shown):
    """A transaction in a list."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    state: State
    born_at: datetime = Field(examples=[AT])
    topic: str = Field(description="of its first message", examples=["order"])
    key: str | None = Field(description="of its first message", examples=["order-1030"])
    message_count: int
    verdict: VerdictWord | None = None
    source: SourceWord | None = None
    decided_at: datetime | None = None
    next_check_at: datetime | None = None
    parked_reason: str | None = None


class TransactionPage(Shown):
    """A page of transactions, newest first."""

    items: list[TransactionRow]
    next_cursor: UUID | None = Field(description="send it as `cursor` for the next page; null: this was the last")


class StoredMessageShown(MessageShown):
    """A message with its body and where it went."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    state: State = Field(description="its transaction's")
    born_at: datetime
    committed_at: datetime | None = None
    body: Any = Field(None, description="the body of a JSON content type, verbatim", examples=[{"order": 1030}])
    body_base64: str | None = Field(None, description="any other body; one of the two is there")


class CheckAsked(Shown):
    """The producer is asked as soon as a worker is free."""

    transaction_id: UUID = Field(examples=[ID])
    next_check_at: datetime


class Matched(Shown):
    """What a filter found, and what was changed by this call."""

    dry_run: bool = Field(description="true: nothing was changed")
    matched: int = Field(description="transactions that meet the filter, up to `limit`")
    changed: int = Field(description="of those, how many this call changed; others were decided meanwhile")
    transaction_ids: list[UUID] = Field(description="those that meet the filter, newest first", examples=[[ID]])
    more: bool = Field(description="there may be more that meet the filter: call again")


class PublishedShown(Shown):
    """A committed message and its place in the log."""

    message_id: str = Field(examples=[f"{REISSUE_ID}-0"])
    topic: str = Field(examples=["order"])
    offset: int = Field(examples=[1031])


class ReissueAnswer(Shown):
    """The messages are committed and on disk, as a new transaction."""

    transaction_id: UUID = Field(description="the new one's", examples=[REISSUE_ID])
    reissued_from: UUID = Field(description="the rolled-back one's, whose verdict stands", examples=[ID])
    committed_at: datetime
    replayed: Literal[False] = Field(False, description="a reissue happens once: a second one is refused")
    messages: list[PublishedShown]
