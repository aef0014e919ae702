"""The query and the answer of `GET /stats/series`."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from app.schemas.fields import Strict, Time
from app.schemas.transactions import AT, Shown

Metric = Literal[
    "halves",
    "commits",
    "rollbacks",
    "deliveries",
    "failed_attempts",
    "checks",
    "in_doubt",
    "parked",
    "dead_letters",
    "open_breakers",
    "lag_messages",
    "lag_s",
    "database_bytes",
]


class SeriesQuery(Strict):
    """A metric, a range of time and a step."""

    metric: Metric = Field(description="what to show", examples=["halves"])
    since: Time | None = Field(None, alias="from", description="from this time on; without it, 24 hours before `to`")
    until: Time | None = Field(None, alias="to", description="before this time; without it, until now")
    step: int = Field(600, ge=60, le=86_400, multiple_of=60, description="seconds of a point: whole minutes")


class PointShown(Shown):
    """A step of the series."""

    at: datetime = Field(description="when the step begins", examples=[AT])
    value: float | None = Field(description="null: there is no figure", examples=[1030])


class SeriesShown(Shown):
    """A metric over time."""

    metric: Metric = Field(examples=["halves"])
    of_step: Literal["sum", "max"] = Field(
        description="`sum`: what was done in the step; `max`: the most that stood open in a minute of it",
        examples=["sum"],
    )
    step_s: int = Field(examples=[600])
    points: list[PointShown]
