"""Requests and answers of the replay routes."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.fields import Actor, Name, Reason, Strict, Time, Whole
from app.schemas.subscription_put import OFFSET_MAX, TOPICS_MAX, WantedHeaders, WantedTags

KEYS_MAX = 1000

REQUEST_EXAMPLE: dict[str, Any] = {
    "from": {"time": "2026-11-21T07:00:00Z"},
    "until": {"offset": 1030},
    "filters": {"tags": ["created"], "keys": ["order-1030"]},
    "reason": "the mailer lost its database",
    "actor": "dana",
}
EXAMPLE: dict[str, Any] = {
    "replay_id": 7,
    "subscription": "mailer",
    "state": "running",
    "after": 811,
    "until": 1030,
    "offset": 811,
    "filters": {"tags": ["created"], "keys": ["order-1030"]},
    "reason": "the mailer lost its database",
    "actor": "dana",
    "created_at": "2026-11-21T08:00:00Z",
    "moved_at": "2026-11-21T08:00:00Z",
    "ended_at": None,
}


class LogOffset(Strict):
    """A position in the log. The message with this offset is part of the replay."""

    offset: Whole = Field(ge=1, le=OFFSET_MAX)


class LogTime(Strict):
    """A commit time. Clocks step, so the replay includes up to one second more."""

    time: Time


class ReplayFilters(Strict):
    """A filter of the replay, in addition to the subscription's topics and filters."""

    topics: list[Name] | None = Field(None, min_length=1, max_length=TOPICS_MAX, description="any of these, by name")
    keys: list[Name] | None = Field(None, min_length=1, max_length=KEYS_MAX, description="any of these")
    tags: WantedTags | None = Field(None, description="any of these")
    headers: WantedHeaders | None = Field(None, description="all of these, names and values exactly")


class ReplayRequest(Strict):
    """The part of the log to replay."""

    model_config = ConfigDict(json_schema_extra={"examples": [REQUEST_EXAMPLE]})

    from_: Literal["earliest"] | LogOffset | LogTime = Field(
        alias="from", description="the first message, or `earliest`: the oldest message in the database"
    )
    until: LogOffset | LogTime | None = Field(None, description="the last message; not given: the newest message now")
    filters: ReplayFilters | None = None
    reason: Reason | None = None
    actor: Actor = None
    dry_run: bool = Field(False, strict=True, description="true: count what would be sent, and send nothing")


class ReplayPreview(BaseModel):
    """What a replay would send."""

    dry_run: Literal[True] = True
    subscription: str = Field(examples=["mailer"])
    after: int = Field(description="it would begin after this offset", examples=[811])
    until: int = Field(description="the last offset", examples=[1030])
    messages: int = Field(
        description="those that match, whatever their headers, of the first 20,000 entries of the log", examples=[140]
    )
    exact: bool = Field(description="false: the part has more entries, which were not counted", examples=[True])


class ReplayAnswer(BaseModel):
    """A replay: after the offset `after`, up to and including `until`, read up to `offset`."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    replay_id: int = Field(description="its deliveries carry it as `halfnote-replay`")
    subscription: str
    state: Literal["running", "done", "cancelled"] = Field(
        description="done: every message is delivered or dead. A paused subscription pauses its replays"
    )
    after: int
    until: int
    offset: int = Field(description="everything up to here is settled or in retry")
    filters: ReplayFilters | None
    reason: str | None
    actor: str | None
    created_at: datetime
    moved_at: datetime
    ended_at: datetime | None


class ReplayShown(ReplayAnswer):
    """A replay with the counts of its messages."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**EXAMPLE, "delivered": 140, "retrying": 2, "dead": 0}]})

    delivered: int
    retrying: int = Field(description="messages that wait for their next try, or for earlier messages of their key")
    dead: int = Field(
        description="dead letters; those that it had not read when their day was removed at the longest retention too"
    )


class ReplayPage(Strict):
    """A page of replays, newest first."""

    cursor: Annotated[str, Field(pattern="^[1-9][0-9]{0,8}$")] | None = Field(
        None, description="`next_cursor` of the page before"
    )
    limit: int = Field(100, ge=1, le=1000, description="how many on a page")


class ReplayList(BaseModel):
    """A page of a subscription's replays, newest first."""

    items: list[ReplayAnswer]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
