"""The answer of `GET /search`."""

from datetime import datetime
from typing import Literal
from uuid import UUID

from pydantic import Field

from app.schemas.transactions import AT, ID, Shown
from app.verdicts import State

HitKind = Literal["transaction", "message", "topic", "producer_group", "subscription"]


class SearchHit(Shown):
    """One thing that the text names."""

    kind: HitKind = Field(examples=["transaction"])
    name: str = Field(description="its id or its name", examples=[ID])
    by: Literal["id", "key", "name"] = Field(description="what of it the text is, or is a part of", examples=["key"])
    path: str = Field(description="where the API shows it", examples=[f"/transactions/{ID}"])
    page: str = Field(description="where the console shows it", examples=[f"/console/transactions/{ID}"])
    transaction_id: UUID | None = Field(None, description="of a transaction or a message", examples=[ID])
    producer_group: str | None = Field(None, description="of a transaction or a message", examples=["shop"])
    topic: str | None = Field(None, description="of the transaction's first message", examples=["order"])
    state: State | None = Field(None, description="of the transaction")
    born_at: datetime | None = Field(None, description="of the transaction", examples=[AT])


class SearchResult(Shown):
    """What a text names."""

    hits: list[SearchHit] = Field(description="ids first, then transactions of the key, newest first, then names")
    more: bool = Field(description="true: there are more of a kind than the answer holds", examples=[False])
