"""How many rows a list has, up to a limit."""

from pydantic import BaseModel, ConfigDict, Field

# Lists are counted up to this number.
COUNTED_MOST = 10_000

TOTAL = "how many match, on all pages; null unless `count` was asked for"


class TotalShown(BaseModel):
    """How many rows match a filter."""

    model_config = ConfigDict(frozen=True)

    count: int = Field(examples=[1030])
    exact: bool = Field(description="false: there are more, or may be", examples=[True])


def total_of(count: int) -> TotalShown:
    """Return a count that ended after COUNTED_MOST + 1."""
    return TotalShown(count=min(count, COUNTED_MOST), exact=count <= COUNTED_MOST)
