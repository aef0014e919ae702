"""Answers of the subscription routes."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.destinations import WEBHOOK_SHOWN_EXAMPLE, DestinationShown
from app.schemas.fields import PutChanges
from app.schemas.subscription_put import SHAPE_EXAMPLE, Filters, Start
from app.schemas.totals import TOTAL, TotalShown

EXAMPLE: dict[str, Any] = {
    "name": "mailer",
    **SHAPE_EXAMPLE,
    "destination": WEBHOOK_SHOWN_EXAMPLE,
    "state": "active",
    "state_reason": None,
    "created_at": "2026-11-21T08:00:00Z",
    "updated_at": "2026-11-21T08:00:00Z",
}
SHOWN_EXAMPLE: dict[str, Any] = {
    **EXAMPLE,
    "checkpoint": {"offset": 1030, "moved_at": "2026-11-21T08:00:05Z"},
    "lag": {"messages": 2, "seconds": 0.4, "exact": True},
    "rates": {"delivered_per_s": 120.5, "failed_per_s": 0.0},
    "breaker": {"state": "closed", "opened_at": None, "because": None},
    "places": [
        {"shard": 0, "offset": 1030, "holder": "7c0f2f0c1e4b4d6f8a559b1c2d3e4f50", "held_until": "2026-11-21T08:00:12Z"}
    ],
    "retrying": 0,
    "held": 0,
    "dead_letters": 0,
    "last_error": None,
    "replays": [],
}


class SubscriptionAnswer(BaseModel):
    """A subscription, without its secrets."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    name: str
    topics: list[str]
    filters: Filters | None
    destination: DestinationShown
    start: Start
    ordered: Literal["none", "key"]
    on_dead: Literal["release", "hold"]
    shards: int
    max_in_flight: int
    rate_per_s: float | None
    timeout_s: float
    retry: list[float]
    expire_after_s: float | None
    max_backlog: int | None
    state: Literal["active", "paused", "disabled", "open"] = Field(
        description="every state keeps the checkpoint and loses nothing. disabled: the destination answered 410; "
        "open: the circuit breaker is open, and only probes are sent"
    )
    state_reason: str | None
    created_at: datetime
    updated_at: datetime


class SubscriptionChanged(PutChanges, SubscriptionAnswer):
    """The answer of a PUT: the subscription, and what changed."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**EXAMPLE, "changed": ["rate_per_s"], "reset": ["rate_per_s"]}]}
    )


class SubscriptionCreated(SubscriptionChanged):
    """A new subscription, with its secret unless the request gave one."""

    secret: str | None = Field(
        description="shown only in this answer; null if the request gave it, in a dry run, and for brokers, which have "
        "passwords"
    )


class CheckpointShown(BaseModel):
    """Every message up to `offset` is settled or in retry; with shards, the checkpoint of the slowest shard."""

    offset: int
    moved_at: datetime = Field(description="when it last moved; with shards, for the slowest shard")


class LagShown(BaseModel):
    """Committed messages that are not yet delivered, in retry, or dead."""

    messages: int = Field(description="matched by topics and tags; the relay applies header filters later")
    seconds: float = Field(description="age of the oldest")
    exact: bool = Field(
        description="false: `messages` is a minimum, counted in the first 10,000 log entries after the checkpoint"
    )


class RatesShown(BaseModel):
    """Messages per second over the last seconds, all shards together."""

    delivered_per_s: float
    failed_per_s: float


class BreakerShown(BaseModel):
    """The circuit breaker: closed, or open with probes only; with shards: open if any is open."""

    state: Literal["closed", "open"]
    opened_at: datetime | None
    because: str | None = Field(description="the failure that opened it")
    paused_until: datetime | None = Field(
        None,
        description="the end of the pause that the destination last asked for (429 or 503 with `Retry-After`), with "
        "shards the latest; from then on only probes are sent, until it takes a message. null: it asks for none",
    )


class PlaceShown(BaseModel):
    """A shard: its checkpoint and its lease."""

    shard: int
    offset: int
    holder: str | None = Field(description="the worker with the lease; null: none now")
    held_since: datetime | None = Field(
        None, description="when the worker took it; null: none has it, or a worker of an earlier version"
    )
    held_until: datetime | None = Field(description="when its lease ends, unless it is renewed")


class SubscriptionShown(SubscriptionAnswer):
    """A subscription and its state."""

    model_config = ConfigDict(json_schema_extra={"examples": [SHOWN_EXAMPLE]})

    checkpoint: CheckpointShown
    lag: LagShown
    rates: RatesShown
    breaker: BreakerShown
    places: list[PlaceShown] = Field(description="one a shard; fewer or more than `shards` while that is changing")
    retrying: int = Field(description="messages that wait for their next try or their due time")
    held: int = Field(description="messages that wait for earlier messages of their key")
    dead_letters: int = Field(description="counted up to 100,000")
    last_error: str | None = Field(description="of the newest message that is in retry or dead")
    replays: list[int] = Field(description="ids of those that are running")


class SubscriptionStanding(BaseModel):
    """The state of a subscription in a list."""

    messages: int = Field(description="that wait, of the next 100 log entries after the checkpoint")
    seconds: float = Field(description="age of the oldest that waits; 0: none waits")
    dead_letters: int = Field(description="counted up to 1,000")
    exact: bool = Field(description="false: at least so many messages wait, or are dead letters")
    last_error: str | None = Field(description="of the newest message that is in retry or dead")


class SubscriptionListed(SubscriptionAnswer):
    """A subscription in a list."""

    standing: SubscriptionStanding | None = Field(None, description="null unless it was asked for")


class SubscriptionList(BaseModel):
    """A page of subscriptions."""

    items: list[SubscriptionListed]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)


class TestAnswer(BaseModel):
    """The result of a test delivery."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"outcome": "delivered", "status": 204, "duration_ms": 3, "error": None, "response": None},
            ]
        }
    )

    outcome: Literal["delivered", "failed", "refused", "gone"]
    status: int | None
    duration_ms: int
    error: str | None
    response: str | None = Field(description="the beginning of the answer's body, if it was not a success")
