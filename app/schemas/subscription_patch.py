"""A subscription in a PATCH: the fields of its PUT, each of them optional."""

from math import isfinite
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field

from app.schemas.fields import Strict, Whole
from app.schemas.subscription_put import TOPICS_MAX, Backlog, RetryWait, TopicPattern

# Without these rules an infinite number would be written as null, and null gives a field its default.
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if a JSON object has an infinite number at any depth."""
    left: list[Any] = [value]
    while left:
        one = left.pop()
        if isinstance(one, float) and not isfinite(one):
            raise ValueError("each number must be finite")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return value


Finite: TypeAlias = Annotated[dict[str, Any], AfterValidator(_finite)]


class SubscriptionPatch(Strict):
    """A change of some fields. Null gives a field its default. The rules of PUT hold for the whole that results."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"rate_per_s": 20.0}, {"filters": None}]})

    topics: Annotated[list[TopicPattern], Field(default_factory=list, min_length=1, max_length=TOPICS_MAX)]
    filters: Finite | None = Field(None, description="`tags` or `headers`, or null for no filter")
    destination: Finite = Field(default_factory=dict, description="the fields of the destination that change")
    ordered: str | None = Field(None, description="`none` or `key`")
    on_dead: str | None = Field(None, description="`release` or `hold`")
    shards: Whole | None = None
    max_in_flight: Whole | None = None
    rate_per_s: Number | None = Field(None, description="null for no limit")
    timeout_s: Number | None = None
    retry: list[RetryWait] | None = None
    expire_after_s: Number | None = None
    max_backlog: Backlog | None = None
