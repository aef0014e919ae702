"""The answer of `GET /subscriptions/{name}/recent`."""

from datetime import datetime

from pydantic import Field

from app.schemas.transactions import AT, Shown


class TookShown(Shown):
    """How long the receiver took for the delivery that it confirmed, of the newest 1,000 receipts."""

    count: int = Field(description="deliveries among them", examples=[1000])
    p50_ms: int | None = Field(description="half of them took no longer (ms); null: there is none", examples=[12])
    p99_ms: int | None = Field(description="99 of 100 took no longer (ms)", examples=[180])
    since: datetime | None = Field(description="when the oldest of them was recorded", examples=[AT])


class StandingErrorShown(Shown):
    """Messages that failed with one kind of error."""

    error: str = Field(description="the kind of error, as in `GET /dead-letters/groups`", examples=["answered 503"])
    retrying: int = Field(description="messages in retry whose last attempt failed with it", examples=[7])
    dead: int = Field(description="messages that died of it within the last hour", examples=[2])


class RecentDeliveries(Shown):
    """What the deliveries of a subscription were like recently."""

    took: TookShown
    errors: list[StandingErrorShown] = Field(
        description="the most frequent 20, of the newest 10,000 messages in retry and dead letters"
    )
