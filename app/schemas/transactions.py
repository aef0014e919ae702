"""Answers of the transaction and message routes. An absent optional field is left out; null is a value."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.totals import TOTAL, TotalShown
from app.verdicts import CheckOutcome, State

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
    """The recorded verdict: exactly one per transaction, and final."""

    verdict: VerdictWord
    source: SourceWord = Field(description="who gave it")
    actor: str | None = Field(
        None, description="the person, where one gave it: the key's name, or both as `erin (key dana)`"
    )
    reason: str | None = None
    decided_at: datetime


class DeliveryShown(Shown):
    """The delivery of one message to one subscription."""

    subscription: str = Field(examples=["mailer"])
    state: str = Field(description="delivered, waiting, in_retry, dead or dropped", examples=["delivered"])
    replay: int | None = Field(None, description="the replay, if this is not the live delivery")
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
    offset: int | None = Field(None, description="its offset in the log, once committed", examples=[1030])
    deliveries: list[DeliveryShown]


class TimelineEntry(Shown):
    """One event. Fields that do not apply are left out."""

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
    response: str | None = Field(None, description="the beginning of the answer")
    message_id: str | None = None
    subscription: str | None = None
    attempt: int | None = Field(None, description="the number of the delivery's attempt, from 1")
    attempts: int | None = None
    times: int | None = Field(
        None, description="how many postponements this entry is for: they used up no attempt and had the same cause"
    )
    last_at: datetime | None = Field(None, description="the time of the last of them")
    replay: int | None = Field(None, description="the replay, if not the live delivery")
    offset: int | None = None
    next_check_at: datetime | None = None


class TransactionShown(Shown):
    """A transaction with its state, messages and timeline."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    state: State
    born_at: datetime = Field(examples=[AT])
    first_check_at: datetime = Field(description="no check before this time")
    context: Any = Field(None, description="the producer's own JSON, any value", examples=[{"order": 1030}])
    verdict: VerdictShown | None = None
    next_check_at: datetime | None = Field(
        None,
        description="the time of the next check, if the transaction is still undecided; not before `held_until` of its "
        "producer group",
    )
    parked_reason: str | None = None
    reissued_from: UUID | None = Field(None, description="the rolled-back transaction whose messages these are")
    reissued_as: UUID | None = Field(None, description="the transaction that sent these messages later")
    messages: list[MessageShown]
    timeline: list[TimelineEntry] = Field(
        description="by time; of checks, attempts and refused ends the latest `HALFNOTE_ATTEMPTS_PAGE_MAX` (1,000), "
        "and as many redeliveries; of deliveries those in `messages`"
    )
    attempts_cursor: str | None = Field(
        description="send it as `cursor` to `GET /transactions/{id}/attempts` for earlier attempts; null: all are shown"
    )
    deliveries_cursor: str | None = Field(
        description="the messages have more than 1,000 deliveries together: send it as `cursor` to "
        "`GET /transactions/{id}/deliveries` for the others; null: all are shown"
    )


class DeliveryOfMessage(DeliveryShown):
    """A delivery in a list."""

    message_id: str = Field(examples=[f"{ID}-0"])


class DeliveryPage(Shown):
    """A page of a transaction's deliveries."""

    items: list[DeliveryOfMessage]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")


class AttemptPage(Shown):
    """A page of a transaction's checks, attempts and refused ends, latest first."""

    items: list[TimelineEntry]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")


class LastCheck(Shown):
    """The last check of a transaction."""

    at: datetime
    outcome: CheckOutcome = Field(description="`unanswered`: the detail is in the transaction's timeline")


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
    next_check_at: datetime | None = Field(None, description="not before `held_until` of its producer group")
    parked_reason: str | None = None
    last_check: LastCheck | None = Field(None, description="of an undecided transaction that was asked")


class TransactionPage(Shown):
    """A page of transactions."""

    items: list[TransactionRow]
    next_cursor: UUID | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)


class StoredMessageShown(MessageShown):
    """A message with its body and its deliveries."""

    transaction_id: UUID = Field(examples=[ID])
    producer_group: str = Field(examples=["shop"])
    state: State = Field(description="its transaction's")
    born_at: datetime
    committed_at: datetime | None = None
    body: Any = Field(None, description="the body, byte for byte, if it is JSON", examples=[{"order": 1030}])
    body_base64: str | None = Field(None, description="any other body; one of the three is there")
    body_hidden: bool | None = Field(None, description="true: the key may not read bodies")
    deliveries_cursor: str | None = Field(
        description="the message has more than 1,000 deliveries: the same request with this as `cursor` has the next "
        "ones; null: these were the last"
    )


class CheckAsked(Shown):
    """A worker checks the transaction at this time, or as soon after it as one is free."""

    transaction_id: UUID = Field(examples=[ID])
    next_check_at: datetime = Field(
        description="now; or `held_until` of its producer group, which has asked for no checks until then"
    )
    held_until: datetime | None = Field(
        description="null, or the end of the pause that its producer group asked for by `Retry-After`"
    )


class Matched(Shown):
    """The transactions that match a filter, and the changes of this call."""

    dry_run: bool = Field(description="true: nothing was changed")
    matched: int = Field(description="transactions that match the filter, up to `limit`")
    changed: int = Field(description="of those, how many this call changed; others were decided meanwhile")
    transaction_ids: list[UUID] = Field(description="the transactions that match, newest first", examples=[[ID]])
    more: bool = Field(description="more transactions may match: call again")


class PublishedShown(Shown):
    """A committed message and its place in the log."""

    message_id: str = Field(examples=[f"{REISSUE_ID}-0"])
    topic: str = Field(examples=["order"])
    offset: int = Field(examples=[1031])


class ReissueAnswer(Shown):
    """The messages are committed and on disk, as a new transaction."""

    transaction_id: UUID = Field(description="the new one's", examples=[REISSUE_ID])
    reissued_from: UUID = Field(description="the rolled-back transaction, whose verdict stands", examples=[ID])
    committed_at: datetime
    replayed: Literal[False] = Field(False, description="a transaction is reissued at most once")
    messages: list[PublishedShown]
