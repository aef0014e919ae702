"""A subscription in a PATCH: the fields of its PUT, each of them optional."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from app.schemas.fields import Strict, Whole
from app.schemas.subscription_put import TOPICS_MAX, Backlog, RetryWait, TopicPattern


class SubscriptionPatch(Strict):
    """A change of some fields. Null gives a field its default. The rules of PUT hold for the whole that results."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"rate_per_s": 20.0}, {"filters": None}]})

    topics: Annotated[list[TopicPattern], Field(default_factory=list, min_length=1, max_length=TOPICS_MAX)]
    filters: dict[str, Any] | None = Field(None, description="`tags` or `headers`, or null for no filter")
    destination: dict[str, Any] = Field(default_factory=dict, description="the fields of the destination that change")
    ordered: str | None = Field(None, description="`none` or `key`")
    on_dead: str | None = Field(None, description="`release` or `hold`")
    shards: Whole | None = None
    max_in_flight: Whole | None = None
    rate_per_s: float | None = Field(None, description="null for no limit")
    timeout_s: float | None = None
    retry: list[RetryWait] | None = None
    expire_after_s: float | None = None
    max_backlog: Backlog | None = None
